"""The CPU implementation and its backward by hand against the specification in fp64."""

from __future__ import annotations

import random

import pytest
import torch

from tests.delta.cases import CASES, Case, check
from warploom.delta import cpu


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("poisoned_memory")
def test_case(name: str) -> None:
    check(Case(random.randrange(2**31), **CASES[name]), cpu.BACKEND)


@pytest.mark.parametrize("name", ["default", "packed", "lengths"])
def test_without_a_gradient_of_the_state(name: str) -> None:
    check(Case(random.randrange(2**31), **CASES[name]), cpu.BACKEND, gradient_of_state=False)


@pytest.mark.parametrize("name", CASES)
def test_to_nine_digits(name: str) -> None:
    check(Case(random.randrange(2**31), **{**CASES[name], "dtype": torch.float64}), cpu.BACKEND)


@pytest.mark.parametrize(("chunk", "tokens", "size"), [(64, 256, 1), (16, 64, 2**11), (32, 32, 2**14)])
def test_blocks_of_any_size(chunk: int, tokens: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and rows one at a time, and several, over several blocks."""
    monkeypatch.setattr(cpu, "CHUNK", chunk)
    monkeypatch.setattr(cpu, "TOKENS", tokens)
    monkeypatch.setattr(cpu, "BLOCK", size)
    seed = random.randrange(2**31)
    for changes in (
        {"batch": 2, "heads": 2, "tokens": 300},
        {"batch": 3, "lengths": (270, 300, 5), "tokens": 300, "hidden": float("nan")},
        {"sequences": (130, 0, 140), "tokens": 280, "heads": 3},
    ):
        check(Case(seed, group=2, state=True, dtype=torch.float64, **changes), cpu.BACKEND)


def test_a_long_sequence_keeps_its_precision() -> None:
    check(Case(random.randrange(2**31), tokens=2000, e=8, m=8, state=True), cpu.BACKEND)


def test_inputs_and_upstream_gradients_are_not_written_to() -> None:
    """In fp64 a tile may be a view of what it was loaded from."""
    case = Case(random.randrange(2**31), tokens=64, heads=1, state=True, dtype=torch.float64)
    call, dout, dstate = case.call()
    given = [t for t in (*vars(call).values(), dout, dstate) if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in given]
    cpu.BACKEND.forward(call, True)
    cpu.BACKEND.backward(call, dout, dstate)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_backward_keeps_a_state_every_few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk's state of 64 heads and 256k tokens would be 17 GB."""
    kept, block = [], cpu.Block.backward

    def backward(self: cpu.Block, state: torch.Tensor, *others: object) -> torch.Tensor:
        kept.append(state.numel())
        return block(self, state, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu.Block, "backward", backward)
    call, dout, dstate = Case(0, tokens=1100, e=16, m=16).call()
    cpu.BACKEND.backward(call, dout, dstate)
    assert len(kept) == 5 and sum(kept) * 4 <= call.q.nbytes
