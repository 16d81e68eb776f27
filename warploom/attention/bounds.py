"""Minimum and maximum of each column vector over each block of columns: prepared once for a mask, shared by all layers.

Outside of torch.compile and CUDA graph capture the result is kept while the vectors live unchanged. A compiler sees the
same op with the same inputs in every layer and keeps one of them; a captured graph computes it anew at every replay.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from warploom.attention.problem import AttentionArgs
from warploom.masks.intervals import ResolvedMask
from warploom.runtime.device import on_device
from warploom.runtime.op import plain

if TYPE_CHECKING:
    from warploom.runtime.triton_launch import Launch

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
    return bounds_of((*mask.vectors, q_offset), mask.left, mask.right, seqlen_q)


def bounds_of(vectors: tuple[Tensor | None, ...], left: int | None, right: int | None, seqlen_q: int) -> Tensor:
    """As ``prepared_bounds``, of lts, lte, uts, ute and the offsets."""
    key = _key(vectors, left, right, seqlen_q)
    if key is None:
        return _computed(vectors, left, right, seqlen_q)
    entry = _kept.get(key)
    if entry is not None:
        for ref in entry[0]:
            if ref() is None:  # and another tensor has its id
                break
        else:
            return entry[1]
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # autograd may save them later
            bounds = _computed(vectors, left, right, seqlen_q)
    else:
        bounds = _computed(vectors, left, right, seqlen_q)
    _kept[key] = [weakref.ref(t) for t in vectors if t is not None], bounds
    if len(_kept) > _KEPT:
        _kept.popitem(last=False)
    return bounds


def _computed(vectors: tuple[Tensor | None, ...], left: int | None, right: int | None, seqlen_q: int) -> Tensor:
    lts, lte, uts, ute, q_offset = vectors
    straight = not torch.compiler.is_compiling() and plain(*vectors)
    run = _column_bounds if straight else torch.ops.warploom.column_bounds
    return run(lts, lte, uts, ute, left, right, seqlen_q, q_offset)


def _key(
    vectors: tuple[Tensor | None, ...], left: int | None, right: int | None, seqlen_q: int
) -> tuple[Any, ...] | None:
    """What the kept bounds depend on; None where nothing may be kept: while compiling or capturing, of tensors of inference."""
    if torch.compiler.is_compiling() or any([t is not None and type(t) is not Tensor for t in vectors]):
        return None
    some = vectors[0] if vectors[0] is not None else vectors[3]
    assert some is not None
    stream = None
    if some.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch._C._cuda_getCurrentRawStream(some.device.index)
    try:
        versions = tuple([None if t is None else (t._version, t.data_ptr()) for t in vectors])
    except RuntimeError:
        return None
    return *map(id, vectors), versions, left, right, seqlen_q, stream


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
    vectors = [None if t is None else t.contiguous() for t in (lts, lte, uts, ute)]
    some = vectors[0] if vectors[0] is not None else vectors[3]
    assert some is not None
    bounds = some.new_empty(_shape(some, q_offset))
    blocks, groups = _blocks(some)
    left, right = [None if x is None else max(min(x, _FAR), -_FAR) for x in (left, right)]
    if bounds.numel():
        with on_device(some):
            _launch(*[x is None for x in (*vectors, left, right, q_offset)])(
                (bounds.shape[0] * bounds.shape[1] * groups, 1),
                *(*vectors, bounds, blocks, seqlen_q, some.shape[2], left, right, q_offset),
                *((None, None) if q_offset is None else (some.shape[1], some.shape[0])),
            )
    return bounds


@cache
def _launch(*absent: bool) -> Launch:
    """Of the kernel, for calls with the same arguments absent."""
    from warploom.kernels.triton.bounds import bounds_kernel
    from warploom.runtime.triton_launch import Launch

    return Launch(bounds_kernel, {"num_warps": 4}, direct=True)


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
