"""`warploom banks`: the contract of its options and of its JSON."""

from __future__ import annotations

import json

import pytest

from warploom.cli import main

CANONICAL = [
    "lds.32",
    "lds.64",
    "lds.128",
    "sts.32",
    "sts.64",
    "sts.128",
    "ldmatrix.x1",
    "ldmatrix.x2",
    "ldmatrix.x4",
    "ldmatrix.x4.trans",
    "stmatrix.x1",
    "stmatrix.x2",
    "stmatrix.x4",
]


def printed(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert main(["banks", *arguments]) == 0
    return capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture, line: str) -> dict:
    return json.loads(printed(capsys, *line.split(), "--json"))


@pytest.mark.parametrize("access", CANONICAL)
def test_json_of_a_tile(capsys: pytest.CaptureFixture, access: str) -> None:
    result = answer(capsys, f"--access {access} --rows 16 --cols 128 --dtype f16")
    assert {"phases", "wavefronts", "ideal", "excess"} <= result.keys()
    for key in ("phases", "wavefronts", "ideal", "excess"):
        assert result[key] == sum(one[key] for one in result["instructions"])
    assert result["excess"] == result["wavefronts"] - result["ideal"] == (224 if "matrix" in access else 0)


@pytest.mark.parametrize(
    ("options", "wavefronts", "excess"),
    [
        ("--swizzle 3,3,4", 32, 0),
        ("--pad 8", 32, 0),
        ("--swizzle 3,3,3", 64, 32),
        ("--dtype f32 --swizzle 3,2,5", 64, 0),
        ("--dtype bf16", 256, 224),
    ],
)
def test_layouts(capsys: pytest.CaptureFixture, options: str, wavefronts: int, excess: int) -> None:
    result = answer(capsys, f"--access ldmatrix.x4 --rows 16 --cols 128 {options}")
    assert (result["wavefronts"], result["excess"]) == (wavefronts, excess)


def test_addresses(capsys: pytest.CaptureFixture) -> None:
    line = ",".join(str(128 * lane) for lane in range(32))
    result = answer(capsys, f"--access lds.128 --addresses {line}")
    assert {key: result[key] for key in ("phases", "wavefronts", "ideal", "excess")} == {
        "phases": 4,
        "wavefronts": 32,
        "ideal": 4,
        "excess": 28,
    }
    assert result["wavefronts_by_phase"] == [8] * 4
    assert result["words_by_bank"][0]["3"] == [3 + 32 * lane for lane in range(8)]


def test_addresses_of_inactive_lanes_and_hexadecimal(capsys: pytest.CaptureFixture) -> None:
    line = ",".join(["0x80", "-", " 0"[1:], *["-"] * 29])
    result = answer(capsys, f"--access sts.32 --addresses {line}")
    assert (result["phases"], result["wavefronts"], result["lanes"]) == (1, 2, [[0, 2]])
    assert "0: words 0, 32" in printed(capsys, "--access", "sts.32", "--addresses", line)


def test_eight_addresses_for_one_matrix(capsys: pytest.CaptureFixture) -> None:
    assert answer(capsys, "--access ldmatrix.x1 --addresses 0,16,32,48,64,80,96,112")["wavefronts"] == 1


def test_several_accesses_are_summed(capsys: pytest.CaptureFixture) -> None:
    result = answer(capsys, "--access sts.128 --access ldmatrix.x4 --rows 16 --cols 16")
    assert (result["phases"], result["excess"]) == (8, 4)
    assert [one["access"] for one in result["accesses"]] == ["sts.128", "ldmatrix.x4"]


def test_design(capsys: pytest.CaptureFixture) -> None:
    line = "--design --rows 16 --cols 128 --access sts.128 --access ldmatrix.x4"
    result = answer(capsys, line)
    assert (result["swizzle"], result["excess"], result["before"]) == ([3, 3, 4], 0, 224)
    assert result["least_excess_by_bits"] == {"0": 224, "1": 96, "2": 32, "3": 0}
    assert result["best"] == {"pad": 0, "swizzle": [[3, 3, 4]]}
    assert printed(capsys, *line.split()) == result["words"] + "\n"


def test_text_names_the_conflict(capsys: pytest.CaptureFixture) -> None:
    text = printed(capsys, *["--access", "ldmatrix.x4", "--rows", "16", "--cols", "64", "--dtype", "f16"])
    assert "4 instructions\n  16 phases, 128 wavefronts, 16 ideal, 112 excess" in text
    assert "instruction 0, phase 0 (lanes 0 to 7): 8 different words in bank 0" in text
    assert "SW128     a TMA box can hold this tile" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rows 8 --cols 8", "--access takes one of"),
        ("--access lds.32", "--rows and --cols are needed"),
        ("--access lds.24 --rows 8 --cols 8", "got 'lds.24'"),
        ("--access lds.32 --addresses 1,2", "takes 32 addresses"),
        ("--access lds.32 --addresses 0,zero", "takes whole numbers"),
        ("--access lds.32 --access lds.64 --addresses 0", "takes one --access, got 2"),
        ("--access lds.32 --addresses 0 --rows 8", "--addresses are final"),
        ("--access lds.32 --rows 8 --cols 8 --swizzle 1,2", "swizzle takes B,M,S"),
        ("--access lds.32 --rows 8 --cols 8 --draw tile.jpg", "ending in .svg, .png or .html"),
        ("--design --access lds.32 --rows 8 --cols 8 --pad 1", "without padding"),
        ("--access sts.128 --access lds.32 --rows 8 --cols 8 --draw tile.html", "takes one access"),
        ("--access lds.32 --rows 8 --cols 8 --size 128", "--size takes one of --gemm and --attention"),
        ("--gemm --access lds.32 --rows 8 --cols 8", "take no --access"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture, line: str, message: str) -> None:
    assert main(["banks", *line.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("warploom banks: ") and message in error


def test_help_lists_accesses_and_orders(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["banks", "--help"])
    text = capsys.readouterr().out
    assert all(access in text for access in CANONICAL)
    assert "fragment" in text and "ACCESS@ROWSxCOLS" in text
