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
        ("--access sts.128 --access lds.32 --access lds.16 --rows 8 --cols 8 --draw tile.html", "takes one or two accesses"),
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


def test_a_layout(capsys: pytest.CaptureFixture) -> None:
    text = "Swizzle<3,3,3> o (64,64):(64,1)"
    arguments = ["--layout", text, "--access", "ldmatrix.x4", "--access", "lds.32@columns"]
    result = json.loads(printed(capsys, *arguments, "--json"))
    assert (result["layout"], result["rows"], result["cols"], result["bytes"]) == (text, 64, 64, 8192)
    assert [one["excess"] for one in result["accesses"]] == [0, 192] and result["excess"] == 192
    shown = printed(capsys, *arguments)
    assert "first conflict: lds.32@columns, instruction 0, phase 0 (lanes 0 to 31): 4 different words in bank 0" in shown
    assert result["swizzle_unit"] == "elements" and "note" not in shown


def test_an_atom_as_the_dsl_prints_it(capsys: pytest.CaptureFixture) -> None:
    """Its swizzle is of bytes; read as one of elements it leaves conflicts, and a note says why."""
    arguments = ["--layout", "S<3,4,3> o 0 o (8,64):(64,1)", "--access", "ldmatrix.x1"]
    shown = printed(capsys, *arguments)
    assert "8 excess" in shown and "--swizzle-bytes" in shown
    shown = printed(capsys, *arguments, "--swizzle-bytes")
    assert " 0 excess" in shown and "note" not in shown
    assert "rows along the second mode" in printed(capsys, "--layout", "(64,16):(1,64)", "--access", "ldmatrix.x4.trans")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layout", "(8,64):(64,x)", "--access", "lds.32"], "where ▸ stands: (8,64):(64,▸x)"),
        (["--layout", "(8,64)"], "--layout takes an --access beside it"),
        (["--layout", "(8,64)", "--access", "cp.async.128"], "access takes one of"),
        (["--layout", "(8,64)", "--access", "lds.32", "--rows", "8"], "--layout takes no --rows"),
        (["--layout", "(8,64)", "--access", "lds.32", "--design"], "--layout takes no --design"),
        (["--swizzle-bytes", "--access", "lds.32", "--rows", "8", "--cols", "8"], "--swizzle-bytes takes a --layout"),
    ],
)
def test_layouts_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["banks", *arguments]) == 2
    assert said in capsys.readouterr().err
