"""From a call's arguments to the kernels': shapes, strides and constants, read on the host; contents never are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warploom.attention import philox
from warploom.attention.band import seen
from warploom.attention.features import Features
from warploom.attention.problem import AttentionArgs
from warploom.attention.triton.config import Config, Tiling, config, shared_tiling
from warploom.kernels.triton.widths import tile_widths
from warploom.runtime.arguments import keeps_nothing
from warploom.runtime.device import capability

# Elements that strides count in where they can: 16 bytes of the narrowest dtype.
UNIT = 8
# Beyond it a limit changes nothing, and 32-bit arithmetic on positions stays in range.
_FAR = 2**30
# Kinds of bias with values that may be -inf.
_HIDING = ("tensor", "distance")


class BiasVariant(NamedTuple):
    """What a binary depends on of a bias."""

    kind: str
    dtype: torch.dtype
    unit: int  # `warploom.attention.triton.bias.bias_of`
    rows: bool  # differ from each other
    columns: bool
    gradient: str  # "" (none), "tiles" or "rows" of dQ's kernel, "columns" of dK/dV's; "tensor", "distance": of its own
    boxes: bool = False  # the copy engine reads tiles of a tensor


class Variant(NamedTuple):
    """Everything about a call that a binary depends on, beyond a kernel's tile sizes."""

    features: Features
    unit: int  # strides are multiples of so many elements
    wide: bool  # offsets within a tile pass 31 bits
    direct: bool  # pointers are aligned to 16 bytes and all integers fit 32 bits: every launch fits one binary
    descending: bool
    scattered: bool
    tail: bool  # some tile of queries may be short
    edges: bool  # some query may see nothing
    present: tuple[bool, ...]  # which of the mask's vectors, of their bounds and of cu_seqlens_k there are
    sink: torch.dtype | None
    device: int | None  # None: the interpreter
    bias: BiasVariant | None = None
    token_scales: bool = False  # of FP8 pages: each token and head has one


def read_bounds(args: AttentionArgs) -> Tensor | None:
    """The bounds that kernels read: of packed sequences they read the vectors alone, whoever prepared the call."""
    return args.bounds if args.cu_seqlens_q is None else None


@dataclass(frozen=True)
class Call:
    """One call as every kernel of it sees it. Tuples hold kernel arguments in their order."""

    variant: Variant
    config: Config
    packed: bool
    batches: int
    seqlen_q: int  # all packed tokens where the call is packed
    seqlen_k: int  # likewise; the most keys of a sequence where it is paged
    heads: int
    heads_kv: int
    vectors: tuple[Tensor | None, ...]
    sequences: tuple[Tensor | None, ...]  # cu_q, cu_k, used, q_offset
    strides: tuple[int, ...]  # of q, k, v, then dout in a backward pass
    mask_strides: tuple[int, int]
    bounds_strides: tuple[int, int]
    lengths: tuple[int, ...]  # seqlen_q, seqlen_k, heads, group, mask_group
    mask: tuple[Any, ...]  # left, right, scale, softcap, threshold, keep_scale, chunks
    bias: tuple[int | None, ...] = (None,) * 7  # strides of batch, heads, rows and columns, rows, columns, origin
    shared: tuple[Tiling, tuple[int, ...]] | None = None  # tiles and batch entries of the launches for a bias that these share
    scales: tuple[int | None, ...] = (None,) * 6  # strides of page, token and head, of k's scales, then of v's

    @classmethod
    def of(cls, args: AttentionArgs, dout: Tensor | None = None, out: Tensor | None = None, dlse: bool = False) -> Call:
        q, k, v, table, cu_q = args.q, args.k, args.v, args.block_table, args.cu_seqlens_q
        features = Features.of_args(args, dlse)
        inputs = (q, k, v) if dout is None else (q, k, v, dout)
        if cu_q is None:
            batches, seqlen_q, heads, _ = q.shape
            _, seqlen_k, heads_kv, _ = k.shape
        else:
            batches, (seqlen_q, heads, _) = cu_q.shape[0] - 1, q.shape
            seqlen_k, heads_kv = k.shape[-3], k.shape[-2]
            if table is not None:
                seqlen_k *= table.shape[1]
        vectors: tuple[Tensor | None, ...] = (args.lts, args.lte, args.uts, args.ute)
        mask_batches, mask_heads = 1, 1
        if features.columns:
            vectors = tuple([None if t is None else t.contiguous() for t in vectors])
            mask_batches, mask_heads = next(t.shape[:2] for t in vectors if t is not None)
        bounds, bounds_strides = read_bounds(args), (0, 0)
        if bounds is not None:
            b, h = bounds.stride()[:2]
            bounds_strides = (b if bounds.shape[0] > 1 else 0, h if mask_heads > 1 else 0)
        strides = [s for t in inputs for s in _strides(t)]
        unit, limit, aligned = UNIT, 2**31, True
        bias, bias_numbers = _bias(args, batches)
        for stride in strides:
            if stride % UNIT:
                unit = 1
        for t in (*inputs, *(() if out is None else (out,))):
            aligned = aligned and t.data_ptr() % 16 == 0
        left, right = _limit(args.left), _limit(args.right)
        # Descriptors know a tensor's end, but no sequence's, and no keys that the band hides from every query.
        boxes = cu_q is None and q.element_size() == 2 and unit == UNIT and aligned
        boxes = boxes and (not features.columns or bounds is not None)
        if args.q_offset is None:
            boxes = boxes and seen(seqlen_q, seqlen_k, left, right) == (0, seqlen_k)
        else:  # where the band lies, only the device knows
            boxes = boxes and left is None and right is None
        boxes = boxes and all([min(t.shape) > 0 and min(t.stride()) > 0 for t in inputs])
        tiling = config(features, capability(q.device), boxes, bias is not None and bias.boxes)
        shared = None
        if boxes and dout is not None and bias is not None and bias.boxes and bias.gradient == "tensor":
            assert args.bias is not None
            found = shared_tiling(features, capability(q.device))
            entries = () if found is None else found.launches(batches, args.bias.element_size())
            if found is not None and entries and args.bias.shape[:2] == (1, heads):
                shared = found.tiling, entries
        longest = max(tiling.forward.n, tiling.dkdv.m, tiling.dq.n)
        wide = is_wide(args, inputs, longest)
        small = seqlen_q < limit and seqlen_k * (mask_batches * mask_heads) < limit and max(strides) // unit < limit
        small = small and all([n is None or n < limit for n in bias_numbers])
        small = small and all([t is None or t.stride(0) < limit for t in (args.k_scale, args.v_scale)])
        all_see = left is None or (left >= 0 and args.q_offset is None)
        if right is not None:
            first = seqlen_k - seqlen_q if args.q_offset is None else 0
            all_see = all_see and first + right >= 0 and not keeps_nothing(left, right)
        return cls(
            variant=Variant(
                features=features,
                unit=unit,
                wide=wide,
                direct=aligned and small,
                descending=args.scale <= 0.0,
                scattered=table is not None and k.shape[1] % tiling.forward.n != 0,
                tail=cu_q is not None or seqlen_q % tiling.dkdv.m != 0,
                edges=features.columns or cu_q is not None or not (all_see and seqlen_k) or args.bias_kind in _HIDING,
                present=tuple([t is not None for t in (*vectors, bounds, args.cu_seqlens_k)]),
                sink=None if args.sink is None else args.sink.dtype,
                device=q.device.index,
                bias=bias,
                token_scales=args.k_scale is not None and args.k_scale.ndim > 1,
            ),
            config=tiling,
            packed=cu_q is not None,
            batches=batches,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads=heads,
            heads_kv=heads_kv,
            vectors=vectors,
            sequences=(cu_q, args.cu_seqlens_k, args.seqused_k, args.q_offset),
            strides=tuple([s // unit for s in strides]),
            mask_strides=(
                mask_heads * seqlen_k if mask_batches > 1 else 0,
                seqlen_k if mask_heads > 1 else 0,
            ),
            bounds_strides=bounds_strides,
            lengths=(seqlen_q, seqlen_k, heads, heads // heads_kv, heads // mask_heads),
            mask=(
                left,
                right,
                args.scale,
                args.softcap or None,
                philox.kernel_bound(args.dropout_p),
                philox.keep_scale(args.dropout_p),
                None if args.q_offset is None else args.q_chunks,
            ),
            bias=bias_numbers,
            shared=shared,
            scales=(*_scale_strides(args.k_scale), *_scale_strides(args.v_scale)),
        )

    def alone(self) -> Call:
        """The same without its tensors, which a launcher that is kept would keep alive."""
        return replace(self, vectors=(), sequences=())

    def tiles(self, seqlen: int, rows: int) -> tuple[int, int]:
        """Tiles of `rows` that cover seqlen, and how many batches have each of them.

        Packed tokens take a few slots more, one batch of them: see `warploom.kernels.triton.packed`.
        """
        if self.packed:
            return seqlen // rows + self.batches + 1, 1
        return -(-seqlen // rows), self.batches


def is_wide(args: AttentionArgs, inputs: Sequence[Tensor], longest: int) -> bool:
    """Whether offsets within a tile of ``longest`` rows or keys of these tensors, or of a bias, pass 31 bits."""
    limit = 2**31
    wide = any([t.stride(-3) * longest >= limit for t in inputs])
    if args.bias is not None and args.bias_kind == "tensor":
        # The gradient's rows are as many elements apart as there are columns.
        wide = wide or longest * (sum(args.bias.stride()[2:]) + args.bias.shape[3]) >= limit
    return wide


def dims(variant: Variant) -> dict[str, int]:
    """Head dims as the kernels' constants."""
    d, dv = variant.features.head_dim, variant.features.head_dim_v
    width, width_v = tile_widths(d, dv, variant.features.dtype.itemsize)
    return {"DIM": d, "DIM_V": dv, "D": width, "DV": width_v, "UNIT": variant.unit}


def strides_in(unit: int, t: Tensor) -> tuple[int, ...]:
    """Strides of a tensor as kernels take them, in units of so many elements."""
    return tuple([s // unit for s in _strides(t)])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int]:
    """Of a contiguous tensor of this shape, in device.py's OUT_UNIT: of those that we allocate."""
    tokens, head = shape[-2] * shape[-1], shape[-1]
    batch = shape[1] * tokens if len(shape) == 4 else 0
    return batch // UNIT, tokens // UNIT, head // UNIT


def lse_strides(shape: Sequence[int]) -> tuple[int, int]:
    """Batch and head strides of a contiguous tensor of shape (batch, heads, seqlen) or (heads, tokens)."""
    return (shape[1] * shape[2], shape[2]) if len(shape) == 3 else (0, shape[1])


def _bias(args: AttentionArgs, batches: int) -> tuple[BiasVariant | None, tuple[int | None, ...]]:
    """What kernels take of a bias; a dimension that all of a call share has a stride of 0, of rows and columns None."""
    bias, kind, origin = args.bias, args.bias_kind, max(min(args.bias_origin, _FAR), -_FAR)
    if bias is None:
        return None, (None,) * 7
    gradient = kind if args.bias_grad else ""
    if kind == "alibi":
        found = BiasVariant(kind, bias.dtype, 0, False, False, "rows" if gradient else "")
        return found, (bias.stride(0) if bias.shape[0] > 1 else 0, 1, None, None, None, None, origin)
    if kind == "distance":
        entries = bias.shape[1]
        return BiasVariant(kind, bias.dtype, 0, False, False, gradient), (0, entries, None, None, None, entries, origin)
    batch, head, row, column = [0 if n == 1 else stride for n, stride in zip(bias.shape, bias.stride(), strict=True)]
    rows, columns = bias.shape[2:]
    unit = 0
    if column == 1:
        unit = 1
        if not any([n % UNIT for n in (batch, head, row, columns)]) and bias.data_ptr() % 16 == 0:
            unit = UNIT
    if gradient and columns == 1:
        gradient = "rows"
    elif gradient and rows == 1:
        gradient = "columns"
    elif gradient and bias.shape[:2] == (batches, args.q.shape[-2]):
        gradient = "tiles"
    step = max(unit, 1)
    numbers = (batch // step, head // step, row // step if row else None, column or None, rows, columns // step, None)
    boxes = unit == UNIT and row != 0 and bias.numel() > 0 and bias.element_size() <= 4
    # Tiles of 12x are those of 99 KiB, which hold none of a bias.
    boxes = boxes and 90 <= capability(args.q.device) < 120
    return BiasVariant(kind, bias.dtype, unit, row != 0, column != 0, gradient, boxes), numbers


def _scale_strides(scale: Tensor | None) -> tuple[int | None, int | None, int | None]:
    """Of page, token and head; None for what no kernel reads."""
    if scale is None:
        return None, None, None
    if scale.ndim > 1:
        return scale.stride(0), scale.stride(1), scale.stride(2)
    return None, None, scale.stride(0) if scale.shape[0] > 1 else 0


def _strides(t: Tensor) -> tuple[int, ...]:
    """(batch, seqlen, heads) strides of a dense tensor, (0, tokens, heads) of a packed one."""
    return t.stride()[:3] if t.ndim == 4 else (0, *t.stride()[:2])


def _limit(value: int | None) -> int | None:
    return None if value is None else max(min(value, _FAR), -_FAR)
