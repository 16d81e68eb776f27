"""Running a call: chunks prepared, then walked; a backward pass range by range; and a step of decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from warploom.delta.problem import StepArgs
from warploom.delta.triton.back_kernel import back_kernel
from warploom.delta.triton.call import Call, Ranges, Tensors, Variant, readable
from warploom.delta.triton.config import Config, Launches, padded
from warploom.delta.triton.gradient_kernels import dk_kernel, dq_kernel
from warploom.delta.triton.prepare_kernel import prepare_kernel
from warploom.delta.triton.step_kernel import step_kernel
from warploom.delta.triton.walk_kernel import walk_kernel
from warploom.runtime.device import on_device
from warploom.runtime.likeness import like
from warploom.runtime.qkv import last_contiguous
from warploom.runtime.room import Room
from warploom.runtime.triton_launch import Chain, Launch

if TYPE_CHECKING:
    from warploom.delta.problem import DeltaCall

# Value columns and warps of a step by the keys' padded dim. Sums of columns that one warp holds need no barrier. At 128 dims 32
# columns reached 0.95 of a copy's rate on an H200, 0.92 in place, 16 columns 0.91 and 0.83 (states of 256 MB), 8 columns 0.68.
# Rows of other strides need an address each, for which one warp has no registers.
_STEP = {64: (32, 1), 128: (32, 1), 256: (16, 1)}
_STRIDED = {64: (64, 4), 128: (16, 2), 256: (32, 8)}


Piece = tuple[tuple[int, ...], torch.dtype]  # of memory that kernels alone see
Step = tuple[Launch, tuple[int, int], tuple[Any, ...]]  # a launch, its grid and its numbers
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def forward(c: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor | None]:
    """Out and the last state; see `warploom.delta.backend`."""
    c = readable(c)
    return _forward(Call.of(c), return_state)(*Tensors.of(c))


def bind(c: DeltaCall, return_state: bool) -> Callable[..., tuple[Tensor, Tensor | None] | None] | None:
    """What launches further calls of this kind by their tensors; see `warploom.delta.backend`."""
    if readable(c) is not c:
        return None
    call = Call.of(c)
    if not call.variant.direct:
        return None
    launch = _forward(call, return_state)

    def run(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
        return None if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 else launch(q, k, v, *others)

    return run


def _forward(call: Call, return_state: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What launches a call by its ``Tensors``."""
    like_out = call.like(((call.batch, call.seqlen, call.heads_v, call.variant.m), call.variant.dtype))
    like_last = call.like(call.states(call.sequences)) if return_state else None
    chain = Chain(_prepare(call), _walk(call, call.whole(), 0, 0, (True, return_state, False, False)))
    room = Room(call.device, *_prepared(call))

    def run(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, state: Tensor | None, lengths: Tensor | None,
        cu: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        out, last, memory = torch.empty_like(like_out), _new(like_last), room.new()
        with on_device(q):
            (prepare, walk), short = chain.launches()
            prepared = room.addresses(memory) if short else room.tensors(memory)
            prepare(q, k, beta, decay, *prepared, lengths, cu)
            walk(q, k, v, out, *prepared, state, last, None, None, None, None, lengths, cu)
        return out, last

    return run


def backward(c: DeltaCall, dout: Tensor, dstate: Tensor | None) -> Gradients:
    """dq, dk, dv, dbeta, ddecay and the initial state's gradient."""
    c, dout = readable(c), last_contiguous(dout)
    return _backward(Call.of(c, dout), dstate is not None)(dout, dstate, *Tensors.of(c))


def bind_backward(c: DeltaCall, dout: Tensor, dstate: Tensor | None) -> Callable[..., Gradients | None] | None:
    """What launches further backward passes of this kind by dout, dstate and the call's tensors."""
    if readable(c) is not c or last_contiguous(dout) is not dout:
        return None
    call = Call.of(c, dout)
    if not call.variant.direct:
        return None
    launch = _backward(call, dstate is not None)

    def run(dout: Tensor, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Gradients | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15:
            return None
        return launch(dout, dstate, q, k, v, *others)

    return run


def _backward(call: Call, with_dstate: bool) -> Callable[..., Gradients]:
    """What launches a backward pass by dout, dstate and the call's ``Tensors``."""
    starts = call.variant.present[1]
    cut = call.ranges()
    like_first = call.like(call.states(call.sequences)) if starts else None
    cuts = cut.number > 1
    steps = [_prepare(call)]
    for current in reversed(range(cut.number)):
        # The last range is reached through all others, whose states stay.
        begin = 0 if current == cut.number - 1 else current
        steps += [
            _walk(call, cut, begin, current, (False, False, cuts, True)),
            _back(call, cut, current, (with_dstate, starts, cuts)),
            *_gradients(call, cut, current),
        ]
    chain = Chain(*steps)
    resume = call.states((cut.number - 1) * cut.carriers) if cuts else None
    carry = call.states(cut.carriers if cut.per_sequence else 2) if cuts else None
    prepared, kept = _prepared(call), _kept(call, cut)
    room = Room(call.device, *prepared, *kept, resume, carry)
    first_kept, behind_kept = len(prepared), len(prepared) + len(kept)

    def run(
        dout: Tensor, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None,
        state: Tensor | None, lengths: Tensor | None, cu: Tensor | None,
    ) -> Gradients:  # fmt: skip
        dq, dk, dv, dbeta = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, beta))
        ddecay = None if decay is None else torch.empty_like(decay, memory_format=torch.contiguous_format)
        first, memory = _new(like_first), room.new()
        dlast = None if dstate is None else dstate.contiguous()
        with on_device(q):
            (prepare, *ranges), short = chain.launches()
            pieces = room.addresses(memory) if short else room.tensors(memory)
            prepared, kept = pieces[:first_kept], pieces[first_kept:behind_kept]
            resume, carry = pieces[behind_kept:]
            missing, states, factors, dstates, dfactors = kept
            prepare(q, k, beta, decay, *prepared, lengths, cu)
            for n in range(0, len(ranges), 4):
                walk, back, of_queries, of_keys = ranges[n : n + 4]
                walk(q, k, v, None, *prepared, state, None, resume, states, factors, missing, lengths, cu)
                back(q, k, dout, dv, *prepared, dlast, first, carry, dstates, dfactors, lengths, cu)
                of_queries(q, k, dout, *kept, beta, decay, dq, dk, dv, dbeta, ddecay, lengths, cu)
                of_keys(q, k, dout, dv, *kept, beta, decay, dk, dbeta, ddecay, lengths, cu)
        return dq, dk, dv, dbeta, ddecay, first

    return run


def step(args: StepArgs, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out (batch, heads_v, M) and the new state of one token a sequence, in one launch."""
    args = _readable_step(args, into is not None)
    q, k, v, beta, state, decay, *_ = args
    return _step(args, into)(q, k, v, beta, state, decay)


def bind_step(args: StepArgs, into: Tensor | None) -> Callable[..., tuple[Tensor, Tensor] | None] | None:
    """What launches further steps of this kind by q, k, v, beta, the state and decay; see `warploom.delta.backend`."""
    if _readable_step(args, into is not None) is not args:
        return None
    launch = _step(args, into)

    def run(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, decay: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | state.data_ptr()) & 15:
            return None
        return launch(q, k, v, beta, state, decay)

    return run


def _readable_step(args: StepArgs, inplace: bool) -> StepArgs:
    q, k, v = (last_contiguous(t) for t in (args.q, args.k, args.v))
    state = args.state if inplace else last_contiguous(args.state)
    if q is args.q and k is args.k and v is args.v and state is args.state:
        return args
    return args._replace(q=q, k=k, v=v, state=state)


def _step(args: StepArgs, into: Tensor | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """What launches a step by q, k, v, beta, the state, which is written over where there is ``into``, and decay."""
    q, k, v, beta, state, decay, scale, normalize, eps, _ = args
    batch, heads, e = q.shape
    heads_v, m = v.shape[1:]
    like_out = like((batch, heads_v, m), v.dtype, v.device)
    like_new = like(state.shape, state.dtype, state.device)
    strides = [*(s for t in (q, k, v, beta) for s in t.stride()[:2]), *((0, 0) if decay is None else decay.stride())]
    held = [*state.stride()[:3], *(state.stride()[:3] if into is not None else (heads_v * e * m, e * m, m))]
    # Sixteen bytes at a time.
    dense = m % 4 == 0 and held[2] == held[5] == m and all(s % 4 == 0 for s in held)
    strides += [s // 4 for s in held] if dense else held
    direct = all(t.data_ptr() % 16 == 0 for t in (q, k, v, state)) and max(map(abs, strides)) < 2**31
    block, warps = (_STEP if dense else _STRIDED)[padded(e)]
    kind = v.dtype, e, m, heads_v // heads, normalize, dense, decay is not None, block, warps
    grid = batch * heads_v * -(-m // block), 1
    launch = _step_launch(*kind, direct, q.device.index).kept(grid, (*strides, heads_v, scale, eps))
    inplace = into is not None

    def run(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, decay: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, new = torch.empty_like(like_out), state if inplace else torch.empty_like(like_new)
        with on_device(q):
            launch(q, k, v, beta, decay, state, out, new)
        return out, new

    return run


def _new(like: Tensor | None) -> Tensor | None:
    return None if like is None else torch.empty_like(like)


def _prepared(call: Call) -> list[Piece]:
    """Lower, weights and rows of every slot and value head: see prepare_kernel.py."""
    c, count = call.config.chunk, call.slots
    square = (count, call.heads_v, c, c), call.variant.dtype
    return [square, square, ((count, call.heads_v, 4, c), torch.float32)]


def _kept(call: Call, cut: Ranges) -> list[Piece | None]:
    """Missing, states, factors, dstates and dfactors of every chunk of a range and value head; factors are fp16's.

    See walk_kernel.py and back_kernel.py.
    """
    m, dtype = call.variant.m, call.variant.dtype
    factors: Piece | None = None
    if dtype == torch.float16:
        factors = (cut.entries, call.heads_v, -(-m // call.config.block)), torch.float32
    states = call.states(cut.entries, dtype)
    return [((cut.entries, call.heads_v, call.config.chunk, m), dtype), states, factors, states, factors]


def _prepare(call: Call) -> Step:
    strides = [s for name in ("q", "k", "beta", "decay") for s in call.strides[name]]
    numbers = (*strides, *call.tokens, call.heads_v, call.scale, call.eps)
    return _prepare_launch(call.variant, call.config), (call.slots * call.heads_v, 1), numbers


def _walk(call: Call, cut: Ranges, begin: int, end: int, present: tuple[bool, ...]) -> Step:
    """Ranges `begin` to `end`; present: out, the last state, states to resume from, and what is kept."""
    blocks = -(-call.variant.m // call.config.block)
    strides = [s for name in ("q", "k", "v") for s in call.strides[name]]
    numbers = (*strides, *call.tokens, call.heads_v, cut.size, begin, end)
    launch = _walk_launch(call.variant, call.config, cut.per_sequence, present)
    return launch, (call.walked * call.heads_v * blocks, 1), numbers


def _back(call: Call, cut: Ranges, current: int, present: tuple[bool, ...]) -> Step:
    """What writes dv and the states' gradients of a range, and of the initial states where it is the first.

    present: the last states' gradients, the initial states', and what is carried between ranges.
    """
    blocks = -(-call.variant.m // call.config.block)
    strides = [s for name in ("q", "k", "dout") for s in call.strides[name]]
    numbers = (*strides, *call.tokens, call.heads_v, cut.size, current)
    launch = _back_launch(call.variant, call.config, cut.per_sequence, present)
    return launch, (call.sequences * call.heads_v * blocks, 1), numbers


def _gradients(call: Call, cut: Ranges, current: int) -> tuple[Step, Step]:
    """What writes dq, part of dbeta and ddecay of a range, and what writes dk and the rest."""
    strides = [s for name in ("q", "k", "dout", "beta", "decay") for s in call.strides[name]]
    numbers = (*strides, *call.tokens, call.heads, cut.size, current, call.scale, call.eps)
    grid = (cut.entries * call.heads, 1)
    of_queries = _gradient_launch(dq_kernel, call.variant, call.config, call.config.dq, cut.per_sequence)
    of_keys = _gradient_launch(dk_kernel, call.variant, call.config, call.config.dk, cut.per_sequence)
    return (of_queries, grid, numbers), (of_keys, grid, numbers)


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
    dtype: torch.dtype, e: int, m: int, group: int, normalize: bool, dense: bool, decays: bool, block: int, warps: int,
    direct: bool, device: int | None,
) -> Launch:  # fmt: skip
    shapes = {"E": e, "M": m, "DE": padded(e), "BM": block, "num_warps": warps}
    return Launch(step_kernel, {**shapes, "GROUP": group, "DENSE": dense, "NORMALIZE": normalize}, direct=direct)
