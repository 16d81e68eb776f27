"""Running a call: a walk for its output, and one for each gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.attention.views import aligned
from warploom.linear.hopper.config import WalkConfig
from warploom.linear.hopper.plan import config, width
from warploom.runtime import modules
from warploom.runtime.device import on_device

if TYPE_CHECKING:
    from warploom.linear.problem import LinearCall


def forward(call: LinearCall) -> Tensor:
    """The numerator of every query, (batch, seqlen, heads, M)."""
    return _walk(call, False, None, call.q, call.k, call.v)


def backward(call: LinearCall, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a call without a denominator."""
    q, k, v = (aligned(t) for t in (call.q, call.k, call.v))
    dout = aligned(dout)
    dq = _walk(call, False, None, dout, v, k)
    dk = _walk(call, True, None, v, dout, q)
    return dq, dk, _walk(call, True, None, k, q, dout)


def values_gradient(call: LinearCall, dout: Tensor, norm: Tensor) -> Tensor:
    """dv of a call with denominators ``norm``, (batch, heads, seqlen), which divide the upstream gradient's rows."""
    return _walk(call, True, norm.reciprocal(), call.k, call.q, dout)


def _walk(call: LinearCall, reverse: bool, weights: Tensor | None, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """scale · Σ (a_i · b_j) w_j c_j over j <= i, in reverse over j >= i; all (batch, seqlen, heads, ·), weights one a row."""
    out = torch.empty(c.shape, dtype=c.dtype, device=c.device)
    function = _function(config(width(call.q.shape[3], call.v.shape[3]), reverse, weights is not None))
    with on_device(a):
        function(aligned(a), aligned(b), aligned(c), out, weights, call.scale)
    return out


def _function(variant: WalkConfig) -> Callable[..., None]:
    function = modules.loaded(variant.spec)
    if function is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{variant.name} is not loaded, which a capturing stream cannot do: make such a call before")
        function = modules.load(variant.spec)
    return function
