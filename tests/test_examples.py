"""The examples run on a CPU in seconds and show what they say; `tests/linear/test_example.py` has that of linear attention."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from warploom.masks import Causal, Document

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def test_packed_training_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("train_packed.py", monkeypatch, "--steps", "40")
    first, last = re.search(r"loss went from (\S+) to (\S+)", capsys.readouterr().out).groups()
    assert float(last) < float(first) - 0.5


def test_packed_documents_do_not_see_each_other() -> None:
    example = load("train_packed.py")
    torch.manual_seed(0)
    model, lengths = example["Model"](), example["draw_lengths"]()
    assert sum(lengths) == example["SEQLEN"]
    assert example["packed_against_alone"](model, "cpu") < 1e-5
    tokens, places, _ = example["batch"](lengths, "cpu")
    packed, leaking = (model(tokens, places, mask) for mask in (Document(lengths), Causal()))
    assert (packed - leaking).abs().max() > 1e-3


def test_long_rows_are_learned_by_one_process_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """tests/distributed/usage.py has several."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    run("train_long.py", monkeypatch, "--steps", "8", "--seqlen", "256", "--rows", "2", "--device", "cpu")
    first, last = re.search(r"loss went from (\S+) to (\S+)", capsys.readouterr().out).groups()
    assert float(last) < float(first) - 0.5


@pytest.mark.parametrize("seed", ["0", "3"])
def test_served_tokens_are_those_of_whole_sequences(
    seed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("serve.py", monkeypatch, "--tokens", "20", "--seed", seed)
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split(": ")[1].split()) for line in lines[:-1]] == [20, 20, 20]
    assert lines[-1] == "the same as whole sequences run anew: True"


def test_masks_are_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("draw_masks.py", monkeypatch, "--out", str(tmp_path / "masks"), "--seqlen", "32")
    pictures = sorted(path.name for path in (tmp_path / "masks").iterdir())
    assert len(pictures) == len(capsys.readouterr().out.splitlines()) == 6
    assert "documents-in-a-window.svg" in pictures
    assert all((tmp_path / "masks" / name).read_text().lstrip().startswith("<?xml") for name in pictures)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve.py", "--tokens", "0"], "--tokens takes 1 or more, got 0"),
        (["serve.py", "--device", "cuda"], "--device cuda: torch sees no CUDA device here"),
        (["train_packed.py", "--steps", "0"], "--steps takes 1 or more, got 0"),
        (["train_packed.py", "--device", "cuda:1"], "--device cuda:1: torch sees no CUDA device here"),
        (["linear_lm.py", "--tokens", "-1"], "--tokens takes 1 or more, got -1"),
        (["linear_lm.py", "--device", "cuda"], "--device cuda: torch sees no CUDA device here"),
        (["train_long.py", "--device", "cuda"], "--device cuda: torch sees no CUDA device here"),
        (["train_long.py", "--device", "cpu", "--resume", "missing.pt"], "--resume missing.pt: there is no such file"),
        (["train_long.py", "--device", "cpu", "--rows", "0"], "--rows takes 1 or more, got 0"),
        (["train_long.py", "--device", "cpu", "--context", "0"], "--context takes 1 or more, got 0"),
        (["train_long.py", "--device", "cpu", "--seqlen", "100"], "--seqlen takes 130 or more, got 100"),
        (["train_long.py", "--device", "cpu", "--save", "no/state.pt"], "--save no/state.pt: there is no folder no"),
        (["linear_lm.py", "--device", "foo"], "--device takes cpu or cuda, got foo"),
        (["draw_masks.py", "--seqlen", "0"], "--seqlen takes 1 or more, got 0"),
        (["draw_masks.py"], "drawing needs matplotlib: pip install matplotlib"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_was_a_traceback(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as left:
        run(arguments[0], monkeypatch, *arguments[1:])
    assert left.value.code == 2 and capsys.readouterr().err.endswith(f": error: {words}\n")


def test_a_file_that_is_no_checkpoint_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    other, words = tmp_path / "other.pt", tmp_path / "words.pt"
    torch.save({"weights": torch.zeros(1)}, other)
    words.write_text("words")
    for path in (other, words):
        with pytest.raises(SystemExit, match=rf"--resume {path}: it is no file of --save"):
            run("train_long.py", monkeypatch, "--steps", "1", "--seqlen", "256", "--device", "cpu", "--resume", str(path))
        torch.distributed.destroy_process_group()


def test_every_example_is_run_by_a_test_and_named_in_the_documentation() -> None:
    tests = "".join(path.read_text() for path in (Path(__file__), Path(__file__).parent / "linear" / "test_example.py"))
    pages = "".join(path.read_text() for path in (EXAMPLES.parent / "docs").glob("*.md"))
    for path in EXAMPLES.glob("*.py"):
        assert path.name in tests and f"examples/{path.name}" in pages, path.name
