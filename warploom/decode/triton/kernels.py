"""The two kernels: `split_kernel` computes one split of one sequence, `merge_kernel` folds a row's splits.

Tile legend: M rows (queries of a group of heads, t · group + g), N keys, D head_dim, DV head_dim of v. Scores are in
units of log2, so that exp2 needs no multiply. Splits depend on the sequence's own length alone, and every row's
arithmetic has one order: a sequence's bits are the same in any batch, cache size and page layout.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Where a tile's keys lie: in the sequence's own row, in the one page of a one-column table, within some page of a table,
# or key by key in any page.
CONTIGUOUS = tl.constexpr(0)
ONE_PAGE = tl.constexpr(1)
TILE_IN_PAGE = tl.constexpr(2)
SCATTERED = tl.constexpr(3)


@triton.jit
def _key_range(length, left, right, T: tl.constexpr, HAS_LEFT: tl.constexpr):
    """Keys [first, last) that some query of the sequence sees."""
    first = 0
    if HAS_LEFT:
        first = tl.maximum(length - T - left, 0)
    last = tl.minimum(length, length + right)
    return first, last


@triton.jit
def _splits(first, last, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, N: tl.constexpr):
    """Start of split 0, keys in a split and how many splits hold keys; whole tiles, so tiles fall alike everywhere."""
    start = first // N * N
    keys = tl.maximum(last - start, 0)
    size = tl.maximum(SPLIT, tl.cdiv(tl.cdiv(keys, MAX_SPLITS), N) * N)
    return start, size, tl.cdiv(keys, size)


@triton.jit
def _tanh(x):
    """Odd polynomial near 0, where 1 - 2 / (e^2x + 1) cancels."""
    square = x * x
    p = -5.70498872745e-3
    p = p * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    near = x + x * square * p
    far = 1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    table_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_table,
    heads_kv,
    row_blocks,
    programs,
    max_splits,
    capacity,
    pages,
    page_shift,
    page_mask,
    left,
    right,
    scale,
    softcap,
    T: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PAGES: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINK: tl.constexpr,
    FINAL: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of one sequence for the rows of one kv head.

    Writes normalised partial results, fp32 out (batch, heads_q, T, max_splits, head_dim_v) and lse in log2 units; with
    FINAL (the cache holds a single split) the result itself. Heads vary fastest over programs: the heads of a token
    are neighbours in memory, and their programs run at once.
    """
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    head = pid % heads_kv
    pid = pid // heads_kv
    row_block = pid % row_blocks
    pid = pid // row_blocks
    program = pid % programs
    batch = (pid // programs).to(tl.int64)

    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), capacity)
    first, last = _key_range(length, left, right, T, HAS_LEFT)
    start, size, used = _splits(first, last, SPLIT, MAX_SPLITS, N)
    if not FINAL:
        if program >= used:
            return

    rows = row_block * M + tl.arange(0, M)
    t = rows // GROUP
    head_q = head * GROUP + rows % GROUP
    row_live = rows < T * GROUP
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    n = tl.arange(0, N)
    d_live = d < HEAD_DIM
    dv_live = dv < HEAD_DIM_V
    position = length - T + t

    q_offset = t.to(tl.int64) * stride_qt + head_q.to(tl.int64) * stride_qh
    q = tl.load(
        q_ptr + batch * stride_qb + q_offset[:, None] + d[None, :], mask=row_live[:, None] & d_live[None, :], other=0.0
    )
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_vh
    if PAGES != CONTIGUOUS:
        table_ptr += batch * stride_table
    if PAGES == CONTIGUOUS:
        k_ptr += batch * stride_kb
        v_ptr += batch * stride_vb
    elif PAGES == ONE_PAGE:
        page = tl.load(table_ptr)
        inside = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
        k_ptr += inside * stride_kb
        v_ptr += inside * stride_vb

    for split in range(program, tl.maximum(used, 1) if FINAL else used, programs):
        begin = start + split * size
        end = tl.minimum(begin + size, last)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, DV), tl.float32)
        # The next tile's pages are read one tile ahead: then K and V never wait for them.
        if PAGES == TILE_IN_PAGE:
            page = tl.load(table_ptr + (begin >> page_shift), mask=begin < end, other=0)
        elif PAGES == SCATTERED:
            page = tl.load(table_ptr + ((begin + n) >> page_shift), mask=begin + n < end, other=0)
        for tile in range(begin, end, N):
            cols = tile + n
            live = (cols >= first) & (cols < end)
            if PAGES == TILE_IN_PAGE:
                slot = (tile & page_mask) + n
            elif PAGES == SCATTERED:
                slot = cols & page_mask
            else:
                slot = cols
            k_offset = slot.to(tl.int64) * stride_kn
            v_offset = slot.to(tl.int64) * stride_vn
            if PAGES == TILE_IN_PAGE or PAGES == SCATTERED:
                inside = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
                k_offset += inside * stride_kb
                v_offset += inside * stride_vb
                if PAGES == TILE_IN_PAGE:
                    page = tl.load(table_ptr + ((tile + N) >> page_shift), mask=tile + N < end, other=0)
                else:
                    page = tl.load(table_ptr + ((cols + N) >> page_shift), mask=cols + N < end, other=0)
            k = tl.load(
                k_ptr + k_offset[:, None] + d[None, :],
                mask=live[:, None] & d_live[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if SOFTCAP:
                s = _tanh(s * (scale / softcap)) * (softcap * LOG2E)
            else:
                s = s * (scale * LOG2E)
            seen = live[None, :] & (cols[None, :] <= position[:, None] + right)
            if HAS_LEFT:
                seen = seen & (cols[None, :] >= position[:, None] - left)
            s = tl.where(seen, s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(s - base[:, None])
            rescale = tl.exp2(top - base)
            total = total * rescale + tl.sum(p, 1)
            v = tl.load(
                v_ptr + v_offset[:, None] + dv[None, :],
                mask=live[:, None] & dv_live[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
            top = new_top

        empty = total == 0.0
        divisor = tl.where(empty, 1.0, total)
        partial = acc / divisor[:, None]
        partial_lse = tl.where(empty, float("-inf"), top + tl.log2(divisor))
        row = (batch * heads_kv * GROUP + head_q) * T + t
        if FINAL:
            sink = float("-inf")
            if SINK:
                sink = tl.load(sink_ptr + head_q, mask=row_live, other=0.0).to(tl.float32) * LOG2E
            base = tl.maximum(partial_lse, sink)
            base = tl.where(base == float("-inf"), 0.0, base)
            weight = tl.exp2(partial_lse - base)
            total = weight + tl.exp2(sink - base)
            empty = total == 0.0
            divisor = tl.where(empty, 1.0, total)
            result = partial * weight[:, None] / divisor[:, None]
            result_lse = tl.where(empty, float("-inf"), (base + tl.log2(divisor)) * LN2)
            out_row = (batch * T + t) * (heads_kv * GROUP) + head_q
            tl.store(
                out_ptr + out_row[:, None] * HEAD_DIM_V + dv[None, :],
                result.to(out_ptr.dtype.element_ty),
                mask=row_live[:, None] & dv_live[None, :],
            )
            tl.store(lse_ptr + row, result_lse, mask=row_live)
        else:
            slot = row * max_splits + split
            tl.store(
                out_ptr + slot[:, None] * HEAD_DIM_V + dv[None, :],
                partial,
                mask=row_live[:, None] & dv_live[None, :],
            )
            tl.store(lse_ptr + slot, partial_lse, mask=row_live)


@triton.jit
def merge_kernel(
    part_out_ptr,
    part_lse_ptr,
    lengths_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    heads_q,
    max_splits,
    capacity,
    left,
    right,
    T: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    N: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    SINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Out and lse of one row (batch, head, t) from its splits, in split order; the sink joins here, once."""
    row = tl.program_id(0)
    batch = row // (heads_q * T)
    head = row // T % heads_q
    t = row % T
    row = row.to(tl.int64)

    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), capacity)
    first, last = _key_range(length, left, right, T, HAS_LEFT)
    _, _, used = _splits(first, last, SPLIT, MAX_SPLITS, N)
    if PDL:
        gdc_wait()

    splits = tl.arange(0, MAX_SPLITS)
    lses = tl.load(part_lse_ptr + row * max_splits + splits, mask=splits < used, other=float("-inf"))
    sink = float("-inf")
    if SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2E
    base = tl.maximum(tl.max(lses, 0), sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    total = tl.sum(tl.exp2(lses - base), 0) + tl.exp2(sink - base)

    chunk = tl.arange(0, CHUNK)
    dv = tl.arange(0, DV)
    dv_live = dv < HEAD_DIM_V
    acc = tl.zeros((DV,), tl.float32)
    for s in range(0, used, CHUNK):
        live = s + chunk < used
        slot = row * max_splits + s + chunk
        lse = tl.load(part_lse_ptr + slot, mask=live, other=float("-inf"))
        part = tl.load(
            part_out_ptr + slot[:, None] * HEAD_DIM_V + dv[None, :], mask=live[:, None] & dv_live[None, :], other=0.0
        )
        acc += tl.sum(part * tl.exp2(lse - base)[:, None], 0)
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    out_row = (batch.to(tl.int64) * T + t) * heads_q + head
    tl.store(out_ptr + out_row * HEAD_DIM_V + dv, (acc / divisor).to(out_ptr.dtype.element_ty), mask=dv_live)
    tl.store(lse_ptr + row, tl.where(empty, float("-inf"), (base + tl.log2(divisor)) * LN2))


@triton.jit
def append_kernel(
    k_cache_ptr,
    v_cache_ptr,
    lengths_ptr,
    table_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    stride_kcb,
    stride_kcn,
    stride_kch,
    stride_vcb,
    stride_vcn,
    stride_vch,
    stride_table,
    stride_slots,
    stride_slots_t,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vd,
    tokens,
    heads_kv,
    pages,
    page_size,
    capacity,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGED: tl.constexpr,
    SLOTS: tl.constexpr,
    ADVANCE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TOKENS tokens of one sequence; with ADVANCE one program has them all, and adds them to the length."""
    batch = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), capacity)
    kept = 0
    first = tl.program_id(1) * TOKENS
    for t in range(first, tl.minimum(first + TOKENS, tokens)):
        if SLOTS:
            slot = tl.load(slots_ptr + batch * stride_slots + t * stride_slots_t).to(tl.int64)
            page = tl.maximum(slot, 0) // page_size
            offset = tl.maximum(slot, 0) % page_size
            live = (slot >= 0) & (page < pages)
            kept += (slot >= 0).to(tl.int32)
        else:
            position = length + t
            room = position < capacity
            kept += room.to(tl.int32)
            if PAGED:
                page = tl.load(table_ptr + batch * stride_table + position // page_size, mask=room, other=-1).to(tl.int64)
                offset = (position % page_size).to(tl.int64)
                live = room & (page >= 0) & (page < pages)
            else:
                page = batch
                offset = position.to(tl.int64)
                live = room
        for start in range(0, heads_kv * HEAD_DIM, BLOCK):
            i = start + tl.arange(0, BLOCK)
            head = (i // HEAD_DIM).to(tl.int64)
            d = i % HEAD_DIM
            mask = (i < heads_kv * HEAD_DIM) & live
            x = tl.load(k_ptr + batch * stride_kb + t.to(tl.int64) * stride_kt + head * stride_kh + d * stride_kd, mask=mask)
            tl.store(k_cache_ptr + page * stride_kcb + offset * stride_kcn + head * stride_kch + d, x, mask=mask)
        for start in range(0, heads_kv * HEAD_DIM_V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            head = (i // HEAD_DIM_V).to(tl.int64)
            d = i % HEAD_DIM_V
            mask = (i < heads_kv * HEAD_DIM_V) & live
            x = tl.load(v_ptr + batch * stride_vb + t.to(tl.int64) * stride_vt + head * stride_vh + d * stride_vd, mask=mask)
            tl.store(v_cache_ptr + page * stride_vcb + offset * stride_vcn + head * stride_vch + d, x, mask=mask)
    if ADVANCE:
        # Every thread has read the old length before one of them replaces it.
        tl.debug_barrier()
        tl.store(lengths_ptr + batch, tl.minimum(length + kept, capacity))
