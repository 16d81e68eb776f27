"""Drawn batch-invariant calls: one sequence has the same bits in another form of the call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fuzz import families
from tests.fuzz.check import check
from tests.fuzz.draw import Draw
from tests.fuzz.families.invariant import TAKE_INVARIANT
from warploom.runtime import invariance

SEED = 20261124
CPU = torch.device("cpu")
FAMILIES = ("attention", "varlen", "decode")


def drawn(family: str, backend: str, count: int) -> list[Any]:
    """The first so many batch-invariant problems."""
    module, found, number = families.load(family), [], 0
    while len(found) < count:
        problem = module.draw(Draw(SEED, family, number), None, backend)
        number += 1
        if problem.invariant and module.refusal(problem, module.inputs(problem, CPU), backend) is None:
            found.append(problem)
    return found


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_problems_have_one_set_of_bits(family: str, backend: str) -> None:
    for problem in drawn(family, backend, 12):
        outcome = check(family, problem, backend, CPU)
        assert outcome.status == "right", f"{outcome.words}\n{problem}"


@pytest.mark.parametrize("family", ["attention", "varlen"])
def test_a_switch_that_nobody_heeds_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "asked", lambda value: False)
    words = [w for problem in drawn(family, "reference", 12) for w in check(family, problem, "reference", CPU).words]
    assert any(w.startswith("one_set_of_bits") for w in words)


def test_a_decode_under_the_switch_that_reads_its_neighbour_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = invariance.attend

    def shifted(q: torch.Tensor, cache: Any, **keywords: Any) -> Any:
        return attend(q, replace(cache, lengths=cache.lengths + cache.lengths.roll(1)), **keywords)

    monkeypatch.setattr(invariance, "attend", shifted)
    found = [check("decode", problem, "cpu", CPU) for problem in drawn("decode", "cpu", 20)]
    assert any(outcome.failed for outcome in found)


def test_every_backend_that_promises_it_is_drawn() -> None:
    """Of Triton on a GPU by variants, each of which is one binary."""
    for family in ("attention", "varlen"):
        module = families.load(family)
        assert set(TAKE_INVARIANT) <= set(module.BACKENDS)
        variants = module.variants(Draw(SEED, "variants"), "triton", 16)
        asked = [v for v in variants if v.invariant]
        assert len(asked) == 2
        for number, variant in enumerate(asked * 5):
            problem = module.draw(Draw(SEED, number), variant, "triton")
            counted = problem.batch and not problem.offsets if family == "attention" else problem.lengths_q
            assert bool(problem.invariant) == bool(counted)
