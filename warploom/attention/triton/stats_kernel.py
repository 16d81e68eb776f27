"""Stats of a call: one program a block of keys of one query head walks the rows that see them, as dK/dV's does.

Probabilities come from scores and lse, one tile at a time; every key's sum has a fixed order. Largest scores are kept for each
block of keys, and `largest_kernel` takes the largest of a sequence's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.attention.triton.bias import Bias, bias_values, biased, column_stride, in_elements
from warploom.attention.triton.device import (
    Lengths,
    Softmax,
    block_extrema,
    load_rows,
    score_factor,
    scores,
    shift_of,
    used_keys,
    visible,
)
from warploom.attention.triton.row_runs import Runs, band_rows, extrema_of, run_of, visible_runs
from warploom.kernels.triton.columns import Band, Columns, load_columns, normalised, shifted
from warploom.kernels.triton.numerics import LN2, LOG2E, dot
from warploom.kernels.triton.packed import find_tile, span


class Block(NamedTuple):
    """A block of keys, and the queries of one sequence and head that it meets."""

    k: Any  # (dims, N)
    n0: Any
    cols: Any
    vectors: Any
    columns: Any
    band: Any
    lengths: Any
    softmax: Any
    bias: Any
    q: Any  # pointer to the first row, or a descriptor of the whole tensor
    head: Any  # int32
    stride: Any  # elements; None: q is a descriptor
    dims: Any
    live: Any
    lse: Any  # pointer to the first row's; None where no probabilities are asked for


@triton.jit
def _larger(a, b):
    """The larger of two, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _step(state, block, m, m0, test, WITH_LARGEST: tl.constexpr):
    """One tile of rows, (M, N): sums of probabilities, of elements (M, N) or of columns (N,), and rows' largest scores."""
    sums, largest = state
    rows = m0 + tl.arange(0, m.shape[0])
    inside = rows < block.lengths.q
    if block.lse is not None:
        lse = tl.load(block.lse + rows, mask=inside, other=0.0)
    if block.stride is None:
        q = tl.reshape(block.q.load([block.lengths.batch, block.head, m0, 0]), (m.shape[0], block.dims.shape[0]))
    else:
        pointers = block.q + tl.cast(m0, tl.int64) * block.stride + (m[:, None] * block.stride + block.dims[None, :])
        q = load_rows(pointers, inside, block.live, True)
    s, _ = scores(dot(q, block.k, None), block.softmax)
    factor = score_factor(block.softmax)
    if block.bias.given is not None:
        shift, n = shift_of(block.lengths, None), tl.arange(0, block.k.shape[1]).to(m.dtype)[None, :]
        s = biased(s, factor, block.bias, m0, block.n0, m[:, None], n, shift, None, 1)
        factor = 1.0
    if test:
        shift = shift_of(block.lengths, None)
        at, keys = rows[:, None], block.cols[None, :]
        seen = visible(at, keys, block.vectors, block.columns, block.band, shift, block.lengths.k)
        s = tl.where(seen & inside[:, None], s, float("-inf"))
    if WITH_LARGEST:
        largest = _larger(largest, tl.reduce(s, 1, _larger))
    if block.lse is not None:
        # A row that sees nothing has no lse.
        lse2 = tl.where(lse == float("-inf"), 0.0, lse * LOG2E)
        # At most 1: an lse of huge scores is rounded by more than its sum is worth.
        p = tl.exp2(tl.minimum(s * factor - lse2[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL))
        if test or block.bias.hides is not None:
            # What is hidden weighs nothing, whatever the row's lse.
            p = tl.where(s == float("-inf"), 0.0, p)
        if len(sums.shape) == 1:
            p = tl.sum(p, 0)
        sums += p
    return sums, largest


_PLAIN = [
    "lse_ptr", "sums_ptr", "largest_ptr", "lts_ptr", "lte_ptr", "uts_ptr", "ute_ptr", "bounds_ptr", "cu_q_ptr", "cu_k_ptr",
    "used_ptr", "bias_ptr", "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_lb",
    "stride_lh", "stride_mb", "stride_mh", "stride_bb", "stride_bh", "batches", "tiles", "seqlen_q", "seqlen_k", "heads",
    "group", "mask_group", "left", "right", "stride_ab", "stride_ah", "stride_aq", "stride_ak", "bias_rows", "bias_columns",
    "bias_origin",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def stats_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    sums_ptr,
    largest_ptr,
    lts_ptr,
    lte_ptr,
    uts_ptr,
    ute_ptr,
    bounds_ptr,
    cu_q_ptr,
    cu_k_ptr,
    used_ptr,
    bias_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_lb,
    stride_lh,
    stride_mb,
    stride_mh,
    stride_bb,
    stride_bh,
    batches,
    tiles,
    seqlen_q,
    seqlen_k,
    heads,
    group,
    mask_group,
    left,
    right,
    scale,
    softcap,
    stride_ab,
    stride_ah,
    stride_aq,
    stride_ak,
    bias_rows,
    bias_columns,
    bias_origin,
    DIM: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    BOXES: tl.constexpr,
    WIDE: tl.constexpr,
    DESCENDING: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_UNIT: tl.constexpr,
):
    """Column sums and the largest score of one block of N keys of one query head; either pointer may be None.

    sums is fp32 (batch, heads, seqlen_k) or (heads, total_k), 0 where nobody looks; lse_ptr is None without it. largest is
    (batch, heads, tiles), natural scores, -inf of blocks that nobody sees; slots of packed calls that hold no keys are not
    written. BOXES: q_ptr is a descriptor of the (batch, heads, seqlen, head_dim) tensor, read in boxes of M rows.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    head = pid // tiles % heads
    if cu_q_ptr is None:
        sequence, n0, first_q, first_k = pid // tiles // heads, tile * N, 0, 0
        len_q, stored, len_k = seqlen_q, seqlen_k, seqlen_k
    else:
        sequence, n0, first_k, stored = find_tile(tile, cu_q_ptr if cu_k_ptr is None else cu_k_ptr, batches, seqlen_k, N)
        first_q, len_q = span(sequence, cu_q_ptr, batches, seqlen_q)
        len_k = used_keys(sequence, stored, used_ptr, batches)
    if (n0 < 0) | (n0 >= stored):
        return
    count = tl.cdiv(len_q, M)
    batch = tl.cast(sequence, tl.int64)
    head64 = tl.cast(head, tl.int64)
    head_kv = head64 // group
    lengths = Lengths(sequence, len_q, len_k, first_q, first_k)
    shift = shift_of(lengths, None)
    band = Band(left, right)
    n = tl.arange(0, N)
    cols = n0 + n
    row = (first_k + cols).to(tl.int64)
    n1 = tl.minimum(n0 + N, len_k)
    begin, end, all_from, all_until = band_rows(n0, n1, shift, band, count, seqlen_q, lengths, M)

    mask_at = batch * stride_mb + tl.cast(head // mask_group, tl.int64) * stride_mh + first_k
    columns = Columns(
        shifted(lts_ptr, mask_at), shifted(lte_ptr, mask_at), shifted(uts_ptr, mask_at), shifted(ute_ptr, mask_at)
    )
    vectors = load_columns(columns, tl.minimum(cols, tl.maximum(len_k - 1, 0)))
    HAS_COLUMNS: tl.constexpr = lts_ptr is not None or ute_ptr is not None
    if lts_ptr is not None or ute_ptr is not None:
        if bounds_ptr is None:
            lts, lte, uts, ute, _ = normalised(vectors, columns, cols, band, len_q, shift)
            extrema = extrema_of(lts, lte, uts, ute)
        else:
            at = bounds_ptr + batch * stride_bb + tl.cast(head // mask_group, tl.int64) * stride_bh
            extrema = block_extrema(at, n0, len_k, N)
        runs = visible_runs(extrema, begin, end, count, len_q, M)
    else:
        runs = Runs(begin, end, end, end, end, end)
    lts, lte, uts, ute = vectors

    dims = tl.arange(0, D)
    live = None if DIM == D else dims < DIM
    k_at = (batch * stride_kb + head_kv * stride_kh) * UNIT
    k = load_rows(k_ptr + k_at + (row * (stride_ks * UNIT))[:, None] + dims[None, :], cols < len_k, live, True)
    if BOXES:
        q = q_ptr
    else:
        q = q_ptr + (batch * stride_qb + head64 * stride_qh + tl.cast(first_q, tl.int64) * stride_qs) * UNIT
    softmax = Softmax(scale, softcap, 1 if DESCENDING else None)
    bias = Bias(
        1 if BIAS != "" else None, 1 if BIAS == "tensor" or BIAS == "distance" else None,
        bias_values(bias_ptr, stride_ab, stride_ah, batch, head64, sequence < batches, BIAS, BIAS_UNIT),
        in_elements(stride_aq, BIAS_UNIT), column_stride(stride_ak, BIAS_UNIT), bias_rows,
        in_elements(bias_columns, BIAS_UNIT), bias_origin, None, None, None, None,
    )  # fmt: skip
    block = Block(
        tl.trans(k), n0, cols, (lts[None, :], lte[None, :], uts[None, :], ute[None, :]), columns, band, lengths, softmax, bias,
        q, head, None if BOXES else stride_qs * UNIT, dims, live,
        shifted(lse_ptr, batch * stride_lb + head64 * stride_lh + first_q),
    )  # fmt: skip
    m = tl.arange(0, M).to(tl.int64) if WIDE else tl.arange(0, M)
    sums, largest = tl.zeros([M, N], tl.float32), tl.full([M], float("-inf"), tl.float32)
    # A column past the end is multiplied as zeros, which may be larger than all scores.
    short = largest_ptr is not None and n0 + N > len_k
    if HAS_COLUMNS:
        for part in range(3):
            a, b = run_of(runs, part)
            for m0 in tl.range(a * M, b * M, M):
                # Scalars decide whether any of the tile's elements may be hidden.
                test = short | (m0 + M > len_q)
                if right is not None:
                    test = test | (m0 < all_from)
                if left is not None:
                    test = test | (m0 > all_until)
                test = test | ((m0 < extrema.lte_max) & (m0 + M > extrema.lts_min))
                test = test | ((m0 < extrema.ute_max) & (m0 + M > extrema.uts_min))
                sums, largest = _step((sums, largest), block, m, m0, test, largest_ptr is not None)
        total = tl.sum(sums, 0)
    else:
        # Tiles whose rows all see every column are [first, last): a loop without a test.
        first, last = begin, tl.where(short, begin, tl.minimum(end, len_q // M))
        if right is not None:
            first = tl.maximum(first, tl.cdiv(tl.maximum(all_from, 0), M))
        if left is not None:
            last = tl.minimum(last, tl.maximum(all_until + M, 0) // M)
        first = tl.minimum(first, end)
        last = tl.maximum(first, last)
        for m0 in tl.range(first * M, last * M, M):
            sums, largest = _step((sums, largest), block, m, m0, False, largest_ptr is not None)
        # The few tiles left are summed by columns, across warps: their test needs the registers of sums by elements.
        total = tl.sum(sums, 0)
        for part in range(2):
            a, b = tl.where(part == 0, begin, last), tl.where(part == 0, first, end)
            for m0 in tl.range(a * M, b * M, M):
                total, largest = _step((total, largest), block, m, m0, True, largest_ptr is not None)

    # Columns past the end were multiplied as zeros, untested.
    if sums_ptr is not None:
        to = sums_ptr + ((batch if cu_q_ptr is None else 0) * heads + head64) * seqlen_k + row
        tl.store(to, tl.where(cols < len_k, total, 0.0), mask=cols < stored)
    if largest_ptr is not None:
        factor = 1.0 if BIAS != "" else score_factor(softmax)
        to = largest_ptr + ((batch if cu_q_ptr is None else 0) * heads + head64) * tiles + tile
        tl.store(to, tl.reduce(largest, 0, _larger) * (factor * LN2))


@triton.jit(do_not_specialize=["cu_ptr", "largest_ptr", "out_ptr", "batches", "heads", "tiles", "seqlen_k"])
def largest_kernel(cu_ptr, largest_ptr, out_ptr, batches, heads, tiles, seqlen_k, N: tl.constexpr, WIDTH: tl.constexpr):
    """The largest score of one head of one sequence, from those of its blocks of N keys; out is (batch, heads).

    cu_ptr: where packed sequences of keys start; seqlen_k is all of them then.
    """
    pid = tl.program_id(0)
    sequence, head = pid // heads, pid % heads
    if cu_ptr is None:
        first, count = pid.to(tl.int64) * tiles, tiles
    else:
        start, length = span(sequence, cu_ptr, batches, seqlen_k)
        first = tl.cast(head, tl.int64) * tiles + start // N + sequence
        count = tl.cdiv(length, N)
    largest = tl.full([WIDTH], float("-inf"), tl.float32)
    for at in range(0, count, WIDTH):
        i = at + tl.arange(0, WIDTH)
        values = tl.load(largest_ptr + first + i, mask=i < count, other=float("-inf"))
        largest = _larger(largest, values)
    tl.store(out_ptr + pid, tl.reduce(largest, 0, _larger))
