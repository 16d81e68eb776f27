"""Running a call: one pass where there are enough heads, else states of segments first; backward, and a step of decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.kernels.triton.feature_maps import MAPS
from warploom.linear.problem import StepArgs
from warploom.linear.triton.call import NO_STATES, Call, States, Tensors, Variant, block_of, dims, new, new_states, readable
from warploom.linear.triton.config import Tiling, padded
from warploom.linear.triton.forward_kernel import forward_kernel
from warploom.linear.triton.gradients import Pieces, of_keys, of_queries
from warploom.linear.triton.options import kind, maps, tile
from warploom.linear.triton.states import logs_summed, prefixes, room
from warploom.linear.triton.step_kernel import step_kernel
from warploom.runtime.device import on_device
from warploom.runtime.likeness import like
from warploom.runtime.qkv import last_contiguous
from warploom.runtime.triton_launch import Launch

if TYPE_CHECKING:
    from warploom.linear.problem import LinearCall

_STEP = {"BM": 64, "num_warps": 4}

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
Three = tuple[Tensor, Tensor, Tensor]


def forward(c: LinearCall, return_state: bool) -> Results:
    """Out, norm, s and z; see `warploom.linear.problem`."""
    c = readable(c)
    return _forward(Call.of(c), return_state)(*Tensors.of(c))


def bind(c: LinearCall, return_state: bool) -> Callable[..., Results | None] | None:
    """What launches further calls of this kind by their tensors; see `warploom.linear.backend`."""
    if readable(c) is not c:
        return None
    call = Call.of(c)
    if not call.variant.direct:
        return None
    launch = _forward(call, return_state)

    def run(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Results | None:
        return None if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 else launch(q, k, v, *others)

    return run


def _forward(call: Call, return_state: bool) -> Callable[..., Results]:
    """What launches a call by its ``Tensors``."""
    variant, tiling = call.variant, call.config.forward
    like_out = call.like((call.batch, call.seqlen_q, call.heads, variant.m), variant.dtype)
    like_norm = call.like((call.batch, call.heads, call.seqlen_q)) if variant.normalize else None
    likes: States = call.states(call.sequences) if return_state else NO_STATES
    programs = -(-variant.m // tiling.block) * call.heads
    looks_back = call.looks_back(programs)
    if looks_back:
        cut, per_slot, present = call.looking_back(programs), False, call.with_state
        make_room = room(call, cut, programs, padded(variant.e), block_of(variant.m, tiling.block))
    else:
        before = prefixes(call, programs, return_state)
        cut, per_slot, present = before.cut, before.per_slot, before.present[0]
    writes = return_state and (cut.whole or looks_back) and variant.causal
    launch = _forward_launch(variant, tiling, per_slot, (present, writes, looks_back)).kept(
        (cut.slots * programs, 1),
        (
            *(*call.strides_q, *call.strides_k, *call.strides_v, *call.strides_g, *call.numbers(cut)),
            *(call.heads, variant.group, call.scale, call.eps),
        ),
    )

    summed = logs_summed(call)

    def run(*tensors: Tensor | None) -> Results:
        t = Tensors(*tensors)  # type: ignore[arg-type]
        out, norm, last = torch.empty_like(like_out), new(like_norm), new_states(likes)
        held: States = NO_STATES
        with on_device(t.q):
            t = summed(t)
            if looks_back:
                first, held = t.states, make_room()
            else:
                first = before.states(t, last)
            after = last if writes else NO_STATES
            launch(t.q, t.k, t.v, out, norm, *first, *after, *held, t.lengths, t.cu, t.decay, t.sums)
        return out, norm, *last

    return run


def backward(c: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None) -> Gradients:
    """dq, dk, dv, ds0 and dz0 where the call has a state, and the decay's gradient where it asks for one."""
    c, dout = readable(c), last_contiguous(dout)
    return _backward(c, dout, ds, dz)[0](dout, norm, ds, dz, *Tensors.of(c))


def bind_backward(
    c: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None
) -> Callable[..., Gradients | None] | None:
    """What launches further backward passes of this kind by dout, norm, ds, dz and the call's tensors."""
    if readable(c) is not c:
        return None
    launch, direct = _backward(c, last_contiguous(dout), ds, dz)
    if not direct:
        return None

    def run(
        dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        *others: Tensor | None,
    ) -> Gradients | None:  # fmt: skip
        dout = last_contiguous(dout)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15:
            return None
        return launch(dout, norm, ds, dz, q, k, v, *others)

    return run


def _backward(
    c: LinearCall, dout: Tensor, ds: Tensor | None, dz: Tensor | None
) -> tuple[Callable[..., Gradients], bool]:
    """What launches a backward pass by dout, norm, ds, dz and the call's ``Tensors``; whether that fits one binary."""
    there = ds is not None, dz is not None
    call = Call.of(c, dout, there)
    likes: States = call.states(call.sequences) if call.with_state else NO_STATES
    with_z = call.variant.normalize or there[1]
    like_pieces = Pieces.like(call, with_z) if c.decay_grad else None
    queries, keys = of_queries(call, like_pieces), of_keys(call, there, c.decay_grad, c.decay_grad and with_z)
    summed = logs_summed(call)
    sums = c.decay is not None and c.decay.ndim == 1

    def run(
        dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None, *tensors: Tensor | None
    ) -> Gradients:
        t = Tensors(*tensors)  # type: ignore[arg-type]
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (t.q, t.k, t.v))
        last = None if ds is None else ds.contiguous(), None if dz is None else dz.contiguous()
        norm = None if norm is None else norm.contiguous()
        first, pieces = new_states(likes), None if like_pieces is None else like_pieces.new()
        with on_device(t.q):
            t = summed(t)
            delta = queries(t, dout, dq, norm, pieces)
            ddecay = keys(t, dout, dk, dv, norm, delta, last, first, pieces)
        if ddecay is not None and sums:
            ddecay = ddecay.sum((0, 1))
        return dq, dk, dv, *first, ddecay

    return run, call.variant.direct


def step(args: StepArgs) -> Three:
    """Out (batch, heads_q, M) in v's dtype and the new s and z of one token a sequence, in one launch."""
    args = _readable_step(args)
    return _step(args)(args.q, args.k, args.v, args.s, args.z, args.decay)


def bind_step(args: StepArgs) -> Callable[..., Three | None] | None:
    """What launches further steps of this kind by q, k, v, s, z and decay; see `warploom.linear.backend`."""
    if _readable_step(args) is not args:
        return None
    launch = _step(args)

    def run(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, decay: Tensor | None) -> Three | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | s.data_ptr()) & 15:
            return None
        return launch(q, k, v, s, z, decay)

    return run


def _readable_step(args: StepArgs) -> StepArgs:
    q, k, v = (last_contiguous(t) for t in (args.q, args.k, args.v))
    s, z = args.s.contiguous(), args.z.contiguous()
    if q is args.q and k is args.k and v is args.v and s is args.s and z is args.z:
        return args
    return args._replace(q=q, k=k, v=v, s=s, z=z)


def _step(args: StepArgs) -> Callable[..., Three]:
    """What launches a step by q, k, v, s, z and decay."""
    q, k, v, s, _, map_q, map_k, normalize, eps, scale, _, decay = args
    batch, heads, e = q.shape
    heads_kv, m = v.shape[1:]
    like_out = like((batch, heads, m), v.dtype, v.device)
    direct = all(t.data_ptr() % 16 == 0 for t in (q, k, v, s)) and max(*q.stride(), *k.stride(), *v.stride()) < 2**31
    strides_g = (None, None) if decay is None else decay.expand(batch, heads_kv).stride()
    launch = _step_launch(
        v.dtype, e, m, heads // heads_kv, (map_q, map_k), normalize, direct, q.device.index, decay is not None
    ).kept(
        (batch * heads_kv * -(-m // block_of(m, _STEP["BM"])), 1),
        (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *strides_g, heads_kv, scale, eps),
    )

    def run(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, decay: Tensor | None) -> Three:
        out, s_out, z_out = torch.empty_like(like_out), torch.empty_like(s), torch.empty_like(z)
        with on_device(q):
            launch(q, k, v, s, z, out, s_out, z_out, decay)
        return out, s_out, z_out

    return run


@cache
def _forward_launch(variant: Variant, tiling: Tiling, per_slot: bool, present: tuple[bool, ...]) -> Launch:
    shapes = dims(variant, DE=padded(variant.e), BM=block_of(variant.m, tiling.block))
    options = {**shapes, **maps(variant), **kind(variant), **tile(tiling), "PER_SLOT": per_slot, "A_HEAD": variant.a_head}
    return Launch(forward_kernel, options, direct=variant.direct)


@cache
def _step_launch(
    dtype: torch.dtype,
    e: int,
    m: int,
    group: int,
    maps: tuple[str, str],
    normalize: bool,
    direct: bool,
    device: int | None,
    decay: bool,
) -> Launch:
    kind = {"GROUP": group, "MAP_Q": MAPS[maps[0]], "MAP_K": MAPS[maps[1]], "NORMALIZE": normalize}
    shapes = {"E": e, "M": m, "DE": padded(e), "BM": block_of(m, _STEP["BM"]), "num_warps": _STEP["num_warps"]}
    return Launch(step_kernel, {**shapes, **kind}, direct=direct)
