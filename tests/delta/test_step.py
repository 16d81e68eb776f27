"""One token at a time equals one pass, from any state; a state is changed where that is asked for only."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.delta.cases import Case
from tests.delta.harness import detached, drawn
from warploom import gated_delta_rule, gated_delta_step

STEP = ("scale", "normalize_qk", "eps")


def token(given: dict[str, Any], at: int) -> dict[str, Any]:
    """gated_delta_step()'s arguments but the state."""
    found = {n: None if given[n] is None else given[n][:, at] for n in ("q", "k", "v", "beta", "decay")}
    return {**found, **{n: given[n] for n in STEP}}


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    """Whether the largest difference is small beside the largest value."""
    return bool((got.double() - want.double()).abs().max() <= tolerance * want.double().abs().max().clamp_min(1.0))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"decay": None, "normalize_qk": False, "keys": "long"}, {"dtype": torch.bfloat16}, {"decay": "forgets"}],
    ids=["default", "plain", "bfloat16", "forgets"],
)
def test_prefill_then_steps_equal_one_pass(changes: dict[str, Any], inplace: bool, backend: str) -> None:
    case = Case(random.randrange(2**31), batch=2, tokens=40, heads=2, group=2, m=24, state=True, **changes)
    given = detached(drawn(case))
    want, last = gated_delta_rule(**given, return_state=True)
    head = {n: t[:, :25] if n in ("q", "k", "v", "beta", "decay") and t is not None else t for n, t in given.items()}
    out, state = gated_delta_rule(**head, return_state=True, backend=backend)
    rows = [out]
    for i in range(25, 40):
        before = state
        kept = before.clone()
        row, state = gated_delta_step(**token(given, i), state=before, inplace=inplace, backend=backend)
        assert (state is before) == inplace and torch.equal(before, kept) != inplace
        rows.append(row.unsqueeze(1))
    got = torch.cat(rows, 1)
    assert got.dtype == want.dtype and near(got, want, 2**-7 if case.dtype == torch.bfloat16 else 1e-5), case
    assert near(state, last, 1e-5), case


def test_chained_states_equal_one_pass() -> None:
    case = Case(random.randrange(2**31), tokens=150, dtype=torch.float64, state=True)
    given = drawn(case)
    want = gated_delta_rule(**given)
    parts, state = [], given["state"]
    for span in (slice(0, 70), slice(70, 71), slice(71, 150)):
        cut = {n: t[:, span] if n in ("q", "k", "v", "beta", "decay") else t for n, t in given.items()}
        part, state = gated_delta_rule(**{**cut, "state": state}, return_state=True)
        parts.append(part)
    assert near(torch.cat(parts, 1), want, 1e-11), case
    names = ("q", "k", "v", "beta", "decay", "state")
    chained = torch.autograd.grad(torch.cat(parts, 1).sin().sum(), [given[n] for n in names])
    whole = torch.autograd.grad(want.sin().sum(), [given[n] for n in names])
    for a, b in zip(chained, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_gradients_flow_through_steps() -> None:
    case = Case(random.randrange(2**31), tokens=6, group=2, dtype=torch.float64, state=True)
    given = drawn(case)
    names = ("q", "k", "v", "beta", "decay", "state")
    want = torch.autograd.grad(gated_delta_rule(**given).sin().sum(), [given[n] for n in names])
    state, rows = given["state"], []
    for i in range(6):
        row, state = gated_delta_step(**token(given, i), state=state)
        rows.append(row)
    found = torch.autograd.grad(torch.stack(rows, 1).sin().sum(), [given[n] for n in names])
    for got, each in zip(found, want, strict=True):
        torch.testing.assert_close(got, each, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_in_place_over_a_view_of_a_larger_cache(backend: str) -> None:
    """Every second slot of a pool of states; the others stay."""
    given = detached(drawn(Case(random.randrange(2**31), batch=2, tokens=1, state=True)))
    pool = torch.full((4, *given["state"].shape[1:]), 7.0)
    pool[::2] = given["state"]
    want, after = gated_delta_step(**token(given, 0), state=given["state"], backend=backend)
    version = pool._version
    out, state = gated_delta_step(**token(given, 0), state=pool[::2], inplace=True, backend=backend)
    assert torch.equal(out, want) and torch.equal(pool[::2], after) and state.data_ptr() == pool.data_ptr()
    assert (pool[1::2] == 7.0).all() and pool._version > version


def test_rows_of_a_longer_call() -> None:
    given = detached(drawn(Case(random.randrange(2**31), batch=2, tokens=1, group=2, state=True)))
    one = {n: t for n, t in given.items() if n not in ("lengths", "cu_seqlens")}
    out, state = gated_delta_step(**one)
    want, last = gated_delta_step(**token(given, 0), state=given["state"])
    assert torch.equal(out[:, 0], want) and torch.equal(state, last) and out.shape == given["v"].shape


def test_no_sequences() -> None:
    q = torch.zeros(0, 2, 16)
    for inplace in (False, True):
        out, state = gated_delta_step(q, q, q, q[..., 0], torch.zeros(0, 2, 16, 16), inplace=inplace)
        assert out.shape == (0, 2, 16) and state.shape == (0, 2, 16, 16)


def test_a_gradient_and_a_forward_derivative_in_place_are_refused() -> None:
    given = drawn(Case(random.randrange(2**31), tokens=1, state=True))
    with pytest.raises(ValueError, match=r"inplace=True writes over a state that a gradient would need; use torch\.no_grad"):
        gated_delta_step(**token(given, 0), state=given["state"], inplace=True)
    with torch.no_grad():
        gated_delta_step(**token(given, 0), state=given["state"], inplace=True)
    free = detached(given)
    row = free["v"][:, 0]

    def out(v: torch.Tensor) -> torch.Tensor:
        return gated_delta_step(**{**token(free, 0), "v": v}, state=free["state"])[0]

    with pytest.raises(NotImplementedError, match=r"forward-mode AD through warploom\.gated_delta_rule"):
        torch.func.jvp(out, (row,), (row,))
