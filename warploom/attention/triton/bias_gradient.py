"""Gradients of biases that no backward kernel holds whole: sums of dscores over what shares an element, in a fixed order.

`bias_gradient_kernel` computes dscores anew for the tiles whose sum a program owns: those of all batch entries and heads that
share a tile of a tensor, or those along one diagonal of a batch entry and head, whose elements are equally far apart. Of the
latter it leaves histograms by distance, which `distance_sums_kernel` adds; `bias_sums_kernel` adds what the dQ and dK/dV
kernels leave of rows and columns. Nothing is added atomically.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.attention.triton.bias import (
    Bias,
    added,
    bias_values,
    biased,
    box_of,
    column_stride,
    entries_of,
    holds_nan,
    in_elements,
    probabilities,
    store_tile,
    tile_of,
)
from warploom.attention.triton.device import (
    Dropout,
    Lengths,
    Softmax,
    band_columns,
    kept,
    load_rows,
    score_factor,
    scores,
    shift_of,
    used_keys,
    visible,
)
from warploom.kernels.triton.columns import Band, Columns, load_columns, load_offset, of_chunk, shifted
from warploom.kernels.triton.numerics import clamp, dot, narrowed
from warploom.kernels.triton.packed import span

# Where no histogram lies.
_NOWHERE = tl.constexpr(2**30)

_GRADIENT_PLAIN = [
    "rows_ptr", "bias_ptr", "to_ptr", "places_ptr", "lts_ptr", "lte_ptr", "uts_ptr", "ute_ptr", "seed_ptr", "cu_q_ptr",
    "cu_k_ptr", "used_ptr", "offset_ptr", "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh",
    "stride_vb", "stride_vs", "stride_vh", "stride_gb", "stride_gs", "stride_gh", "stride_mb", "stride_mh", "batches", "slots",
    "tiles_q", "tiles_k", "batch_steps", "head_steps", "row_tiles", "seqlen_q", "seqlen_k", "heads", "group", "mask_group",
    "left", "right", "threshold", "chunks", "stride_ab", "stride_ah", "stride_aq", "stride_ak", "bias_rows", "bias_columns",
    "bias_origin",
]  # fmt: skip


@triton.jit(do_not_specialize=_GRADIENT_PLAIN)
def bias_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    rows_ptr,
    bias_ptr,
    bias_box,
    to_box,
    to_ptr,
    places_ptr,
    lts_ptr,
    lte_ptr,
    uts_ptr,
    ute_ptr,
    seed_ptr,
    cu_q_ptr,
    cu_k_ptr,
    used_ptr,
    offset_ptr,
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
    stride_mb,
    stride_mh,
    batches,
    slots,
    tiles_q,
    tiles_k,
    batch_steps,
    head_steps,
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
    BOXES: tl.constexpr,
):
    """The sum of dscores over the tiles that a program owns.

    Of tensors to_ptr is the gradient, (batch|1, heads|1, rows, keys) in the dtype of the bias, and bias_box and to_box are
    descriptors of both, None where the copy engine cannot read it; `batch_steps`, `head_steps` say how many batch entries and
    heads share an element. Of distances it is fp32 (heads, slots, 2 N + 2): a histogram over the
    2 N - 1 distances of a diagonal of tiles, then what lies before and behind the table's entries. Histograms begin at entry
    places_ptr[slot], int32, which may lie outside of the table. BOXES: q_ptr, k_ptr, v_ptr and dout_ptr are descriptors of the
    (batch, seqlen, heads, head_dim) tensors.
    """
    tl.static_assert(BIAS != "distance" or M == N)
    pid = tl.program_id(0)
    if BIAS == "distance":
        slot = pid % slots
        first_head = pid // slots
        first_batch, diagonal = _diagonal(slot, cu_q_ptr, cu_k_ptr, batches, seqlen_q, seqlen_k, tiles_q, tiles_k, M, N)
        own = _lengths(first_batch, cu_q_ptr, cu_k_ptr, used_ptr, batches, seqlen_q, seqlen_k)
        over = diagonal - (tl.cdiv(own.k, N) - 1)  # tile of rows less tile of keys
        row_tile = tl.maximum(over, 0)
        steps = tl.minimum(tl.cdiv(own.q, M), tl.cdiv(own.k, N) + over) - row_tile
        near = over * M + shift_of(own, load_offset(offset_ptr, first_batch, first_batch < batches)) - (N - 1)
        steps = tl.where((first_batch < batches) & (own.k > 0), tl.maximum(steps, 0), 0)
        place = tl.where(steps > 0, near + bias_origin, _NOWHERE)
        cut = False
        if left is not None:
            steps = tl.where(near > left, 0, steps)
            cut = near + (M + N - 2) > left
        if right is not None:
            steps = tl.where(near + (M + N - 2) < -right, 0, steps)
            cut = cut | (near < -right)
        if first_head == 0:
            tl.store(places_ptr + slot, place)
    else:
        r0 = pid // tiles_k % tiles_q * M
        n0 = pid % tiles_k * N
        shared = pid // tiles_k // tiles_q
        bias_heads = heads // head_steps
        first_batch, first_head = shared // bias_heads, shared % bias_heads
        steps = batch_steps * head_steps
    # Where every batch entry hides the same elements, a tile that is hidden has no steps; elsewhere each step looks. What a
    # band hides it hides along the whole diagonal.
    PLAIN: tl.constexpr = lts_ptr is None and ute_ptr is None
    ALIKE: tl.constexpr = PLAIN and (BIAS == "distance" or (cu_q_ptr is None and offset_ptr is None))
    if ALIKE and BIAS != "distance":
        shown = band_columns(r0, r0 + M, seqlen_k - seqlen_q, Band(left, right), seqlen_k)
        steps = tl.where((n0 < shown[1]) & (n0 + N > shown[0]) & (r0 < seqlen_q), steps, 0)
        cut = (n0 < shown[2]) | (n0 + N > shown[3])
    total = tl.zeros([M, N], tl.float32)
    m, n = tl.arange(0, M), tl.arange(0, N)
    if WIDE:
        m, n = m.to(tl.int64), n.to(tl.int64)
    dims, dims_v = tl.arange(0, D), tl.arange(0, DV)
    live = None if DIM == D else dims < DIM
    live_v = None if DIM_V == DV else dims_v < DIM_V
    band = Band(left, right)
    softmax = Softmax(scale, softcap, 1 if DESCENDING else None)
    if bias_box is not None:
        # What shares an element of the gradient shares the bias.
        box = box_of(bias_box, stride_ab, stride_ah, first_batch, first_head)
        given = narrowed(tile_of(box, r0, n0, M, N))
    elif BIAS == "distance":
        entries = bias_values(bias_ptr, stride_ab, stride_ah, first_batch, first_head, first_batch < batches, BIAS, BIAS_UNIT)
        first_entry = near + (N - 1) + bias_origin
        given = entries_of(entries, first_entry + m[:, None] - n[None, :], in_elements(bias_columns, BIAS_UNIT))
    # Once more, with care, if NaN came of the first time; beside the addresses of a tensor's tiles it would spill.
    QUICK: tl.constexpr = ALIKE and (BIAS == "distance" or BOXES)
    turns = steps
    for walked in tl.static_range(2 if QUICK else 1):
        careful = None if QUICK and walked == 0 else 1
        if walked == 1:
            again = holds_nan(total)
            turns = tl.where(again, steps, 0)
            total = tl.where(again, 0.0, total)
        for step in range(turns):
            if BIAS == "distance":
                batch, head = first_batch, first_head
                m0, n0 = (row_tile + step) * M, (row_tile + step - over) * N
            else:
                batch, head = first_batch + step // head_steps, first_head + step % head_steps
            lengths = _lengths(batch, cu_q_ptr, cu_k_ptr, used_ptr, batches, seqlen_q, seqlen_k)
            offset = load_offset(offset_ptr, batch, batch < batches)
            if BIAS != "distance":
                m0 = r0 if offset is None else r0 - offset
            rows, cols = m0 + tl.arange(0, M), n0 + tl.arange(0, N)
            inside, there = (rows >= 0) & (rows < lengths.q), cols < lengths.k
            shift = shift_of(lengths, offset)
            batch64, head64 = tl.cast(batch, tl.int64), tl.cast(head, tl.int64)
            mask_at = batch64 * stride_mb + tl.cast(head // mask_group, tl.int64) * stride_mh + lengths.first_k
            columns = Columns(
                shifted(lts_ptr, mask_at),
                shifted(lte_ptr, mask_at),
                shifted(uts_ptr, mask_at),
                shifted(ute_ptr, mask_at),
            )
            vectors = load_columns(columns, tl.minimum(cols, tl.maximum(lengths.k - 1, 0)))
            lts, lte, uts, ute = of_chunk(vectors, columns, offset, lengths.q)
            vectors = (lts[None, :], lte[None, :], uts[None, :], ute[None, :])
            seen = visible(rows[:, None], cols[None, :], vectors, columns, band, shift, lengths.k) & inside[:, None]
            if ALIKE:
                shows = True
                test = cut | (n0 + N > lengths.k) | (m0 + M > lengths.q)
            else:
                test = True
                shows = tl.max(tl.max(seen.to(tl.int32), 1), 0) != 0
            if shows:
                row, column = (lengths.first_q + rows).to(tl.int64), (lengths.first_k + cols).to(tl.int64)
                if BOXES:
                    q = tl.reshape(q_ptr.load([batch, m0, head, 0]), (M, D))
                    k = tl.reshape(k_ptr.load([batch, n0, head // group, 0]), (N, D))
                else:
                    q_at = q_ptr + (batch64 * stride_qb + head64 * stride_qh) * UNIT
                    k_at = k_ptr + (batch64 * stride_kb + tl.cast(head // group, tl.int64) * stride_kh) * UNIT
                    q = load_rows(q_at + (row * (stride_qs * UNIT))[:, None] + dims[None, :], inside, live, True)
                    k = load_rows(k_at + (column * (stride_ks * UNIT))[:, None] + dims[None, :], there, live, True)
                s, _ = scores(dot(q, tl.trans(k), None), softmax)
                if BOXES:
                    dout = tl.reshape(dout_ptr.load([batch, m0, head, 0]), (M, DV))
                    v = tl.reshape(v_ptr.load([batch, n0, head // group, 0]), (N, DV))
                else:
                    g_at = dout_ptr + (batch64 * stride_gb + head64 * stride_gh) * UNIT
                    v_at = v_ptr + (batch64 * stride_vb + tl.cast(head // group, tl.int64) * stride_vh) * UNIT
                    dout = load_rows(g_at + (row * (stride_gs * UNIT))[:, None] + dims_v[None, :], inside, live_v, True)
                    v = load_rows(v_at + (column * (stride_vs * UNIT))[:, None] + dims_v[None, :], there, live_v, True)
                dp = dot(dout, tl.trans(v), None)
                bias = Bias(
                    1 if BIAS != "" else None, 1 if BIAS == "tensor" or BIAS == "distance" else None,
                    bias_values(bias_ptr, stride_ab, stride_ah, batch64, head64, batch < batches, BIAS, BIAS_UNIT),
                    in_elements(stride_aq, BIAS_UNIT), column_stride(stride_ak, BIAS_UNIT), bias_rows,
                    in_elements(bias_columns, BIAS_UNIT), bias_origin, None, None, None, None,
                )  # fmt: skip
                if bias_box is None and BIAS != "distance":
                    s = biased(s, score_factor(softmax), bias, m0, n0, m[:, None], n[None, :], shift, offset, careful)
                else:
                    s = added(s, score_factor(softmax), given, careful)
                if test:
                    s = tl.where(seen, s, float("-inf"))
                first_tile = 0 if cu_q_ptr is None else lengths.first_q // ROW_TILE + batch
                tile_at = ((batch64 if cu_q_ptr is None else 0) * heads + head64) * row_tiles + first_tile
                at = rows_ptr + tile_at * (2 * ROW_TILE) + (rows // ROW_TILE * (2 * ROW_TILE) + rows % ROW_TILE)
                lse2 = tl.load(at, mask=inside, other=float("inf"))
                delta = tl.load(at + ROW_TILE, mask=inside, other=0.0)
                p = probabilities(s, lse2[:, None], bias)
                if seed_ptr is not None:
                    dropout = Dropout(seed_ptr, threshold, head, keep_scale, chunks)
                    dp = tl.where(kept(dropout, batch, offset, m0, n0, M, N, False), dp * keep_scale, 0.0)
                ds = p * (dp - delta[:, None])
                if careful is not None:
                    # No sum crosses elements before this: what is hidden is out of it, whatever it holds.
                    ds = tl.where(s == float("-inf"), 0.0, ds)
                total += ds
    if BIAS == "distance":
        w = tl.arange(0, 2 * N)[None, :]
        key = tl.arange(0, M)[:, None] + (N - 1) - w  # of each row, the one that lies so far
        found = tl.gather(total, clamp(key, 0, N - 1), 1)
        histogram = tl.sum(tl.where((key >= 0) & (key < N), found, 0.0), 0)
        if place < _NOWHERE:
            to = to_ptr + (tl.cast(first_head, tl.int64) * slots + slot) * (2 * N + 2)
            entry = place + tl.arange(0, 2 * N)
            tl.store(to + tl.arange(0, 2 * N), histogram)
            tl.store(to + 2 * N, tl.sum(tl.where(entry < 0, histogram, 0.0), 0))
            tl.store(to + (2 * N + 1), tl.sum(tl.where(entry >= bias_columns, histogram, 0.0), 0))
    elif to_box is not None:
        store_tile((to_box, first_batch, first_head), total, r0, n0)
    else:
        width = in_elements(bias_columns, BIAS_UNIT)
        to = to_ptr + ((tl.cast(shared, tl.int64) * bias_rows + r0) * width + n0)
        within = (m < bias_rows - r0)[:, None] & (n < width - n0)[None, :]
        # Rows of the gradient lie `width` elements apart.
        pointers = to + (m.to(tl.int64) * width)[:, None] + n[None, :]
        tl.store(pointers, total.to(to_ptr.dtype.element_ty), mask=within)


@triton.jit
def _lengths(sequence, cu_q_ptr, cu_k_ptr, used_ptr, batches, seqlen_q, seqlen_k):
    """Those of a batch entry, or of a packed sequence."""
    if cu_q_ptr is None:
        return Lengths(sequence, seqlen_q, seqlen_k, 0, 0)
    else:
        first_q, len_q = span(sequence, cu_q_ptr, batches, seqlen_q)
        first_k, len_k = first_q, len_q
        if cu_k_ptr is not None:
            first_k, len_k = span(sequence, cu_k_ptr, batches, seqlen_k)
        return Lengths(sequence, len_q, used_keys(sequence, len_k, used_ptr, batches), first_q, first_k)


@triton.jit
def _diagonal(slot, cu_q_ptr, cu_k_ptr, batches, seqlen_q, seqlen_k, tiles_q, tiles_k, M: tl.constexpr, N: tl.constexpr):
    """The batch entry of a slot, and which of its diagonals of tiles it is; past the last sequence number `batches`.

    As `warploom.kernels.triton.packed.find_tile`, of two lengths: slots of a sequence begin at cu_q // M + cu_k // N + 2 i.
    """
    if cu_q_ptr is None:
        return slot // (tiles_q + tiles_k - 1), slot % (tiles_q + tiles_k - 1)
    else:
        keys_ptr = cu_q_ptr if cu_k_ptr is None else cu_k_ptr
        begun = 0
        for first in range(0, batches + 1, 256):
            i = first + tl.arange(0, 256)
            q = clamp(tl.load(cu_q_ptr + i, mask=i <= batches, other=0), 0, seqlen_q)
            k = clamp(tl.load(keys_ptr + i, mask=i <= batches, other=0), 0, seqlen_k)
            begun += tl.sum(((i <= batches) & (q // M + k // N + 2 * i <= slot)).to(tl.int32), 0)
        sequence = tl.maximum(begun - 1, 0)
        q = clamp(tl.load(cu_q_ptr + sequence), 0, seqlen_q)
        k = clamp(tl.load(keys_ptr + sequence), 0, seqlen_k)
        return sequence, slot - q // M - k // N - 2 * sequence


@triton.jit(do_not_specialize=["histograms_ptr", "places_ptr", "to_ptr", "slots", "entries", "blocks"])
def distance_sums_kernel(
    histograms_ptr, places_ptr, to_ptr, slots, entries, blocks, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK entries of a head's gradient, fp32 (heads, entries): the sum of all histograms, in the order of their slots."""
    block, head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    before, behind = 0.0, 0.0
    for first in range(0, slots, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        place = tl.load(places_ptr + slot, mask=slot < slots, other=_NOWHERE)
        at = histograms_ptr + (head * slots + slot) * (2 * N + 2)
        w = entry[None, :] - place[:, None]
        total += tl.sum(tl.load(at[:, None] + w, mask=(w >= 0) & (w < 2 * N), other=0.0), 0)
        written = place < _NOWHERE
        before += tl.sum(tl.load(at + 2 * N, mask=written, other=0.0), 0)
        behind += tl.sum(tl.load(at + (2 * N + 1), mask=written, other=0.0), 0)
    total += tl.where(entry == 0, before, 0.0) + tl.where(entry == entries - 1, behind, 0.0)
    tl.store(to_ptr + head * entries + entry, total, mask=entry < entries)


_SUMS_PLAIN = [
    "sums_ptr", "to_ptr", "cu_ptr", "offset_ptr", "batches", "heads", "seqlen", "places", "blocks", "batch_steps", "head_steps",
]  # fmt: skip


@triton.jit(do_not_specialize=_SUMS_PLAIN)
def bias_sums_kernel(
    sums_ptr, to_ptr, cu_ptr, offset_ptr, batches, heads, seqlen, places, blocks, batch_steps, head_steps,
    TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of a gradient (batch|1, heads|1, places): sums over what shares them, in order of batch entries and heads.

    sums is fp32 (batch, heads, seqlen) or, packed, (heads, seqlen). TOTAL: a gradient has one place, the sum of all.
    `offset_ptr`: places are of the whole sequence, sums of a chunk's rows.
    """
    block, shared = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    bias_heads = heads // head_steps
    first_batch, first_head = shared // bias_heads, shared % bias_heads
    place = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(batch_steps * head_steps):
        batch, head = first_batch + step // head_steps, first_head + step % head_steps
        if cu_ptr is None:
            at, length = (tl.cast(batch, tl.int64) * heads + head) * seqlen, seqlen
        else:
            start, length = span(batch, cu_ptr, batches, seqlen)
            at = tl.cast(head, tl.int64) * seqlen + start
        if TOTAL:
            for first in range(0, length, BLOCK):
                total += tl.load(sums_ptr + at + (first + place), mask=first + place < length, other=0.0)
        else:
            row = place
            if offset_ptr is not None:
                row = place - load_offset(offset_ptr, batch, batch < batches)
            total += tl.load(sums_ptr + at + row, mask=(row >= 0) & (row < length), other=0.0)
    to = to_ptr + tl.cast(shared, tl.int64) * places
    if TOTAL:
        tl.store(to, tl.sum(total, 0).to(to_ptr.dtype.element_ty))
    else:
        tl.store(to + place, total.to(to_ptr.dtype.element_ty), mask=place < places)
