"""The part of the fuzzer that fits into the tests: a fixed seed, printed; `make fuzz` draws many more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fuzz import plan
from tests.fuzz.check import check
from tests.fuzz.mutants import hunt
from tests.fuzz.plan import Options
from tests.fuzz.replay import KEPT, again, load
from tests.interpreter import run_interpreted

SEED = 20261122
PROBLEMS = 240
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_problems_agree_with_the_oracle(part: int) -> None:
    options = Options(seed=SEED)
    print(f"python -m tests.fuzz {options.words()}")
    for number in range(part, PROBLEMS, PARTS):
        job, problem = plan.problem(options, number)
        outcome = check(job.family, problem, job.backend, torch.device("cpu"))
        assert not outcome.failed, f"{outcome.words}\npython -m tests.fuzz {options.words()} --only {number}\n{problem}"


@pytest.mark.parametrize("family", plan.present())
def test_every_mutant_of_the_oracle_is_caught(family: str) -> None:
    caught = hunt(family, "cpu")
    assert caught
    assert [c.mutant for c in caught if c.number is None] == []


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json")), ids=lambda p: p.stem)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_once_failed_is_right(path: Path, backend: str) -> None:
    outcome = again(load(path), backend, "cpu")
    assert outcome.status == "right", outcome.words  # and not refused, which would judge nothing


@pytest.mark.gpu
@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json")), ids=lambda p: p.stem)
def test_what_once_failed_is_right_on_its_own_backend(path: Path) -> None:
    kept = load(path)
    device = "cpu" if kept["backend"] in ("cpu", "reference") else "cuda"
    outcome = again(kept, kept["backend"], device)
    assert not outcome.failed, outcome.words


def test_triton_agrees_with_the_oracle_under_its_interpreter() -> None:
    run_interpreted(Path(__file__).parent / "interpreted")
