"""Running a call: the forward kernel, or the three or four of the backward pass."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from warploom.attention.problem import AttentionArgs
from warploom.attention.triton.backward_kernels import dkdv_kernel, dq_kernel, rows_kernel
from warploom.attention.triton.call import UNIT, Call, Variant, dims, lse_strides, strides_in
from warploom.attention.triton.config import Tiling
from warploom.attention.triton.forward_kernel import forward_kernel
from warploom.kernels.triton.widths import tile_widths
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
    call = Call.of(args)
    q, k, v, table = args.q, args.k, args.v, args.block_table
    tiling = call.config.forward
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((call.heads, q.shape[0]) if call.packed else (q.shape[0], call.heads, q.shape[1]), dtype=torch.float32)
    tiles, batches = call.tiles(call.seqlen_q, tiling.m)
    with on_device(q):
        _forward_launch(call.variant, tiling)(
            (tiles * batches * call.heads, 1),
            *(q, k, v, out, lse, *call.vectors, args.bounds, args.sink, _seed(args), *call.sequences, table),
            *_key_boxes(k, v, tiling, call.variant),
            *(*call.strides, *strides_in(UNIT, out), *lse_strides(lse), *call.mask_strides, *call.bounds_strides),
            *(0 if table is None else table.stride(0), call.batches, tiles, *call.lengths, k.shape[0], k.shape[1]),
            *call.mask,
        )
    return out, lse


def backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink (empty without a sink) in the dtypes of q, k, v and sink."""
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    out, lse = out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    call = Call.of(args, dout, out, dlse is not None)
    q, k, v, variant = args.q, args.k, args.v, call.variant
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    row_tile = call.config.dkdv.m
    row_tiles, batches = call.tiles(call.seqlen_q, row_tile)
    grid = (row_tiles * batches * call.heads, 1)
    rows = q.new_empty((grid[0], 2, row_tile), dtype=torch.float32)
    edges = q.new_empty((grid[0],), dtype=torch.int32)
    inputs = (q, k, v, dout, rows)
    with on_device(q):
        _rows_launch(variant, row_tile)(
            grid,
            *(out, dout, lse, dlse, rows, edges, args.cu_seqlens_q, q, args.sink),
            *(*strides_in(variant.unit, q), *strides_in(UNIT, out), *strides_in(variant.unit, dout), *lse_strides(lse)),
            *(call.batches, row_tiles, call.seqlen_q, call.seqlen_k, call.heads),
        )
        tiling = call.config.dkdv
        tiles, batches = call.tiles(call.seqlen_k, tiling.n)
        for part, with_edges in product(call.config.dkdv_parts, (False, True) if variant.edges else (False,)):
            # Rows that see nothing are not read: descriptors cannot leave them out.
            boxes = tiling.boxes and not with_edges
            rows_of = _box_pair(q, dout, tiling.m, variant) if boxes else (q, dout)
            _dkdv_launch(variant, tiling, part, with_edges)(
                (tiles * batches * call.heads_kv, 1),
                *(rows_of[0], k, v, rows_of[1], rows, edges, dk, dv, *call.vectors, args.bounds, _seed(args), *call.sequences),
                *(*call.strides, *strides_in(UNIT, dk), *strides_in(UNIT, dv), *call.mask_strides, *call.bounds_strides),
                *(call.batches, tiles, row_tiles, *call.lengths, *call.mask),
            )
        tiling = call.config.dq
        tiles, batches = call.tiles(call.seqlen_q, tiling.m)
        _dq_launch(variant, tiling, row_tile)(
            (tiles * batches * call.heads, 1),
            *(*inputs, dq, *call.vectors, args.bounds, _seed(args), *call.sequences),
            *_key_boxes(k, v, tiling, variant),
            *(*call.strides, *strides_in(UNIT, dq), *call.mask_strides, *call.bounds_strides),
            *(call.batches, tiles, row_tiles, *call.lengths, *call.mask),
        )
    return dq, dk, dv, _dsink(args, dout, dlse, out, lse)


def _box_pair(t: Tensor, t_v: Tensor, rows: int, variant: Variant) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Tensors of head_dim and head_dim_v, (batch, seqlen, heads, ·), read by the copy engine `rows` of one head at a time."""
    features = variant.features
    widths = tile_widths(features.head_dim, features.head_dim_v, features.dtype.itemsize)
    first, second = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, width])
        for x, width in zip((t, t_v), widths, strict=True)
    )
    return first, second


def _key_boxes(
    k: Tensor, v: Tensor, tiling: Tiling, variant: Variant
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    return _box_pair(k, v, tiling.n, variant) if tiling.boxes else (None, None)


def _seed(args: AttentionArgs) -> Tensor | None:
    return args.dropout_seed if args.dropout_p else None


def _options(variant: Variant, tiling: Tiling) -> dict[str, Any]:
    return {
        **dims(variant),
        "M": tiling.m,
        "N": tiling.n,
        "WIDE": variant.wide,
        "DESCENDING": variant.descending,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        **({} if tiling.registers is None else {"maxnreg": tiling.registers}),
    }


@cache
def _forward_launch(variant: Variant, tiling: Tiling) -> Launch:
    options = {**_options(variant, tiling), "SCATTERED": variant.scattered}
    return Launch(forward_kernel, options, direct=variant.direct)


@cache
def _rows_launch(variant: Variant, row_tile: int) -> Launch:
    return Launch(rows_kernel, {**dims(variant), "M": row_tile, "num_warps": 4}, direct=variant.direct)


@cache
def _dkdv_launch(variant: Variant, tiling: Tiling, part: str, edges: bool) -> Launch:
    kind = {"TAIL": variant.tail, "BOXES": tiling.boxes and not edges, "EDGES": edges, "SCAN": variant.edges}
    options = {**_options(variant, tiling), **kind, "WITH_DK": "k" in part, "WITH_DV": "v" in part}
    return Launch(dkdv_kernel, options, direct=variant.direct)


@cache
def _dq_launch(variant: Variant, tiling: Tiling, row_tile: int) -> Launch:
    return Launch(dq_kernel, {**_options(variant, tiling), "ROW_TILE": row_tile}, direct=variant.direct)


def _dsink(args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """-sum over queries of exp(sink - lse) · (rowsum(dO * O) - dLSE), (heads_q,); tokens past the sequences have none."""
    if args.sink is None:
        return args.q.new_empty(0)
    delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(args.sink.float()[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    return -(share * delta).sum(dim=[d for d in range(lse.ndim) if d != lse.ndim - 2]).to(args.sink.dtype)
