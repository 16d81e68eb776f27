"""The backward kernels (FlashAttention-2, arXiv 2307.08691, algorithm 2, cut in two so that nothing is added atomically).

`rows_kernel` prepares what both need per query row; `dkdv_kernel` walks the visible rows of a block of keys, for every
head of its group, and `dq_kernel` the visible keys of a tile of rows. Scores are computed twice, in exchange for sums
of a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.attention.triton.bias import (
    Bias,
    bias_values,
    biased,
    box_of,
    column_stride,
    far,
    holds_nan,
    in_elements,
    probabilities,
    shown_only,
    store_gradient,
    stored,
)
from warploom.attention.triton.device import (
    EDGE,
    OUT_UNIT,
    Dropout,
    Heads,
    Lengths,
    Mask,
    Pages,
    Queries,
    Softmax,
    block_extrema,
    in_turn,
    kept,
    live_columns,
    load_keys,
    load_rows,
    packed_query_tile,
    readable_columns,
    score_factor,
    scores,
    shift_of,
    store_rows,
    tile_visible,
    used_keys,
    visible,
)
from warploom.attention.triton.row_runs import Runs, band_rows, extrema_of, run_of, visible_runs
from warploom.attention.triton.walk import CHUNK, MIXED, attend
from warploom.kernels.triton.columns import Band, Columns, load_columns, load_offset, normalised, of_chunk, shifted
from warploom.kernels.triton.numerics import LOG2E, clamp, dot, opaque_zeros
from warploom.kernels.triton.packed import find_tile, span

_ROWS_PLAIN = [
    "lse_ptr", "dlse_ptr", "edges_ptr", "cu_q_ptr", "sink_ptr", "stride_qb", "stride_qs", "stride_qh",
    "stride_ob", "stride_os", "stride_oh", "stride_gb", "stride_gs", "stride_gh", "stride_lb", "stride_lh", "batches",
    "tiles", "seqlen_q", "seqlen_k", "heads",
]  # fmt: skip


@triton.jit(do_not_specialize=_ROWS_PLAIN)
def rows_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    rows_ptr,
    edges_ptr,
    cu_q_ptr,
    q_ptr,
    sink_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_ob,
    stride_os,
    stride_oh,
    stride_gb,
    stride_gs,
    stride_gh,
    stride_lb,
    stride_lh,
    batches,
    tiles,
    seqlen_q,
    seqlen_k,
    heads,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Per row delta = rowsum(dO * O) - dLSE and lse in log2 units; per tile whether it needs care.

    lse2 is +inf for rows that see nothing and past the end, which makes their probabilities 0. A tile is an edge where some
    of its rows see nothing: they may hold NaN. rows is (batch, heads, tiles, 2, M), lse2 before delta, M rows
    a tile in packed calls too: aligned, so that a kernel copies several at once. edges is (batch, heads, tiles).
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    head = pid // tiles % heads
    lengths, m0 = packed_query_tile(tile, pid // tiles // heads, cu_q_ptr, None, None, None, batches, seqlen_q, seqlen_k, M)
    if (m0 < 0) | (m0 >= lengths.q):
        return
    batch = tl.cast(lengths.batch, tl.int64)
    rows = m0 + tl.arange(0, M)
    inside = rows < lengths.q
    row = (lengths.first_q + rows).to(tl.int64)
    dims = tl.arange(0, DV)
    live = None if DIM_V == DV else dims < DIM_V
    head64 = tl.cast(head, tl.int64)
    out_base = out_ptr + (batch * stride_ob + head64 * stride_oh) * OUT_UNIT
    out_ptrs = out_base + (row * (stride_os * OUT_UNIT))[:, None] + dims[None, :]
    g_base = dout_ptr + (batch * stride_gb + head64 * stride_gh) * UNIT
    out = load_rows(out_ptrs, inside, live, True).to(tl.float32)
    dout = load_rows(g_base + (row * (stride_gs * UNIT))[:, None] + dims[None, :], inside, live, True).to(tl.float32)
    at = batch * stride_lb + head64 * stride_lh + row
    lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
    empty = lse == float("-inf")
    if sink_ptr is not None:
        # With a sink the lse of a row that sees nothing is the sink, but so is that of a row whose keys weigh nothing beside
        # it. The rest of the pass treats both alike, unless the row holds what must not be multiplied by zero.
        sink = tl.load(sink_ptr + head).to(tl.float32)
        doubtful = inside & (tl.abs(lse - sink) <= 1e-5 * (1.0 + tl.abs(sink)))
        if tl.max(doubtful.to(tl.int32), 0) != 0:
            q_dims = tl.arange(0, D)
            q_base = q_ptr + (batch * stride_qb + head64 * stride_qh) * UNIT
            q_ptrs = q_base + (row * (stride_qs * UNIT))[:, None] + q_dims[None, :]
            q = load_rows(q_ptrs, doubtful, None if DIM == D else q_dims < DIM, True).to(tl.float32)
            empty = empty | (doubtful & (_holds_no_number(q) | _holds_no_number(dout)))
    delta = tl.sum(out * dout, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=inside, other=0.0)
    to = rows_ptr + pid.to(tl.int64) * (2 * M) + tl.arange(0, M)
    tl.store(to, tl.where(empty, float("inf"), lse * LOG2E))
    tl.store(to + M, tl.where(empty, 0.0, delta))
    tl.store(edges_ptr + pid, tl.max((empty & inside).to(tl.int32), 0))


@triton.jit
def _holds_no_number(tile):
    """Rows of a tile that hold NaN or an infinity."""
    return tl.max((tl.abs(tile) < float("inf")).to(tl.int32) ^ 1, 1) != 0


class Rows(NamedTuple):
    """Queries or dO of one sequence and head, a tile of M rows at a time."""

    first: Any  # pointer to the first row, or a descriptor of the whole tensor
    stride: Any  # elements
    dims: Any
    live: Any


class Block(NamedTuple):
    """A block of keys: what rows meet."""

    k: Any
    v: Any
    n0: Any
    cols: Any
    vectors: Any
    columns: Any
    band: Any
    offset: Any  # of the rows in the whole sequence; None where the call has no offsets
    bias: Any
    careful: Any  # not None: what a bias hides counts as 0, whatever it holds; else NaN there stays NaN


@triton.jit
def _load_tile(rows, batch, m0, m, head, inside, BOXES: tl.constexpr, MASKED: tl.constexpr):
    """Rows m0 + m of q or dO, (M, dims)."""
    if BOXES:
        return tl.reshape(rows.first.load([batch, m0, head, 0]), (m.shape[0], rows.dims.shape[0]))
    else:
        pointers = rows.first + tl.cast(m0, tl.int64) * rows.stride + (m[:, None] * rows.stride + rows.dims[None, :])
        return load_rows(pointers, inside, rows.live, MASKED)


@triton.jit
def _dkdv_step(
    sums,
    block,
    q_rows,
    dout_rows,
    rows_base,
    m,
    m0,
    head,
    lengths,
    softmax,
    dropout,
    test,
    KIND: tl.constexpr,
    TAIL: tl.constexpr,
    BOXES: tl.constexpr,
    WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr,
):
    """One tile of rows for a block of keys; everything transposed, (N, M), so that P and dS stay in registers."""
    dk, dv = sums[0], sums[1]
    k, v = block.k, block.v
    batch = lengths.batch
    MASKED: tl.constexpr = KIND == EDGE or TAIL
    # Tile m0 / M of (tiles, 2, M).
    lse2 = tl.load(rows_base + 2 * m0 + tl.arange(0, m.shape[0]))
    if KIND == EDGE:
        inside = lse2 < float("inf")
    else:
        inside = m < lengths.q - m0
    q = _load_tile(q_rows, batch, m0, m, head, inside, BOXES, MASKED)
    # Accumulators that start at -lse and -delta spare the registers that would hold these until the products are done.
    FOLD: tl.constexpr = BOXES and softmax.softcap is None and softmax.descending is None
    if FOLD:
        start = tl.broadcast_to((lse2 * (-1.0 / score_factor(softmax)))[None, :], (k.shape[0], m.shape[0]))
        s, bent = dot(k, tl.trans(q), start), 0.0
    else:
        s, bent = scores(dot(k, tl.trans(q), None), softmax)
    dout = _load_tile(dout_rows, batch, m0, m, head, inside, BOXES, MASKED)
    if WITH_DK:
        delta_ptrs = rows_base + 2 * m0 + m.shape[0] + tl.arange(0, m.shape[0])
        if BOXES and dropout.seed is None:
            dp = dot(v, tl.trans(dout), tl.broadcast_to(-tl.load(delta_ptrs)[None, :], (k.shape[0], m.shape[0])))
        else:
            dp = dot(v, tl.trans(dout), None)
    if block.bias.given is not None:
        shift = shift_of(lengths, block.offset)
        at, n = m[None, :], tl.arange(0, k.shape[0]).to(m.dtype)[:, None]
        s = biased(s, score_factor(softmax), block.bias, m0, block.n0, at, n, shift, block.offset, block.careful)
        if block.careful is not None:
            # Rows that see nothing, or past the end: the bias need not hide from them what it hides from all others.
            s = tl.where((lse2 == float("inf"))[None, :], float("-inf"), s)
        if FOLD:
            p = probabilities(s, 0.0, block.bias)
        else:
            p = probabilities(s, lse2[None, :], block.bias)
    elif FOLD:
        p = tl.exp2(s * score_factor(softmax))
    else:
        p = tl.exp2(s * score_factor(softmax) - lse2[None, :])
    if test:
        rows = m0 + tl.arange(0, m.shape[0])
        shift = shift_of(lengths, block.offset)
        seen = visible(rows[None, :], block.cols[:, None], block.vectors, block.columns, block.band, shift, lengths.k)
        if block.careful is None:
            p = tl.where(seen, p, 0.0)
        else:
            s = tl.where(seen, s, float("-inf"))
    if block.careful is not None:
        # NaN included: a key that the mask hides from some rows and the bias from all others is read.
        p = tl.where(s == float("-inf"), 0.0, p)
    if dropout.seed is not None:
        keep = kept(dropout, batch, block.offset, m0, block.n0, p.shape[1], p.shape[0], True)
    if WITH_DV:
        kept_p = p
        if dropout.seed is not None:
            kept_p = tl.where(keep, p, 0.0)
        dv = dot(kept_p.to(dout.dtype), dout, dv)
    if WITH_DK:
        if dropout.seed is not None:
            dp = tl.where(keep, dp * dropout.scale, 0.0)
        if not BOXES or dropout.seed is not None:
            # Loaded late: sixteen registers a thread that the products above need.
            dp -= tl.load(delta_ptrs)[None, :]
        ds = p * dp
        if block.careful is not None:
            ds = tl.where(s == float("-inf"), 0.0, ds)
        if block.bias.sums is not None:
            found = sums[2] + tl.sum(ds, 1)
        if softmax.softcap is not None:
            ds = ds * (1.0 - bent * bent)
            if block.careful is not None:
                ds = tl.where(s == float("-inf"), 0.0, ds)
        dk = dot(ds.to(q.dtype), q, dk)
    if block.bias.sums is not None and WITH_DK:
        return dk, dv, found
    else:
        return dk, dv


_DKDV_PLAIN = [
    "edges_ptr", "lts_ptr", "lte_ptr", "uts_ptr", "ute_ptr", "bounds_ptr", "seed_ptr", "cu_q_ptr", "cu_k_ptr", "used_ptr",
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "stride_gb", "stride_gs", "stride_gh", "stride_dkb", "stride_dks", "stride_dkh", "stride_dvb", "stride_dvs",
    "stride_dvh", "stride_mb", "stride_mh", "stride_bb", "stride_bh", "batches", "tiles", "row_tiles", "seqlen_q",
    "seqlen_k", "heads", "group", "mask_group", "left", "right", "threshold", "offset_ptr", "chunks", "bias_ptr", "sums_ptr",
    "stride_ab", "stride_ah", "stride_aq", "stride_ak", "bias_rows", "bias_columns", "bias_origin",
]  # fmt: skip


@triton.jit(do_not_specialize=_DKDV_PLAIN)
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    rows_ptr,
    edges_ptr,
    dk_ptr,
    dv_ptr,
    lts_ptr,
    lte_ptr,
    uts_ptr,
    ute_ptr,
    bounds_ptr,
    seed_ptr,
    cu_q_ptr,
    cu_k_ptr,
    used_ptr,
    offset_ptr,
    bias_ptr,
    bias_box,
    sums_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_gb,
    stride_gs,
    stride_gh,
    stride_dkb,
    stride_dks,
    stride_dkh,
    stride_dvb,
    stride_dvs,
    stride_dvh,
    stride_mb,
    stride_mh,
    stride_bb,
    stride_bh,
    batches,
    tiles,
    row_tiles,
    seqlen_q,
    seqlen_k,
    heads,
    group,
    mask_group,
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
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DESCENDING: tl.constexpr,
    TAIL: tl.constexpr,
    BOXES: tl.constexpr,
    EDGES: tl.constexpr,
    SCAN: tl.constexpr,
    WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_UNIT: tl.constexpr,
):
    """dK, dV or both of one block of N keys of one kv head, over all query heads of its group in order.

    EDGES: some tile of rows may be an edge, and has a loop of its own, which costs the other one registers. With SCAN a
    launch leaves to another, of the other EDGES, the heads that are not of its kind. TAIL: the last tile may be short.
    BOXES: q_ptr and dout_ptr are descriptors of the (batch, seqlen, heads, head_dim) tensors, read in boxes of M rows.
    sums_ptr: where sums of dscores over rows go, fp32 (batch, heads, seqlen_k) or (heads, total_k), of a bias for all rows.
    """
    pid = tl.program_id(0)
    if BIAS == "tensor" and cu_q_ptr is None:
        tile, head_kv, entry = in_turn(pid, tiles, heads // group, batches, stride_ab)
    else:
        tile = pid % tiles
        heads_kv = heads // group
        head_kv = pid // tiles % heads_kv
        entry = pid // tiles // heads_kv
    if cu_q_ptr is None:
        sequence, n0, first_q, first_k = entry, tile * N, 0, 0
        len_q, stored, len_k = seqlen_q, seqlen_k, seqlen_k
        first_tile = 0
    else:
        sequence, n0, first_k, stored = find_tile(tile, cu_q_ptr if cu_k_ptr is None else cu_k_ptr, batches, seqlen_k, N)
        first_q, len_q = span(sequence, cu_q_ptr, batches, seqlen_q)
        len_k = used_keys(sequence, stored, used_ptr, batches)
        first_tile = first_q // M + sequence
    if (n0 < 0) | (n0 >= stored):
        return
    count = tl.cdiv(len_q, M)
    batch = tl.cast(sequence, tl.int64)
    tile_at = ((batch if cu_q_ptr is None else 0) * heads + head_kv * group) * row_tiles + first_tile
    if SCAN:
        found = 0
        for g in range(group):
            first_edge, last_edge = _edge_tiles(edges_ptr + tile_at + g * row_tiles, 0, count)
            found |= (first_edge < last_edge).to(tl.int32)
        if EDGES:
            if found == 0:
                return
        else:
            if found != 0:
                return
    offset = load_offset(offset_ptr, sequence, sequence < batches)
    lengths = Lengths(sequence, len_q, len_k, first_q, first_k)
    shift = shift_of(lengths, offset)
    band = Band(left, right)
    softmax = Softmax(scale, softcap, 1 if DESCENDING else None)

    n = tl.arange(0, N)
    cols = n0 + n
    row = (first_k + cols).to(tl.int64)
    dims = tl.arange(0, D)
    dims_v = tl.arange(0, DV)
    live = None if DIM == D else dims < DIM
    live_v = None if DIM_V == DV else dims_v < DIM_V
    first, last = live_columns(lengths, offset, band)
    n1 = tl.minimum(n0 + N, len_k)
    begin, end, all_from, all_until = band_rows(n0, n1, shift, band, count, seqlen_q, lengths, M)

    m = tl.arange(0, M).to(tl.int64) if WIDE else tl.arange(0, M)
    k_at = (batch * stride_kb + tl.cast(head_kv, tl.int64) * stride_kh) * UNIT
    v_at = (batch * stride_vb + tl.cast(head_kv, tl.int64) * stride_vh) * UNIT
    k_ptrs = k_ptr + k_at + (row * (stride_ks * UNIT))[:, None] + dims[None, :]
    v_ptrs = v_ptr + v_at + (row * (stride_vs * UNIT))[:, None] + dims_v[None, :]
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, DV], tl.float32)
    HAS_COLUMNS: tl.constexpr = lts_ptr is not None or ute_ptr is not None
    RUNS: tl.constexpr = 3 if HAS_COLUMNS else 1
    PARTS: tl.constexpr = 2 * RUNS if EDGES else RUNS
    SUMS: tl.constexpr = sums_ptr is not None
    HIDES: tl.constexpr = BIAS == "tensor" or BIAS == "distance"
    # Where all rows see something, keys are walked by once more, with care, if NaN came of the first time.
    QUICK: tl.constexpr = HIDES and not EDGES
    turns = group
    for walked in tl.static_range(2 if QUICK else 1):
        careful = 1 if HIDES and (EDGES or walked == 1) else None
        if walked == 1:
            again = holds_nan(dk) | holds_nan(dv)
            turns = tl.where(again, group, 0)
            dk, dv = tl.where(again, 0.0, dk), tl.where(again, 0.0, dv)
        for g in range(turns):
            head = head_kv * group + g
            head64 = tl.cast(head, tl.int64)
            mask_at = batch * stride_mb + tl.cast(head // mask_group, tl.int64) * stride_mh + first_k
            columns = Columns(
                shifted(lts_ptr, mask_at),
                shifted(lte_ptr, mask_at),
                shifted(uts_ptr, mask_at),
                shifted(ute_ptr, mask_at),
            )
            vectors = load_columns(columns, tl.minimum(cols, tl.maximum(len_k - 1, 0)))
            lts, lte, uts, ute = of_chunk(vectors, columns, offset, len_q)
            vectors = (lts[:, None], lte[:, None], uts[:, None], ute[:, None])
            readable = (cols >= first) & (cols < last)
            if lts_ptr is not None or ute_ptr is not None:
                lts, lte, uts, ute, dead = normalised((lts, lte, uts, ute), columns, cols, band, len_q, shift)
                readable = readable & (dead == 0)
                if bounds_ptr is None:
                    # Columns past the end repeat the last one, which changes no extremum.
                    extrema = extrema_of(lts, lte, uts, ute)
                else:
                    at = bounds_ptr + batch * stride_bb + tl.cast(head // mask_group, tl.int64) * stride_bh
                    extrema = block_extrema(at, n0, len_k, N)
                runs = visible_runs(extrema, begin, end, count, len_q, M)
            else:
                runs = Runs(begin, end, end, end, end, end)
            k = load_rows(k_ptrs, readable, live, True)
            if WITH_DK:
                v = load_rows(v_ptrs, readable, live_v, True)
            else:
                v = k

            q_at = (batch * stride_qb + head64 * stride_qh + tl.cast(first_q, tl.int64) * stride_qs) * UNIT
            dout_at = (batch * stride_gb + head64 * stride_gh + tl.cast(first_q, tl.int64) * stride_gs) * UNIT
            q_rows = Rows(q_ptr if BOXES else q_ptr + q_at, stride_qs * UNIT, dims, live)
            dout_rows = Rows(dout_ptr if BOXES else dout_ptr + dout_at, stride_gs * UNIT, dims_v, live_v)
            edges_at = tile_at + g * row_tiles
            rows_base = rows_ptr + edges_at * (2 * M)
            dropout = Dropout(seed_ptr, threshold, head, keep_scale, chunks)
            bias = Bias(
                1 if BIAS != "" else None, 1 if BIAS == "tensor" or BIAS == "distance" else None,
                bias_values(bias_ptr, stride_ab, stride_ah, batch, head64, sequence < batches, BIAS, BIAS_UNIT),
                in_elements(stride_aq, BIAS_UNIT), column_stride(stride_ak, BIAS_UNIT), bias_rows,
                in_elements(bias_columns, BIAS_UNIT), bias_origin, None, None, 1 if SUMS else None,
                box_of(bias_box, stride_ab, stride_ah, sequence, head),
            )  # fmt: skip
            block = Block(k, v, n0, cols, vectors, columns, band, offset, bias, careful)
            sums = (dk, dv)
            if SUMS:
                sums = (dk, dv, tl.zeros([N], tl.float32))  # type: ignore[assignment]
            if EDGES:
                first_edge, last_edge = _edge_tiles(edges_ptr + edges_at, begin, end)
            for part in range(PARTS):
                if EDGES:
                    # Each run is cut in two where edge tiles lie between.
                    a, b = run_of(runs, part // 2)
                    edge_a = clamp(first_edge, a, tl.maximum(a, b))
                    edge_b = clamp(last_edge, edge_a, tl.maximum(a, b))
                    if part % 2 == 0:
                        b = edge_a
                    else:
                        a = edge_b
                        edge_a = edge_b
                    for m0 in tl.range(edge_a * M, edge_b * M, M):
                        sums = _dkdv_step(
                            sums, block, q_rows, dout_rows, rows_base, m, m0, head, lengths, softmax, dropout,
                            True, EDGE, TAIL, BOXES, WITH_DK, WITH_DV,
                        )  # fmt: skip
                else:
                    a, b = run_of(runs, part)
                # An empty pipeline would fill and drain all the same. (Beside an edge loop a guard would make ptxas serialise
                # the products.)
                for _ in range(1 if EDGES else (a < b).to(tl.int32)):
                    for m0 in tl.range(a * M, b * M, M):
                        # Scalars decide whether any of the tile's elements may be hidden.
                        test = False
                        if right is not None:
                            test = m0 < all_from
                        if left is not None:
                            test = test | (m0 > all_until)
                        if lts_ptr is not None:
                            test = test | ((m0 < extrema.lte_max) & (m0 + M > extrema.lts_min))
                        if ute_ptr is not None or lts_ptr is not None:
                            test = test | ((m0 < extrema.ute_max) & (m0 + M > extrema.uts_min))
                        sums = _dkdv_step(
                            sums, block, q_rows, dout_rows, rows_base, m, m0, head, lengths, softmax, dropout,
                            test, MIXED, TAIL, BOXES, WITH_DK, WITH_DV,
                        )  # fmt: skip

            dk, dv = sums[0], sums[1]
            if SUMS:
                to = sums_ptr + ((batch if cu_q_ptr is None else 0) * heads + head64) * seqlen_k + row
                tl.store(to, tl.where(cols < len_k, sums[2], 0.0), mask=cols < stored)  # type: ignore[misc]

    if seed_ptr is not None:
        dv *= keep_scale
    inside = cols < stored
    dk_at = (batch * stride_dkb + tl.cast(head_kv, tl.int64) * stride_dkh) * OUT_UNIT
    dv_at = (batch * stride_dvb + tl.cast(head_kv, tl.int64) * stride_dvh) * OUT_UNIT
    dk_ptrs = dk_ptr + dk_at + (row * (stride_dks * OUT_UNIT))[:, None] + dims[None, :]
    dv_ptrs = dv_ptr + dv_at + (row * (stride_dvs * OUT_UNIT))[:, None] + dims_v[None, :]
    if used_ptr is not None:
        # Keys past the used ones lie within the sequence's stored ones, and no test has hidden them.
        dk = tl.where((cols < len_k)[:, None], dk, 0.0)
        dv = tl.where((cols < len_k)[:, None], dv, 0.0)
    if WITH_DK:
        store_rows(dk_ptrs, dk * scale, inside, live)
    if WITH_DV:
        store_rows(dv_ptrs, dv, inside, live_v)


@triton.jit
def _edge_tiles(edges_ptr, begin, end):
    """The first and past-the-last of the row tiles [begin, end) that are edges; (end, begin) where none is."""
    first, last = end, begin
    for at in range(begin, end, CHUNK):
        tile = at + tl.arange(0, CHUNK)
        edge = tl.load(edges_ptr + tile, mask=tile < end, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(edge, tile, end), 0))
        last = tl.maximum(last, tl.max(tl.where(edge, tile + 1, begin), 0))
    return first, last


@triton.jit
def _no_gradient(M: tl.constexpr, D: tl.constexpr, SUMS: tl.constexpr):
    """The state before the first tile: dQ, and with SUMS what its rows' scores have in all."""
    if SUMS:
        return opaque_zeros(M, D), tl.zeros([M], tl.float32)
    else:
        return (opaque_zeros(M, D),)


@triton.jit
def _dq_step(state, tile, n0, test, KIND: tl.constexpr):
    """One tile of keys for a tile of rows."""
    dq = state[0]
    queries = tile.queries
    cols = n0 + tl.arange(0, tile.n.shape[0])
    readable = readable_columns(tile, cols, KIND)
    MASKED: tl.constexpr = KIND == EDGE or tile.has_columns is None
    k = load_keys(tile.k, tile, n0, readable, KIND == EDGE, MASKED)
    s, bent = scores(dot(queries.q, tl.trans(k), None), tile.softmax)
    v = load_keys(tile.v, tile, n0, readable, KIND == EDGE, MASKED)
    dp = dot(queries.dout, tl.trans(v), None)
    if tile.bias.given is not None:
        shift = shift_of(tile.lengths, queries.offset)
        m, n = tl.arange(0, s.shape[0]).to(tile.n.dtype)[:, None], tile.n[None, :]
        s = biased(s, score_factor(tile.softmax), tile.bias, queries.m0, n0, m, n, shift, queries.offset, tile.careful)
        if test:
            s = tl.where(tile_visible(tile, cols, KIND), s, float("-inf"))
        p = probabilities(s, queries.lse[:, None], tile.bias)
    else:
        p = tl.exp2(s * score_factor(tile.softmax) - queries.lse[:, None])
    if tile.dropout.seed is not None:
        keep = kept(tile.dropout, tile.lengths.batch, queries.offset, queries.m0, n0, p.shape[0], p.shape[1], False)
        dp = tl.where(keep, dp * tile.dropout.scale, 0.0)
    ds = p * (dp - queries.delta[:, None])
    if tile.bias.given is not None:
        if tile.careful is not None or tile.bias.hides is None:
            ds = tl.where(s == float("-inf"), 0.0, ds)
        if tile.bias.gradient is not None:
            store_gradient(ds, tile.bias, queries.m0, n0, m, n, queries.offset)
        if tile.bias.sums is not None:
            slopes = ds
            if tile.bias.hides is None:
                slopes = -ds * far(tile.bias, queries.m0, n0, m, n, shift)
            found = state[1] + tl.sum(slopes, 1)
        if tile.softmax.softcap is not None:
            ds = tl.where(s == float("-inf"), 0.0, ds * (1.0 - bent * bent))
        dq = dot(ds.to(k.dtype), shown_only(k, s, tile), dq)
        if tile.bias.sums is not None:
            return dq, found
        else:
            return (dq,)
    else:
        if tile.softmax.softcap is not None:
            ds = ds * (1.0 - bent * bent)
        if test:
            ds = tl.where(tile_visible(tile, cols, KIND), ds, 0.0)
        return (dot(ds.to(k.dtype), k, dq),)


_DQ_PLAIN = [
    "lts_ptr", "lte_ptr", "uts_ptr", "ute_ptr", "bounds_ptr", "seed_ptr", "cu_q_ptr", "cu_k_ptr", "used_ptr",
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "stride_gb", "stride_gs", "stride_gh", "stride_dqb", "stride_dqs", "stride_dqh", "stride_mb", "stride_mh",
    "stride_bb", "stride_bh", "batches", "tiles", "row_tiles", "seqlen_q", "seqlen_k", "heads", "group", "mask_group",
    "left", "right", "threshold", "offset_ptr", "chunks", "bias_ptr", "dbias_ptr", "stride_ab", "stride_ah", "stride_aq",
    "stride_ak", "bias_rows", "bias_columns", "bias_origin",
]  # fmt: skip


@triton.jit(do_not_specialize=_DQ_PLAIN)
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    rows_ptr,
    dq_ptr,
    lts_ptr,
    lte_ptr,
    uts_ptr,
    ute_ptr,
    bounds_ptr,
    seed_ptr,
    cu_q_ptr,
    cu_k_ptr,
    used_ptr,
    offset_ptr,
    k_boxes,
    v_boxes,
    bias_ptr,
    bias_box,
    dbias_ptr,
    dbias_box,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_gb,
    stride_gs,
    stride_gh,
    stride_dqb,
    stride_dqs,
    stride_dqh,
    stride_mb,
    stride_mh,
    stride_bb,
    stride_bh,
    batches,
    tiles,
    row_tiles,
    seqlen_q,
    seqlen_k,
    heads,
    group,
    mask_group,
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
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DESCENDING: tl.constexpr,
    ROW_TILE: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_UNIT: tl.constexpr,
    SUMS: tl.constexpr,
):
    """dQ of one tile of M queries of one head.

    bias_box, dbias_box: descriptors of a bias and of its gradient, None where the copy engine cannot read it.
    dbias_ptr: where dscores go, in the bias's dtype and of its shape, (batch, heads, rows, keys); with SUMS their sums over
    keys, of a bias for all keys, or times -|p - j| of slopes: fp32 (batch, heads, seqlen_q) or (heads, total_q).
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
    lengths, m0 = packed_query_tile(tile_index, entry, cu_q_ptr, cu_k_ptr, used_ptr, None, batches, seqlen_q, seqlen_k, M)
    if (m0 < 0) | (m0 >= lengths.q):
        return
    batch = tl.cast(lengths.batch, tl.int64)
    head64 = tl.cast(head, tl.int64)
    rows = m0 + tl.arange(0, M)
    inside = rows < lengths.q
    row = (lengths.first_q + rows).to(tl.int64)
    dims = tl.arange(0, D)
    dims_v = tl.arange(0, DV)
    live = None if DIM == D else dims < DIM
    live_v = None if DIM_V == DV else dims_v < DIM_V
    q_base = q_ptr + (batch * stride_qb + head64 * stride_qh) * UNIT
    g_base = dout_ptr + (batch * stride_gb + head64 * stride_gh) * UNIT
    q = load_rows(q_base + (row * (stride_qs * UNIT))[:, None] + dims[None, :], inside, live, True)
    dout = load_rows(g_base + (row * (stride_gs * UNIT))[:, None] + dims_v[None, :], inside, live_v, True)
    first_tile = 0 if cu_q_ptr is None else lengths.first_q // ROW_TILE + lengths.batch
    tile_at = ((batch if cu_q_ptr is None else 0) * heads + head) * row_tiles + first_tile
    # Row r of (tiles, 2, ROW_TILE).
    rows_ptrs = rows_ptr + tl.cast(tile_at, tl.int64) * (2 * ROW_TILE) + (rows // ROW_TILE * (2 * ROW_TILE) + rows % ROW_TILE)
    lse2 = tl.load(rows_ptrs, mask=inside, other=float("inf"))
    delta = tl.load(rows_ptrs + ROW_TILE, mask=inside, other=0.0)
    band, columns = Band(left, right), Columns(lts_ptr, lte_ptr, uts_ptr, ute_ptr)
    mask = Mask(band, columns, stride_mb, stride_mh, bounds_ptr, stride_bb, stride_bh, mask_group)
    queries = Queries(q, dout, lse2, delta, m0, rows, head, load_offset(offset_ptr, lengths.batch, lengths.batch < batches))
    k = Heads(k_ptr, k_boxes, stride_kb, stride_ks, stride_kh, dims, live, None, None, None)
    v = Heads(v_ptr, v_boxes, stride_vb, stride_vs, stride_vh, dims_v, live_v, None, None, None)
    pages = Pages(None, 0, 1, 1, None)
    softmax = Softmax(scale, softcap, 1 if DESCENDING else None)
    dropout = Dropout(seed_ptr, threshold, head, keep_scale, chunks)
    STORED: tl.constexpr = dbias_ptr is not None and not SUMS
    BOXED: tl.constexpr = dbias_box is not None
    gradient_row = None if BOXED else in_elements(bias_columns, BIAS_UNIT)
    if BOXED:
        gradient = (dbias_box, lengths.batch, head)
    else:
        first = (batch * heads + head64) * bias_rows * gradient_row if STORED else None
        gradient = shifted(dbias_ptr, first) if STORED else None  # type: ignore[assignment]
    bias = Bias(
        1 if BIAS != "" else None, 1 if BIAS == "tensor" or BIAS == "distance" else None,
        bias_values(bias_ptr, stride_ab, stride_ah, batch, head64, lengths.batch < batches, BIAS, BIAS_UNIT),
        in_elements(stride_aq, BIAS_UNIT), column_stride(stride_ak, BIAS_UNIT), bias_rows,
        in_elements(bias_columns, BIAS_UNIT), bias_origin, gradient, gradient_row, 1 if SUMS else None,
        box_of(bias_box, stride_ab, stride_ah, lengths.batch, head),
    )  # fmt: skip
    found = attend(
        _dq_step, _no_gradient(M, D, SUMS), queries, lengths, k, v, mask, pages, softmax, dropout, bias, group, N, UNIT, WIDE,
        False, False, False, False,
    )
    if bias.hides is not None:  # noqa: SIM102 - known when compiling
        if holds_nan(found[0]):
            if BOXED:
                stored()
            found = attend(
                _dq_step, _no_gradient(M, D, SUMS), queries, lengths, k, v, mask, pages, softmax, dropout, bias, group, N, UNIT,
                WIDE, False, True, False, False,
            )
    dq = found[0]
    if SUMS:
        to = dbias_ptr + ((batch if cu_q_ptr is None else 0) * heads + head64) * seqlen_q + row
        tl.store(to, found[1], mask=inside)
    dq_base = dq_ptr + (batch * stride_dqb + head64 * stride_dqh) * OUT_UNIT
    store_rows(dq_base + (row * (stride_dqs * OUT_UNIT))[:, None] + dims[None, :], dq * scale, inside, live)
