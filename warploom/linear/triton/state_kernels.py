"""States of segments, where there are too few heads to fill the device: each segment's own, then sums over segments."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.logs import exp2
from warploom.kernels.triton.numerics import LN2, exp, opaque_zeros
from warploom.kernels.triton.operands import power_of_two
from warploom.kernels.triton.packed import span
from warploom.linear.triton.device import (
    Source,
    dot,
    head_base,
    load_chunk,
    load_operand,
    load_queries,
    place,
    row_base,
    store_state,
)
from warploom.linear.triton.fading import chunk_sums, faded, fading, load_logs

_PLAIN = [
    "norm_ptr", "delta_ptr", "s_ptr", "z_ptr", "lengths_ptr", "cu_ptr", "decay_ptr", "sums_ptr", "fading_ptr",
    "stride_xb", "stride_xs", "stride_xh", "stride_yb", "stride_ys", "stride_yh", "stride_gb", "stride_gs", "stride_gh",
    "sequences", "segments", "segment", "seqlen_q", "seqlen_k", "heads_kv",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def state_kernel(
    x_ptr,
    y_ptr,
    norm_ptr,
    delta_ptr,
    s_ptr,
    z_ptr,
    lengths_ptr,
    cu_ptr,
    decay_ptr,
    sums_ptr,
    fading_ptr,
    stride_xb,
    stride_xs,
    stride_xh,
    stride_yb,
    stride_ys,
    stride_yh,
    stride_gb,
    stride_gs,
    stride_gh,
    sequences,
    segments,
    segment,
    seqlen_q,
    seqlen_k,
    heads_kv,
    scale,
    E: tl.constexpr,
    M: tl.constexpr,
    DE: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    MAP: tl.constexpr,
    BACKWARD: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SKIP: tl.constexpr,
    A_HEAD: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A segment's own sums: (S, z) of keys x and values y, or, BACKWARD, (dS, dz) of queries x and gradients y.

    dS = sum of scale * phi(q) / norm outer dO and dz = -sum of scale * phi(q) * delta / norm, over the query heads of a
    key head too. Writes state `slot` of (slots, heads_kv, E, M) and (slots, heads_kv, E); SKIP leaves out those that only
    the sum over all segments takes. With a decay keys have faded to the segment's end, queries to its start, and the sum of
    the segment's logs goes to fading_ptr, (slots, heads_kv).
    """
    pid = tl.program_id(0)
    blocks: tl.constexpr = (M + BM - 1) // BM
    block = pid % blocks
    pid = pid // blocks
    head_kv = pid % heads_kv
    slot = pid // heads_kv
    at = place(slot, cu_ptr, lengths_ptr, sequences, segments, segment, seqlen_q, seqlen_k)
    length = at.len_q if BACKWARD else at.len_k
    # No segment starts from the sum over all.
    skipped = at.first == 0 if BACKWARD else at.first + segment >= at.rows_q
    if (at.first < 0) | (at.sequence >= sequences) | (skipped & SKIP):
        return
    DECAY: tl.constexpr = decay_ptr is not None
    tokens = tl.maximum(tl.minimum(length - at.first, segment), 0)
    if DECAY:
        # Keys past the last query fade what comes after them.
        tokens = tl.maximum(tl.minimum(tl.maximum(length, at.len_k) - at.first, segment), 0)
        fades = fading(
            decay_ptr, sums_ptr, stride_gb, stride_gs, stride_gh, at, head_kv, heads_kv, seqlen_q, seqlen_k, A_HEAD
        )  # fmt: skip
        passed = tl.zeros([], tl.float32)

    n = tl.arange(0, C)
    e = tl.arange(0, DE)
    m = block * BM + tl.arange(0, BM)
    rows = n.to(tl.int64) if WIDE else n
    dtype = y_ptr.dtype.element_ty
    APART: tl.constexpr = DECAY and not BACKWARD  # ptxas would run these products one by one at 64 and 256 dims
    s = opaque_zeros(BM, DE) if APART else tl.zeros([BM, DE], tl.float32)
    if BACKWARD:
        # Summed over rows at the end: a sum over rows takes two barriers.
        z = tl.zeros([C, DE], tl.float32)
    else:
        # Sixteen equal columns, as in the forward kernel. A sum of rows would read the tile into registers too, and of such a
        # tile Triton 3.6 keeps a buffer too few: the next one lands in it while the product for S still reads.
        z = opaque_zeros(DE, 16) if APART else tl.zeros([DE, 16], tl.float32)
        ones = tl.full([C, 16], 1.0, dtype)
    chunks = tl.cdiv(tokens, C)
    for i in tl.range(0, chunks * GROUP, num_stages=STAGES):
        # Towards where who reads them next begins: dK and dV at a segment's end, out and dQ at its start.
        t = at.first + (i // GROUP if BACKWARD else chunks - 1 - i // GROUP) * C
        head = head_kv * GROUP + i % GROUP
        x_base = head_base(Source(x_ptr, stride_xb, stride_xs, stride_xh), at, head, UNIT)
        y_base = head_base(Source(y_ptr, stride_yb, stride_ys, stride_yh), at, head, UNIT)
        y = load_chunk(y_base, t, rows, m, stride_ys * UNIT, length, M, M % BM == 0)
        if DECAY and (A_HEAD or sums_ptr is not None):
            sums = chunk_sums(fades.sums, fades.constant, t, n, fades.rows, fades.length, A_HEAD)
            left = exp2(passed + (sums.each if BACKWARD else sums.last - sums.each))
            passed += tl.where(i % GROUP == GROUP - 1, sums.last, 0.0)
        elif DECAY:
            logs = load_logs(fades.logs, t, n, stride_gs, at.len_k)
            if BACKWARD:
                left = exp(passed + logs.high)
            else:
                left = exp(passed + (logs.all_high - logs.high) + (logs.all_low - logs.low))
            passed += tl.where(i % GROUP == GROUP - 1, logs.all_high, 0.0)
        if BACKWARD:
            fx = load_queries(x_base, t, rows, length, e, stride_xs * UNIT, E, E == DE, MAP)
            live = t + n < length
            heads = heads_kv * GROUP
            factor = tl.full([C], 1.0, tl.float32) * scale
            if NORMALIZE:
                norm = tl.load(row_base(norm_ptr, at, head, heads, seqlen_q) + t + n, mask=live, other=1.0)
                factor = scale / norm
            if DECAY:
                factor *= left
            fx *= factor[:, None]
            # Quotients by large norms would vanish in fp16: their common power of two stays outside.
            common = power_of_two(tl.max(tl.max(tl.abs(fx), 1), 0)) if dtype == tl.float16 else 1.0
            fx = fx / common
            if NORMALIZE:
                delta = tl.load(row_base(delta_ptr, at, head, heads, seqlen_q) + t + n, mask=live, other=0.0)
                z -= fx * (delta * common)[:, None]
            if dtype == tl.float16:
                s = dot(tl.trans(y), fx.to(dtype), s / common) * common
            else:
                s = dot(tl.trans(y), fx.to(dtype), s)
        else:
            fx = load_operand(x_base, t, rows, length, e, stride_xs * UNIT, E, E == DE, MAP, True)
            if DECAY:
                fx = faded(fx, left)
            s = dot(tl.trans(y), fx, s)
            z = dot(tl.trans(fx), ones, z)
    index = slot.to(tl.int64) * heads_kv + head_kv
    store_state(s_ptr, index, True, e, m, tl.trans(s), E, M)
    total = tl.sum(z, 0) if BACKWARD else tl.sum(z, 1) / 16
    tl.store(z_ptr + index * E + e, total, mask=(e < E) & (block == 0))
    if DECAY:
        if A_HEAD or sums_ptr is not None:
            passed *= LN2
        tl.store(fading_ptr + index, passed, mask=block == 0)


@triton.jit(
    do_not_specialize=[
        "s_ptr", "z_ptr", "s_first_ptr", "z_first_ptr", "s_total_ptr", "z_total_ptr", "cu_ptr", "fading_ptr",
        "sequences", "segments", "segment", "total", "heads_kv",
    ]
)  # fmt: skip
def scan_kernel(
    s_ptr,
    z_ptr,
    s_first_ptr,
    z_first_ptr,
    s_total_ptr,
    z_total_ptr,
    cu_ptr,
    fading_ptr,
    sequences,
    segments,
    segment,
    total,
    heads_kv,
    E: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Replace each segment's own state by the sum of those before it (REVERSE: after it), in place.

    s_first_ptr and z_first_ptr, (sequences, heads_kv, ...), are what the sum starts from, each None for zeros; the sums
    over all segments go to s_total_ptr and z_total_ptr, unless None. With fading_ptr a segment fades what is added before it.
    """
    pid = tl.program_id(0)
    blocks_s: tl.constexpr = (E * M + BLOCK - 1) // BLOCK
    blocks: tl.constexpr = blocks_s + (E + BLOCK - 1) // BLOCK
    block = pid % blocks
    pid = pid // blocks
    head = pid % heads_kv
    sequence = pid // heads_kv
    if cu_ptr is None:
        slot = sequence * segments
        count = segments
    else:
        start, length = span(sequence, cu_ptr, sequences, total)
        slot = start // segment + sequence
        count = tl.cdiv(length, segment)
    if block < blocks_s:
        _scan(
            s_ptr, s_first_ptr, s_total_ptr, fading_ptr, block, slot, count, sequence, head, heads_kv, E * M, BLOCK, REVERSE,
            STAGES,
        )  # fmt: skip
    else:
        block -= blocks_s
        _scan(
            z_ptr, z_first_ptr, z_total_ptr, fading_ptr, block, slot, count, sequence, head, heads_kv, E, BLOCK, REVERSE,
            STAGES,
        )  # fmt: skip


@triton.jit
def _scan(
    pointer,
    first_ptr,
    total_ptr,
    fading_ptr,
    block,
    slot,
    count,
    sequence,
    head,
    heads_kv,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    i = block * BLOCK + tl.arange(0, BLOCK)
    live = i < SIZE
    state = (sequence.to(tl.int64) * heads_kv + head) * SIZE
    running = tl.zeros([BLOCK], tl.float32)
    if first_ptr is not None:
        running = tl.load(first_ptr + state + i, mask=live, other=0.0)
    for j in tl.range(0, count, num_stages=STAGES):
        here = slot + (count - 1 - j if REVERSE else j)
        own = pointer + (here.to(tl.int64) * heads_kv + head) * SIZE + i
        added = tl.load(own, mask=live, other=0.0)
        tl.store(own, running, mask=live)
        if fading_ptr is not None:
            running *= exp(tl.load(fading_ptr + here.to(tl.int64) * heads_kv + head))
        running += added
    if total_ptr is not None:
        tl.store(total_ptr + state + i, running, mask=live)
