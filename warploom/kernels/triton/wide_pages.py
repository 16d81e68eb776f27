"""The kernel that writes the keys and values of FP8 pages as numbers of 16 bits, in pages of their own."""

from __future__ import annotations

import triton
import triton.language as tl


# Strides are specialised on: where they are of whole 16 bytes, numbers are loaded so.
@triton.jit(do_not_specialize=["page_size", "keys", "heads"])
def widen_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, wide_k_ptr, wide_v_ptr, used_ptr, own_table_ptr,
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ksb, stride_kss, stride_ksh,
    stride_vsb, stride_vss, stride_vsh, stride_tb, stride_tp, page_size, keys, heads,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """ROWS keys of a sequence and head, of its first `keys`: number times scale, rounded once.

    Keys past a sequence's length are neither read nor written. The first head's programs also write what goes with these
    pages: the table, in which they stand in order, PAGE keys each, and the lengths, held to `keys`.
    """
    blocks = tl.cdiv(keys, ROWS)
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, sequence = rest % heads, (rest // heads).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + sequence), keys)
    if head == 0:
        pages: tl.constexpr = ROWS // PAGE
        page = block * pages + tl.arange(0, pages)
        own = sequence * (keys // PAGE) + page
        tl.store(own_table_ptr + own, own.to(tl.int32), mask=page < keys // PAGE)
        if block == 0:
            tl.store(used_ptr + sequence, length)
    row = block * ROWS + tl.arange(0, ROWS)
    live = row < length
    place, slot = (row // page_size).to(tl.int64), row % page_size
    page = tl.load(table_ptr + sequence * stride_tb + place * stride_tp, mask=live, other=0).to(tl.int64)
    to = ((sequence * keys + row) * heads + head)[:, None]
    at, col = page * stride_kb + slot * stride_ks + head.to(tl.int64) * stride_kh, tl.arange(0, WIDTH)
    x = tl.load(k_ptr + at[:, None] + col[None, :], mask=live[:, None] & (col < DIM)[None, :], other=0.0)
    scale = tl.load(k_scale_ptr + page * stride_ksb + slot * stride_kss + head * stride_ksh, mask=live, other=0.0)
    wide = (x.to(tl.float32) * scale[:, None]).to(wide_k_ptr.dtype.element_ty)
    tl.store(wide_k_ptr + to * DIM + col[None, :], wide, mask=live[:, None] & (col < DIM)[None, :])
    at, col = page * stride_vb + slot * stride_vs + head.to(tl.int64) * stride_vh, tl.arange(0, WIDTH_V)
    x = tl.load(v_ptr + at[:, None] + col[None, :], mask=live[:, None] & (col < DIM_V)[None, :], other=0.0)
    scale = tl.load(v_scale_ptr + page * stride_vsb + slot * stride_vss + head * stride_vsh, mask=live, other=0.0)
    wide = (x.to(tl.float32) * scale[:, None]).to(wide_v_ptr.dtype.element_ty)
    tl.store(wide_v_ptr + to * DIM_V + col[None, :], wide, mask=live[:, None] & (col < DIM_V)[None, :])
