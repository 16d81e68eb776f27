"""Minimum and maximum of each column vector over each block of columns: prepared once for a mask, shared by all layers.

Outside of torch.compile and CUDA graph capture the result is kept while the vectors live unchanged. A compiler sees the
same op with the same inputs in every layer and keeps one of them; a captured graph computes it anew at every replay.

Of a dense call they are int32 (batch|1, heads|1, blocks, 8): blocks of BLOCK columns, and behind them those of COARSE_BLOCK.

Of packed sequences they are int32 (1, heads|1, blocks, 8). Each sequence's vectors are normalised by its own rows, keys and
shift, keys past its ``seqused_k`` cut off. Blocks count from a sequence's first key, so that no two sequences share one, and
where they stand needs no scan of the lengths: with ``start`` the first key of sequence s, within the call's tokens,

- its i-th block of 64 columns is number start // 64 + s + i, of total_k // 64 + sequences;
- its i-th block of 2048 is number start // 2048 + s + i behind those, of total_k // 2048 + sequences.

`warploom.kernels.cute.packed.first_tile` is the same formula. Only blocks with a key that counts are written: what
stands in others is undefined, and nobody may read it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from warploom.attention.problem import AttentionArgs
from warploom.masks.intervals import ResolvedMask
from warploom.masks.kept import Kept
from warploom.runtime import flops
from warploom.runtime.device import on_device
from warploom.runtime.likeness import like
from warploom.runtime.op import plain

if TYPE_CHECKING:
    from warploom.runtime.triton_launch import Launch

# Columns of a block, and of a coarse one: BOUND_BLOCK and COARSE of kernels/triton.
BLOCK, COARSE_BLOCK = 64, 2048

# Masks whose bounds are kept: a model alternates between a few (full and windowed layers, micro-batches).
_KEPT = 8
_FAR = 2**30  # beyond it a limit of the band changes nothing
_NONE = (None,)

_kept: OrderedDict[tuple[Any, ...], tuple[list[weakref.ref[Tensor]], Tensor]] = OrderedDict()


def with_bounds(args: AttentionArgs, packed: bool = False) -> AttentionArgs:
    """A call with the bounds of its column mask, if it has one; ``packed``: packed sequences too, not dense calls alone.

    Whoever reads bounds does not ask where documents start.
    """
    if args.documents is not None:
        args = args._replace(documents=None)
    if args.bounds is not None or (args.lts is None and args.ute is None):
        return args
    if args.cu_seqlens_q is None:
        return args._replace(bounds=prepared_bounds(args.mask, args.q.shape[1], args.k.shape[1], args.q_offset))
    if not packed:
        return args
    sequences = args.cu_seqlens_q, args.cu_seqlens_k, args.seqused_k
    return args._replace(bounds=packed_bounds_of(args.mask.vectors, sequences, args.left, args.right, args.q.shape[0]))


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
    return _kept_or_made(False, vectors, left, right, seqlen_q)


def bounds_of_kept(mask: Kept, left: int | None, right: int | None, seqlen_q: int) -> Tensor:
    """As ``prepared_bounds``, under the band of a call that nothing sees; the mask, of one stream, remembers where they are."""
    vectors, prepared = mask.resolved[2:], mask.prepared
    if prepared is None:
        return bounds_of((*vectors, None), left, right, seqlen_q)
    lts, lte, uts, ute = vectors
    some = lts if lts is not None else ute
    assert some is not None
    key = left, right
    state: Any = (some._version, some.data_ptr())
    if lte is not None or uts is not None or (lts is not None and ute is not None):
        state = [None if t is None else (t._version, t.data_ptr()) for t in vectors]
    entry = prepared.get(key)
    if entry is not None and entry[0] == state:
        found: Tensor | None = entry[1]()
        if found is not None:
            return found
    bounds = _kept_or_made(False, (*vectors, None), left, right, seqlen_q, straight=True)
    if len(prepared) >= _KEPT:
        prepared.clear()
    prepared[key] = state, weakref.ref(bounds)  # which lives as long as the few that are kept for all masks
    return bounds


def packed_bounds_of(
    vectors: tuple[Tensor | None, ...],
    sequences: tuple[Tensor | None, ...],
    left: int | None,
    right: int | None,
    total_q: int,
    straight: bool = False,
) -> Tensor:
    """Bounds of a packed mask, as the module has them, in one launch, or kept from before.

    Args:
        vectors: lts, lte, uts, ute, int32 (1, heads|1, total_k) or None; at least one interval.
        sequences: cu_seqlens_q and cu_seqlens_k, int32 (sequences + 1,), and seqused_k, int32 (sequences,); without the second
            the first, without the third all keys count.
        left, right: the band.
        total_q: packed queries.
        straight: nothing sees the call.

    Returns:
        int32 (1, heads|1, total_k // 64 + total_k // 2048 + 2 · sequences, 8).
    """
    return _kept_or_made(True, (*vectors, *sequences), left, right, total_q, straight)


def _kept_or_made(
    packed: bool, tensors: tuple[Tensor | None, ...], left: int | None, right: int | None, queries: int, straight: bool = False
) -> Tensor:
    """Bounds by the vectors and, behind them, the offsets or what says where sequences are."""
    key = _key(tensors, left, right, queries)
    if key is None:
        return _made(packed, tensors, left, right, queries, straight)
    entry = _kept.get(key)
    if entry is not None:
        for ref in entry[0]:
            if ref() is None:  # and another tensor has its id
                break
        else:
            return entry[1]
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # autograd may save them later
            bounds = _made(packed, tensors, left, right, queries, straight)
    else:
        bounds = _made(packed, tensors, left, right, queries, straight)
    _kept[key] = [weakref.ref(t) for t in tensors if t is not None], bounds
    if len(_kept) > _KEPT:
        _kept.popitem(last=False)
    return bounds


def _made(
    packed: bool, tensors: tuple[Tensor | None, ...], left: int | None, right: int | None, queries: int, straight: bool
) -> Tensor:
    straight = straight or (not torch.compiler.is_compiling() and plain(*tensors))
    run: Any
    if packed:
        run = _packed_bounds if straight else torch.ops.warploom.packed_column_bounds
    else:
        run = _column_bounds if straight else torch.ops.warploom.column_bounds
    found: Tensor = run(*tensors[:4], left, right, queries, *tensors[4:])
    return found


def _key(tensors: tuple[Tensor | None, ...], left: int | None, right: int | None, queries: int) -> tuple[Any, ...] | None:
    """What the kept bounds depend on; None where nothing may be kept: while compiling or capturing, of tensors of inference."""
    if torch.compiler.is_compiling():
        return None
    some = tensors[0] if tensors[0] is not None else tensors[3]
    assert some is not None
    stream = None
    if some.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch._C._cuda_getCurrentRawStream(some.device.index)
    key: tuple[int | None, ...] = (left, right, queries, stream)
    try:
        for t in tensors:
            if t is None:
                key += _NONE
            elif type(t) is Tensor:
                key += (id(t), t._version, t.data_ptr())
            else:
                return None
    except RuntimeError:  # of inference
        return None
    return key


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
    some = lts if lts is not None else ute
    assert some is not None
    absent = (lts is None, lte is None, uts is None, ute is None)
    offsets = None if q_offset is None else q_offset.shape[0]
    like_bounds, launch = _dense(some.shape, some.device, absent, left, right, seqlen_q, offsets)
    bounds = torch.empty_like(like_bounds)
    if launch is not None:
        vectors = [None if t is None else t.contiguous() for t in (lts, lte, uts, ute)]
        with on_device(some):
            launch(*vectors, bounds, *(() if q_offset is None else (q_offset,)))
    return bounds


@lru_cache(256)
def _dense(
    vector: torch.Size, device: torch.device, absent: tuple[bool, ...], left: int | None, right: int | None, seqlen_q: int,
    offsets: int | None,
) -> tuple[Tensor, Callable[..., None] | None]:  # fmt: skip
    """What stands for the bounds of vectors of a shape, and what launches their kernel by vectors, bounds and offsets.

    None in its place where there is nothing to do.
    """
    (batch, heads, columns), shape = vector, _shape(vector, offsets)
    blocks, groups = _blocks(vector)
    like_bounds = like(shape, torch.int32, device)
    if 0 in (*shape, blocks):
        return like_bounds, None
    left, right, grid = _near(left), _near(right), (shape[0] * heads * groups, 1)
    kernel = _launch(*absent, left is None, right is None, offsets is None)
    numbers = (blocks, seqlen_q, columns, left, right)
    if offsets is None:
        return like_bounds, kernel.kept(grid, (*numbers, None, None, None))

    def launch(*tensors: Tensor | None) -> None:
        kernel(grid, *tensors[:-1], *numbers, tensors[-1], heads, batch)

    return like_bounds, launch


def _packed_bounds(
    lts: Tensor | None,
    lte: Tensor | None,
    uts: Tensor | None,
    ute: Tensor | None,
    left: int | None,
    right: int | None,
    total_q: int,
    cu_q: Tensor,
    cu_k: Tensor | None,
    used: Tensor | None,
) -> Tensor:
    vectors = [None if t is None else t.contiguous() for t in (lts, lte, uts, ute)]
    some = vectors[0] if vectors[0] is not None else vectors[3]
    assert some is not None
    total_k, sequences = some.shape[2], cu_q.shape[0] - 1
    bounds = some.new_empty(_packed_shape(some, cu_q))
    left, right = _near(left), _near(right)
    cu_q = cu_q.contiguous()
    cu_k = cu_q if cu_k is None else cu_k.contiguous()
    used = None if used is None else used.contiguous()
    if sequences and some.numel():
        with on_device(some):
            _launch(*[x is None for x in (*vectors, left, right, used)], packed=True)(
                (some.shape[1] * (total_k // COARSE_BLOCK + sequences), 1),
                *(*vectors, bounds, cu_q, cu_k, used, sequences, total_q, total_k, left, right),
            )
    return bounds


def _near(limit: int | None) -> int | None:
    return None if limit is None else max(min(limit, _FAR), -_FAR)


@cache
def _launch(*absent: bool, packed: bool = False) -> Launch:
    """Of a kernel, for calls with the same arguments absent."""
    from warploom.kernels.triton.bounds import bounds_kernel, packed_bounds_kernel
    from warploom.runtime.triton_launch import Launch

    return Launch(packed_bounds_kernel if packed else bounds_kernel, {"num_warps": 4}, direct=True)


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
    return some.new_empty(_shape(some.shape, None if q_offset is None else q_offset.shape[0]))


def _packed_bounds_fake(
    lts: Tensor | None,
    lte: Tensor | None,
    uts: Tensor | None,
    ute: Tensor | None,
    left: int | None,
    right: int | None,
    total_q: int,
    cu_q: Tensor,
    cu_k: Tensor | None,
    used: Tensor | None,
) -> Tensor:
    some = next(t for t in (lts, lte, uts, ute) if t is not None)
    return some.new_empty(_packed_shape(some, cu_q))


def _packed_shape(vector: Tensor, cu_q: Tensor) -> tuple[int, ...]:
    _, heads, total_k = vector.shape
    return (1, heads, total_k // BLOCK + total_k // COARSE_BLOCK + 2 * (cu_q.shape[0] - 1), 8)


def _shape(vector: Sequence[int], offsets: int | None) -> tuple[int, ...]:
    return (vector[0] if offsets is None else offsets, vector[1], sum(_blocks(vector)), 8)


def _blocks(vector: Sequence[int]) -> tuple[int, int]:
    """Blocks and coarse blocks of a vector."""
    columns = vector[2]
    return (columns + BLOCK - 1) // BLOCK, (columns + COARSE_BLOCK - 1) // COARSE_BLOCK


_library = torch.library.Library("warploom", "FRAGMENT")
_library.define(
    "column_bounds(Tensor? lts, Tensor? lte, Tensor? uts, Tensor? ute, SymInt? left, SymInt? right, SymInt seqlen_q, "
    "Tensor? q_offset=None) -> Tensor"
)
_library.define(
    "packed_column_bounds(Tensor? lts, Tensor? lte, Tensor? uts, Tensor? ute, SymInt? left, SymInt? right, SymInt total_q, "
    "Tensor cu_q, Tensor? cu_k, Tensor? used) -> Tensor"
)
for _dispatch_key in ("CPU", "CUDA"):
    _library.impl("column_bounds", _column_bounds, _dispatch_key)
    _library.impl("packed_column_bounds", _packed_bounds, _dispatch_key)
torch.library.register_fake("warploom::column_bounds", _column_bounds_fake, lib=_library)
torch.library.register_fake("warploom::packed_column_bounds", _packed_bounds_fake, lib=_library)
for _name in ("column_bounds", "packed_column_bounds"):
    flops.register(_name, flops.nothing)
