"""The states before segments of queries, and their gradients behind segments of keys, summed in launches of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warploom.kernels.triton.feature_maps import MAPS
from warploom.linear.triton.call import Call, Cut, States, Tensors, Variant, block_of, dims, new, new_states
from warploom.linear.triton.config import Tiling, padded
from warploom.linear.triton.fading import sums_kernel
from warploom.linear.triton.options import tile
from warploom.linear.triton.state_kernels import scan_kernel, state_kernel
from warploom.runtime.triton_launch import Launch

# Elements of a state that one program of the scan sums; many small programs, as each walks all segments.
_SUMMED = {"HEADS": 16, "num_warps": 2}
_SCAN = {"BLOCK": 512, "STAGES": 4, "num_warps": 4}


class Segments(NamedTuple):
    """How a kernel's tokens are cut, and what finds the states that its segments start from.

    ``states`` takes the call's tensors and what takes the states after the sequences (both None: nothing does), and returns
    those before; of gradients dout, norm, delta and the gradients of the last states come between.
    """

    cut: Cut
    per_slot: bool  # states are one a segment
    present: tuple[bool, bool]  # whether there are any S and z
    states: Callable[..., States]


def prefixes(call: Call, programs: int, with_last: bool, keys: bool = False) -> Segments:
    """How queries are cut where `programs` would walk a sequence.

    Args:
        with_last: ``states`` is given room for the states after the sequences, and fills it where that is not for the queries'
            kernel to do.
        keys: those past the last query are walked too.
    """
    variant, segment = call.variant, call.config.segment
    given = call.with_state
    keys = keys or with_last
    longest = max(call.seqlen_q, call.seqlen_k) if keys else call.seqlen_q
    if not variant.causal:
        # Every query sees all keys: the sums over segments are the state, and any number of programs may share them.
        cut = call.cut(call.seqlen_k, segment)
        own_states, like_total = _own_states(call, cut, False), call.states(call.sequences)
        scan = _scan(call, cut, (given, given), (True, True), reverse=False)

        def whole(t: Tensors, last: States) -> States:
            total = last if with_last else new_states(like_total)
            scan(*own_states(t), t.states, total, t.cu)
            return total

        return Segments(call.cut(call.seqlen_q, segment), False, (True, True), whole)
    if call.crowded(programs * call.sequences) or (not call.packed and longest <= segment):
        return Segments(call.cut(longest if keys else call.seqlen_q), False, (given, given), lambda t, last: t.states)
    cut = call.cut(longest, segment)
    own_states = _own_states(call, cut, not keys)
    scan = _scan(call, cut, (given, given), (with_last, with_last), reverse=False)

    def each(t: Tensors, last: States) -> States:
        own, fading = own_states(t)
        scan(own, fading, t.states, last, t.cu)
        return own

    return Segments(cut, True, (True, True), each)


def suffixes(call: Call, programs: int, last: tuple[bool, bool]) -> Segments:
    """As `prefixes`, of dS and dz for the keys; ``last``: which of the last states have gradients.

    What takes the sums over all are the gradients of the initial states, where the call has these.
    """
    variant, segment = call.variant, call.config.segment
    longest, with_first = max(call.seqlen_q, call.seqlen_k), call.with_state
    if not variant.causal:
        cut = call.cut(call.seqlen_q, segment)
        own_gradients, like_total = _own_gradients(call, cut, False), call.states(call.sequences)
        scan = _scan(call, cut, last, (True, True), reverse=True)

        def whole(
            t: Tensors, dout: Tensor, norm: Tensor | None, delta: Tensor | None, last: States, first: States
        ) -> States:
            total = first if with_first else new_states(like_total)
            scan(*own_gradients(t, dout, norm, delta), last, total, t.cu)
            return total

        return Segments(call.cut(call.seqlen_k, segment), False, (True, True), whole)
    if call.crowded(programs * call.sequences) or (not call.packed and longest <= segment):
        return Segments(call.cut(longest), False, last, lambda t, dout, norm, delta, last, first: last)
    cut = call.cut(longest, segment)
    own_gradients = _own_gradients(call, cut, not with_first)
    scan = _scan(call, cut, last, (with_first, with_first), reverse=True)

    def each(t: Tensors, dout: Tensor, norm: Tensor | None, delta: Tensor | None, last: States, first: States) -> States:
        own, fading = own_gradients(t, dout, norm, delta)
        scan(own, fading, last, first, t.cu)
        return own

    return Segments(cut, True, (True, True), each)


def logs_summed(call: Call) -> Callable[[Tensors], Tensors]:
    """What adds to a call's tensors the sums of its logs, where kernels weigh rows by them."""
    variant = call.variant
    if not variant.by_rows or variant.a_head:
        return lambda t: t
    chunk = call.config.forward.chunk
    cut = call.cut(max(call.seqlen_q, call.seqlen_k), chunk)
    like_sums = call.like((call.batch, call.heads_kv, max(call.seqlen_q, call.seqlen_k)))
    launch = _sums_launch(chunk, variant.present[1:3], variant.direct, variant.device).kept(
        (cut.slots * -(-call.heads_kv // _SUMMED["HEADS"]), 1),
        (*call.strides_g, call.sequences, cut.segments, call.seqlen_q, call.seqlen_k, call.heads_kv),
    )

    def run(t: Tensors) -> Tensors:
        sums = torch.empty_like(like_sums)
        launch(t.decay, sums, t.lengths, t.cu)
        return t._replace(sums=sums)

    return run


def room(call: Call, cut: Cut, programs: int, columns: int, rows: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """What makes zeroed flags and a ticket, and room for a state of each program: see lookback.py."""
    count, rows = cut.slots * programs, rows + (2 if call.variant.decay else 1)
    like_flags, like_own = call.like((1 + count,), torch.int32), call.like((count * rows * columns,))
    return lambda: (torch.zeros_like(like_flags), torch.empty_like(like_own))


Own = tuple[States, Tensor | None]


def _own_states(call: Call, cut: Cut, skip: bool) -> Callable[[Tensors], Own]:
    """What finds each segment's own S and z, `skip` that of the last one, and the sums of their logs."""
    likes, like_fading = call.states(cut.slots), _fading(call, cut)
    launch = _state_launch(call.variant, call.config.state, False, skip).kept(
        _grid(call, cut),
        (*call.strides_k, *call.strides_v, *call.strides_g, *call.numbers(cut), call.heads_kv, call.scale),
    )

    def run(t: Tensors) -> Own:
        own, fading = new_states(likes), new(like_fading)
        launch(t.k, t.v, None, None, *own, t.lengths, t.cu, t.decay, t.sums, fading)
        return own, fading

    return run


def _own_gradients(call: Call, cut: Cut, skip: bool) -> Callable[..., Own]:
    """What finds each segment's own dS and dz, `skip` that of the first one, and the sums of their logs."""
    likes, like_fading = call.states(cut.slots), _fading(call, cut)
    launch = _state_launch(call.variant, call.config.state, True, skip).kept(
        _grid(call, cut),
        (*call.strides_q, *call.strides_do, *call.strides_g, *call.numbers(cut), call.heads_kv, call.scale),
    )

    def run(t: Tensors, dout: Tensor, norm: Tensor | None, delta: Tensor | None) -> Own:
        own, fading = new_states(likes), new(like_fading)
        launch(t.q, dout, norm, delta, *own, t.lengths, t.cu, t.decay, t.sums, fading)
        return own, fading

    return run


def _grid(call: Call, cut: Cut) -> tuple[int, int]:
    return cut.slots * call.heads_kv * -(-call.variant.m // call.config.state.block), 1


def _fading(call: Call, cut: Cut) -> Tensor | None:
    """What stands for the sum of each segment's logs, where there are any."""
    return call.like((cut.slots, call.heads_kv)) if call.variant.decay else None


def _scan(
    call: Call, cut: Cut, first: tuple[bool, bool], total: tuple[bool, bool], *, reverse: bool
) -> Callable[[States, Tensor | None, States, States, Tensor | None], None]:
    """What turns segments' own states into sums over those before them, by own, fading, first, total and cu.

    `total` takes the sums over all; the flags say which of it and of the first states there are.
    """
    e, m = call.variant.e, call.variant.m
    blocks = -(-e * m // _SCAN["BLOCK"]) + -(-e // _SCAN["BLOCK"])
    present = (*first, *total, call.packed, call.variant.decay)
    launch = _scan_launch(e, m, reverse, present, call.variant.device).kept(
        (blocks * call.sequences * call.heads_kv, 1),
        (call.sequences, cut.segments, cut.segment, call.seqlen_q, call.heads_kv),
    )

    def run(own: States, fading: Tensor | None, first: States, total: States, cu: Tensor | None) -> None:
        launch(*own, *first, *total, cu, fading)

    return run


@cache
def _sums_launch(chunk: int, present: tuple[bool, ...], direct: bool, device: int | None) -> Launch:
    return Launch(sums_kernel, {"C": chunk, **_SUMMED}, direct=direct)


@cache
def _state_launch(variant: Variant, tiling: Tiling, backward: bool, skip: bool) -> Launch:
    shapes = dims(variant, DE=padded(variant.e), BM=block_of(variant.m, tiling.block))
    kind: dict[str, Any] = {
        "GROUP": variant.group if backward else 1,
        "MAP": MAPS[variant.map_q if backward else variant.map_k],
        "BACKWARD": backward,
        "NORMALIZE": variant.normalize,
        "SKIP": skip,
        "A_HEAD": variant.a_head,
    }
    return Launch(state_kernel, {**shapes, **kind, **tile(tiling)}, direct=variant.direct)


@cache
def _scan_launch(e: int, m: int, reverse: bool, present: tuple[bool, ...], device: int | None) -> Launch:
    return Launch(scan_kernel, {"E": e, "M": m, "REVERSE": reverse, **_SCAN}, direct=True)
