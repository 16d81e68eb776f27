"""Running a call: a walk for its output, and one for each gradient; maps and denominators around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.linear.hopper.cut import gradient_states, own_states
from warploom.linear.hopper.log_gradients import Terms, log_gradients
from warploom.linear.hopper.plan import config, width
from warploom.linear.hopper.rows import denominators, mapped, mapped_and_sums, queries_gradient, sums_of_logs, through
from warploom.runtime import modules
from warploom.runtime.alignment import aligned, stepped
from warploom.runtime.device import on_device
from warploom.runtime.likeness import like

if TYPE_CHECKING:
    from warploom.linear.problem import LinearCall


_NO_TERMS = (None, None, None)  # of walks that leave none


def forward(call: LinearCall, segments: int) -> tuple[Tensor, Tensor | None]:
    """Out, and the denominators, (batch, heads, seqlen); sequences are cut into so many segments."""
    q, k, v = (aligned(t) for t in (call.q, call.k, call.v))
    if not call.normalize:
        return _forward(call, segments)(q, k, v, call.decay), None
    with on_device(q):
        q, (k, sums) = mapped(q, call.map_q), mapped_and_sums(k, call.map_k)
        norm, weights = denominators(q, k, sums, call.scale, call.eps)
        return _walk(call, q, k, v, weights), norm


def bind(call: LinearCall, segments: int) -> Callable[..., tuple[Tensor, None, None, None] | None] | None:
    """What launches further forward passes of this kind; see `warploom.linear.backend`."""
    if call.normalize or not all(stepped(t) for t in (call.q, call.k, call.v)):
        return None
    launch = _forward(call, segments)

    def run(
        q: Tensor, k: Tensor, v: Tensor, s: None, z: None, decay: Tensor | None, *others: None
    ) -> tuple[Tensor, None, None, None] | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        return launch(q, k, v, decay), None, None, None

    return run


def _forward(call: LinearCall, segments: int) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """What launches the walk of a call without a denominator, and what comes before it, by q, k, v and decay."""
    like_out = like(call.v.shape, call.v.dtype, call.v.device)
    tile, scale = width(call.q.shape[3], call.v.shape[3]), call.scale
    chunk = config(tile).chunk
    function = _function(tile, **_fading(call), cut=segments > 1)

    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> Tensor:
        out = torch.empty_like(like_out)
        with on_device(q):
            logs = _logs(decay, k.shape, chunk)
            before: tuple[Tensor | None, ...] = (None, None)
            if segments > 1:
                assert logs is not None
                before = own_states(k, v, logs, segments, chunk)
            function(q, k, v, out, logs, None, *before, *_NO_TERMS, scale)
        return out

    return run


def backward(
    call: LinearCall, dout: Tensor, norm: Tensor | None, segments: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and the decay's gradient where it asks for one; sequences are cut into so many segments."""
    q, k, v, dout = (aligned(t) for t in (call.q, call.k, call.v, dout))
    if norm is None:
        return _backward(call, segments)(dout, q, k, v, call.decay)
    with on_device(q):
        q, (k, sums) = mapped(q, call.map_q), mapped_and_sums(k, call.map_k)
        weights = norm.contiguous().reciprocal()
        x = _walk(call, dout, v, k, wide=True)
        dq, bias = queries_gradient(q, k, sums, x, weights, call.scale, call.map_q)
        dk = _walk(call, v, dout, q, weights, bias, reverse=True)
        return dq, through(dk, k, call.map_k), _walk(call, k, q, dout, weights, reverse=True), None


def bind_backward(call: LinearCall, segments: int) -> Callable[..., tuple[Tensor | None, ...] | None] | None:
    """What launches further backward passes of this kind, without gradients of states; see `warploom.linear.backend`."""
    if call.normalize or not all(stepped(t) for t in (call.q, call.k, call.v)):
        return None
    launch = _backward(call, segments)

    def run(
        dout: Tensor, norm: None, ds: None, dz: None, q: Tensor, k: Tensor, v: Tensor, s: None, z: None, decay: Tensor | None,
        *others: None,
    ) -> tuple[Tensor | None, ...] | None:  # fmt: skip
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        dq, dk, dv, ddecay = launch(aligned(dout), q, k, v, decay)
        return dq, dk, dv, None, None, ddecay

    return run


def _backward(call: LinearCall, segments: int) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """What launches the three walks of a call without a denominator, and all around them, by dout, q, k, v and decay."""
    likes = [like(t.shape, t.dtype, t.device) for t in (call.q, call.k, call.v)]
    tile, scale = width(call.q.shape[3], call.v.shape[3]), call.scale
    chunk = config(tile).chunk
    kind = {**_fading(call), "cut": segments > 1}
    asked = {**kind, "terms": call.decay_grad}
    of_queries, of_keys, of_values = (
        _function(tile, **features) for features in (asked, {**asked, "reverse": True}, {**kind, "reverse": True})
    )
    configs = [config(tile, **asked, reverse=reverse) for reverse in (False, True)]

    def run(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        dq, dk, dv = (torch.empty_like(t) for t in likes)
        ddecay = None
        with on_device(q):
            logs = _logs(decay, k.shape, chunk)
            left: list[tuple[Tensor | None, ...]] = [_NO_TERMS] * 2
            if call.decay_grad:
                terms = [Terms.of(each, q) for each in configs]
                left = [(x, *each) for x, each in zip((q, k), terms, strict=True)]
            before: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * 3
            if segments > 1:
                assert logs is not None
                before = gradient_states(q, k, v, dout, logs, segments, chunk)
            # In this order each walk begins where the one before ended, whose tensors L2 still has a part of.
            of_keys(v, dout, q, dk, logs, None, *before[1], *left[1], scale)
            of_queries(dout, v, k, dq, logs, None, *before[0], *left[0], scale)
            of_values(k, q, dout, dv, logs, None, *before[2], *_NO_TERMS, scale)
            if call.decay_grad and decay is not None:
                ddecay = log_gradients(terms[0], terms[1], decay.expand(k.shape[:3]), chunk, scale)
                ddecay = ddecay.sum((0, 1)) if decay.ndim == 1 else ddecay
        return dq, dk, dv, ddecay

    return run


def _logs(decay: Tensor | None, shape: torch.Size, chunk: int) -> Tensor | None:
    """Sums of a decay's logs within chunks of keys of a shape; logs of heads as they are."""
    if decay is None:
        return None
    return decay[None, :, None] if decay.ndim == 1 else sums_of_logs(decay.expand(shape[:3]), chunk)


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
    function(a, b, c, out, weights, bias, None, None, *_NO_TERMS, call.scale)
    return out


@cache
def _function(width: int, **features: bool) -> Callable[..., None]:
    """The function of the variant that ``plan.config`` names."""
    return modules.fetch(config(width, **features).spec)
