"""Minimum and maximum of each column vector over each block of columns: prepared once for a mask, shared by all layers.

Outside of torch.compile and CUDA graph capture the result is kept while the vectors live unchanged. A compiler sees the
same op with the same inputs in every layer and keeps one of them; a captured graph computes it anew at every replay.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from warploom.attention.problem import AttentionArgs
from warploom.masks.intervals import ResolvedMask
from warploom.runtime.device import on_device

# Columns of a block, and of a coarse one: BOUND_BLOCK and COARSE of kernels/triton.
BLOCK, COARSE_BLOCK = 64, 2048

# Masks whose bounds are kept: a model alternates between a few (full and windowed layers, micro-batches).
_KEPT = 8
_FAR = 2**30  # beyond it a limit of the band changes nothing

_kept: OrderedDict[tuple[Any, ...], tuple[list[weakref.ref[Tensor]], Tensor]] = OrderedDict()


def with_bounds(args: AttentionArgs) -> AttentionArgs:
    """A dense call with the bounds of its column mask, if it has one."""
    if args.bounds is not None or args.cu_seqlens_q is not None or (args.lts is None and args.ute is None):
        return args
    return args._replace(bounds=prepared_bounds(args.mask, args.q.shape[1], args.k.shape[1], args.q_offset))


def prepared_bounds(mask: ResolvedMask, seqlen_q: int, seqlen_k: int, q_offset: Tensor | None = None) -> Tensor:
    """`warploom.masks.tiles.column_bounds` for blocks of 64 columns and then of 2048, in one launch, or kept from before.

    Args:
        mask: column vectors on the device; at least one interval.
        q_offset: int32 (batch,), see `AttentionArgs`: of which rows each batch entry has bounds.

    Returns:
        int32 (batch|1, heads|1, blocks, 8), blocks of 64 columns and behind them those of 2048; with offsets for each batch.
    """
    vectors = [t for t in (*mask.vectors, q_offset) if t is not None]
    arguments = (*mask.vectors, mask.left, mask.right, seqlen_q, q_offset)
    key = _key(vectors, mask, seqlen_q, q_offset)
    if key is None:
        return torch.ops.warploom.column_bounds(*arguments)
    entry = _kept.get(key)
    if entry is not None and all(ref() is t for ref, t in zip(entry[0], vectors, strict=True)):
        return entry[1]
    bounds = torch.ops.warploom.column_bounds(*arguments)
    _kept[key] = [weakref.ref(t) for t in vectors], bounds
    if len(_kept) > _KEPT:
        _kept.popitem(last=False)
    return bounds


def _key(
    vectors: list[Tensor], mask: ResolvedMask, seqlen_q: int, q_offset: Tensor | None
) -> tuple[Any, ...] | None:
    """What the kept bounds depend on; None where nothing may be kept."""
    if torch.compiler.is_compiling() or any(type(t) is not Tensor or t.is_inference() for t in vectors):
        return None
    stream = None
    if vectors[0].is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(vectors[0].device).cuda_stream
    state = tuple([None if t is None else (id(t), t._version) for t in (*mask.vectors, q_offset)])
    return state, mask.left, mask.right, seqlen_q, stream


def _column_bounds(
    lts: Tensor | None,
    lte: Tensor | None,
    uts: Tensor | None,
    ute: Tensor | None,
    left: int | None,
    right: int | None,
    seqlen_q: int,
    q_offset: Tensor | None = None,
) -> Tensor:
    from warploom.kernels.triton.bounds import bounds_kernel

    vectors = [None if t is None else t.contiguous() for t in (lts, lte, uts, ute)]
    some = next(t for t in vectors if t is not None)
    bounds = some.new_empty(_shape(some, q_offset))
    blocks, groups = _blocks(some)
    left, right = (None if x is None else max(min(x, _FAR), -_FAR) for x in (left, right))
    if bounds.numel():
        with on_device(some):
            bounds_kernel[(bounds.shape[0] * bounds.shape[1] * groups,)](
                *(*vectors, bounds, blocks, seqlen_q, some.shape[2], left, right, q_offset),
                *((None, None) if q_offset is None else (some.shape[1], some.shape[0])),
                num_warps=4,
            )
    return bounds


def _column_bounds_fake(
    lts: Tensor | None,
    lte: Tensor | None,
    uts: Tensor | None,
    ute: Tensor | None,
    left: int | None,
    right: int | None,
    seqlen_q: int,
    q_offset: Tensor | None = None,
) -> Tensor:
    some = next(t for t in (lts, lte, uts, ute) if t is not None)
    return some.new_empty(_shape(some, q_offset))


def _shape(vector: Tensor, q_offset: Tensor | None) -> tuple[int, ...]:
    batch = vector.shape[0] if q_offset is None else q_offset.shape[0]
    return (batch, vector.shape[1], sum(_blocks(vector)), 8)


def _blocks(vector: Tensor) -> tuple[int, int]:
    """Blocks and coarse blocks of a vector."""
    columns = vector.shape[2]
    return (columns + BLOCK - 1) // BLOCK, (columns + COARSE_BLOCK - 1) // COARSE_BLOCK


_library = torch.library.Library("warploom", "FRAGMENT")
_library.define(
    "column_bounds(Tensor? lts, Tensor? lte, Tensor? uts, Tensor? ute, SymInt? left, SymInt? right, SymInt seqlen_q, "
    "Tensor? q_offset=None) -> Tensor"
)
for _dispatch_key in ("CPU", "CUDA"):
    _library.impl("column_bounds", _column_bounds, _dispatch_key)
torch.library.register_fake("warploom::column_bounds", _column_bounds_fake, lib=_library)
