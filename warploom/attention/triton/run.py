"""Running a call: the forward kernel, or the three of the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.attention.problem import AttentionArgs
from warploom.attention.triton.backward_kernels import dkdv_kernel, dq_kernel, rows_kernel
from warploom.attention.triton.call import Call, is_wide, on_device, strides, unit_of
from warploom.attention.triton.forward_kernel import forward_kernel


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
    call = Call.of(args)
    q, k, v, table = args.q, args.k, args.v, args.block_table
    tiling = call.config.forward
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    heads = q.shape[-2]
    lse = q.new_empty((heads, call.seqlen_q) if q.ndim == 3 else (q.shape[0], heads, call.seqlen_q), dtype=torch.float32)
    tiles, batches = call.tiles(call.seqlen_q, tiling.m)
    unit = unit_of(q, k, v)
    with on_device(q):
        forward_kernel[(tiles * batches * heads,)](
            q_ptr=q,
            k_ptr=k,
            v_ptr=v,
            out_ptr=out,
            lse_ptr=lse,
            sink_ptr=args.sink,
            table_ptr=table,
            **strides(unit, q=q, k=k, v=v),
            **strides(8, o=out),
            stride_lb=lse.stride(0) if lse.ndim == 3 else 0,
            stride_lh=lse.stride(-2),
            stride_table=0 if table is None else table.stride(0),
            tiles=tiles,
            pages=k.shape[0],
            page_size=k.shape[1],
            **call.sequences(),
            **call.bounds(),
            **call.mask,
            **call.scalars,
            M=tiling.m,
            N=tiling.n,
            UNIT=unit,
            WIDE=is_wide(tiling.n, k, v),
            SCATTERED=table is not None and k.shape[1] % tiling.n != 0,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return out, lse


def backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink (empty without a sink) in the dtypes of q, k, v and sink."""
    call = Call.of(args)
    q, k, v = args.q, args.k, args.v
    heads, heads_kv = q.shape[-2], k.shape[-2]
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    out, lse = out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    row_tile = call.config.dkdv.m
    row_tiles, batches = call.tiles(call.seqlen_q, row_tile)
    rows = q.new_empty((batches * heads * row_tiles, 2, row_tile), dtype=torch.float32)
    edges = q.new_empty((batches * heads * row_tiles,), dtype=torch.int32)
    unit = unit_of(q, k, v, dout)
    inputs = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "dout_ptr": dout, "rows_ptr": rows}
    shared = {**inputs, **strides(unit, q=q, k=k, v=v, g=dout), **call.sequences(), **call.mask, **call.scalars}
    with on_device(q):
        rows_kernel[(row_tiles * batches * heads,)](
            out_ptr=out,
            dout_ptr=dout,
            lse_ptr=lse,
            dlse_ptr=dlse,
            rows_ptr=rows,
            edges_ptr=edges,
            cu_q_ptr=args.cu_seqlens_q,
            **strides(8, o=out),
            **strides(unit, g=dout),
            stride_lb=lse.stride(0) if lse.ndim == 3 else 0,
            stride_lh=lse.stride(-2),
            batches=call.batches,
            tiles=row_tiles,
            seqlen_q=call.seqlen_q,
            seqlen_k=call.seqlen_k,
            heads=heads,
            DIM_V=call.scalars["DIM_V"],
            DV=call.scalars["DV"],
            M=row_tile,
            UNIT=unit,
            num_warps=4,
        )
        tiling = call.config.dkdv
        tiles, batches = call.tiles(call.seqlen_k, tiling.n)
        dkdv_kernel[(tiles * batches * heads_kv,)](
            edges_ptr=edges,
            dk_ptr=dk,
            dv_ptr=dv,
            **strides(8, dk=dk, dv=dv),
            tiles=tiles,
            row_tiles=row_tiles,
            **shared,
            M=tiling.m,
            N=tiling.n,
            UNIT=unit,
            WIDE=is_wide(tiling.m, q, dout),
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
        tiling = call.config.dq
        tiles, batches = call.tiles(call.seqlen_q, tiling.m)
        dq_kernel[(tiles * batches * heads,)](
            dq_ptr=dq,
            **strides(8, dq=dq),
            tiles=tiles,
            row_tiles=row_tiles,
            **shared,
            **call.bounds(),
            M=tiling.m,
            N=tiling.n,
            UNIT=unit,
            WIDE=is_wide(tiling.n, k, v),
            ROW_TILE=row_tile,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return dq, dk, dv, _dsink(args, dout, dlse, out, lse)


def _dsink(args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """-sum over queries of exp(sink - lse) · (rowsum(dO * O) - dLSE), (heads_q,); tokens past the sequences have none."""
    if args.sink is None:
        return args.q.new_empty(0)
    delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(args.sink.float()[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    return -(share * delta).sum(dim=[d for d in range(lse.ndim) if d != lse.ndim - 2]).to(args.sink.dtype)
