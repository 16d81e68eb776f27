"""Running a call: a walk for its output, and one for each gradient; maps and denominators around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.attention.views import aligned
from warploom.linear.hopper.config import WalkConfig
from warploom.linear.hopper.plan import config, width
from warploom.linear.hopper.rows import divide, keys_gradient, mapped, mapped_and_sums, queries_gradient
from warploom.runtime import modules
from warploom.runtime.device import on_device

if TYPE_CHECKING:
    from warploom.linear.problem import LinearCall


def forward(call: LinearCall) -> tuple[Tensor, Tensor | None]:
    """Out, and the denominators, (batch, heads, seqlen)."""
    q, k, v = (aligned(t) for t in (call.q, call.k, call.v))
    with on_device(q):
        if not call.normalize:
            return _walk(call, q, k, v), None
        q = mapped(q, call.map_q)
        k, sums = mapped_and_sums(k, call.map_k)
        out = _walk(call, q, k, v)
        return out, divide(q, k, sums, out, call.scale, call.eps)


def backward(call: LinearCall, dout: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    q, k, v, dout = (aligned(t) for t in (call.q, call.k, call.v, dout))
    with on_device(q):
        if norm is None:
            dq, dk = _walk(call, dout, v, k), _walk(call, v, dout, q, reverse=True)
            return dq, dk, _walk(call, k, q, dout, reverse=True)
        q = mapped(q, call.map_q)
        k, sums = mapped_and_sums(k, call.map_k)
        norm = norm.contiguous()
        weights = norm.reciprocal()
        dq, delta = queries_gradient(q, k, sums, _walk(call, dout, v, k, wide=True), norm, call.scale, call.map_q)
        dk = _walk(call, v, dout, q, weights, reverse=True)
        keys_gradient(q, k, delta, dk, call.map_k)
        return dq, dk, _walk(call, k, q, dout, weights, reverse=True)


def _walk(
    call: LinearCall,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    weights: Tensor | None = None,
    *,
    reverse: bool = False,
    wide: bool = False,
) -> Tensor:
    """scale · Σ (a_i · b_j) w_j c_j over j <= i, in reverse over j >= i; all (batch, seqlen, heads, ·), weights one a row."""
    out = torch.empty(c.shape, dtype=torch.float32 if wide else c.dtype, device=c.device)
    variant = config(width(call.q.shape[3], call.v.shape[3]), reverse, weights is not None, wide)
    _function(variant)(a, b, c, out, weights, None, call.scale)
    return out


def _function(variant: WalkConfig) -> Callable[..., None]:
    function = modules.loaded(variant.spec)
    if function is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{variant.name} is not loaded, which a capturing stream cannot do: make such a call before")
        function = modules.load(variant.spec)
    return function
