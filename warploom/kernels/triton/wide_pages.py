"""The kernel that writes the keys and values of FP8 pages as numbers of 16 bits, in pages of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import clamp


# Strides are specialised on: where they are of whole 16 bytes, numbers are loaded so.
@triton.jit(do_not_specialize=["page_size", "keys", "heads", "pages"])
def widen_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, wide_k_ptr, wide_v_ptr, used_ptr, own_table_ptr,
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ksb, stride_kss, stride_ksh,
    stride_vsb, stride_vss, stride_vsh, stride_tb, stride_tp, page_size, keys, heads, pages,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """ROWS keys of a sequence and head, of its first `keys`: number times scale, rounded once.

    Keys past a sequence's length are neither read nor written. Entries of the table are held to the pool's `pages`, so that no
    contents lead elsewhere. The first head's programs also write what goes with the pages that are written: the table, in
    which they stand in order, PAGE keys each, and the lengths, held to `keys`.
    """
    blocks = tl.cdiv(keys, ROWS)
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, sequence = rest % heads, (rest // heads).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + sequence), keys)
    if head == 0:
        page = block * (ROWS // PAGE) + tl.arange(0, ROWS // PAGE)
        own = sequence * (keys // PAGE) + page
        tl.store(own_table_ptr + own, own.to(tl.int32), mask=page < keys // PAGE)
        if block == 0:
            tl.store(used_ptr + sequence, length)
    row = block * ROWS + tl.arange(0, ROWS)
    live = row < length
    place, slot = (row // page_size).to(tl.int64), row % page_size
    page = tl.load(table_ptr + sequence * stride_tb + place * stride_tp, mask=live, other=0)
    page = clamp(page, 0, pages - 1).to(tl.int64)
    to = (sequence * keys + row) * heads + head
    at = page * stride_kb + slot * stride_ks + head.to(tl.int64) * stride_kh
    scale = page * stride_ksb + slot * stride_kss + head * stride_ksh
    _widen(wide_k_ptr + to * DIM, k_ptr + at, k_scale_ptr + scale, live, DIM, WIDTH)
    at = page * stride_vb + slot * stride_vs + head.to(tl.int64) * stride_vh
    scale = page * stride_vsb + slot * stride_vss + head * stride_vsh
    _widen(wide_v_ptr + to * DIM_V, v_ptr + at, v_scale_ptr + scale, live, DIM_V, WIDTH_V)


@triton.jit
def _widen(to, at, scales, live, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of DIM numbers that begin `at`, times `scales`, to where others begin."""
    column = tl.arange(0, WIDTH)[None, :]
    read = live[:, None] & (column < DIM)
    x = tl.load(at[:, None] + column, mask=read, other=0.0)
    scale = tl.load(scales, mask=live, other=0.0)
    tl.store(to[:, None] + column, (x.to(tl.float32) * scale[:, None]).to(to.dtype.element_ty), mask=read)
