"""Shared prefixes: splits that neighbours of a batch have in common are computed for all of them at once.

Sequence b shares with b - 1 the leading keys that `_with_previous` says: they are the same, every query of both sees them, and
both sequences are cut alike. A chunk is as many neighbours as a program has rows for, BLOCKS tiles of M. A split that several
of a chunk share is read once, as the first of them has it, for the rows of all. Each row gets the part that its own program
would have written: the same tiles by the same instructions in the same order. Splits that are not shared, or not whole, stay
with the programs of their sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.decode.triton.bias import bias_of_rows, biased
from warploom.decode.triton.pairs import columns, parted, rows_of_queries, weigh_scaled
from warploom.decode.triton.parts import (
    CONTIGUOUS,
    ONE_PAGE,
    SCALARS,
    SCATTERED,
    TILE_IN_PAGE,
    ended,
    far,
    no_weights,
    split_size,
    summed,
    tile_in_pages,
    weigh,
    whole_splits,
    zeros,
)
from warploom.kernels.triton.numerics import LOG2E, capped, clamp, dot


@triton.jit
def _with_previous(
    b, paired, prefix_ptr, prefix_keys, lengths_ptr, capacity, right, T: tl.constexpr, TREE: tl.constexpr,
    SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, HALVED: tl.constexpr, N: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Leading keys that sequences b and b - 1 share, 0 where they are not ``paired``; keys of a split of b."""
    own = clamp(tl.load(lengths_ptr + b, mask=paired, other=0), 0, capacity)
    before = clamp(tl.load(lengths_ptr + b - 1, mask=paired, other=0), 0, capacity)
    if prefix_ptr is None:
        keys = prefix_keys
    else:
        keys = tl.load(prefix_ptr + b, mask=paired, other=0)
    # A tree hides of its own keys, the last T, even ones that a window would show all queries.
    margin = tl.minimum(right + 1, 0) if TREE else right + 1
    keys = tl.minimum(keys, tl.minimum(own, before) - T + margin)
    # No window ends to the left.
    size = split_size(tl.minimum(own, own + right), SPLIT, MAX_SPLITS, HALVED, N, LEAST)
    alike = paired & (size == split_size(tl.minimum(before, before + right), SPLIT, MAX_SPLITS, HALVED, N, LEAST))
    return tl.where(alike, tl.maximum(keys, 0), 0), size


@triton.jit
def shared_splits(
    b, sequences, chunk, prefix_ptr, prefix_keys, lengths_ptr, capacity, right, T: tl.constexpr, TREE: tl.constexpr,
    SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, HALVED: tl.constexpr, N: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Leading splits of sequence b that `share_kernel` computes, with one of its neighbours in the chunk or both."""
    place = b % chunk
    last = (place == chunk - 1) | (b + 1 >= sequences)
    above, size = _with_previous(
        b, place > 0, prefix_ptr, prefix_keys, lengths_ptr, capacity, right, T, TREE, SPLIT, MAX_SPLITS, HALVED, N, LEAST
    )
    below, other = _with_previous(
        b + 1, last == 0, prefix_ptr, prefix_keys, lengths_ptr, capacity, right, T, TREE, SPLIT, MAX_SPLITS, HALVED, N, LEAST
    )
    return tl.maximum(
        whole_splits(above, size, SPLIT, HALVED, LEAST), whole_splits(below, other, SPLIT, HALVED, LEAST)
    )  # fmt: skip


@triton.jit
def own_units(shared, used, grouped, each, GROUP_SPLITS: tl.constexpr):
    """What is left to a sequence's own programs: units, how many of them are single splits, the first split of the others.

    Groups that begin among shared splits are left as single splits; those behind are units as ever, of ``each`` splits. Units
    that are no groups begin behind what is shared.
    """
    edge = tl.where(grouped, tl.minimum(_units(shared, each, GROUP_SPLITS) * each, used), shared)
    single = edge - shared
    return single + _units(used - edge, each, GROUP_SPLITS), single, edge


@triton.jit
def _units(n, each, GROUP_SPLITS: tl.constexpr):
    """tl.cdiv(n, each) of a unit's splits: one, a group, and twice as many halves."""
    many = tl.where(each == GROUP_SPLITS, tl.cdiv(n, GROUP_SPLITS), tl.cdiv(n, 2 * GROUP_SPLITS))
    return tl.where(each == 1, n, tl.where(each == 2, tl.cdiv(n, 2), many))


@triton.jit
def unit_splits(unit, shared, single, edge, each):
    """Of a unit of `own_units`: its first split, and how many splits it has at most."""
    alone = unit < single
    return tl.where(alone, shared + unit, edge + (unit - single) * each), tl.where(alone, 1, each)


@triton.jit
def _rows(block, first, head, T: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """Of a tile of stacked rows: the sequence, from the chunk's first on, and the token and head of the queries."""
    row = block * M + tl.arange(0, M)
    member = first + row // (T * GROUP)
    row = row % (T * GROUP)
    return member, row // GROUP, head * GROUP + row % GROUP


@triton.jit
def most_shared(
    sequences, prefix_ptr, prefix_keys, capacity, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, HALVED: tl.constexpr
):  # fmt: skip
    """Splits that two neighbours share, at most."""
    if prefix_ptr is None:
        keys = prefix_keys
    else:
        keys = tl.load(prefix_ptr + sequences)
    keys = tl.minimum(keys, capacity)
    most = tl.minimum(keys // SPLIT, MAX_SPLITS)
    if HALVED > 0:
        most = tl.maximum(most, tl.minimum(keys, HALVED) // (SPLIT // 2))
    return most


@triton.jit(do_not_specialize=SCALARS)
def share_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, table_ptr, sink_ptr, tree_ptr, k_scale_ptr, v_scale_ptr, bias_ptr, prefix_ptr, out_ptr,
    lse_ptr, whole_ptr, whole_lse_ptr, stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64, stride_kb: tl.int64,
    stride_kn: tl.int64, stride_kh: tl.int64, stride_vb: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    stride_table: tl.int64, stride_tree, programs, grouped, crowded, max_units, capacity, pages, page_shift, page_mask, left,
    right, scale, softcap, stride_ksb: tl.int64, stride_ksn: tl.int64, stride_ksh: tl.int64, stride_vsb: tl.int64,
    stride_vsn: tl.int64, stride_vsh: tl.int64, stride_bias_b, stride_bias_h, stride_bias_k, bias_entries, bias_origin,
    sequences, chunk, prefix_keys,
    T: tl.constexpr, HEADS_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    HALVED: tl.constexpr, PAGES: tl.constexpr, LEAST: tl.constexpr, SOFTCAP: tl.constexpr, TREE: tl.constexpr,
    TREE_DEPTHS: tl.constexpr, FP8: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr, UNIT: tl.constexpr,
    BLOCKS: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, PLACES: tl.constexpr, SAME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every split that neighbours share, once: parts of all rows that share it. It takes what `split_kernel` takes.

    The programs of `split_kernel` start once all of these are past their wait, and run beside them: they read nothing that is
    written here, nor write what is read. Where nothing is shared a program ends at once.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    LANES: tl.constexpr = BLOCKS * M // (T * GROUP)
    lane = tl.arange(0, triton.next_power_of_2(LANES))
    END: tl.constexpr = triton.next_power_of_2(LANES)
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    n = tl.arange(0, N)
    asked = tl.arange(0, N // STEP) * STEP
    if PAGE > 0:
        page_mask = PAGE - 1
        page_shift = tl.constexpr(PAGE.bit_length() - 1)
    d_live = d < HEAD_DIM
    dv_live = dv < HEAD_DIM_V
    SLICES: tl.constexpr = 2 if PAIRS else 1
    WHOLE: tl.constexpr = PAIRS and UNIT > 1
    UNIT_KV: tl.constexpr = UNIT // 2 if WHOLE else UNIT
    if PAIRS:
        k_ptr = k_ptr.to(tl.pointer_type(tl.int16 if WHOLE else tl.int8), bitcast=True)
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16 if WHOLE else tl.int8), bitcast=True)

    chunks = tl.cdiv(sequences, chunk)
    items = HEADS_KV * chunks * most_shared(sequences, prefix_ptr, prefix_keys, capacity, SPLIT, MAX_SPLITS, HALVED)
    # Heads vary fastest, then chunks: programs that run at once read the same keys.
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head = item % HEADS_KV
        nth = item // HEADS_KV
        split = nth // chunks
        base = nth % chunks * chunk
        paired = (lane > 0) & (lane < chunk) & (base + lane < sequences)
        keys, size = _with_previous(
            base + lane, paired, prefix_ptr, prefix_keys, lengths_ptr, capacity, right, T, TREE, SPLIT, MAX_SPLITS, HALVED, N,
            LEAST,
        )  # fmt: skip
        joined = keys // size > split
        second = tl.min(tl.where(joined, lane, END), 0)
        # Neighbours from `first` on, up to `past`, share the split; there may be several such runs in a chunk.
        while second < END:
            first = second - 1
            past = tl.min(tl.where((joined == 0) & (lane > second), lane, END), 0)
            step = tl.max(tl.where(lane == second, size, 0), 0)
            begin = split * step
            end = begin + step
            leader = (base + first).to(tl.int64)

            qs = ()
            odds = ()
            factors = ()
            tops = ()
            totals = ()
            accs = ()
            slopes = ()
            positions = ()
            for r in tl.static_range(BLOCKS):
                member, t, head_q = _rows(r, first, head, T, GROUP, M)
                row_live = member < past
                batch = (base + member).to(tl.int64)
                offset = (batch * stride_qb + t.to(tl.int64) * stride_qt + head_q.to(tl.int64) * stride_qh) * UNIT
                if PAIRS:
                    q, odd, factor = rows_of_queries(q_ptr, offset, row_live, HEAD_DIM, D)
                    odds += (odd,)  # type: ignore[assignment]
                    factors += (factor,)  # type: ignore[assignment]
                else:
                    q = tl.load(q_ptr + offset[:, None] + d[None, :], mask=row_live[:, None] & d_live[None, :], other=0.0)
                qs += (q,)  # type: ignore[assignment]
                tops += (tl.full((M,), float("-inf"), tl.float32),)  # type: ignore[assignment]
                totals += (no_weights(M, N),)  # type: ignore[assignment]
                accs += zeros(M, DV, SLICES)
                if BIAS != "":
                    slope = bias_of_rows(bias_ptr, stride_bias_b, stride_bias_h, batch, head_q, row_live, BIAS)
                    slopes += (slope,)  # type: ignore[assignment]
                    length = clamp(tl.load(lengths_ptr + batch, mask=row_live, other=0), 0, capacity)
                    ahead = t
                    if TREE_DEPTHS:
                        depth = tl.load(tree_ptr + batch * stride_tree + T + t, mask=row_live, other=0)
                        ahead = depth.to(tl.int32)
                    positions += (length - T + ahead,)  # type: ignore[assignment]

            k_base = k_ptr + head.to(tl.int64) * stride_kh * UNIT_KV
            v_base = v_ptr + head.to(tl.int64) * stride_vh * UNIT_KV
            if FP8:
                k_scales = k_scale_ptr + head.to(tl.int64) * stride_ksh
                v_scales = v_scale_ptr + head.to(tl.int64) * stride_vsh
            entry = leader
            if PAGES != CONTIGUOUS:
                table = table_ptr + leader * stride_table
                if PAGES == ONE_PAGE:
                    entry = clamp(tl.load(table), 0, pages - 1).to(tl.int64)
                elif PAGES == TILE_IN_PAGE:
                    page = tl.load(table + (begin >> page_shift))
                else:
                    page = tl.load(table + (begin >> page_shift) + (asked >> page_shift))
            if PAGES == CONTIGUOUS or PAGES == ONE_PAGE:
                k_base += entry * stride_kb * UNIT_KV
                v_base += entry * stride_vb * UNIT_KV
                if FP8:
                    k_scales += entry * stride_ksb
                    v_scales += entry * stride_vsb
            for tile in range(begin, end, N):
                cols = tile + n
                live = cols < end
                if PAGES == TILE_IN_PAGE:
                    slot = (tile & page_mask) + n
                elif PAGES == SCATTERED:
                    slot = n & page_mask
                else:
                    slot = cols
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
                        page = tl.load(table + ((tile + N) >> page_shift), mask=tile + N < end, other=0)
                    else:
                        entries = table + ((tile + N) >> page_shift)
                        page = tl.load(entries + (asked >> page_shift), mask=asked < end - tile - N, other=0)
                k_offset = k_far.to(tl.int64) * UNIT_KV
                v_offset = k_offset if SAME else v_far.to(tl.int64) * UNIT_KV
                if PAIRS:
                    k_even, k_odd = columns(k_base, k_offset, live, HEAD_DIM, D, WHOLE)
                    v_even, v_odd = columns(v_base, v_offset, live, HEAD_DIM_V, DV, WHOLE)
                    k_scale = tl.load(k_scales + ks_offset)
                    f, e, inverse = parted(tl.load(v_scales + vs_offset))
                else:
                    k = tl.load(k_base + k_offset + d[None, :], mask=d_live[None, :], other=0.0)
                    v = tl.load(v_base + v_offset + dv[None, :], mask=dv_live[None, :], other=0.0)
                    if FP8:
                        k = k.to(q.dtype)
                        k_scale = tl.load(k_scales + ks_offset)
                        v_scale = tl.load(v_scales + vs_offset)
                        v = (v.to(tl.float32) * v_scale[:, None]).to(q.dtype)
                # All scores, then all weights, then all sums: between them are barriers, and a product waits for no other's.
                scores = ()
                for r in tl.static_range(BLOCKS):
                    if PAIRS:
                        s = tl.dot(odds[r], tl.trans(k_odd), tl.dot(qs[r], tl.trans(k_even)))
                        s = s * k_scale[None, :]
                    else:
                        s = dot(qs[r], tl.trans(k), None)
                        if FP8:
                            s = s * k_scale[None, :]
                    if SOFTCAP:
                        s, _ = capped(s * factors[r][:, None] if PAIRS else s, scale, softcap)
                    else:
                        s = s * (factors[r] * (scale * LOG2E))[:, None] if PAIRS else s * (scale * LOG2E)
                    member, _, _ = _rows(r, first, head, T, GROUP, M)
                    # All keys are seen by all rows, but a sequence's own program chooses by run time too: without it the
                    # compiler would contract the product and the difference behind it.
                    seen = live[None, :] & (member < past)[:, None]
                    if BIAS != "":
                        s, seen = biased(s, seen, slopes[r], positions[r], cols, stride_bias_k, bias_entries, bias_origin, BIAS)
                    scores += (tl.where(seen, s, float("-inf")),)  # type: ignore[assignment]
                new_tops = ()
                new_totals = ()
                weights = ()
                rescales = ()
                for r in tl.static_range(BLOCKS):
                    if PAIRS:
                        p, rescale, total, top = weigh_scaled(scores[r], e, inverse, f, tops[r], totals[r], None)
                    else:
                        p, rescale, total, top = weigh(scores[r], tops[r], totals[r])
                        p = p.to(v.dtype)
                    weights += (p,)  # type: ignore[assignment]
                    rescales += (rescale[:, None],)  # type: ignore[assignment]
                    new_tops += (top,)  # type: ignore[assignment]
                    new_totals += (total,)  # type: ignore[assignment]
                new_accs = ()
                for r in tl.static_range(BLOCKS):
                    if PAIRS:
                        acc = (
                            tl.dot(weights[r], v_even, accs[2 * r] * rescales[r]),
                            tl.dot(weights[r], v_odd, accs[2 * r + 1] * rescales[r]),
                        )
                    else:
                        acc = (dot(weights[r], v, accs[r] * rescales[r]),)  # type: ignore[assignment]
                    new_accs += acc  # type: ignore[assignment]
                tops = new_tops
                totals = new_totals
                accs = new_accs
            for r in tl.static_range(BLOCKS):
                member, t, head_q = _rows(r, first, head, T, GROUP, M)
                row_live = member < past
                if PAIRS:
                    both, total, top = ended((accs[2 * r], accs[2 * r + 1]), totals[r], tops[r], True)
                    part = tl.interleave(both[0], both[1])
                else:
                    part, total, top = accs[r], summed(totals[r]), tops[r]
                row = ((base + member).to(tl.int64) * HEADS_KV * GROUP + head_q) * T + t
                place = row * max_units + split
                tl.store(
                    out_ptr + place[:, None] * HEAD_DIM_V + dv[None, :],
                    part,
                    mask=row_live[:, None] & dv_live[None, :],
                    eviction_policy="evict_last",
                )
                tl.store(lse_ptr + 2 * place, total, mask=row_live, eviction_policy="evict_last")
                tl.store(lse_ptr + 2 * place + 1, top, mask=row_live, eviction_policy="evict_last")
            second = tl.min(tl.where(joined & (lane >= past), lane, END), 0)
