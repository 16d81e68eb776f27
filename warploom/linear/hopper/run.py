"""Running a call: a walk for its output, and one for each gradient; maps and denominators around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.linear.hopper.cut import bind_states
from warploom.linear.hopper.plan import config, width
from warploom.linear.hopper.rows import bind_sums, denominators, mapped, mapped_and_sums, queries_gradient, through
from warploom.runtime import modules
from warploom.runtime.alignment import aligned, stepped
from warploom.runtime.device import on_device
from warploom.runtime.likeness import like

if TYPE_CHECKING:
    from warploom.linear.problem import LinearCall

# By q, k, v, two states that there are not, and decay; None where it does not take these addresses.
Forward = Callable[..., tuple[Tensor, None, None, None] | None]


def forward(call: LinearCall, segments: int) -> tuple[Tensor, Tensor | None]:
    """Out, and the denominators, (batch, heads, seqlen); sequences are cut into so many segments."""
    q, k, v = (aligned(t) for t in (call.q, call.k, call.v))
    if not call.normalize:
        found = _forward(replace(call, q=q, k=k, v=v), segments)(q, k, v, None, None, call.decay)
        assert found is not None
        return found[0], None
    with on_device(q):
        q, (k, sums) = mapped(q, call.map_q), mapped_and_sums(k, call.map_k)
        norm, weights = denominators(q, k, sums, call.scale, call.eps)
        return _walk(call, q, k, v, weights), norm


def bind(call: LinearCall, segments: int) -> Forward | None:
    """What launches further forward passes of this kind; see `warploom.linear.backend`."""
    if call.normalize or not all(stepped(t) for t in (call.q, call.k, call.v)):
        return None
    return _forward(call, segments)


def _forward(call: LinearCall, segments: int) -> Forward:
    """What launches the walk of a call without a denominator, and what comes before it."""
    like_out = like(call.v.shape, call.v.dtype, call.v.device)
    tile, scale = width(call.q.shape[3], call.v.shape[3]), call.scale
    function = _function(tile, **_fading(call), cut=segments > 1)
    before = _before(call, segments, config(tile).chunk)

    def run(
        q: Tensor, k: Tensor, v: Tensor, s: None, z: None, decay: Tensor | None, *others: None
    ) -> tuple[Tensor, None, None, None] | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        out = torch.empty_like(like_out)
        with on_device(q):
            function(q, k, v, out, *before(k, v, decay), scale)
        return out, None, None, None

    return run


def _before(call: LinearCall, segments: int, chunk: int) -> Callable[..., tuple[Tensor | None, ...]]:
    """What gives a walk over earlier tokens its weights, bias, segments' states and fades, and the logs that it sums."""
    decay = call.decay
    if decay is None or (segments == 1 and decay.ndim == 1):
        return lambda k, v, decay: (decay, None, None, None, None)
    if segments == 1:
        batch, seqlen, heads = decay.shape
        sums = like((batch, heads, -(-seqlen // chunk) * chunk), decay.dtype, decay.device)
        return lambda k, v, decay: (torch.empty_like(sums), None, None, None, decay)
    if decay.ndim == 1:
        own_states = bind_states(call.k, call.v, segments, chunk, decay.stride(0), True)
        return lambda k, v, decay: (decay, None, *own_states(k, v, decay), None)
    sum_logs = bind_sums(decay, chunk)
    own_states = bind_states(call.k, call.v, segments, chunk, call.k.shape[1], False)

    def run(k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor | None, ...]:
        sums = sum_logs(decay)
        return sums, None, *own_states(k, v, sums), None

    return run


def backward(call: LinearCall, dout: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    q, k, v, dout = (aligned(t) for t in (call.q, call.k, call.v, dout))
    if norm is None:
        return _backward(call)(dout, q, k, v, call.decay)
    with on_device(q):
        q, (k, sums) = mapped(q, call.map_q), mapped_and_sums(k, call.map_k)
        weights = norm.contiguous().reciprocal()
        x = _walk(call, dout, v, k, wide=True)
        dq, bias = queries_gradient(q, k, sums, x, weights, call.scale, call.map_q)
        dk = _walk(call, v, dout, q, weights, bias, reverse=True)
        return dq, through(dk, k, call.map_k), _walk(call, k, q, dout, weights, reverse=True)


def bind_backward(call: LinearCall) -> Callable[..., tuple[Tensor | None, ...] | None] | None:
    """What launches further backward passes of this kind, without gradients of states; see `warploom.linear.backend`."""
    if call.normalize or not all(stepped(t) for t in (call.q, call.k, call.v)):
        return None
    launch = _backward(call)

    def run(
        dout: Tensor, norm: None, ds: None, dz: None, q: Tensor, k: Tensor, v: Tensor, s: None, z: None, decay: Tensor | None,
        *others: None,
    ) -> tuple[Tensor | None, ...] | None:  # fmt: skip
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        return *launch(aligned(dout), q, k, v, decay), None, None, None

    return run


def _backward(call: LinearCall) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """What launches the three walks of a call without a denominator by dout, q, k, v and decay; the first sums its logs."""
    likes = [like(t.shape, t.dtype, t.device) for t in (call.q, call.k, call.v)]
    tile, scale = width(call.q.shape[3], call.v.shape[3]), call.scale
    earlier, later = (_function(tile, **_fading(call), reverse=reverse) for reverse in (False, True))
    before, nothing = _before(call, 1, config(tile).chunk), (None,) * 4

    def run(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(t) for t in likes)
        with on_device(q):
            weights, *others = before(k, v, decay)
            earlier(dout, v, k, dq, weights, *others, scale)
            later(v, dout, q, dk, weights, *nothing, scale)
            later(k, q, dout, dv, weights, *nothing, scale)
        return dq, dk, dv

    return run


def _fading(call: LinearCall) -> dict[str, bool]:
    """The features of walks that a decay asks for."""
    return {"fading": call.decay is not None, "a_head": call.decay is not None and call.decay.ndim == 1}


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

    a, b and c are (batch, seqlen, heads, ·); weights w and bias (batch, heads, seqlen) in fp32, 1 and 0 where None.
    """
    out = torch.empty(c.shape, dtype=torch.float32 if wide else c.dtype, device=c.device)
    tile = width(call.q.shape[3], call.v.shape[3])
    function = _function(tile, reverse=reverse, weighted=weights is not None, biased=bias is not None, wide=wide)
    function(a, b, c, out, weights, bias, None, None, None, call.scale)
    return out


@cache
def _function(width: int, **features: bool) -> Callable[..., None]:
    """The function of the variant that ``plan.config`` names."""
    return modules.fetch(config(width, **features).spec)
