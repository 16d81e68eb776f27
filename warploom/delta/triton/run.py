"""Running a call: chunks prepared, then walked; a backward pass range by range; and a step of decoding."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from warploom.delta.problem import StepArgs
from warploom.delta.triton.back_kernel import back_kernel
from warploom.delta.triton.call import Call, Ranges, Variant
from warploom.delta.triton.config import Config, Launches, padded
from warploom.delta.triton.gradient_kernels import dk_kernel, dq_kernel
from warploom.delta.triton.prepare_kernel import prepare_kernel
from warploom.delta.triton.step_kernel import step_kernel
from warploom.delta.triton.walk_kernel import walk_kernel
from warploom.runtime.device import on_device
from warploom.runtime.qkv import last_contiguous
from warploom.runtime.triton_launch import Launch

if TYPE_CHECKING:
    from warploom.delta.problem import DeltaCall

# Value columns and warps of a step by the keys' padded dim: 32 elements of the state a thread. Of 128 timed.
_STEP = {64: (64, 4), 128: (16, 2), 256: (32, 8)}


class Prepared(NamedTuple):
    """Of every slot and value head: see prepare_kernel.py."""

    lower: Tensor
    weights: Tensor
    rows: Tensor


class Kept(NamedTuple):
    """Of every chunk of a range and value head: see walk_kernel.py and back_kernel.py. Factors are fp16's."""

    missing: Tensor
    states: Tensor
    factors: Tensor | None
    dstates: Tensor
    dfactors: Tensor | None


def forward(c: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor | None]:
    """Out and the last state; see `warploom.delta.backend`."""
    call = Call.of(c)
    out = torch.empty(c.v.shape, dtype=c.v.dtype, device=c.v.device)
    last = call.states(call.sequences) if return_state else None
    with on_device(call.q):
        _walk(call, _prepared(call), call.whole(), 0, 0, out=out, last=last)
    return out, last


def backward(
    c: DeltaCall, dout: Tensor, dstate: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv, dbeta, ddecay and the initial state's gradient."""
    call = Call.of(c, dout)
    cut = call.ranges()
    dq, dk, dv, dbeta = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (c.q, c.k, c.v, c.beta))
    ddecay = None if c.decay is None else torch.empty(c.decay.shape, dtype=c.decay.dtype, device=c.decay.device)
    first = call.states(call.sequences) if c.state is not None else None
    dlast = None if dstate is None else dstate.contiguous()
    kept = _kept(call, cut)
    resume = call.states((cut.number - 1) * cut.carriers) if cut.number > 1 else None
    carry = call.states(cut.carriers if cut.per_sequence else 2) if cut.number > 1 else None
    with on_device(call.q):
        prepared = _prepared(call)
        for current in reversed(range(cut.number)):
            # The last range is reached through all others, whose states stay.
            begin = 0 if current == cut.number - 1 else current
            _walk(call, prepared, cut, begin, current, resume=resume, kept=kept)
            _back(call, prepared, cut, current, dv, dlast, first, carry, kept)
            _gradients(call, cut, current, (dq, dk, dv, dbeta, ddecay), kept)
    return dq, dk, dv, dbeta, ddecay, first


def step(args: StepArgs, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out (batch, heads_v, M) and the new state of one token a sequence, in one launch."""
    q, k, v, beta, state, decay, scale, normalize, eps, _ = args
    q, k, v = (last_contiguous(t) for t in (q, k, v))
    if into is None:
        state = last_contiguous(state)
    batch, heads, e = q.shape
    heads_v, m = v.shape[1:]
    out = torch.empty((batch, heads_v, m), dtype=v.dtype, device=v.device)
    new = torch.empty(state.shape, dtype=state.dtype, device=state.device) if into is None else into
    given = (q, k, v, state)
    strides = [*(s for t in (q, k, v, beta) for s in t.stride()[:2]), *((0, 0) if decay is None else decay.stride())]
    strides += [*state.stride()[:3], *new.stride()[:3]]
    direct = all(t.data_ptr() % 16 == 0 for t in (*given, new)) and max(map(abs, strides)) < 2**31
    launch = _step_launch(v.dtype, e, m, heads_v // heads, normalize, decay is not None, direct, q.device.index)
    with on_device(q):
        blocks = -(-m // _STEP[padded(e)][0])
        launch((batch * heads_v * blocks, 1), q, k, v, beta, decay, state, out, new, *strides, heads_v, scale, eps)
    return out, new


def _prepared(call: Call) -> Prepared:
    c, count = call.config.chunk, call.slots
    shape = (count, call.heads_v, c, c)
    lower, weights = (torch.empty(shape, dtype=call.variant.dtype, device=call.q.device) for _ in range(2))
    found = Prepared(lower, weights, torch.empty((count, call.heads_v, 4, c), dtype=torch.float32, device=call.q.device))
    strides = [s for name in ("q", "k", "beta", "decay") for s in call.strides[name]]
    _prepare_launch(call.variant, call.config)(
        (count * call.heads_v, 1),
        *(call.q, call.k, call.beta, call.decay, *found, call.lengths, call.cu, *strides, *call.tokens, call.heads_v),
        *(call.scale, call.eps),
    )
    return found


def _kept(call: Call, cut: Ranges) -> Kept:
    m, dtype = call.variant.m, call.variant.dtype
    factors: list[Tensor | None] = [None, None]
    if dtype == torch.float16:
        shape = (cut.entries, call.heads_v, -(-m // call.config.block))
        factors = [call.q.new_empty(shape, dtype=torch.float32) for _ in range(2)]
    missing = torch.empty((cut.entries, call.heads_v, call.config.chunk, m), dtype=dtype, device=call.q.device)
    return Kept(missing, call.states(cut.entries, dtype), factors[0], call.states(cut.entries, dtype), factors[1])


def _walk(
    call: Call,
    prepared: Prepared,
    cut: Ranges,
    begin: int,
    end: int,
    *,
    out: Tensor | None = None,
    last: Tensor | None = None,
    resume: Tensor | None = None,
    kept: Kept | None = None,
) -> None:
    """Ranges `begin` to `end`: out and the last state, or what `kept` and `resume` take."""
    missing, states, factors = (None, None, None) if kept is None else (kept.missing, kept.states, kept.factors)
    present = tuple(t is not None for t in (out, last, resume, states))
    blocks = -(-call.variant.m // call.config.block)
    strides = [s for name in ("q", "k", "v") for s in call.strides[name]]
    _walk_launch(call.variant, call.config, cut.per_sequence, present)(
        (call.walked * call.heads_v * blocks, 1),
        *(call.q, call.k, call.v, out, *prepared, call.state, last, resume, states, factors, missing, call.lengths, call.cu),
        *(*strides, *call.tokens, call.heads_v, cut.size, begin, end),
    )


def _back(
    call: Call,
    prepared: Prepared,
    cut: Ranges,
    current: int,
    dv: Tensor,
    last: Tensor | None,
    first: Tensor | None,
    carry: Tensor | None,
    kept: Kept,
) -> None:
    """Write dv and the states' gradients of a range, and of the initial states where it is the first."""
    present = tuple(t is not None for t in (last, first, carry))
    blocks = -(-call.variant.m // call.config.block)
    strides = [s for name in ("q", "k", "dout") for s in call.strides[name]]
    _back_launch(call.variant, call.config, cut.per_sequence, present)(
        (call.sequences * call.heads_v * blocks, 1),
        *(call.q, call.k, call.dout, dv, *prepared, last, first, carry, kept.dstates, kept.dfactors, call.lengths, call.cu),
        *(*strides, *call.tokens, call.heads_v, cut.size, current),
    )


def _gradients(call: Call, cut: Ranges, current: int, results: tuple[Tensor | None, ...], kept: Kept) -> None:
    """Write dq, dk, dbeta and ddecay of a range."""
    dq, dk, dv, dbeta, ddecay = results
    strides = [s for name in ("q", "k", "dout", "beta", "decay") for s in call.strides[name]]
    numbers = (*strides, *call.tokens, call.heads, cut.size, current, call.scale, call.eps)
    grid = (cut.entries * call.heads, 1)
    _gradient_launch(dq_kernel, call.variant, call.config, call.config.dq, cut.per_sequence)(
        grid,
        *(call.q, call.k, call.dout, *kept, call.beta, call.decay),
        *(dq, dk, dv, dbeta, ddecay, call.lengths, call.cu, *numbers),
    )
    _gradient_launch(dk_kernel, call.variant, call.config, call.config.dk, cut.per_sequence)(
        grid,
        *(call.q, call.k, call.dout, dv, *kept, call.beta, call.decay),
        *(dk, dbeta, ddecay, call.lengths, call.cu, *numbers),
    )


def _constants(variant: Variant, config: Config, launches: Launches) -> dict[str, Any]:
    return {
        "E": variant.e,
        "DE": padded(variant.e),
        "C": config.chunk,
        "GROUP": variant.group,
        "UNIT": variant.unit,
        "WIDE": variant.wide,
        "num_warps": launches.warps,
    }


@cache
def _prepare_launch(variant: Variant, config: Config) -> Launch:
    options = {**_constants(variant, config, config.prepare), "NORMALIZE": variant.normalize}
    return Launch(prepare_kernel, options, direct=variant.direct)


@cache
def _walk_launch(variant: Variant, config: Config, per_sequence: bool, present: tuple[bool, ...]) -> Launch:
    options = {**_constants(variant, config, config.walk), "M": variant.m, "BM": config.block, "STAGES": config.walk.stages}
    return Launch(walk_kernel, {**options, "PER_SEQUENCE": per_sequence}, direct=variant.direct)


@cache
def _back_launch(variant: Variant, config: Config, per_sequence: bool, present: tuple[bool, ...]) -> Launch:
    options = {**_constants(variant, config, config.back), "M": variant.m, "BM": config.block, "STAGES": config.back.stages}
    return Launch(back_kernel, {**options, "PER_SEQUENCE": per_sequence}, direct=variant.direct)


@cache
def _gradient_launch(kernel: Any, variant: Variant, config: Config, launches: Launches, per_sequence: bool) -> Launch:
    options = {**_constants(variant, config, launches), "M": variant.m, "BM": config.block, "STAGES": launches.stages}
    return Launch(kernel, {**options, "NORMALIZE": variant.normalize, "PER_SEQUENCE": per_sequence}, direct=variant.direct)


@cache
def _step_launch(
    dtype: torch.dtype, e: int, m: int, group: int, normalize: bool, decays: bool, direct: bool, device: int | None
) -> Launch:
    block, warps = _STEP[padded(e)]
    shapes = {"E": e, "M": m, "DE": padded(e), "BM": block, "num_warps": warps}
    return Launch(step_kernel, {**shapes, "GROUP": group, "NORMALIZE": normalize}, direct=direct)
