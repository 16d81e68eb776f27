"""Wrong uses end in one sentence that names what is wrong, with status 2 for bad input, before any work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from warploom.cli import main

HUGE = str(2**31 - 1)
TILE = ("banks", "--access", "lds.32", "--rows", "16", "--cols", "32")
LAID = ("banks", "--access", "lds.32", "--layout", "(16,32):(32,1)", "--dtype", "f32")
QUICK = ("bench", "--device", "cpu", "--quick", "--only", "D16 S128 full")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file where a folder is wanted and files that are no results."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text("[1, 2]")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*TILE, "--draw", "file/tile.svg"], "--draw: the folder file cannot be made: a file stands in its way"),
        ([*TILE, "--draw", "folder.svg/"], "--draw folder.svg cannot be written"),
        ([*TILE, "--draw", "tile.gif"], "--draw takes a name ending in .svg, .png or .html, got 'tile.gif'"),
        (["banks", "--atom", "tma-128", "--draw", "file/atom.svg"], "--draw: the folder file cannot be made"),
        ([*LAID, "--draw", "file/tile.svg"], "--draw: the folder file cannot be made: a file stands in its way"),
        ([*QUICK, "--out", "file/found.json"], "--out: the folder file cannot be made: a file stands in its way"),
        ([*QUICK, "--out", "folder"], "--out folder cannot be written: Is a directory"),
        ([*QUICK, "--out", ""], "--out . cannot be written: Is a directory"),
        (["build", "--out", "file"], "is not a folder"),
        (["build", "--out", ""], "--out takes a folder, got an empty name"),
        (["build", "--all"], "--all is of --list"),
        (["demo", "--out", "file/pictures"], "--out: the folder file/pictures cannot be made"),
        (["bench", "report", "broken.json"], "report: broken.json is not JSON: "),
        (["bench", "report", "missing.json"], "report: missing.json cannot be read: No such file or directory"),
        (["bench", "report", "folder"], "report: folder cannot be read: Is a directory"),
        (["bench", "report", "other.json"], "other.json is no file of `warploom bench`"),
        (["explain", "--seqlen", "8", "--batch", HUGE, "--heads", HUGE, "--head-dim", HUGE], "tensors of 2**63 elements"),
        (["explain", "--seqlen", "8", "--heads", "4", "--head-dim", "0"], "head_dim must be at least 1"),
        (["explain", "--seqlen", "8", "--heads", "4", "--backend", "hoper"], "backend must be one of"),
    ],
    ids=lambda value: " ".join(value[:1] + value[-2:]) if isinstance(value, list) else "",
)
def test_one_sentence(arguments: list[str], words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "folder.svg").mkdir()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"warploom {arguments[0]}: ") and words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["explian"], "explain"),
        (["explain", "--seqlen", "8", "--heads", "4", "--casual"], "--causal"),
        (["explain", "--seqlen", "8", "--heads", "4", "--dtype", "bf61"], "bf16"),
        (["explain", "--seqlen", "8", "--heads", "4", "--device", "H10"], "h100"),
        (["explain", "--seqlen", "8", "--heads", "4", "--backend", "hoper"], "hopper"),
        (["explain", "--seqlen", "8", "--heads", "4", "--mask", "Docment([8])"], "Document(...)"),
        (["explain", "--seqlen", "8", "--heads", "4", "--mask", "causal"], "Causal(...)"),
        (["banks", "--access", "ldmatix.x4", "--rows", "8", "--cols", "64"], "ldmatrix.x4"),
        (["banks", "--atom", "wgmma-k128"], "wgmma-k-128"),
        (["bench", "masks", "--device", "cpu", "--masks", "tre", "--list"], "tree"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else value,
)
def test_what_was_meant_is_named(arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as left:  # argparse's
        status = int(left.code or 0)
    err = capsys.readouterr().err
    assert status == 2 and err.endswith(f"; did you mean {name!r}?\n"), err


def test_a_name_like_none_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--seqlen", "8", "--heads", "4", "--mask", "Nope(3)"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_an_unknown_option_shows_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--seqlen", "8", "--heads", "4", "--nothing-like-it"])
    err = capsys.readouterr().err
    assert err.startswith("usage: warploom explain ") and err.endswith("unrecognized arguments: --nothing-like-it\n")


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5", str(10**18)])
@pytest.mark.parametrize("option", [("bench", "--repeats"), ("bench", "--warm"), ("build", "--jobs")], ids=" ".join)
def test_numbers_within_their_limits(option: tuple[str, str], number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([option[0], f"{option[1]}={number}"])
    assert left.value.code == 2
    assert f"argument {option[1]}: takes a whole number" in capsys.readouterr().err


def test_a_missing_folder_is_made(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TILE, "--draw", "new/deep/tile.html"]) == 0
    assert (here / "new" / "deep" / "tile.html").exists()


def test_what_cannot_be_written_in_the_end_is_a_sentence(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full, say, or memory that is."""
    for error, words in (
        (OSError(28, "No space left on device", "tile.html"), "tile.html: No space left on device"),
        (MemoryError(), "this needs more memory than there is"),
        (ModuleNotFoundError("No module named 'nowhere'", name="nowhere"), "nowhere cannot be imported"),
    ):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("warploom.smem.page.write_page", fail)
        assert main([*TILE, "--draw", "tile.html"]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"warploom banks: {words}") and err.count("\n") == 1


def test_the_summary_of_modules(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It counts what --all names."""
    assert main(["build", "--list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["build", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["build", "--list", "--all"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [row["name"] for row in found]
    kinds = [row["kind"] for row in found]
    counts = {kind: str(kinds.count(kind)) for kind in dict.fromkeys(kinds)}
    *summed, total = [[" ".join(row[:-3]), *row[-3:]] for row in rows[1 : len(counts) + 2]]
    assert {row[0]: row[1:] for row in summed} == {kind: [count, "0", "0.0"] for kind, count in counts.items()}
    assert total == ["all", str(len(found)), "0", "0.0"]


def test_pictures_without_matplotlib_name_the_extra(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {name for name in sys.modules if name.startswith("matplotlib.")}  # an earlier test may have imported parts
    for name in ("matplotlib", *there):
        monkeypatch.setitem(sys.modules, name, None)
    assert main([*TILE, "--draw", "tile.png"]) == 2
    err = capsys.readouterr().err
    assert err == "warploom banks: banks as .png need matplotlib (pip install 'warploom[lab]'); .svg and .html need nothing\n"
    assert not (here / "tile.png").exists()
    assert main([*TILE, "--draw", "tile.svg"]) == 0
