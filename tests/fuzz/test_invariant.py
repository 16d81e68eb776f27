"""Drawn batch-invariant calls: one sequence has the same bits in another form of the call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fuzz import families
from tests.fuzz.check import check
from tests.fuzz.draw import Draw
from tests.fuzz.families.invariant import TAKE_INVARIANT
from warploom.attention.cpu import Cpu
from warploom.attention.problem import AttentionArgs
from warploom.runtime import invariance
from warploom.runtime.threads import one_thread

SEED = 20261124
CPU = torch.device("cpu")
FAMILIES = ("attention", "varlen", "decode")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def drawn(family: str, backend: str, count: int) -> list[Any]:
    """The first so many batch-invariant problems that the backend takes."""
    module, found, number = families.load(family), [], 0
    while len(found) < count:
        problem = module.draw(Draw(SEED, family, number), None, backend)
        number += 1
        if problem.invariant and (backend == "reference" or problem.dtype != "float64"):
            found.append(problem)
    return found


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_problems_have_one_set_of_bits(family: str, backend: str) -> None:
    for problem in drawn(family, backend, 8):
        outcome = check(family, problem, backend, CPU)
        assert outcome.status == "right", f"{outcome.words}\n{problem}"


@pytest.mark.parametrize("family", ["attention", "varlen"])
def test_bits_that_follow_the_number_of_sequences_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Cpu.forward

    def counted(self: Cpu, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        out, lse = forward(self, args)
        count = args.q.shape[0] if args.cu_seqlens_q is None else args.cu_seqlens_q.shape[0] - 1
        return out * (1.0 + count * 2.0**-9), lse

    monkeypatch.setattr(Cpu, "forward", counted)
    words = [w for problem in drawn(family, "cpu", 8) for w in check(family, problem, "cpu", CPU).words]
    assert any(w.startswith("one_set_of_bits") for w in words)


def test_a_decode_under_the_switch_that_reads_its_neighbour_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = invariance.attend

    def shifted(q: Tensor, cache: Any, **keywords: Any) -> Any:
        return attend(q, replace(cache, lengths=cache.lengths + cache.lengths.roll(1)), **keywords)

    monkeypatch.setattr(invariance, "attend", shifted)
    found = [check("decode", problem, "cpu", CPU) for problem in drawn("decode", "cpu", 8)]
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
