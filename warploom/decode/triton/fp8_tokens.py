"""The append to an FP8 cache in one launch: keys are rotated, both scaled by their row or as the cache says, and rounded."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from warploom.decode.problem import AppendFp8Args
from warploom.decode.triton.launch import scale_strides
from warploom.decode.triton.parts import place_of_token
from warploom.decode.triton.tokens import TOKENS, add_tokens
from warploom.kernels.e4m3 import hadamard_norm
from warploom.kernels.triton.fp8 import e4m3_bits, scale_of
from warploom.kernels.triton.hadamard import rotated
from warploom.kernels.triton.numerics import clamp
from warploom.kernels.triton.widths import power_of_two
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch

_ROWS = 8  # heads of a token at a time


@triton.jit(
    do_not_specialize=[
        "k_cache_ptr", "v_cache_ptr", "k_scale_ptr", "v_scale_ptr", "lengths_ptr", "table_ptr", "slots_ptr", "k_ptr", "v_ptr",
        "seed", "stride_kcb", "stride_kcn", "stride_kch", "stride_vcb", "stride_vcn", "stride_vch", "stride_ksb", "stride_ksn",
        "stride_ksh", "stride_vsb", "stride_vsn", "stride_vsh", "stride_table", "stride_slots", "stride_slots_t", "stride_kb",
        "stride_kt", "stride_kh", "stride_kd", "stride_vb", "stride_vt", "stride_vh", "stride_vd", "tokens", "heads", "pages",
        "page_size", "capacity",
    ]
)  # fmt: skip
def append_fp8_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    lengths_ptr,
    table_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    seed: tl.int64,
    stride_kcb: tl.int64,
    stride_kcn: tl.int64,
    stride_kch: tl.int64,
    stride_vcb: tl.int64,
    stride_vcn: tl.int64,
    stride_vch: tl.int64,
    stride_ksb: tl.int64,
    stride_ksn: tl.int64,
    stride_ksh: tl.int64,
    stride_vsb: tl.int64,
    stride_vsn: tl.int64,
    stride_vsh: tl.int64,
    stride_table: tl.int64,
    stride_slots: tl.int64,
    stride_slots_t: tl.int64,
    stride_kb: tl.int64,
    stride_kt: tl.int64,
    stride_kh: tl.int64,
    stride_kd: tl.int64,
    stride_vb: tl.int64,
    stride_vt: tl.int64,
    stride_vh: tl.int64,
    stride_vd: tl.int64,
    tokens,
    heads,
    pages,
    page_size,
    capacity,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    STEPS: tl.constexpr,
    NORM: tl.constexpr,
    SCALES: tl.constexpr,
    ADVANCE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """TOKENS tokens of one sequence; with ADVANCE one program has them all, and adds them to the length.

    Caches are bytes. STEPS: log2 of HEAD_DIM where keys are rotated, else 0. SCALES: each token and head gets its own; else
    scales are read, those of heads or of the whole tensor, whose strides are 0 where one serves all.
    """
    batch = tl.program_id(0).to(tl.int64)
    length = clamp(tl.load(lengths_ptr + batch), 0, capacity)
    kept = 0
    first = tl.program_id(1).to(tl.int64) * TOKENS
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    for t in range(first, tl.minimum(first + TOKENS, tokens)):
        page, offset, live, counts = place_of_token(
            t, batch, length, table_ptr, slots_ptr, stride_table, stride_slots, stride_slots_t, pages, page_size, capacity
        )
        kept += counts
        for begin in range(0, heads, ROWS):
            head = (begin + tl.arange(0, ROWS)).to(tl.int64)
            there = (head < heads) & live
            at = k_ptr + batch * stride_kb + t * stride_kt + head * stride_kh
            k_mask = there[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(at[:, None] + (d * stride_kd)[None, :], mask=k_mask, other=0.0).to(tl.float32)
            if STEPS > 0:
                k = rotated(k, seed, STEPS, NORM)
            at = v_ptr + batch * stride_vb + t * stride_vt + head * stride_vh
            v_mask = there[:, None] & (dv < HEAD_DIM_V)[None, :]
            v = tl.load(at[:, None] + (dv * stride_vd)[None, :], mask=v_mask, other=0.0).to(tl.float32)
            k_scale_at = k_scale_ptr + head * stride_ksh
            v_scale_at = v_scale_ptr + head * stride_vsh
            if SCALES:
                k_scale, v_scale = _scale_of(k), _scale_of(v)
                tl.store(k_scale_at + (page * stride_ksb + offset * stride_ksn), k_scale, mask=there)
                tl.store(v_scale_at + (page * stride_vsb + offset * stride_vsn), v_scale, mask=there)
            else:
                k_scale = tl.load(k_scale_at, mask=there, other=1.0)
                v_scale = tl.load(v_scale_at, mask=there, other=1.0)
            k_at = k_cache_ptr + page * stride_kcb + offset * stride_kcn + head * stride_kch
            tl.store(k_at[:, None] + d[None, :], _bits(k, k_scale), mask=k_mask)
            v_at = v_cache_ptr + page * stride_vcb + offset * stride_vcn + head * stride_vch
            tl.store(v_at[:, None] + dv[None, :], _bits(v, v_scale), mask=v_mask)
    if ADVANCE:
        # Every thread has read the old length before one of them replaces it.
        tl.debug_barrier()
        tl.store(lengths_ptr + batch, tl.minimum(length + kept, capacity))


@triton.jit
def _scale_of(x):
    """`e4m3.scales_of` of rows: NaN where a row holds one."""
    top = tl.max(tl.abs(x), 1)
    top = tl.where(tl.max((x != x).to(tl.int32), 1) != 0, float("nan"), top)
    return scale_of(top)


@triton.jit
def _bits(x, scale):
    """The bytes of `e4m3.quantized`."""
    z = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return e4m3_bits(tl.where(tl.abs(x) < float("inf"), z, float("nan")))


def append(args: AppendFp8Args) -> None:
    """Write k, v (batch, T, heads_kv, ·) behind each sequence's length, and the scales that are theirs, in place."""
    a = args
    batch, tokens, heads, head_dim = a.k.shape
    pages, page_size = a.k_cache.shape[:2]
    capacity = page_size if a.block_table is None else a.block_table.shape[1] * page_size
    whole = tokens <= TOKENS
    launch = _launch(
        head_dim,
        a.v.shape[3],
        a.k.dtype,
        a.seed is not None,
        a.k_scale.ndim > 1,
        a.block_table is not None,
        None if a.slot_mapping is None else a.slot_mapping.dtype,
        whole and a.advance,
        a.k.device.index if a.k.is_cuda else None,
    )
    with on_device(a.k):
        launch(
            (batch, 1 if whole else -(-tokens // TOKENS)),
            a.k_cache, a.v_cache, a.k_scale, a.v_scale, a.lengths, a.block_table, a.slot_mapping, a.k, a.v, a.seed or 0,
            *a.k_cache.stride()[:3], *a.v_cache.stride()[:3],
            *scale_strides(a.k_scale), *scale_strides(a.v_scale),
            0 if a.block_table is None else a.block_table.stride(0),
            *((0, 0) if a.slot_mapping is None else a.slot_mapping.stride()),
            *a.k.stride(), *a.v.stride(), tokens, heads, pages, page_size, capacity,
        )  # fmt: skip
        if a.advance and not whole:
            add_tokens(a.lengths, tokens, a.slot_mapping, capacity)


@lru_cache(maxsize=1024)
def _launch(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    rotates: bool,
    scales: bool,
    paged: bool,
    slots: torch.dtype | None,
    advance: bool,
    device: int | None,
) -> Launch:
    """The launch of one variant; what is not among the constants only tells apart calls that need binaries of their own."""
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "D": power_of_two(head_dim),
        "DV": power_of_two(head_dim_v),
        "STEPS": head_dim.bit_length() - 1 if rotates else 0,
        "NORM": hadamard_norm(head_dim),
        "SCALES": scales,
        "ADVANCE": advance,
        "TOKENS": TOKENS,
        "ROWS": _ROWS,
        "num_warps": 4,
    }
    return Launch(append_fp8_kernel, constants, direct=True)
