"""Running a call: a walk for its output, and one for each gradient; maps and denominators around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.linear.hopper.plan import config, width
from warploom.linear.hopper.rows import denominators, mapped, mapped_and_sums, queries_gradient, sums_of_logs, through
from warploom.runtime import modules
from warploom.runtime.alignment import aligned
from warploom.runtime.device import on_device

if TYPE_CHECKING:
    from warploom.linear.problem import LinearCall


def forward(call: LinearCall) -> tuple[Tensor, Tensor | None]:
    """Out, and the denominators, (batch, heads, seqlen)."""
    q, k, v = (aligned(t) for t in (call.q, call.k, call.v))
    with on_device(q):
        if not call.normalize:
            return _walk(call, q, k, v, _logs(call)), None
        q, (k, sums) = mapped(q, call.map_q), mapped_and_sums(k, call.map_k)
        norm, weights = denominators(q, k, sums, call.scale, call.eps)
        return _walk(call, q, k, v, weights), norm


def backward(call: LinearCall, dout: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    q, k, v, dout = (aligned(t) for t in (call.q, call.k, call.v, dout))
    with on_device(q):
        if norm is None:
            logs = _logs(call)
            dq, dk = _walk(call, dout, v, k, logs), _walk(call, v, dout, q, logs, reverse=True)
            return dq, dk, _walk(call, k, q, dout, logs, reverse=True)
        q, (k, sums) = mapped(q, call.map_q), mapped_and_sums(k, call.map_k)
        weights = norm.contiguous().reciprocal()
        x = _walk(call, dout, v, k, wide=True)
        dq, bias = queries_gradient(q, k, sums, x, weights, call.scale, call.map_q)
        dk = _walk(call, v, dout, q, weights, bias, reverse=True)
        return dq, through(dk, k, call.map_k), _walk(call, k, q, dout, weights, reverse=True)


def _logs(call: LinearCall) -> Tensor | None:
    """Sums of the decay's logs within the walks' chunks; logs of heads as they are."""
    if call.decay is None:
        return None
    if call.decay.ndim == 1:
        return call.decay[None, :, None]
    return sums_of_logs(call.decays(), config(width(call.q.shape[3], call.v.shape[3])).chunk)


def _walk(
    call: LinearCall,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    reverse: bool = False,
    wide: bool = False,
) -> Tensor:
    """w_i · scale · Σ (a_i · b_j) c_j over j <= i, or in reverse scale · Σ (a_i · b_j - bias_j) w_j c_j over j >= i.

    a, b and c are (batch, seqlen, heads, ·); weights w and bias (batch, heads, seqlen) in fp32, 1 and 0 where None. Of a call
    with a decay weights are the sums of its logs within chunks, or one log a head, (1, heads, 1), and products fade by the logs
    between i and j.
    """
    out = torch.empty(c.shape, dtype=torch.float32 if wide else c.dtype, device=c.device)
    tile = width(call.q.shape[3], call.v.shape[3])
    fading = call.decay is not None
    kind = {"weighted": weights is not None and not fading, "fading": fading}
    kind |= {"a_head": call.decay is not None and call.decay.ndim == 1}
    function = _function(tile, reverse=reverse, biased=bias is not None, wide=wide, **kind)
    function(a, b, c, out, weights, bias, call.scale)
    return out


@cache
def _function(width: int, **features: bool) -> Callable[..., None]:
    """The function of the variant that ``plan.config`` names."""
    return modules.fetch(config(width, **features).spec)
