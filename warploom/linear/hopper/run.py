"""Running a call: a walk for its output, and one for each gradient; maps and denominators around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.linear.hopper.cut import bind_states, gradient_states
from warploom.linear.hopper.log_gradients import Terms, log_gradients
from warploom.linear.hopper.plan import config, width
from warploom.linear.hopper.rows import bind_sums, denominators, mapped, mapped_and_sums, queries_gradient, through
from warploom.runtime import modules
from warploom.runtime.alignment import aligned, stepped
from warploom.runtime.device import current, on_device
from warploom.runtime.likeness import allocation, like

if TYPE_CHECKING:
    from warploom.linear.problem import LinearCall

# By q, k, v, two states that there are not, and decay; None where it does not take these addresses.
Forward = Callable[..., tuple[Tensor, None, None, None] | None]
_NO_TERMS = (None,) * 6  # of walks that neither leave any nor find a gradient by them


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
    device = call.v.device
    index, current_device = device.index, current(device)
    new_out = allocation(call.v.shape, call.v.dtype, device)
    tile, scale = width(call.q.shape[3], call.v.shape[3]), call.scale
    kind, chunk = _fading(call), config(tile).chunk
    function, weigh = _function(tile, **kind, cut=segments > 1), _weigh(call, segments, chunk)
    of_tokens = kind["fading"] and not kind["a_head"]
    if segments > 1:
        assert call.decay is not None
        log_stride = call.decay.stride(0) if kind["a_head"] else call.k.shape[1]
        own_states = bind_states(call.k, call.v, segments, chunk, log_stride, kind["a_head"])

    def run(
        q: Tensor, k: Tensor, v: Tensor, s: None, z: None, decay: Tensor | None, *others: None
    ) -> tuple[Tensor, None, None, None] | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        if current_device() != index:
            with torch.cuda.device(device):
                return run(q, k, v, s, z, decay)
        out = new_out()
        if segments > 1:
            weights, _ = weigh(decay)
            assert weights is not None
            function(q, k, v, out, weights, None, *own_states(k, v, weights), None, *_NO_TERMS, scale)
        elif of_tokens:
            function(q, k, v, out, None, None, None, None, decay, *_NO_TERMS, scale)
        else:
            function(q, k, v, out, decay, None, None, None, None, *_NO_TERMS, scale)
        return out, None, None, None

    return run


def _weigh(call: LinearCall, segments: int, chunk: int) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """What makes walks' weights of a decay, one log a head or sums of segments' logs, and the logs that they sum themselves."""
    decay = call.decay
    if decay is None or decay.ndim == 1:
        return lambda decay: (decay, None)
    if segments > 1:
        sum_logs = bind_sums(decay, chunk)
        return lambda decay: (sum_logs(decay), None)
    return lambda decay: (None, decay)


def backward(
    call: LinearCall, dout: Tensor, norm: Tensor | None, segments: int, paired: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and the decay's gradient where it asks for one; sequences are cut into so many segments.

    ``paired``: walks of dk and dv run side by side.
    """
    q, k, v, dout = (aligned(t) for t in (call.q, call.k, call.v, dout))
    if norm is None:
        return _backward(call, segments, paired)(dout, q, k, v, call.decay)
    with on_device(q):
        q, (k, sums) = mapped(q, call.map_q), mapped_and_sums(k, call.map_k)
        weights = norm.contiguous().reciprocal()
        x = _walk(call, dout, v, k, wide=True)
        dq, bias = queries_gradient(q, k, sums, x, weights, call.scale, call.map_q)
        dk = _walk(call, v, dout, q, weights, bias, reverse=True)
        return dq, through(dk, k, call.map_k), _walk(call, k, q, dout, weights, reverse=True), None


def bind_backward(
    call: LinearCall, segments: int, paired: bool = False
) -> Callable[..., tuple[Tensor | None, ...] | None] | None:
    """What launches further backward passes of this kind, without gradients of states; see `warploom.linear.backend`."""
    if call.normalize or not all(stepped(t) for t in (call.q, call.k, call.v)):
        return None
    launch = _backward(call, segments, paired)

    def run(
        dout: Tensor, norm: None, ds: None, dz: None, q: Tensor, k: Tensor, v: Tensor, s: None, z: None, decay: Tensor | None,
        *others: None,
    ) -> tuple[Tensor | None, ...] | None:  # fmt: skip
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        dq, dk, dv, ddecay = launch(aligned(dout), q, k, v, decay)
        return dq, dk, dv, None, None, ddecay

    return run


def _backward(call: LinearCall, segments: int, paired: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """What launches the three walks of a call without a denominator, and all around them, by dout, q, k, v and decay."""
    likes = [like(t.shape, t.dtype, t.device) for t in (call.q, call.k, call.v)]
    tile, scale = width(call.q.shape[3], call.v.shape[3]), call.scale
    chunk, decay_grad = config(tile).chunk, call.decay_grad
    kind = {**_fading(call), "cut": segments > 1}
    asked = {**kind, "terms": decay_grad}
    finds = decay_grad and not paired
    of_keys = {**asked, "reverse": True, "paired": paired}
    features = {**asked, "halves": paired}, of_keys, {**kind, "reverse": True, "finds": finds}
    functions = [_function(tile, **each) for each in (features[:2] if paired else features)]
    configs = [config(tile, **each) for each in features]
    weigh = _weigh(call, segments, chunk)
    order = (1, 0, 2)  # each begins where the one before ended, whose tensors L2 still has a part of

    def run(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        dq, dk, dv = (torch.empty_like(t) for t in likes)
        ddecay = None
        with on_device(q):
            weights, logs = weigh(decay)
            before: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * 3
            if segments > 1:
                assert weights is not None
                before = gradient_states(q, k, v, dout, weights, segments, chunk)
            left: list[tuple[Tensor | None, ...]] = [_NO_TERMS] * 3
            last = logs
            if decay_grad and decay is not None:
                terms = [Terms.of(each, q) for each in configs[:2]]
                left[:2] = (q, *terms[0], None, None, None), (k, *terms[1], None, None, None)
                last = decay.expand(k.shape[:3])
            tensors = (dout, v, k, dq), (v, dout, q, dk), (k, q, dout, dv)
            if paired and last is not None:
                functions[1](q, k, v, dout, dk, dv, weights, logs, *terms[1], scale)
                functions[0](*tensors[0], weights, None, *before[0], logs, *left[0], scale)
                ddecay = log_gradients(terms[0], terms[1], last, chunk, scale)
            else:
                if decay_grad and last is not None:
                    ddecay = torch.empty(last.shape, dtype=last.dtype, device=last.device)
                    left[2] = None, *terms[0], *terms[1], ddecay
                for i in order:
                    functions[i](*tensors[i], weights, None, *before[i], last if i == 2 else logs, *left[i], scale)
            if decay is not None and decay.ndim == 1 and ddecay is not None:
                ddecay = ddecay.sum((0, 1))
        return dq, dk, dv, ddecay

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
    function(a, b, c, out, weights, bias, None, None, None, *_NO_TERMS, call.scale)
    return out


@cache
def _function(width: int, **features: bool) -> Callable[..., None]:
    """The function of the variant that ``plan.config`` names."""
    return modules.fetch(config(width, **features).spec)
