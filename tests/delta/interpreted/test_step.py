"""Steps of decoding in one launch, against the specification and against a prefill."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.delta.cases import Case
from warploom.delta import reference
from warploom.delta.problem import DeltaCall, StepArgs
from warploom.delta.triton import BACKEND

KINDS: dict[str, dict[str, Any]] = {
    "default": {"heads": 2, "group": 3},
    "plain": {"decay": None, "normalize_qk": False, "keys": "long"},
    "forgets": {"decay": "forgets", "heads": 4, "e": 20, "m": 7},
    "half precision": {"dtype": torch.float16, "m": 80},
    "wide keys": {"e": 130, "m": 40},
}


def token(call: DeltaCall, at: int, state: Tensor) -> StepArgs:
    q, k, v, beta = (t[:, at] for t in (call.q, call.k, call.v, call.beta))
    decay = None if call.decay is None else call.decay[:, at]
    return StepArgs(q, k, v, beta, state, decay, call.scale, call.normalize_qk, call.eps, "triton")


@pytest.mark.parametrize("inplace", [False, True], ids=["new state", "in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_step(kind: str, inplace: bool) -> None:
    """The strides of one token of many are not those of tensors of one token."""
    call, _, _ = Case(random.randrange(2**31), tokens=3, batch=2, state=True, **KINDS[kind]).call()
    assert call.state is not None
    state = call.state
    for at in range(3):
        args = token(call, at, state.clone())
        want, wanted = reference.BACKEND.step(args, None)
        before = args.state.clone()
        out, state = BACKEND.step(args, args.state if inplace else None)
        assert (state is args.state) == inplace and torch.equal(args.state, before) != inplace
        tolerance = 2e-3 if call.v.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(state, wanted, rtol=1e-5, atol=1e-5)


def test_state_of_any_strides_and_shared() -> None:
    """Heads first, as a cache may hold them; and one state for all, of which a new one is made."""
    call, _, _ = Case(random.randrange(2**31), tokens=1, batch=2, heads=3, state=True).call()
    assert call.state is not None
    wanted = BACKEND.step(token(call, 0, call.state), None)
    strided = call.state.transpose(0, 1).contiguous().transpose(0, 1)
    for state in (strided, call.state.transpose(2, 3).contiguous().transpose(2, 3)):
        for got, want in zip(BACKEND.step(token(call, 0, state), None), wanted, strict=True):
            assert torch.equal(got, want)
    out, new = BACKEND.step(token(call, 0, strided), strided)
    assert new is strided and torch.equal(out, wanted[0]) and torch.equal(new, wanted[1])
    apart = torch.nn.functional.pad(call.state, (0, 3))[..., : call.state.shape[-1]]
    out, new = BACKEND.step(token(call, 0, apart), apart)
    assert new is apart and torch.equal(out, wanted[0]) and torch.equal(new, wanted[1])
    shared = call.state[:1].expand_as(call.state)
    for got, want in zip(
        BACKEND.step(token(call, 0, shared), None), BACKEND.step(token(call, 0, shared.clone()), None), strict=True
    ):
        assert torch.equal(got, want)


def test_steps_continue_a_prefill() -> None:
    call, _, _ = Case(random.randrange(2**31), tokens=20, heads=2, group=2).call()
    full, last = BACKEND.forward(call, True)
    head = replace(call, **{n: getattr(call, n)[:, :17] for n in ("q", "k", "v", "beta", "decay")})
    _, state = BACKEND.forward(head, True)
    assert state is not None and last is not None
    for at in range(17, 20):
        out, state = BACKEND.step(token(call, at, state), None)
        torch.testing.assert_close(out, full[:, at], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)
