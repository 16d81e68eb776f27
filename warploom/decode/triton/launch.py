"""Launching the decode kernels: shapes and strides on the host, everything else read on the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

from warploom.decode.problem import DecodeArgs
from warploom.decode.triton.config import Config, config
from warploom.decode.triton.kernels import append_kernel, merge_kernel, split_kernel

# Programs of one launch: enough for every SM many times over; beyond, a program walks several splits.
_PROGRAMS = 16384
_FAR = 2**30
OVERRIDE: Config | None = None
PDL = True


def forward(args: DecodeArgs) -> tuple[Tensor, Tensor]:
    q, k, v = args.q, args.k, args.v
    batch, queries, heads_q, head_dim = q.shape
    heads_kv, head_dim_v = k.shape[2], v.shape[3]
    group = heads_q // heads_kv
    rows = queries * group
    c = OVERRIDE or config(rows, head_dim, head_dim_v, q.element_size(), heads_kv)
    out = q.new_empty((batch, queries, heads_q, head_dim_v))
    lse = q.new_empty((batch, heads_q, queries), dtype=torch.float32)

    capacity = args.capacity
    reach = capacity if args.left is None else max(min(capacity, args.left + queries + c.block_n), 0)
    max_splits = max(min(c.max_splits, -(-reach // c.split)), 1)
    final = max_splits == 1
    row_blocks = -(-rows // c.block_m)
    programs = max(min(max_splits, _PROGRAMS // (batch * heads_kv * row_blocks)), 1)
    left = 0 if args.left is None else max(min(args.left, _FAR), -_FAR)
    right = max(args.right, -_FAR)
    if final:
        part_out, part_lse = out, lse
    else:
        part_out = q.new_empty((batch * heads_q * queries, max_splits, head_dim_v), dtype=torch.float32)
        part_lse = q.new_empty((batch * heads_q * queries, max_splits), dtype=torch.float32)
    page_size = k.shape[1]
    pdl = PDL and not final and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] >= 9
    split_kernel[(batch * heads_kv * row_blocks * programs,)](
        q, k, v, args.lengths, args.block_table, args.sink, part_out, part_lse,
        q.stride(0), q.stride(1), q.stride(2),
        k.stride(0), k.stride(1), k.stride(2),
        v.stride(0), v.stride(1), v.stride(2),
        0 if args.block_table is None else args.block_table.stride(0),
        heads_kv, row_blocks, programs, max_splits, capacity, k.shape[0], page_size.bit_length() - 1, page_size - 1, left, right, args.scale, args.softcap,
        T=queries, GROUP=group, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v,
        M=c.block_m, N=c.block_n, D=triton.next_power_of_2(head_dim), DV=triton.next_power_of_2(head_dim_v),
        SPLIT=c.split, MAX_SPLITS=c.max_splits,
        PAGES=_pages(args, c.block_n),
        HAS_LEFT=args.left is not None, SOFTCAP=args.softcap != 0.0, SINK=args.sink is not None, FINAL=final,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "ieee", PDL=pdl,
        num_warps=c.warps, num_stages=c.stages,
    )
    if not final:
        merge_kernel[(batch * heads_q * queries,)](
            part_out, part_lse, args.lengths, args.sink, out, lse,
            heads_q, max_splits, capacity, left, right,
            T=queries, HEAD_DIM_V=head_dim_v, N=c.block_n, DV=triton.next_power_of_2(head_dim_v),
            CHUNK=c.merge_chunk, SPLIT=c.split, MAX_SPLITS=c.max_splits,
            HAS_LEFT=args.left is not None, SINK=args.sink is not None, PDL=pdl,
            num_warps=c.merge_warps, launch_pdl=pdl,
        )
    return out, lse


def _pages(args: DecodeArgs, block_n: int) -> int:
    """Which of the kernel's ways to find keys fits the cache."""
    if args.block_table is None:
        return 0
    if args.block_table.shape[1] == 1:
        return 1
    return 2 if args.k.shape[1] % block_n == 0 else 3


# Up to this many tokens one program writes a whole sequence's, and so may advance its length itself.
_TOKENS = 16


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    k: Tensor,
    v: Tensor,
    advance: bool,
) -> None:
    """Write k, v (batch, T, heads_kv, ·) behind each sequence's length, in place."""
    batch, tokens, heads_kv, head_dim = k.shape
    pages, page_size = k_cache.shape[:2]
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    whole = tokens <= _TOKENS
    slot_strides = (0, 0) if slot_mapping is None else slot_mapping.stride()
    with _device(k):
        append_kernel[(batch, 1 if whole else -(-tokens // _TOKENS))](
            k_cache, v_cache, lengths, block_table, slot_mapping, k, v,
            *k_cache.stride()[:3], *v_cache.stride()[:3],
            0 if block_table is None else block_table.stride(0), *slot_strides,
            *k.stride(), *v.stride(),
            tokens, heads_kv, pages, page_size, capacity,
            HEAD_DIM=head_dim, HEAD_DIM_V=v.shape[3], PAGED=block_table is not None, SLOTS=slot_mapping is not None,
            ADVANCE=whole and advance, TOKENS=_TOKENS, BLOCK=1024,
        )
        if advance and not whole:
            added = tokens if slot_mapping is None else (slot_mapping >= 0).sum(1, dtype=torch.int32)
            lengths.clamp_(0, capacity).add_(added).clamp_(max=capacity)


def _device(t: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device: make that the tensor's."""
    return torch.cuda.device_of(t) if t.is_cuda else nullcontext()
