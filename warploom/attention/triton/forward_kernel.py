"""The forward kernel: one program a tile of M queries of one head (FlashAttention-2, arXiv 2307.08691, algorithm 1).

A program jumps over hidden tiles, computes full ones untested and tests the elements of partial ones. The output is
rescaled as the maximum grows and divided by the sum once, at the end; lse is saved for the backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.attention.triton.bias import Bias, bias_values, biased, box_of, column_stride, holds_nan, in_elements, shown_only
from warploom.attention.triton.device import (
    EDGE,
    FULL,
    OUT_UNIT,
    PARTIAL,
    Dropout,
    Heads,
    Mask,
    Pages,
    Queries,
    Softmax,
    in_turn,
    kept,
    load_keys,
    load_rows,
    load_scales,
    packed_query_tile,
    readable_columns,
    score_factor,
    scores,
    shift_of,
    store_rows,
    tile_visible,
)
from warploom.attention.triton.walk import MIXED, attend
from warploom.kernels.triton.columns import Band, Columns, load_offset
from warploom.kernels.triton.numerics import LN2, LOG2E, dot, opaque_zeros
from warploom.kernels.triton.softmax import add_sink, divisor, finite, log_sum


@triton.jit
def _step(state, tile, n0, test, KIND: tl.constexpr):
    """One tile of keys: (acc, sum, maximum) with the sum and the accumulator relative to the maximum, in log2 units."""
    acc, total, top = state
    cols = n0 + tl.arange(0, tile.n.shape[0])
    readable = readable_columns(tile, cols, KIND)
    # Only a column mask's edges are tiles of their own; a band's lie among the partial ones.
    MASKED: tl.constexpr = KIND == EDGE or ((KIND == PARTIAL or KIND == MIXED) and tile.has_columns is None)
    k = load_keys(tile.k, tile, n0, readable, KIND == EDGE, MASKED)
    if tile.k.scale is None:
        products = dot(tile.queries.q, tl.trans(k), None)
    else:
        # e4m3 is exact in every type that q may have; scales join the fp32 products.
        products = dot(tile.queries.q, tl.trans(k.to(tile.queries.q.dtype)), None)
        found = load_scales(tile.k, tile, n0, readable)
        products = products * (found if tile.k.scale_token is None else found[None, :])
    s, _ = scores(products, tile.softmax)
    factor = score_factor(tile.softmax)
    if tile.bias.given is not None:
        queries, shift = tile.queries, shift_of(tile.lengths, tile.queries.offset)
        m, n = tl.arange(0, s.shape[0]).to(tile.n.dtype)[:, None], tile.n[None, :]
        s = biased(s, factor, tile.bias, queries.m0, n0, m, n, shift, queries.offset, tile.careful)
        factor = 1.0
    if KIND == FULL and tile.bias.hides is None:
        new_top = tl.maximum(top, tl.max(s, 1) * factor)
        safe = new_top
    elif KIND == FULL:
        new_top = tl.maximum(top, tl.max(s, 1))
        safe = finite(new_top)
    else:
        s = tl.where(tile_visible(tile, cols, KIND), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * factor)
        safe = finite(new_top)
    p = tl.exp2(s * factor - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 1)
    if tile.dropout.seed is not None:
        keep = kept(tile.dropout, tile.lengths.batch, tile.queries.offset, tile.queries.m0, n0, p.shape[0], p.shape[1], False)
        p = tl.where(keep, p, 0.0)
    acc = acc * shrink[:, None]
    v = load_keys(tile.v, tile, n0, readable, KIND == EDGE, MASKED)
    if tile.v.scale is not None:
        found = load_scales(tile.v, tile, n0, readable)
        v = (v.to(tl.float32) * (found if tile.v.scale_token is None else found[:, None])).to(tile.queries.q.dtype)
    acc = dot(p.to(v.dtype), shown_only(v, s, tile), acc)
    return acc, total, new_top


@triton.jit
def _nothing(M: tl.constexpr, DV: tl.constexpr, APART: tl.constexpr):
    """The state before the first tile."""
    acc = opaque_zeros(M, DV) if APART else tl.zeros([M, DV], tl.float32)
    return acc, tl.zeros([M], tl.float32), tl.full([M], float("-inf"), tl.float32)


_PLAIN = [
    "lts_ptr", "lte_ptr", "uts_ptr", "ute_ptr", "bounds_ptr", "sink_ptr", "seed_ptr", "cu_q_ptr", "cu_k_ptr", "used_ptr",
    "offset_ptr", "table_ptr",
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "stride_ob", "stride_os", "stride_oh", "stride_lb", "stride_lh", "stride_mb", "stride_mh", "stride_bb", "stride_bh",
    "stride_table", "batches", "tiles", "seqlen_q", "seqlen_k", "heads", "group", "mask_group", "pages", "page_size",
    "left", "right", "threshold", "chunks", "bias_ptr", "stride_ab", "stride_ah", "stride_aq", "stride_ak", "bias_rows",
    "bias_columns", "bias_origin", "k_scale_ptr", "v_scale_ptr", "stride_ksb", "stride_kss", "stride_ksh", "stride_vsb",
    "stride_vss", "stride_vsh",
]  # fmt: skip


# Only the large tensors' pointers are specialised, on their alignment: one binary serves every size. Strides come in
# units of UNIT elements, which tells the compiler how far they align.
@triton.jit(do_not_specialize=_PLAIN)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    lts_ptr,
    lte_ptr,
    uts_ptr,
    ute_ptr,
    bounds_ptr,
    sink_ptr,
    seed_ptr,
    cu_q_ptr,
    cu_k_ptr,
    used_ptr,
    offset_ptr,
    table_ptr,
    k_boxes,
    v_boxes,
    bias_ptr,
    bias_box,
    k_scale_ptr,
    v_scale_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_ob,
    stride_os,
    stride_oh,
    stride_lb,
    stride_lh,
    stride_mb,
    stride_mh,
    stride_bb,
    stride_bh,
    stride_table,
    batches,
    tiles,
    seqlen_q,
    seqlen_k,
    heads,
    group,
    mask_group,
    pages,
    page_size,
    left,
    right,
    scale,
    softcap,
    threshold,
    keep_scale,
    chunks,
    stride_ab,
    stride_ah,
    stride_aq,
    stride_ak,
    bias_rows,
    bias_columns,
    bias_origin,
    stride_ksb,
    stride_kss,
    stride_ksh,
    stride_vsb,
    stride_vss,
    stride_vsh,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DESCENDING: tl.constexpr,
    SCATTERED: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_UNIT: tl.constexpr,
    ASCENDING: tl.constexpr,
):
    """out and lse of one tile of M queries. seqlen_q and seqlen_k are totals where the call is packed.

    Tiles vary fastest over programs, longest first under a causal mask, so that programs that run at once share keys.
    ASCENDING: see `warploom.attention.triton.walk.walk`.
    """
    pid = tl.program_id(0)
    if BIAS == "tensor" and cu_q_ptr is None:
        tile, head, entry = in_turn(pid, tiles, heads, batches, stride_ab)
        tile_index = tiles - 1 - tile
    else:
        tile_index = tiles - 1 - pid % tiles
        pid = pid // tiles
        head = pid % heads
        entry = pid // heads
    lengths, m0 = packed_query_tile(tile_index, entry, cu_q_ptr, cu_k_ptr, used_ptr, table_ptr, batches, seqlen_q, seqlen_k, M)
    if (m0 < 0) | (m0 >= lengths.q):
        return
    batch = tl.cast(lengths.batch, tl.int64)
    rows = m0 + tl.arange(0, M)
    inside = rows < lengths.q
    row = (lengths.first_q + rows).to(tl.int64)
    dims = tl.arange(0, D)
    dims_v = tl.arange(0, DV)
    q_base = q_ptr + (batch * stride_qb + tl.cast(head, tl.int64) * stride_qh) * UNIT
    q_ptrs = q_base + (row * (stride_qs * UNIT))[:, None] + dims[None, :]
    live = None if DIM == D else dims < DIM
    q = load_rows(q_ptrs, inside, live, True)
    live_v = None if DIM_V == DV else dims_v < DIM_V
    band, columns = Band(left, right), Columns(lts_ptr, lte_ptr, uts_ptr, ute_ptr)
    mask = Mask(band, columns, stride_mb, stride_mh, bounds_ptr, stride_bb, stride_bh, mask_group)
    queries = Queries(q, None, None, None, m0, rows, head, load_offset(offset_ptr, lengths.batch, lengths.batch < batches))
    if k_scale_ptr is not None:
        head_kv = tl.cast(head // group, tl.int64)
        k_scale_ptr += head_kv * stride_ksh
        v_scale_ptr += head_kv * stride_vsh
    k = Heads(k_ptr, k_boxes, stride_kb, stride_ks, stride_kh, dims, live, k_scale_ptr, stride_ksb, stride_kss)
    v = Heads(v_ptr, v_boxes, stride_vb, stride_vs, stride_vh, dims_v, live_v, v_scale_ptr, stride_vsb, stride_vss)
    held = Pages(table_ptr, stride_table, pages, page_size, 1 if SCATTERED else None)
    softmax = Softmax(scale, softcap, 1 if DESCENDING else None)
    dropout = Dropout(seed_ptr, threshold, head, keep_scale, chunks)
    bias = Bias(
        1 if BIAS != "" else None, 1 if BIAS == "tensor" or BIAS == "distance" else None,
        bias_values(bias_ptr, stride_ab, stride_ah, batch, tl.cast(head, tl.int64), lengths.batch < batches, BIAS, BIAS_UNIT),
        in_elements(stride_aq, BIAS_UNIT), column_stride(stride_ak, BIAS_UNIT), bias_rows,
        in_elements(bias_columns, BIAS_UNIT), bias_origin, None, None, None,
        box_of(bias_box, stride_ab, stride_ah, lengths.batch, head),
    )  # fmt: skip
    # Where ptxas would run products one by one. Plain calls are up to 5 % faster without, and tables at head_dim 64, whose
    # registers then let three programs share a multiprocessor, 15 %.
    PACKED: tl.constexpr = cu_q_ptr is not None or offset_ptr is not None  # or chunks
    APART: tl.constexpr = ASCENDING or PACKED or (BIAS != "" and (BIAS != "distance" or DV > 64))
    acc, total, top = attend(
        _step, _nothing(M, DV, APART), queries, lengths, k, v, mask, held, softmax, dropout, bias, group, N, UNIT, WIDE, True,
        False, ASCENDING, APART,
    )
    if bias.hides is not None:  # noqa: SIM102 - known when compiling
        if holds_nan(acc):
            acc, total, top = attend(
                _step, _nothing(M, DV, APART), queries, lengths, k, v, mask, held, softmax, dropout, bias, group, N, UNIT, WIDE,
                False, True, ASCENDING, APART,
            )

    unseeing = total == 0.0
    if sink_ptr is not None:
        # Tokens past the last sequence belong to no row of the softmax.
        logit = tl.load(sink_ptr + head).to(tl.float32)
        logit = tl.where(lengths.batch < batches, logit, float("-inf"))
        acc, total, top = add_sink(acc, total, top, logit * LOG2E)
    weight = divisor(total)
    if seed_ptr is not None:
        acc = acc * keep_scale
    out = acc / weight[:, None]
    lse = log_sum(total, top, LN2)
    if sink_ptr is not None:
        lse = tl.where(unseeing, logit, lse)
    tl.store(lse_ptr + batch * stride_lb + tl.cast(head, tl.int64) * stride_lh + row, lse, mask=inside)
    out_base = out_ptr + (batch * stride_ob + tl.cast(head, tl.int64) * stride_oh) * OUT_UNIT
    out_ptrs = out_base + (row * (stride_os * OUT_UNIT))[:, None] + dims_v[None, :]
    store_rows(out_ptrs, out, inside, live_v)
