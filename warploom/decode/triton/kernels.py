"""The kernels: `split_kernel` computes splits of one sequence, `merge_kernel` folds a row's; `append_kernel` writes tokens.

Tile legend: M rows (queries of a group of heads, t · group + g), N keys, D head_dim, DV head_dim of v. Of a latent cache,
whose values are the first columns of its keys, D is DV, and REST holds what keys have behind them: a tile is loaded once for
both products. Scores are in units of log2, so that exp2 needs no multiply. Splits depend on the sequence's own length alone,
and every row's arithmetic has one order: a sequence's bits are the same in any batch, cache size and page layout.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.decode.triton.bias import bias_of_rows, biased, places_of_keys
from warploom.decode.triton.pairs import columns, parted, rows_of_queries, weigh_scaled
from warploom.decode.triton.parts import (
    CONTIGUOUS,
    ONE_PAGE,
    SCALARS,
    SCATTERED,
    TILE_IN_PAGE,
    ended,
    far,
    fold,
    fold_all,
    halves,
    key_range,
    nothing,
    place_of_token,
    product,
    settle,
    shown,
    splits,
    started,
    summed,
    takes_groups,
    tile_in_pages,
    weigh,
    whole_splits,
)
from warploom.decode.triton.prefix import most_shared, own_units, shared_splits, unit_splits
from warploom.kernels.triton.numerics import LN2, LOG2E, capped, clamp
from warploom.kernels.triton.softmax import add_sink

# A total of 0 and a top of -inf, as `_sums` reads them.
_NOTHING = tl.constexpr(-(0x0080 << 48))


@triton.jit(do_not_specialize=SCALARS)
def split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    table_ptr,
    sink_ptr,
    tree_ptr,
    k_scale_ptr,
    v_scale_ptr,
    bias_ptr,
    prefix_ptr,
    out_ptr,
    lse_ptr,
    whole_ptr,
    whole_lse_ptr,
    stride_qb: tl.int64,
    stride_qt: tl.int64,
    stride_qh: tl.int64,
    stride_kb: tl.int64,
    stride_kn: tl.int64,
    stride_kh: tl.int64,
    stride_vb: tl.int64,
    stride_vn: tl.int64,
    stride_vh: tl.int64,
    stride_table: tl.int64,
    stride_tree,
    programs,
    grouped,
    crowded,
    max_units,
    capacity,
    pages,
    page_shift,
    page_mask,
    left,
    right,
    scale,
    softcap,
    stride_ksb: tl.int64,
    stride_ksn: tl.int64,
    stride_ksh: tl.int64,
    stride_vsb: tl.int64,
    stride_vsn: tl.int64,
    stride_vsh: tl.int64,
    stride_bias_b,
    stride_bias_h,
    stride_bias_k,
    bias_entries,
    bias_origin,
    sequences,
    chunk,
    prefix_keys,
    T: tl.constexpr,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REST: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    GROUP_SPLITS: tl.constexpr,
    HALVED: tl.constexpr,
    PAGES: tl.constexpr,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    LEAST: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINK: tl.constexpr,
    TREE: tl.constexpr,
    TREE_DEPTHS: tl.constexpr,
    FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
    LATENT: tl.constexpr,
    FINAL: tl.constexpr,
    SINGLE: tl.constexpr,
    BY_KEYS: tl.constexpr,
    ALONE: tl.constexpr,
    ONCE: tl.constexpr,
    UNIT: tl.constexpr,
    SHARED: tl.constexpr,
    PLACES: tl.constexpr,
    SAME: tl.constexpr,
    DISTANCES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Units of one sequence, every ``programs``-th, for the rows of one kv head.

    Writes parts, the running softmax of each unit: fp32 out (batch, heads_q, T, max_units, head_dim_v), and sums and maxima
    (batch, heads_q, T, max_units, 2); with FINAL (the cache holds a single unit) the result itself. Heads vary fastest over
    programs: the heads of a token are neighbours in memory, and their programs run at once.

    With BY_KEYS the keys of all sequences say whether programs take groups. With SINGLE a sequence is one group too, and where
    programs take groups each writes its result.

    With ONCE a program has one unit at the most, and one that has none goes the same way and stores nothing: ahead of the first
    key there is no branch, behind which ptxas would put some 230 instructions that need not wait for the length.

    With ALONE every split has a loop of its own. Products of 64 rows are by wgmma, and where a branch in their loop reads or
    resets an accumulator, ptxas waits for each product before the next (its note C7515).

    With SHARED, `share_kernel` computes the splits that neighbours share. Parts have a place for every split and go by their
    first; with FINAL a sequence that shares nothing has its result, at ``whole_ptr``.
    """
    ROW_BLOCKS: tl.constexpr = (T * GROUP + M - 1) // M
    pid = tl.program_id(0)
    head = pid % HEADS_KV
    pid = pid // HEADS_KV
    row_block = pid % ROW_BLOCKS
    pid = pid // ROW_BLOCKS
    batch = pid.to(tl.int64)
    program = tl.program_id(1)

    rows = row_block * M + tl.arange(0, M)
    # With one query a row is a head: no division, whose results would stay in registers all through. FP8 over pages is slower
    # for it, 88 us for 85 of 16 × 8,192 on an H200.
    if T > 1 or (PAIRS and PAGES != CONTIGUOUS):
        t = rows // GROUP
        head_q = head * GROUP + rows % GROUP
    else:
        t = tl.zeros((M,), tl.int32)
        head_q = head * GROUP + rows
    row_live = rows < T * GROUP
    row = (batch * HEADS_KV * GROUP + head_q) * T + t
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    n = tl.arange(0, N)
    # The keys of a tile of which the table is asked: each stands for STEP keys, which lie in one page. PAGE: the page's size.
    asked = tl.arange(0, N // STEP) * STEP
    if PAGE > 0:
        page_mask = PAGE - 1
        page_shift = tl.constexpr(PAGE.bit_length() - 1)
    d_live = d < (HEAD_DIM_V if LATENT else HEAD_DIM)
    dv_live = dv < HEAD_DIM_V
    # Of PAIRS, see `warploom.decode.triton.pairs`, tiles hold even columns, or odd ones; accumulators come in two.
    SLICES: tl.constexpr = 2 if PAIRS else 1
    WHOLE: tl.constexpr = PAIRS and UNIT > 1
    UNIT_KV: tl.constexpr = UNIT // 2 if WHOLE else UNIT
    # Of a tile's rows the first eights that hold any: the compiler knows which registers hold the others.
    taken = tl.arange(0, M) < (T * GROUP + 7) // 8 * 8 if PAIRS and ROW_BLOCKS == 1 else None
    if PAIRS:
        k_ptr = k_ptr.to(tl.pointer_type(tl.int16 if WHOLE else tl.int8), bitcast=True)
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16 if WHOLE else tl.int8), bitcast=True)
    if REST > 0:
        rest = HEAD_DIM_V + tl.arange(0, REST)
        rest_live = rest < HEAD_DIM
    if PDL:
        # `share_kernel` let this one start only after its own wait: what came before both is settled.
        if not SHARED:
            gdc_wait()
        gdc_launch_dependents()

    q_ptr += batch * stride_qb * UNIT
    q_offset = (t.to(tl.int64) * stride_qt + head_q.to(tl.int64) * stride_qh) * UNIT
    if PAIRS:
        q_even, q_odd, q_factor = rows_of_queries(q_ptr, q_offset, row_live, HEAD_DIM, D)
    else:
        q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=row_live[:, None] & d_live[None, :], other=0.0)
    if REST > 0:
        q_rest = tl.load(q_ptr + q_offset[:, None] + rest[None, :], mask=row_live[:, None] & rest_live[None, :], other=0.0)

    length = clamp(tl.load(lengths_ptr + batch), 0, capacity)
    first, last = key_range(length, left, right, T, HAS_LEFT)
    if BY_KEYS:
        grouped = takes_groups(grouped, lengths_ptr, tl.num_programs(0) // (HEADS_KV * ROW_BLOCKS), capacity)
    start, size, units, each = splits(first, last, grouped, SPLIT, MAX_SPLITS, GROUP_SPLITS, N, LEAST)
    begin = start + program * each * size
    gathered = each > 1
    if HALVED > 0:
        # The two places where a program may begin are known without the length, from which pages are not to wait.
        other = start + program * (SPLIT // 2)
        size, units, each, lone, pair = halves(start, last, size, units, each, grouped, crowded, SPLIT, HALVED)
    if SHARED:
        shared = shared_splits(
            pid, sequences, chunk, prefix_ptr, prefix_keys, lengths_ptr, capacity, right, T, TREE, SPLIT,
            MAX_SPLITS, HALVED, N, LEAST,
        )  # fmt: skip
        used = whole_splits(tl.maximum(last, 0) + size - 1, size, SPLIT, HALVED, LEAST)
        several = each
        units, single, groups = own_units(shared, used, gathered, several, GROUP_SPLITS)
    position = length - T + t
    if TREE:
        bits = tl.load(tree_ptr + batch * stride_tree + t, mask=row_live, other=0)
    if TREE_DEPTHS:
        # Depths are from 0 to t: no key outside `key_range` is seen.
        position = length - T + tl.load(tree_ptr + batch * stride_tree + T + t, mask=row_live, other=0).to(tl.int32)
    if BIAS != "":
        bias_rows = bias_of_rows(bias_ptr, stride_bias_b, stride_bias_h, batch, head_q, row_live, BIAS)

    k_ptr += head.to(tl.int64) * stride_kh * UNIT_KV
    v_ptr += head.to(tl.int64) * stride_vh * UNIT_KV
    # Scales of e4m3 lie as their keys do; of a whole head or tensor they have strides of 0.
    if FP8:
        k_scale_ptr += head.to(tl.int64) * stride_ksh
        v_scale_ptr += head.to(tl.int64) * stride_vsh
        if PAGES == CONTIGUOUS:
            k_scale_ptr += batch * stride_ksb
            v_scale_ptr += batch * stride_vsb
    if PAGES != CONTIGUOUS:
        table_ptr += batch * stride_table
    if PAGES == CONTIGUOUS:
        k_ptr += batch * stride_kb * UNIT_KV
        v_ptr += batch * stride_vb * UNIT_KV
    elif PAGES == ONE_PAGE:
        page = tl.load(table_ptr)
        inside = clamp(page, 0, pages - 1).to(tl.int64)
        k_ptr += inside * stride_kb * UNIT_KV
        v_ptr += inside * stride_vb * UNIT_KV
        if FP8:
            k_scale_ptr += inside * stride_ksb
            v_scale_ptr += inside * stride_vsb

    # Pages are read one tile ahead: then K and V never wait for them. The first ones need not wait for the length either,
    # which LEAST keeps out of `begin`: what lies past it is a slot of the table all the same.
    if PAGES == TILE_IN_PAGE:
        page = tl.load(table_ptr + (tl.maximum(tl.minimum(begin, capacity - 1), 0) >> page_shift))
        if HALVED > 0:
            nearer = tl.load(table_ptr + (tl.maximum(tl.minimum(other, capacity - 1), 0) >> page_shift))
            page = tl.where(lone, nearer, page)
    elif PAGES == SCATTERED:
        page = tl.load(table_ptr + (tl.maximum(tl.minimum(begin + asked, capacity - 1), 0) >> page_shift))
        if HALVED > 0:
            nearer = tl.load(table_ptr + (tl.maximum(tl.minimum(other + asked, capacity - 1), 0) >> page_shift))
            page = tl.where(lone, nearer, page)
    if SHARED:  # noqa: SIM102 (a constexpr)
        if shared > 0:  # the first unit begins elsewhere
            at, _ = unit_splits(program, shared, single, groups, several)
            begin = at * size
            if PAGES == TILE_IN_PAGE:
                page = tl.load(table_ptr + (tl.minimum(begin, capacity - 1) >> page_shift))
            elif PAGES == SCATTERED:
                page = tl.load(table_ptr + (tl.minimum(begin + asked, capacity - 1) >> page_shift))
    if not LATENT:
        unit_acc, unit_total, unit_top = nothing(M, DV, SLICES)
    # With FINAL there is one unit, and an empty sequence has its result to write too.
    stop = tl.maximum(units, 1) if FINAL else units
    if SINGLE:
        stop = tl.maximum(units, gathered.to(tl.int32))
    if FINAL and SHARED:
        stop = tl.where(shared > 0, units, stop)
    # Known a unit at a time, whether it has two halves costs ptxas fewer registers where programs read tables too.
    BY_UNIT: tl.constexpr = SHARED and PAGES != CONTIGUOUS
    if HALVED > 0:
        # The second half of a pair is not folded: no tile is its last one.
        second = tl.where(pair, N, 0)
    # A run of keys is a unit's, or with ALONE a split's. Else nothing is divided by a value of run time ahead of the first key.
    runs = each if ALONE else 1
    if ALONE:
        first_run, past_run, next_run = 0, tl.cdiv(tl.maximum(stop - program, 0), programs) * runs, 1
    elif ONCE:
        first_run, past_run, next_run = 0, 1, 1
    else:
        first_run, past_run, next_run = program, stop, programs
    row_kept = row_live & (program < stop) if ONCE else row_live
    for run in range(first_run, past_run, next_run):
        if ALONE:
            unit = program + run // runs * programs
        else:
            unit = program if ONCE else run
        if SHARED:
            at, each = unit_splits(unit, shared, single, groups, several)
            begin = at * size
        else:
            begin = start + unit * each * size
            at = unit
            if HALVED > 0:
                at = tl.where(pair, 2 * unit, unit)
        end = tl.minimum(begin + each * size, last)
        if ALONE:
            begin += run % runs * size
            end = tl.minimum(begin + size, end)
        edge = tl.minimum(begin + size, end)
        if HALVED > 0 and BY_UNIT:
            second = tl.where(pair & (edge < end), N, 0)
        acc, total, top = started(M, N, DV, SLICES)
        for tile in range(begin, end, N):
            cols = tile + n
            if DISTANCES:
                # In distances from the tile's start, which stay 32 bits wide: that of `cols` the compiler widens.
                live = n < end - tile
                if HAS_LEFT:
                    live = live & (n >= first - tile)
            else:
                live = (cols >= first) & (cols < end)
            if PAGES == TILE_IN_PAGE:
                slot = (tile & page_mask) + n
            elif PAGES == SCATTERED:
                # A tile begins with a page. Of 64 rows the other way is faster: 18.1 us for 18.4 (2 × 16,384, 64/1, an H200).
                slot = n & page_mask if DISTANCES else cols & page_mask
            else:
                slot = cols
            # Down a tile's rows, so that products are where the tile's pointers are.
            k_far = far(slot[:, None], stride_kn, PLACES)
            v_far = far(slot[:, None], stride_vn, PLACES)
            if FP8:
                ks_offset = far(slot, stride_ksn, PLACES)
                vs_offset = far(slot, stride_vsn, PLACES)
            if PAGES == TILE_IN_PAGE or PAGES == SCATTERED:
                inside = clamp(page, 0, pages - 1)
                k_far = tile_in_pages(k_far, inside, stride_kb, PAGES, STEP, PLACES)
                v_far = tile_in_pages(v_far, inside, stride_vb, PAGES, STEP, PLACES)
                if FP8:
                    ks_offset += far(inside, stride_ksb, PLACES)
                    vs_offset += far(inside, stride_vsb, PLACES)
                if PAGES == TILE_IN_PAGE:
                    page = tl.load(table_ptr + ((tile + N) >> page_shift), mask=tile + N < end, other=0)
                else:
                    if DISTANCES:
                        entry = ((tile + N) >> page_shift) + (asked >> page_shift)
                    else:
                        entry = (tile + N + asked) >> page_shift
                    page = tl.load(table_ptr + entry, mask=asked < end - tile - N, other=0)
            k_offset = k_far.to(tl.int64) * UNIT_KV
            v_offset = k_offset if SAME else v_far.to(tl.int64) * UNIT_KV
            if PAIRS:
                k_even, k_odd = columns(k_ptr, k_offset, live, HEAD_DIM, D, WHOLE)
                s = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q_even, tl.trans(k_even)))
            else:
                k = tl.load(
                    k_ptr + k_offset + d[None, :],
                    mask=live[:, None] & d_live[None, :],
                    other=0.0,
                    eviction_policy="evict_first",
                )
                if FP8:
                    # e4m3 is exact in every type that q may have; its scales join the fp32 products.
                    k = k.to(q.dtype)
                s = product(q, tl.trans(k), None, LATENT)
            if REST > 0:
                k_rest = tl.load(
                    k_ptr + k_offset + rest[None, :],
                    mask=live[:, None] & rest_live[None, :],
                    other=0.0,
                    eviction_policy="evict_first",
                )
                s = product(q_rest, tl.trans(k_rest), s, LATENT)
            if FP8:
                s = s * tl.load(k_scale_ptr + ks_offset, mask=live, other=0.0)[None, :]
            if SOFTCAP:
                s, _ = capped(s * q_factor[:, None] if PAIRS else s, scale, softcap)
            else:
                # A power of two may join either factor: short of fp32's ends no bit differs.
                s = s * (q_factor * (scale * LOG2E))[:, None] if PAIRS else s * (scale * LOG2E)
            if PAIRS:
                seen = n[None, :] < tl.where(row_live, end - tile, 0)[:, None]
                if HAS_LEFT:
                    seen = seen & live[None, :]
            else:
                seen = live[None, :] & row_live[:, None]
            if TREE_DEPTHS:
                # Of the tree's own keys the bits know which ones the window shows.
                band = cols[None, :] <= position[:, None] + right
                if HAS_LEFT:
                    band = band & (cols[None, :] >= position[:, None] - left)
                seen = seen & (band | (cols >= length - T)[None, :])
            else:
                if T > 1 or HAS_LEFT:
                    seen = seen & (cols[None, :] <= position[:, None] + right)
                if HAS_LEFT:
                    seen = seen & (cols[None, :] >= position[:, None] - left)
            if TREE:
                own = length - T
                if tile + N > own:
                    seen = seen & shown(bits, cols, own)
            if BIAS != "":
                depths = tree_ptr + (batch * stride_tree + T) if TREE_DEPTHS else None
                place = places_of_keys(cols, depths, length, T, TREE_DEPTHS)
                s, seen = biased(s, seen, bias_rows, position, place, stride_bias_k, bias_entries, bias_origin, BIAS)
            if TREE_DEPTHS:
                # Keys that a window hides from every path may hold anything: a weight of 0 times NaN is NaN.
                live = tl.max(seen.to(tl.int32), 0) > 0
            s = tl.where(seen, s, float("-inf"))
            if PAIRS:
                v_even, v_odd = columns(v_ptr, v_offset, live, HEAD_DIM_V, DV, WHOLE)
                f, e, inverse = parted(tl.load(v_scale_ptr + vs_offset, mask=live, other=0.0))
                if BIAS == "distance" or BIAS == "key":
                    # As below.
                    shows = tl.max(seen.to(tl.int32), 0) > 0
                    f = tl.where(shows, f, 0.0)
                    v_even = tl.where(shows[:, None], v_even, 0.0)
                    v_odd = tl.where(shows[:, None], v_odd, 0.0)
                p, rescale, total, top = weigh_scaled(s, e, inverse, f, top, total, taken)
            else:
                p, rescale, total, top = weigh(s, top, total)
                if LATENT:
                    v = k
                    if TREE_DEPTHS:
                        v = tl.where(live[:, None], v, 0.0)
                else:
                    v = tl.load(
                        v_ptr + v_offset + dv[None, :],
                        mask=live[:, None] & dv_live[None, :],
                        other=0.0,
                        eviction_policy="evict_first",
                    )
                if FP8:
                    v = (v.to(tl.float32) * tl.load(v_scale_ptr + vs_offset, mask=live, other=0.0)[:, None]).to(q.dtype)
                if BIAS == "distance" or BIAS == "key":
                    # Keys that the bias hides from all rows may hold anything too. Behind the load, which need not wait for
                    # scores.
                    shows = tl.max(seen.to(tl.int32), 0) > 0
                    v = tl.where(shows[:, None], v, 0.0)
            if PAIRS:
                acc = (tl.dot(p, v_even, acc[0] * rescale[:, None]), tl.dot(p, v_odd, acc[1] * rescale[:, None]))
            else:
                acc = (product(p.to(v.dtype), v, acc[0] * rescale[:, None], LATENT),)
            if not LATENT and not ALONE and tile + N >= edge:
                # The end of a split: the stream of keys goes on, the softmax starts anew.
                acc, total, top = ended(acc, total, top, PAIRS)
                unit_acc, unit_total, unit_top = fold_all(unit_acc, unit_total, unit_top, acc, total, top)
                edge = tl.minimum(edge + size, end)
                if HALVED > 0:
                    edge += second
                acc, total, top = started(M, N, DV, SLICES)

        if SHARED:
            ahead, _ = unit_splits(unit + programs, shared, single, groups, several)
            following = ahead * size
        else:
            following = begin + programs * each * size
            if ALONE:
                following = begin + size
                if run % runs == runs - 1:
                    following += (programs - 1) * each * size
        if PAGES == TILE_IN_PAGE:
            page = tl.load(table_ptr + (following >> page_shift), mask=following < last, other=0)
        elif PAGES == SCATTERED:
            page = tl.load(table_ptr + ((following + asked) >> page_shift), mask=following + asked < last, other=0)
        # A latent cache's units are single splits: registers hold no second accumulator of its width.
        if ALONE:
            unit_acc, unit_total, unit_top = fold_all(unit_acc, unit_total, unit_top, acc, total, top)
        if HALVED > 0 and not FINAL:  # noqa: SIM102 (constexprs)
            if (second > 0) if BY_UNIT else pair & (end > begin + size):
                part = tl.interleave(unit_acc[0], unit_acc[1]) if PAIRS else unit_acc[0]
                place = row * max_units + at
                _store_part(out_ptr, lse_ptr, place, part, unit_total, unit_top, row_kept, dv, dv_live, HEAD_DIM_V)
                at += 1
                unit_acc, unit_total, unit_top = ended(acc, total, top, PAIRS)
        if not ALONE or run % runs == runs - 1:
            if LATENT:
                total = summed(total)
            else:
                acc, total, top = unit_acc, unit_total, unit_top
            part = tl.interleave(acc[0], acc[1]) if PAIRS else acc[0]
            place_of_row = (batch * T + t) * (HEADS_KV * GROUP) + head_q
            sink = tl.load(sink_ptr + head_q, mask=row_live, other=0.0) if SINK and (FINAL or SINGLE) else None
            place = row * max_units + at
            if SINGLE or (FINAL and SHARED):
                if gathered if SINGLE else shared == 0:
                    _store_result(
                        whole_ptr, whole_lse_ptr, place_of_row, row, part, total, top, sink, row_kept, dv, dv_live, HEAD_DIM_V
                    )
                else:
                    _store_part(out_ptr, lse_ptr, place, part, total, top, row_kept, dv, dv_live, HEAD_DIM_V)
            elif FINAL:
                _store_result(out_ptr, lse_ptr, place_of_row, row, part, total, top, sink, row_kept, dv, dv_live, HEAD_DIM_V)
            else:
                _store_part(out_ptr, lse_ptr, place, part, total, top, row_kept, dv, dv_live, HEAD_DIM_V)
            if not LATENT:
                unit_acc, unit_total, unit_top = nothing(M, DV, SLICES)
    if PDL and SHARED:  # noqa: SIM102 (a constexpr)
        # What waits for this kernel relies on that one too. One program will do: the others make room.
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            gdc_wait()


@triton.jit
def _store_result(
    out_ptr, lse_ptr, place, row, part, total, top, sink, row_live, dv, dv_live, HEAD_DIM_V: tl.constexpr
):  # fmt: skip
    """Out and lse of rows of which one unit is all that there is."""
    if sink is not None:
        part, total, top = add_sink(part, total, top, sink.to(tl.float32) * LOG2E)
    part, lse = settle(part, total, top)
    tl.store(lse_ptr + row, lse * LN2, mask=row_live)
    _store_rows(out_ptr, place, part, row_live, dv, dv_live, HEAD_DIM_V)


@triton.jit
def _store_part(out_ptr, lse_ptr, place, part, total, top, row_live, dv, dv_live, HEAD_DIM_V: tl.constexpr):
    """A unit's running softmax."""
    tl.store(lse_ptr + 2 * place, total, mask=row_live, eviction_policy="evict_last")
    tl.store(lse_ptr + 2 * place + 1, top, mask=row_live, eviction_policy="evict_last")
    _store_rows(out_ptr, place, part, row_live, dv, dv_live, HEAD_DIM_V)


@triton.jit
def _store_rows(out_ptr, place, x, row_live, dv, dv_live, HEAD_DIM_V: tl.constexpr):
    """Rows of parts are read again at once: they are to outlive the stream of keys in L2."""
    tl.store(
        out_ptr + place[:, None] * HEAD_DIM_V + dv[None, :],
        x.to(out_ptr.dtype.element_ty),
        mask=row_live[:, None] & dv_live[None, :],
        eviction_policy="evict_last",
    )


@triton.jit(
    do_not_specialize=[
        "lengths_ptr", "sink_ptr", "prefix_ptr", "heads_q", "grouped", "max_units", "capacity", "left", "right", "sequences",
        "chunk", "prefix_keys",
    ]
)  # fmt: skip
def merge_kernel(
    part_out_ptr,
    part_lse_ptr,
    lengths_ptr,
    sink_ptr,
    prefix_ptr,
    out_ptr,
    lse_ptr,
    heads_q,
    grouped,
    max_units,
    capacity,
    left,
    right,
    sequences,
    chunk,
    prefix_keys,
    T: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    N: tl.constexpr,
    DV: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    GROUP_SPLITS: tl.constexpr,
    HALVED: tl.constexpr,
    LEAST: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    AHEAD: tl.constexpr,
    SINK: tl.constexpr,
    SHARED: tl.constexpr,
    TREE: tl.constexpr,
    FINAL: tl.constexpr,
    SINGLE: tl.constexpr,
    BY_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Out and lse of DV columns of one row (batch, head, t) from its parts, in order; the sink joins here, once.

    With SHARED there is a place for each split, and a group that nobody shared lies in that of its first. With FINAL, as the
    split kernel had it, rows that share nothing are done already, and a program takes several others. With SINGLE all rows may
    be done.
    """
    if FINAL or SINGLE:
        rows = 0
        if SINGLE:
            grouped = takes_groups(grouped, lengths_ptr, tl.num_programs(0) // (heads_q * T), capacity)
            rows = tl.where(grouped == 0, tl.num_programs(0), 0)
        elif most_shared(sequences, prefix_ptr, prefix_keys, capacity, SPLIT, MAX_SPLITS, HALVED) > 0:
            rows = sequences * heads_q * T
        for past in range(0, rows - tl.program_id(0), tl.num_programs(0)):
            _merge_row(
                tl.program_id(0) + past, part_out_ptr, part_lse_ptr, lengths_ptr, sink_ptr, prefix_ptr, out_ptr, lse_ptr,
                heads_q, grouped, max_units, capacity, left, right, sequences, chunk, prefix_keys, T, HEAD_DIM_V, N, DV, SPLIT,
                MAX_SPLITS, GROUP_SPLITS, HALVED, LEAST, HAS_LEFT, AHEAD, SINK, SHARED, TREE, FINAL, False, PDL,
            )  # fmt: skip
        if PDL:  # noqa: SIM102 (a constexpr)
            # As above.
            if tl.program_id(0) == 0:
                gdc_wait()
    else:
        _merge_row(
            tl.program_id(0), part_out_ptr, part_lse_ptr, lengths_ptr, sink_ptr, prefix_ptr, out_ptr, lse_ptr, heads_q, grouped,
            max_units, capacity, left, right, sequences, chunk, prefix_keys, T, HEAD_DIM_V, N, DV, SPLIT, MAX_SPLITS,
            GROUP_SPLITS, HALVED, LEAST, HAS_LEFT, AHEAD, SINK, SHARED, TREE, FINAL, BY_KEYS, PDL,
        )  # fmt: skip


@triton.jit
def _sums(pair):
    """A part's total and top, which lie side by side."""
    return pair.to(tl.int32).to(tl.float32, bitcast=True), (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _chain(begun, parts, totals, tops, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT parts from the FIRST on, folded one after the other into what has begun."""
    acc, total, top = begun
    for i in tl.static_range(FIRST, FIRST + COUNT):
        acc, total, top = fold(acc, total, top, parts[i], totals[i], tops[i])
    return acc, total, top


@triton.jit
def _merge_row(
    row, part_out_ptr, part_lse_ptr, lengths_ptr, sink_ptr, prefix_ptr, out_ptr, lse_ptr, heads_q, grouped, max_units, capacity,
    left, right, sequences, chunk, prefix_keys,
    T: tl.constexpr, HEAD_DIM_V: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    GROUP_SPLITS: tl.constexpr, HALVED: tl.constexpr, LEAST: tl.constexpr, HAS_LEFT: tl.constexpr, AHEAD: tl.constexpr,
    SINK: tl.constexpr, SHARED: tl.constexpr, TREE: tl.constexpr, FINAL: tl.constexpr, BY_KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row of `merge_kernel`."""
    batch = row // (heads_q * T)
    head = row // T % heads_q
    t = row % T
    row = row.to(tl.int64)
    dv = tl.program_id(1) * DV + tl.arange(0, DV)
    dv_live = dv < HEAD_DIM_V

    # Read before the wait: the split kernel let this one start only after its own wait, so the lengths are settled.
    length = clamp(tl.load(lengths_ptr + batch), 0, capacity)
    first, last = key_range(length, left, right, T, HAS_LEFT)
    if BY_KEYS:
        grouped = takes_groups(grouped, lengths_ptr, tl.num_programs(0) // (heads_q * T), capacity)
    start, size, units, each = splits(first, last, grouped, SPLIT, MAX_SPLITS, GROUP_SPLITS, N, LEAST)
    # A group is one unit or several.
    step = tl.where(each == 1, GROUP_SPLITS, 1)
    if HALVED > 0:
        half = last - start <= HALVED
        # Of halves, which have places of their own, two times as many are a group.
        joined = half & (each == 1)
        units = tl.where(joined, tl.cdiv(tl.maximum(last - start, 0), SPLIT // 2), units)
    if SHARED:
        shared = shared_splits(
            batch, sequences, chunk, prefix_ptr, prefix_keys, lengths_ptr, capacity, right, T, TREE, SPLIT, MAX_SPLITS, HALVED,
            N, LEAST,
        )  # fmt: skip
        many = GROUP_SPLITS
        if HALVED > 0:
            joined = half
            size = tl.where(half, SPLIT // 2, size)
            many = tl.where(half, 2 * GROUP_SPLITS, GROUP_SPLITS)
        units = whole_splits(tl.maximum(last, 0) + size - 1, size, SPLIT, HALVED, LEAST)
        if FINAL:
            units = tl.where(shared > 0, units, 0)
        alone = tl.where(each == 1, units, tl.cdiv(shared, many) * many)
        step = GROUP_SPLITS
    part_sums_ptr = part_lse_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + row * max_units
    part_out_ptr += row * max_units * HEAD_DIM_V
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    none = tl.full((1,), float("-inf"), tl.float32)
    nothing_yet = tl.zeros((DV,), tl.float32), tl.zeros((1,), tl.float32), none
    acc, total, top = nothing_yet
    one = tl.zeros((1,), tl.int32)
    for group in range(0, units, step * AHEAD):
        # Every load goes out before the first result is used: the merge lasts as long as what it waits for. Addresses are
        # constants beside this group's where they can be, and a part's total and top one load: there are dozens of them.
        parts = ()
        totals = ()
        tops = ()
        past = units - group
        among = tl.where(step == GROUP_SPLITS, past, 0)
        out_ptr_here = part_out_ptr + group * HEAD_DIM_V + dv
        sums_ptr = part_sums_ptr + group + one
        for i in tl.static_range(AHEAD * GROUP_SPLITS):
            if i % GROUP_SPLITS == 0:
                live = i // GROUP_SPLITS * step < past
                place = i // GROUP_SPLITS * step
            else:
                live = i < among
                place = i
            if SHARED:
                if i % GROUP_SPLITS > 0:
                    live = live & (group + i < alone)
                elif HALVED > 0 and i // GROUP_SPLITS % 2 == 1:
                    live = live & ((group + i < alone) | (half == 0))
            total_of, top_of = _sums(tl.load(sums_ptr + place, mask=live, other=_NOTHING))
            part = tl.load(out_ptr_here + place * HEAD_DIM_V, mask=dv_live & live, other=0.0)
            parts += (part,)  # type: ignore[assignment]
            totals += (total_of,)  # type: ignore[assignment]
            tops += (top_of,)  # type: ignore[assignment]
        for g in tl.static_range(0, AHEAD, 2 if HALVED > 0 else 1):
            part, part_total, part_top = _chain(nothing_yet, parts, totals, tops, g * GROUP_SPLITS, GROUP_SPLITS)
            before, before_total, before_top = acc, total, top
            acc, total, top = fold(acc, total, top, part, part_total, part_top)
            if HALVED > 0:  # noqa: SIM102 (a constexpr)
                if group + (g + 1) * step < units:
                    # Of halves the group goes on. Few parts are spared these steps.
                    begun = tl.where(joined, part, 0.0), tl.where(joined, part_total, 0.0), tl.where(joined, part_top, none)
                    acc, total = tl.where(joined, before, acc), tl.where(joined, before_total, total)
                    top = tl.where(joined, before_top, top)
                    part, part_total, part_top = _chain(begun, parts, totals, tops, (g + 1) * GROUP_SPLITS, GROUP_SPLITS)
                    acc, total, top = fold(acc, total, top, part, part_total, part_top)
    if SINK:
        sink = tl.load(sink_ptr + head + one).to(tl.float32) * LOG2E
        acc, total, top = add_sink(acc, total, top, sink)
    out, lse = settle(acc, total, top)
    out_row = (batch.to(tl.int64) * T + t) * heads_q + head
    if FINAL:
        dv_live = dv_live & (shared > 0)
    tl.store(out_ptr + out_row * HEAD_DIM_V + dv, out.to(out_ptr.dtype.element_ty), mask=dv_live)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row + one, lse * LN2, mask=(shared + one > 0) if FINAL else None)


@triton.jit(
    do_not_specialize=[
        "k_cache_ptr", "v_cache_ptr", "lengths_ptr", "table_ptr", "slots_ptr", "k_ptr", "v_ptr", "stride_kcb",
        "stride_kcn", "stride_kch", "stride_vcb", "stride_vcn", "stride_vch", "stride_table", "stride_slots",
        "stride_slots_t", "stride_kb", "stride_kt", "stride_kh", "stride_kd", "stride_vb", "stride_vt",
        "stride_vh", "stride_vd", "tokens", "heads_kv", "pages", "page_size", "capacity",
    ]
)  # fmt: skip
def append_kernel(
    k_cache_ptr,
    v_cache_ptr,
    lengths_ptr,
    table_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    stride_kcb: tl.int64,
    stride_kcn: tl.int64,
    stride_kch: tl.int64,
    stride_vcb: tl.int64,
    stride_vcn: tl.int64,
    stride_vch: tl.int64,
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
    heads_kv,
    pages,
    page_size,
    capacity,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    ADVANCE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """TOKENS tokens of one sequence; with ADVANCE one program has them all, and adds them to the length."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    batch = tl.program_id(0).to(tl.int64)
    length = clamp(tl.load(lengths_ptr + batch), 0, capacity)
    kept = 0
    first = tl.program_id(1).to(tl.int64) * TOKENS
    for t in range(first, tl.minimum(first + TOKENS, tokens)):
        page, offset, live, counts = place_of_token(
            t, batch, length, table_ptr, slots_ptr, stride_table, stride_slots, stride_slots_t, pages, page_size, capacity
        )
        kept += counts
        for start in range(0, heads_kv * HEAD_DIM, BLOCK):
            i = start + tl.arange(0, BLOCK)
            head = (i // HEAD_DIM).to(tl.int64)
            d = i % HEAD_DIM
            mask = (i < heads_kv * HEAD_DIM) & live
            x = tl.load(k_ptr + batch * stride_kb + t * stride_kt + head * stride_kh + d * stride_kd, mask=mask)
            tl.store(k_cache_ptr + page * stride_kcb + offset * stride_kcn + head * stride_kch + d, x, mask=mask)
        for start in range(0, heads_kv * HEAD_DIM_V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            head = (i // HEAD_DIM_V).to(tl.int64)
            d = i % HEAD_DIM_V
            mask = (i < heads_kv * HEAD_DIM_V) & live
            x = tl.load(v_ptr + batch * stride_vb + t * stride_vt + head * stride_vh + d * stride_vd, mask=mask)
            tl.store(v_cache_ptr + page * stride_vcb + offset * stride_vcn + head * stride_vch + d, x, mask=mask)
    if ADVANCE:
        # Every thread has read the old length before one of them replaces it.
        tl.debug_barrier()
        tl.store(lengths_ptr + batch, tl.minimum(length + kept, capacity))
