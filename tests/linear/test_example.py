"""The example runs: it trains, writes, and its steps agree with whole passes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "linear_lm.py"


@pytest.mark.parametrize("kind", [[], ["--kind", "delta"]], ids=["linear", "delta"])
def test_example(kind: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "4", "--tokens", "24", *kind])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "loss fell from" in printed and "The for statement is used to " in printed and "tokens/s by steps" in printed


@pytest.mark.parametrize("kind", ["linear", "decay", "delta"])
def test_its_steps_are_its_passes(kind: str) -> None:
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model = example["Model"](dim=32, heads=2, kind=kind).double()
    written = torch.randint(256, (60,))
    worst, _ = example["written_anew"](model, written, 25)
    assert worst < 1e-9
