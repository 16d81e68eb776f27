"""The two or three launches of a backward pass: dQ, which finds the rows that the others read, then dK and dV."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.linear.triton.backward_kernels import GIVEN_DELTA, PARTIAL_DELTA, WHOLE, dkdv_kernel, dq_kernel
from warploom.linear.triton.call import NO_STATES, Call, States, Tensors, Variant, block_of, dims, new
from warploom.linear.triton.config import Tiling, padded
from warploom.linear.triton.log_gradients import log_gradients_kernel
from warploom.linear.triton.options import kind, maps, tile
from warploom.linear.triton.states import prefixes, room, suffixes
from warploom.runtime.triton_launch import Launch


class Pieces(NamedTuple):
    """What the decay's gradient is made of: see `Decay` in backward_kernels.py."""

    first_s: Tensor
    first_z: Tensor | None  # where dz may be other than 0
    from_queries: Tensor  # (blocks of dQ's kernel, batch, heads, seqlen_q)

    @classmethod
    def like(cls, call: Call, with_z: bool) -> Pieces:
        """What stands for them."""
        variant, tiling = call.variant, call.config.dq
        chunks, blocks = call.chunks(tiling.chunk), -(-variant.e // block_of(variant.e, tiling.block))
        # Of fp16 in fp32: sums pass its range.
        narrow = torch.bfloat16 if variant.dtype == torch.bfloat16 else torch.float32
        return cls(
            call.like((chunks, call.heads_kv, variant.m, variant.e), narrow),
            call.like((chunks, call.heads_kv, variant.e)) if with_z else None,
            call.like((blocks, call.batch, call.heads, call.seqlen_q)),
        )

    def new(self) -> Pieces:
        first_s, first_z, from_queries = self
        return Pieces(torch.empty_like(first_s), new(first_z), torch.empty_like(from_queries))


def of_queries(call: Call, pieces: Pieces | None) -> Callable[..., Tensor | None]:
    """What writes dq and, if there are such, `Pieces`, and returns delta, (batch, heads, seqlen_q), where the call normalizes.

    It takes the call's tensors, dout, dq, norm and the pieces.
    """
    variant, tiling = call.variant, call.config.dq
    with_pieces, with_z = pieces is not None, pieces is not None and pieces.first_z is not None
    blocks = -(-variant.e // block_of(variant.e, tiling.block))
    programs = call.heads * blocks
    # With a denominator too many registers hold what waits: 98 against 116 us at 16 heads of 16384 tokens, D64.
    looks_back = call.looks_back(programs) and not variant.normalize and not with_pieces
    if looks_back:
        cut, per_slot, present = call.looking_back(programs), False, call.with_state
        make_room = room(call, cut, programs, block_of(variant.e, tiling.block), padded(variant.m))
    else:
        before = prefixes(call, programs, False, with_pieces)
        cut, per_slot, present = before.cut, before.per_slot, before.present[0]
    like_delta = call.like((blocks, call.batch, call.heads, call.seqlen_q)) if variant.normalize else None
    rest = (
        *(*call.strides_q, *call.strides_k, *call.strides_v, *call.strides_do, *call.strides_g, *call.numbers(cut)),
        *(call.heads, variant.group, call.batch, call.scale),
    )

    def launch_of(part: int) -> Callable[..., None]:
        launch = _dq_launch(variant, tiling, part, per_slot, (present, looks_back, with_pieces, with_z))
        return launch.kept((cut.slots * programs, 1), rest)

    parted = like_delta is not None and blocks > 1
    first_launch = launch_of(PARTIAL_DELTA.value if parted else WHOLE.value)
    second_launch = launch_of(GIVEN_DELTA.value) if parted else None

    def run(t: Tensors, dout: Tensor, dq: Tensor, norm: Tensor | None, pieces: Pieces | None) -> Tensor | None:
        held: States = NO_STATES
        if looks_back:
            first, held = t.states, make_room()
        else:
            first = before.states(t, NO_STATES)
        behind = (*first, *held, t.lengths, t.cu, t.decay, t.sums, *((None, None, None) if pieces is None else pieces))
        delta = new(like_delta)
        first_launch(t.q, t.k, t.v, dout, dq, norm, delta, *behind)
        if second_launch is None or delta is None:
            return None if delta is None else delta[0]
        delta = delta.sum(0)
        second_launch(t.q, t.k, t.v, dout, dq, norm, delta, *behind)
        return delta

    return run


def of_keys(call: Call, last: tuple[bool, bool], with_pieces: bool, with_z: bool) -> Callable[..., Tensor | None]:
    """What writes dk, dv and the gradients of the initial states, and returns that of the logs where there are pieces for it.

    It takes the call's tensors, dout, dk, dv, norm, delta, the gradients of the last states, of which ``last`` says which there
    are, room for those of the initial ones, and the pieces.
    """
    variant, config = call.variant, call.config
    parts = [("kv", config.dkdv)] if config.dkdv is not None else [("k", config.dk), ("v", config.dv)]
    # Programs of a segment and key head, or pairs of them: the two of a pair share a multiprocessor.
    blocks = {"kv": 1, "k": -(-variant.e // config.dk.block), "v": -(-variant.m // config.dv.block)}
    if config.dkdv is not None and config.paired:
        blocks["kv"] = -(-max(variant.e, variant.m) // config.dkdv.block)
    after = suffixes(call, call.heads_kv * min(blocks[part] for part, _ in parts), last)
    cut = after.cut
    one_pass = cut.whole and variant.causal
    whole = config.dkdv is not None and not config.paired
    parts_e = 1 if whole else -(-variant.e // (config.dkdv or config.dk).block)
    add = LogGradients(call, parts_e) if with_pieces else None
    launches = []
    for part, tiling in parts:
        writes = one_pass and "k" in part and call.with_state
        paired = config.paired and part == "kv"
        launch = _dkdv_launch(
            variant, tiling, part, paired, after.per_slot, (*after.present, writes, with_pieces, with_z)
        ).kept(
            (cut.slots * call.heads_kv * blocks[part] * (2 if paired else 1), 1),
            (
                *(*call.strides_q, *call.strides_k, *call.strides_v, *call.strides_do, *call.strides_g),
                *((None, None) if add is None else add.strides),
                *(*call.numbers(cut), call.heads_kv, call.scale),
            ),
        )
        launches.append((launch, writes))

    def run(
        t: Tensors, dout: Tensor, dk: Tensor, dv: Tensor, norm: Tensor | None, delta: Tensor | None, last: States,
        first: States, pieces: Pieces | None,
    ) -> Tensor | None:  # fmt: skip
        states = after.states(t, dout, norm, delta, last, first)
        left: tuple[Tensor | None, ...] = (None, None)
        if add is not None:
            left = add.new()
        before = (None, None) if pieces is None else pieces[:2]
        for launch, writes in launches:
            out = first if writes else NO_STATES
            launch(t.q, t.k, t.v, dout, dk, dv, norm, delta, *states, *out, t.lengths, t.cu, t.decay, t.sums, *before, *left)
        return None if add is None or pieces is None else add(t, pieces.from_queries, *left)

    return run


class LogGradients:
    """What makes the gradient of the logs of what dQ's and dK's kernels leave; of dK's kernel in so many blocks."""

    def __init__(self, call: Call, blocks: int) -> None:
        variant, chunk = call.variant, call.config.dq.chunk
        longest, chunks = max(call.seqlen_q, call.seqlen_k), call.chunks(chunk)
        self.strides = call.batch * call.heads_kv * longest, chunks * call.heads_kv * variant.m
        self._terms = call.like((blocks, 2, call.batch, call.heads_kv, longest))
        self._both = call.like((blocks, chunks, call.heads_kv, variant.m))
        self._gradient = call.like((call.batch, call.seqlen_k, call.heads_kv))
        cut = call.cut(call.seqlen_k, chunk)
        blocks_q = -(-variant.e // block_of(variant.e, call.config.dq.block))
        self._launch = _logs_launch(variant, chunk, blocks_q, blocks).kept(
            (cut.slots * -(-call.heads_kv // _LOGS["HEADS"]), 1),
            (
                *(*call.strides_g, call.sequences, cut.segments, call.seqlen_q, call.seqlen_k, call.heads_kv, call.batch),
                self.strides[1],
            ),
        )

    def new(self) -> tuple[Tensor, Tensor]:
        """Room for what dK's kernel leaves."""
        return torch.empty_like(self._terms), torch.empty_like(self._both)

    def __call__(self, t: Tensors, from_queries: Tensor, terms: Tensor | None, both: Tensor | None) -> Tensor:
        gradient = torch.empty_like(self._gradient)
        self._launch(from_queries, terms, both, t.decay, gradient, t.lengths, t.cu)
        return gradient


_LOGS = {"HEADS": 16, "num_warps": 4}


@cache
def _logs_launch(variant: Variant, chunk: int, blocks_q: int, blocks_k: int) -> Launch:
    shapes = {"M": variant.m, "DM": padded(variant.m), "C": chunk, "GROUP": variant.group}
    return Launch(log_gradients_kernel, {**shapes, "BLOCKS_Q": blocks_q, "BLOCKS_K": blocks_k, **_LOGS}, direct=variant.direct)


@cache
def _dq_launch(variant: Variant, tiling: Tiling, part: int, per_slot: bool, present: tuple[bool, ...]) -> Launch:
    shapes = dims(variant, BE=block_of(variant.e, tiling.block), DM=padded(variant.m))
    flags = {"PART": part, "PER_SLOT": per_slot, "COLUMNS": tiling.columns, "A_HEAD": variant.a_head}
    options = {**shapes, **maps(variant), **kind(variant), **tile(tiling), **flags}
    return Launch(dq_kernel, options, direct=variant.direct)


@cache
def _dkdv_launch(
    variant: Variant, tiling: Tiling, part: str, paired: bool, per_slot: bool, present: tuple[bool, ...]
) -> Launch:
    be = padded(variant.e) if "v" in part and not paired else block_of(variant.e, tiling.block)
    bm = padded(variant.m) if "k" in part and not paired else block_of(variant.m, tiling.block)
    whole = {"DE": padded(variant.e), "DM": padded(variant.m)}
    flags = {"GROUP": variant.group, "WITH_DK": "k" in part, "WITH_DV": "v" in part, "PAIRED": paired, "PER_SLOT": per_slot}
    flags["A_HEAD"] = variant.a_head
    options = {**dims(variant, BE=be, BM=bm, **whole), **maps(variant), **kind(variant), **tile(tiling), **flags}
    return Launch(dkdv_kernel, options, direct=variant.direct)
