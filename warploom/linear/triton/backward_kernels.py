"""The backward kernels: dQ from the start with the states of the forward pass, dK and dV from the end with dS and dz.

With W = tril(dO v^T), f = scale / norm * phi(q), S and z the sums before a chunk, dS and dz those after it:

    g = W phi(k) + dO S^T,  delta = f.g  (= dO.out, by row),  dphi(q) = scale / norm * (g - delta (z + tril(1) phi(k)))
    dphi(k) = (W - delta)^T f + v dS^T + dz,  dv = tril(f phi(k)^T)^T dO + phi(k) dS
    dS += f^T dO,  dz -= f^T delta

so no output is read, and delta, one number a row, is all that dQ leaves to dK. States are held transposed, (M, E), so that
the left factors v^T and dO^T of their updates are taken from shared memory as they were loaded. Products that are added
are subtracted, the second one negative (by -1.0, which costs nothing): Triton would make one accumulator of a sum and give
it to every warpgroup whole.

With a decay everything fades as fading.py has it. The gradient of the log at token t sums what every pair of a query i >= t
and a key j < t gives, P_ij (dO_i.v_j - delta_i) with P of what is left: of keys before the chunk and queries in it (dQ's kernel
sums those by query), of keys in it and queries after it, of keys before and queries after it (<dS, S>, for which dQ's kernel
leaves S before every chunk), and of both in it, where sums over rows and columns of the strict triangle give all t at once.
log_gradients.py adds them up.
Taken by differences of whole gradients instead (q.dq - k.dk, summed from the end) it would drown in the rounding of all that
was forgotten.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.kernels.triton.feature_maps import IDENTITY, through_map
from warploom.kernels.triton.logs import exp2
from warploom.kernels.triton.numerics import exp
from warploom.kernels.triton.operands import operand, power_of_two, times
from warploom.linear.triton.device import (
    Source,
    dot,
    head_base,
    load_chunk,
    load_keys,
    load_operand,
    load_queries,
    load_state,
    place,
    row_base,
    store_chunk,
    store_state,
)
from warploom.linear.triton.fading import (
    BY_ROWS,
    EXACT,
    NONE,
    Fading,
    chunk_of,
    chunk_sums,
    faded,
    fading,
    left_at,
    left_at_end,
    left_by_columns,
    left_by_rows,
    load_for_both,
    load_logs,
    steep,
    weighed,
)
from warploom.linear.triton.lookback import own_sums, sums_before


class Tensors(NamedTuple):
    """What dK and dV are made of; norm and delta (batch, heads, seqlen_q) are None unless normalised."""

    q: Any
    k: Any
    v: Any
    dout: Any
    norm: Any
    delta: Any
    seqlen_q: Any
    seqlen_k: Any


class States(NamedTuple):
    """dS and dz after a segment, and room for those before it, each None where there is none: number `index`, if it `lives`."""

    index: Any
    lives: Any
    s: Any
    z: Any
    s_out: Any
    z_out: Any


class Decay(NamedTuple):
    """The logs, and what their gradient is made of: each None where it is not asked for.

    first_s (chunks, heads_kv, M, E) and first_z (chunks, heads_kv, E) are S and z before every chunk. For log_gradients.py:
    terms (blocks, 2, batch, heads_kv, the longer seqlen), `stride` elements for each of the two, of pairs within a chunk by
    query less by key, and of keys with queries after it; both (blocks, chunks, heads_kv, M), `stride_both` elements a block, of
    pairs with the chunk between them.
    """

    logs: Any
    first_s: Any
    first_z: Any
    terms: Any
    both: Any
    stride: Any
    stride_both: Any


class Bases(NamedTuple):
    """Where a query head's rows begin, and their strides; what dq_kernel writes, and numbers."""

    q: Any
    stride_q: Any
    k: Any
    stride_k: Any
    v: Any
    stride_v: Any
    dout: Any
    stride_o: Any
    norm: Any
    delta: Any
    dq: Any
    seqlen: Any
    head: Any
    heads: Any
    scale: Any


class Kept(NamedTuple):
    """What dq_kernel leaves for the decay's gradient: see `Decay`; and what queries give of keys before their chunk."""

    first_s: Any
    first_z: Any
    from_queries: Any
    cu: Any
    seqlen_k: Any
    group: Any


# What dq_kernel computes of a block of E: delta sums over E, so several blocks need it known before any dQ.
WHOLE = tl.constexpr(0)  # delta and dQ: the only block
PARTIAL_DELTA = tl.constexpr(1)  # this block's part of delta
GIVEN_DELTA = tl.constexpr(2)  # dQ from delta

_PLAIN = [
    "norm_ptr", "delta_ptr", "s_ptr", "z_ptr", "s_out_ptr", "z_out_ptr", "flags_ptr", "lengths_ptr", "cu_ptr",
    "decay_ptr", "sums_ptr", "first_z_ptr", "from_queries_ptr", "terms_ptr", "both_ptr",
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "stride_ob", "stride_os", "stride_oh", "stride_gb", "stride_gs", "stride_gh", "stride_terms", "stride_both",
    "sequences", "segments", "segment", "seqlen_q", "seqlen_k", "heads", "heads_kv", "group", "batches",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dq_ptr,
    norm_ptr,
    delta_ptr,
    s_ptr,
    z_ptr,
    flags_ptr,
    own_ptr,
    lengths_ptr,
    cu_ptr,
    decay_ptr,
    sums_ptr,
    first_s_ptr,
    first_z_ptr,
    from_queries_ptr,
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
    stride_gb,
    stride_gs,
    stride_gh,
    sequences,
    segments,
    segment,
    seqlen_q,
    seqlen_k,
    heads,
    group,
    batches,
    scale,
    E: tl.constexpr,
    M: tl.constexpr,
    BE: tl.constexpr,
    DM: tl.constexpr,
    C: tl.constexpr,
    MAP_Q: tl.constexpr,
    MAP_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PART: tl.constexpr,
    PER_SLOT: tl.constexpr,
    COLUMNS: tl.constexpr,
    A_HEAD: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dQ of one segment of one query head and a block of E, and delta, (blocks, batches, heads, seqlen_q).

    The state is held transposed, (M, E): both its products then take v and dO as they were loaded. z is held in C equal rows,
    which the products that give it add to, or in sixteen equal COLUMNS: fewer registers, more barriers. With flags_ptr segments
    look back for the states that they start from, as in the forward kernel; there is then no denominator. With a decay z is one
    row.

    With first_s_ptr what the decay's gradient is made of is left too, see `Decay`; keys past the last query are then walked.
    from_queries_ptr is (blocks, batches, heads, seqlen_q).
    """
    pid = tl.program_id(0)
    if flags_ptr is not None:
        pid = tl.atomic_add(flags_ptr, 1, sem="relaxed")
    blocks: tl.constexpr = (E + BE - 1) // BE
    block = pid % blocks
    pid = pid // blocks
    head = pid % heads
    slot = pid // heads
    at = place(slot, cu_ptr, lengths_ptr, sequences, segments, segment, seqlen_q, seqlen_k)
    DECAY: tl.constexpr = decay_ptr is not None
    DECAY_GRAD: tl.constexpr = first_s_ptr is not None and PART != PARTIAL_DELTA
    WITH_Z: tl.constexpr = NORMALIZE or first_z_ptr is not None
    stop = at.rows_q
    if DECAY_GRAD:
        stop = tl.maximum(stop, at.len_k)
    if (at.first < 0) | (at.first >= stop):
        return
    stop = tl.minimum(stop, at.first + segment)
    head_kv = head // group
    state_index = (tl.where(PER_SLOT, slot, at.sequence).to(tl.int64) * (heads // group)) + head_kv

    n = tl.arange(0, C)
    e = block * BE + tl.arange(0, BE)
    m = tl.arange(0, DM)
    rows = n.to(tl.int64) if WIDE else n
    q_base = head_base(Source(q_ptr, stride_qb, stride_qs, stride_qh), at, head, UNIT)
    k_base = head_base(Source(k_ptr, stride_kb, stride_ks, stride_kh), at, head_kv, UNIT)
    v_base = head_base(Source(v_ptr, stride_vb, stride_vs, stride_vh), at, head_kv, UNIT)
    do_base = head_base(Source(dout_ptr, stride_ob, stride_os, stride_oh), at, head, UNIT)
    norm_base, delta_base = norm_ptr, delta_ptr
    if NORMALIZE:
        norm_base = row_base(norm_ptr, at, head, heads, seqlen_q)
        delta_base = row_base(delta_ptr, at, head, heads, seqlen_q)
        if PART == PARTIAL_DELTA:
            delta_base += block.to(tl.int64) * batches * heads * seqlen_q
    ROWS: tl.constexpr = A_HEAD or sums_ptr is not None
    fades = Fading(decay_ptr, stride_gs, sums_ptr, None, None, None)
    if DECAY:
        tl.static_assert(CAUSAL and (ROWS or flags_ptr is None))
        fades = fading(
            decay_ptr, sums_ptr, stride_gb, stride_gs, stride_gh, at, head_kv, heads // group, seqlen_q, seqlen_k, A_HEAD
        )  # fmt: skip
    from_queries_base = from_queries_ptr
    if DECAY_GRAD:
        from_queries_base = row_base(from_queries_ptr, at, head, heads, seqlen_q)
        from_queries_base += block.to(tl.int64) * batches * heads * seqlen_q

    s = tl.zeros([DM, BE], tl.float32)
    z = tl.zeros([BE], tl.float32)
    if s_ptr is not None:
        lives = at.sequence < sequences
        s = tl.trans(load_state(s_ptr, state_index, lives, e, m, E, M))
        z = tl.load(z_ptr + state_index * E + e, mask=(e < E) & lives, other=0.0)
    if flags_ptr is not None:
        tl.static_assert(not NORMALIZE)
        last = at.first + segment >= at.rows_q
        own_s, own_z, passed = own_sums(
            k_base, v_base, at.first, tl.where(last, 0, tl.minimum(at.len_k, stop)), e, m, stride_ks * UNIT, stride_vs * UNIT,
            fades, E, M, BE, DM, C, MAP_K, WITH_Z, DECAY, A_HEAD, WIDE, STAGES,
        )  # fmt: skip
        s, z = sums_before(
            flags_ptr + 1, own_ptr, own_s, own_z, passed, s, z, slot, at.first // segment, head * blocks + block,
            heads * blocks, BE, DM, 4 if DM * BE <= 4096 else 2, DECAY,
        )  # fmt: skip
    bases = Bases(
        q_base, stride_qs * UNIT, k_base, stride_ks * UNIT, v_base, stride_vs * UNIT, do_base, stride_os * UNIT,
        norm_base, delta_base, dq_ptr, seqlen_q, head, heads, scale,
    )  # fmt: skip
    kept = Kept(first_s_ptr, first_z_ptr, from_queries_base, cu_ptr, seqlen_k, group)
    if not ROWS:
        _walk(
            at, stop, rows, e, m, s, z, bases, fades, kept, E, M, C, MAP_Q, MAP_K, CAUSAL, NORMALIZE, PART, COLUMNS,
            EXACT if DECAY else NONE, A_HEAD, STAGES,
        )  # fmt: skip
    elif steep(fades.sums, fades.constant, at.first, stop, fades.rows, C, A_HEAD):
        _walk(
            at, stop, rows, e, m, s, z, bases, fades, kept, E, M, C, MAP_Q, MAP_K, CAUSAL, NORMALIZE, PART, COLUMNS, EXACT,
            A_HEAD, 1,
        )  # fmt: skip
    else:
        _walk(
            at, stop, rows, e, m, s, z, bases, fades, kept, E, M, C, MAP_Q, MAP_K, CAUSAL, NORMALIZE, PART, COLUMNS, BY_ROWS,
            A_HEAD, STAGES,
        )  # fmt: skip


@triton.jit
def _walk(
    at,
    stop,
    rows,
    e,
    m,
    s,
    z,
    x,
    fades,
    kept_ptrs,
    E: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    MAP_Q: tl.constexpr,
    MAP_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    FADES: tl.constexpr,
    A_HEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dQ of tokens at.first to stop, and what else `dq_kernel` leaves."""
    BE: tl.constexpr = e.shape[0]
    DM: tl.constexpr = m.shape[0]
    DECAY: tl.constexpr = FADES != NONE
    DECAY_GRAD: tl.constexpr = kept_ptrs.first_s is not None and PART != PARTIAL_DELTA
    WITH_Z: tl.constexpr = NORMALIZE or (DECAY_GRAD and kept_ptrs.first_z is not None)
    n = tl.arange(0, C)
    dtype = x.v.dtype.element_ty
    scale, head, heads = x.scale, x.head, x.heads
    before_z = z
    if FADES == EXACT:
        z = before_z
    elif COLUMNS:
        z = tl.zeros([BE, 16], tl.float32) + before_z[:, None]
        ones = tl.full([C, 16], 1.0, dtype)
    else:
        z = tl.zeros([C, BE], tl.float32) + before_z[None, :]
        ones = tl.full([C, C], 1.0, dtype)
    if not CAUSAL:
        s_operand, s_factor = operand(s, dtype)
    see = n[:, None] >= n[None, :]
    below = tl.where(see, 1.0, 0.0).to(dtype)
    if FADES == BY_ROWS:
        tail = tl.full([], 1.0, tl.float32)

    for t in tl.range(at.first, stop, C, num_stages=STAGES):
        dout = load_chunk(x.dout, t, rows, m, x.stride_o, at.len_q, M, M == DM)
        if CAUSAL:
            v = load_chunk(x.v, t, rows, m, x.stride_v, at.len_k, M, M == DM)
            if FADES == EXACT:
                fk = load_for_both(x.k, t, rows, at.len_k, e, x.stride_k, E, E % BE == 0, MAP_K, True)
            else:
                fk = load_operand(x.k, t, rows, at.len_k, e, x.stride_k, E, E % BE == 0, MAP_K, True)
            since = tl.full([C], 1.0, tl.float32)
            if FADES == BY_ROWS:
                sums = chunk_sums(fades.sums, fades.constant, t, n, fades.rows, fades.length, A_HEAD)
                fk = weighed(fk, exp2(sums.middle - sums.each))
                since, left = exp2(sums.each - sums.middle), exp2(sums.each) * tail
                kept = exp2(sums.middle) * tail
                before = tail
                tail = exp2(sums.last - sums.middle)
            w = dot(dout, tl.trans(v), None)
            if FADES == EXACT:
                logs = load_logs(fades.logs, t, n, fades.stride, at.len_k)
                left, kept = left_at(logs), exp(logs.all_high)
                pairs = left_by_rows(logs)
                w *= pairs
                joining = faded(fk, left_at_end(logs))
                before = 1.0
            s_operand, s_factor = operand(s, dtype)
            if DECAY_GRAD:
                longest = tl.maximum(x.seqlen, kept_ptrs.seqlen_k)
                heads_kv, first = heads // kept_ptrs.group, head % kept_ptrs.group == 0
                chunk = chunk_of(at, t, kept_ptrs.cu, longest, C) * heads_kv + head // kept_ptrs.group
                own = kept_ptrs.first_s + chunk * (E * M) + (m[:, None] * E + e[None, :])
                inside = (m < M)[:, None] & (e < E)[None, :] & first
                tl.store(own, (s * before).to(kept_ptrs.first_s.dtype.element_ty), mask=inside)
            if FADES == BY_ROWS:
                joining = fk
            if DECAY:
                s = dot(tl.trans(v), joining, s * kept)
            else:
                s = dot(tl.trans(v), fk, s)
        g = times(dot(dout, s_operand, None), s_factor, dtype)
        if DECAY:
            g *= left[:, None]
        if CAUSAL:
            within = tl.where(see, w * (since * -1.0)[:, None], 0.0).to(dtype)
            if not DECAY_GRAD:
                g -= dot(within, fk, None)
        if NORMALIZE or MAP_Q != IDENTITY or DECAY_GRAD:
            # Rounded as in the forward pass: delta then cancels what it must.
            fq = load_operand(x.q, t, rows, at.len_q, e, x.stride_q, E, E % BE == 0, MAP_Q, False).to(tl.float32)
        if DECAY_GRAD:
            from_queries = tl.sum(fq * g, 1)
            g -= dot(within, fk, None)
        if WITH_Z and DECAY:
            if FADES == EXACT:
                z_row = z
            elif COLUMNS:
                z_row = tl.sum(z, 1) / 16
            else:
                z_row = tl.sum(z, 0) / C
            if DECAY_GRAD:
                tl.store(kept_ptrs.first_z + chunk * E + e, z_row * before, mask=(e < E) & first)
        if NORMALIZE:
            live = t + n < at.rows_q
            factor = scale / tl.load(x.norm + t + n, mask=live, other=1.0)
            if PART == GIVEN_DELTA:
                delta = tl.load(x.delta + t + n, mask=live, other=0.0)
            else:
                delta = factor * tl.sum(fq * g, 1)
                tl.store(x.delta + t + n, delta, mask=live)
            if DECAY_GRAD:
                from_queries = (from_queries - delta * left * tl.sum(fq * z_row[None, :], 1)) * factor
            if FADES == EXACT:
                sums_z = left[:, None] * z[None, :] + dot(tl.where(see, pairs, 0.0).to(dtype), fk, None)
            elif DECAY:
                sums_z = dot(below, fk, None) * since[:, None] + left[:, None] * z_row[None, :]
            elif COLUMNS:
                sums_z = tl.zeros([C, BE], tl.float32) + (tl.sum(z, 1) / 16)[None, :]
                if CAUSAL:
                    sums_z += dot(below, fk, None)
                    z = dot(tl.trans(fk), ones, z)
            elif CAUSAL:
                sums_z = dot(below, fk, z)
                z = dot(ones, fk, z)
            else:
                sums_z = z
            g = (g - delta[:, None] * sums_z) * factor[:, None]
        else:
            g *= scale
            if DECAY_GRAD:
                from_queries *= scale
        if WITH_Z and DECAY:
            if FADES == EXACT:
                z = z * kept + tl.sum(joining.to(tl.float32), 0)
            elif COLUMNS:
                z = dot(tl.trans(fk), ones, z * kept)
            else:
                z = dot(ones, fk, z * kept)
        if PART != PARTIAL_DELTA:
            if MAP_Q != IDENTITY:
                g = through_map(g, fq, MAP_Q)
            store_chunk(x.dq, at, x.seqlen, head, heads, t, n, e, g, at.rows_q, E, E % BE == 0)
        if DECAY_GRAD:
            tl.store(kept_ptrs.from_queries + t + n, from_queries, mask=t + n < at.rows_q)


@triton.jit(do_not_specialize=_PLAIN)
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dk_ptr,
    dv_ptr,
    norm_ptr,
    delta_ptr,
    s_ptr,
    z_ptr,
    s_out_ptr,
    z_out_ptr,
    lengths_ptr,
    cu_ptr,
    decay_ptr,
    sums_ptr,
    first_s_ptr,
    first_z_ptr,
    terms_ptr,
    both_ptr,
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
    stride_gb,
    stride_gs,
    stride_gh,
    stride_terms,
    stride_both,
    sequences,
    segments,
    segment,
    seqlen_q,
    seqlen_k,
    heads_kv,
    scale,
    E: tl.constexpr,
    M: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    DE: tl.constexpr,
    DM: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    MAP_Q: tl.constexpr,
    MAP_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr,
    PAIRED: tl.constexpr,
    PER_SLOT: tl.constexpr,
    A_HEAD: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK and dV of one segment of one key head, from the end, summed over its query heads.

    One of the two alone holds a block of the state: dK needs all of M and BE columns of E, dV all of E and BM columns of M.
    With both PAIRED, programs of even number compute dK and the others dV: side by side on a multiprocessor they hide each
    other's latency, and what both read comes from memory once.

    s_ptr and z_ptr hold dS and dz after the segments, one a slot if PER_SLOT, else one a sequence, None for zeros;
    s_out_ptr and z_out_ptr take those before the sequences, whose segments are then whole sequences.
    """
    pid = tl.program_id(0)
    blocks_e: tl.constexpr = (E + BE - 1) // BE if WITH_DK else 1
    blocks_m: tl.constexpr = (M + BM - 1) // BM if WITH_DV else 1
    tl.static_assert(PAIRED or not (WITH_DK and WITH_DV) or (blocks_e == 1 and blocks_m == 1))
    blocks: tl.constexpr = max(blocks_e, blocks_m)
    which = pid % 2
    if PAIRED:
        pid = pid // 2
    block = pid % blocks
    pid = pid // blocks
    if PAIRED and blocks_e != blocks_m and block >= tl.where(which == 0, blocks_e, blocks_m):
        return
    head_kv = pid % heads_kv
    slot = pid // heads_kv
    at = place(slot, cu_ptr, lengths_ptr, sequences, segments, segment, seqlen_q, seqlen_k)
    stop = at.rows_k
    if CAUSAL:
        stop = tl.maximum(stop, at.len_q)
    if (at.first < 0) | ((at.first > 0) & (at.first >= stop)):
        return
    stop = tl.minimum(stop, at.first + segment)
    state_index = tl.where(PER_SLOT, slot, at.sequence).to(tl.int64) * heads_kv + head_kv
    tensors = Tensors(
        Source(q_ptr, stride_qb, stride_qs, stride_qh),
        Source(k_ptr, stride_kb, stride_ks, stride_kh),
        Source(v_ptr, stride_vb, stride_vs, stride_vh),
        Source(dout_ptr, stride_ob, stride_os, stride_oh),
        norm_ptr,
        delta_ptr,
        seqlen_q,
        seqlen_k,
    )
    states = States(state_index, at.sequence < sequences, s_ptr, z_ptr, s_out_ptr, z_out_ptr)
    ROWS: tl.constexpr = A_HEAD or sums_ptr is not None
    fades = Fading(decay_ptr, stride_gs, sums_ptr, None, None, None)
    if decay_ptr is not None:
        fades = fading(
            decay_ptr, sums_ptr, stride_gb, stride_gs, stride_gh, at, head_kv, heads_kv, seqlen_q, seqlen_k, A_HEAD
        )  # fmt: skip
    decay = Decay(fades, first_s_ptr, first_z_ptr, terms_ptr, both_ptr, stride_terms, stride_both)
    arguments = (at, stop, block, head_kv, heads_kv, tensors, states, decay, dk_ptr, dv_ptr, lengths_ptr, cu_ptr, scale)
    # Tuples would not keep constants.
    if not ROWS:
        _parts(
            arguments, which, WITH_DK, WITH_DV, PAIRED, E, M, BE, BM, DE, DM, C, GROUP, MAP_Q, MAP_K, CAUSAL, NORMALIZE,
            NONE if decay_ptr is None else EXACT, A_HEAD, UNIT, WIDE, STAGES,
        )  # fmt: skip
    elif steep(fades.sums, fades.constant, at.first, stop, fades.rows, C, A_HEAD):
        _parts(
            arguments, which, WITH_DK, WITH_DV, PAIRED, E, M, BE, BM, DE, DM, C, GROUP, MAP_Q, MAP_K, CAUSAL, NORMALIZE,
            EXACT, A_HEAD, UNIT, WIDE, 1,
        )  # fmt: skip
    else:
        _parts(
            arguments, which, WITH_DK, WITH_DV, PAIRED, E, M, BE, BM, DE, DM, C, GROUP, MAP_Q, MAP_K, CAUSAL, NORMALIZE,
            BY_ROWS, A_HEAD, UNIT, WIDE, STAGES,
        )  # fmt: skip


@triton.jit
def _parts(
    arguments,
    which,
    WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr,
    PAIRED: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    DE: tl.constexpr,
    DM: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    MAP_Q: tl.constexpr,
    MAP_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    FADES: tl.constexpr,
    A_HEAD: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What a program of dkdv_kernel computes, `which` of two where they are PAIRED."""
    if not PAIRED:
        _gradients(
            *arguments, WITH_DK, WITH_DV, E, M, BE, BM, C, GROUP, MAP_Q, MAP_K, CAUSAL, NORMALIZE, FADES, A_HEAD, UNIT, WIDE,
            STAGES,
        )  # fmt: skip
    elif which == 0:
        _gradients(
            *arguments, True, False, E, M, BE, DM, C, GROUP, MAP_Q, MAP_K, CAUSAL, NORMALIZE, FADES, A_HEAD, UNIT, WIDE, STAGES
        )  # fmt: skip
    else:
        _gradients(
            *arguments, False, True, E, M, DE, BM, C, GROUP, MAP_Q, MAP_K, CAUSAL, NORMALIZE, FADES, A_HEAD, UNIT, WIDE, STAGES
        )  # fmt: skip


@triton.jit
def _gradients(
    at,
    stop,
    block,
    head_kv,
    heads_kv,
    tensors,
    states,
    decay,
    dk_ptr,
    dv_ptr,
    lengths_ptr,
    cu_ptr,
    scale,
    WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    MAP_Q: tl.constexpr,
    MAP_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    FADES: tl.constexpr,
    A_HEAD: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK, dV or both of a segment, whose state is written by who computes dK."""
    n = tl.arange(0, C)
    e = tl.arange(0, BE) if WITH_DV else block * BE + tl.arange(0, BE)
    m = tl.arange(0, BM) if WITH_DK else block * BM + tl.arange(0, BM)
    rows = n.to(tl.int64) if WIDE else n
    dtype = tensors.v.pointer.dtype.element_ty
    k_base = head_base(tensors.k, at, head_kv, UNIT)
    v_base = head_base(tensors.v, at, head_kv, UNIT)

    ds = tl.zeros([BM, BE], tl.float32)
    DECAY: tl.constexpr = FADES != NONE
    fades = decay.logs
    # With dK, whose products it needs.
    DECAY_GRAD: tl.constexpr = WITH_DK and decay.terms is not None
    # The negative of dz, as products with delta's rows give it: rows r and r + 8 add up to it. By weights of pairs one row, by
    # sums.
    dz = tl.zeros([1 if FADES == EXACT else C, BE], tl.float32)
    if states.s is not None:
        ds = tl.trans(load_state(states.s, states.index, states.lives, e, m, E, M))
    if states.z is not None:
        first = tl.load(states.z + states.index * E + e, mask=(e < E) & states.lives, other=0.0)
        if FADES == EXACT:
            dz -= first[None, :]
        else:
            dz -= tl.where((n // 8 % 2 == 0)[:, None], first[None, :], 0.0)

    chunks = tl.cdiv(tl.maximum(stop - at.first, 0), C)
    if FADES == BY_ROWS:
        tail = tl.full([], 1.0, tl.float32)
    # A left factor of dv, so carried as in the forward kernel.
    CARRIED: tl.constexpr = (WITH_DV or DECAY_GRAD) and MAP_K != IDENTITY
    if CARRIED:
        t = at.first + tl.maximum(chunks - 1, 0) * C
        fk = load_operand(k_base, t, rows, at.len_k, e, tensors.k.stride_s * UNIT, E, E % BE == 0, MAP_K, True)
    for i in tl.range(0, chunks, num_stages=STAGES):
        t = at.first + (chunks - 1 - i) * C
        ds_operand, ds_factor = operand(ds, dtype)
        if DECAY_GRAD and not CARRIED:
            fk = load_for_both(k_base, t, rows, at.len_k, e, tensors.k.stride_s * UNIT, E, E % BE == 0, MAP_K, True)
        elif WITH_DV and not CARRIED:
            fk = load_chunk(k_base, t, rows, e, tensors.k.stride_s * UNIT, at.len_k, E, E % BE == 0)
        v = None
        if WITH_DK:
            v = load_chunk(v_base, t, rows, m, tensors.v.stride_s * UNIT, at.len_k, M, M % BM == 0)
        pairs = None
        left = None
        since = None
        after_this = 1.0
        if FADES == BY_ROWS:
            sums = chunk_sums(fades.sums, fades.constant, t, n, fades.rows, fades.length, A_HEAD)
            since = exp2(sums.each - sums.middle)
            pairs = exp2(sums.middle - sums.each)[:, None]
            left_of_keys = exp2(sums.last - sums.each) * tail
            kept = exp2(sums.last - sums.middle) * tail
            after_this = tail
            tail = exp2(sums.middle)
        elif DECAY:
            logs = load_logs(fades.logs, t, n, fades.stride, at.len_k)
            pairs, left, kept = left_by_columns(logs), left_at(logs), exp(logs.all_high)
            left_of_keys = left_at_end(logs)
        if DECAY_GRAD:
            by_query, by_key = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        # What this chunk's queries give, negative.
        dk = tl.zeros([C, BE], tl.float32)
        dv = tl.zeros([C, BM], tl.float32)
        if CAUSAL and GROUP > 1:
            next_ds, next_dz = ds, dz
            if DECAY:
                next_ds, next_dz = ds * kept, dz * kept
            for g in tl.range(0, GROUP, num_stages=STAGES):
                head = head_kv * GROUP + g
                f, wide, delta, dout, common = _weights(
                    at, head, heads_kv * GROUP, t, rows, e, m, tensors, since, scale, E, M, BE, BM, C, MAP_Q, NORMALIZE, UNIT
                )
                if WITH_DV:
                    dv = _to_values(dv, fk, f, dout, pairs, common, C)
                if WITH_DK:
                    dk, w = _to_keys(dk, v, f, dout, delta, pairs, common, C, NORMALIZE)
                    if NORMALIZE and FADES == EXACT:
                        next_dz += tl.sum(wide * (delta * left * common)[:, None], 0)[None, :]
                    elif NORMALIZE:
                        next_dz = _to_sums(next_dz, w, f, delta, common, C)
                if DECAY_GRAD:
                    of_head = _met(fk, f, w, common, C)
                    by_query += of_head[0]
                    by_key += of_head[1]
                if FADES == EXACT:
                    f = faded(wide, left).to(dtype)
                next_ds = _to_state(next_ds, f, dout, common)
        if CAUSAL and GROUP == 1:
            f, wide, delta, dout, common = _weights(
                at, head_kv, heads_kv, t, rows, e, m, tensors, since, scale, E, M, BE, BM, C, MAP_Q, NORMALIZE, UNIT
            )
        # One gradient after the other, so that few accumulators live at once.
        if WITH_DV:
            if CAUSAL and GROUP == 1:
                dv = _to_values(dv, fk, f, dout, pairs, common, C)
            after = times(dot(fk, tl.trans(ds_operand), None), ds_factor, dtype)
            if DECAY:
                after *= left_of_keys[:, None]
            dv = after - dv
            store_chunk(dv_ptr, at, tensors.seqlen_k, head_kv, heads_kv, t, n, m, dv, at.rows_k, M, M % BM == 0)
        if WITH_DK:
            if CAUSAL and GROUP == 1:
                dk, w = _to_keys(dk, v, f, dout, delta, pairs, common, C, NORMALIZE)
            if DECAY:
                after = times(dot(v, ds_operand, None), ds_factor, dtype)
                if (NORMALIZE or states.z is not None) and FADES == EXACT:
                    after -= dz
                elif NORMALIZE or states.z is not None:
                    after -= _pairs_of_rows(dz)
                after *= left_of_keys[:, None]
                if DECAY_GRAD:
                    if CAUSAL and GROUP == 1:
                        by_query, by_key = _met(fk, f, w, common, C)
                    chunk = chunk_of(at, t, cu_ptr, tl.maximum(tensors.seqlen_q, tensors.seqlen_k), C) * heads_kv + head_kv
                    inside = (m < M)[:, None] & (e < E)[None, :]
                    own = decay.first_s + chunk * (E * M) + m[:, None] * E + e[None, :]
                    both = tl.sum(ds * tl.load(own, mask=inside, other=0.0).to(tl.float32), 1)
                    if (NORMALIZE or states.z is not None) and decay.first_z is not None:
                        first_z = tl.load(decay.first_z + chunk * E + e, mask=e < E, other=0.0)
                        of_z = tl.sum(tl.sum(dz, 0) * first_z, 0) * (1.0 if FADES == EXACT else 2.0 / C)
                        both -= tl.where(m == 0, of_z, 0.0)
                    if FADES == BY_ROWS:
                        both *= after_this * exp2(sums.last)
                    else:
                        both *= kept
                    to = decay.both + tl.cast(decay.stride_both, tl.int64) * block + chunk * M + m
                    tl.store(to, both, mask=m < M)
                    line = (at.batch * heads_kv + head_kv) * tl.maximum(tensors.seqlen_q, tensors.seqlen_k) + at.start
                    to = decay.terms + 2 * tl.cast(decay.stride, tl.int64) * block + line + t + n
                    live = t + n < fades.rows
                    tl.store(to, by_query - by_key, mask=live)
                    tl.store(to + decay.stride, tl.sum(fk.to(tl.float32) * after, 1), mask=live)
                dk = after - dk
            else:
                dk = times(dot(v, ds_operand, None), ds_factor, dtype) - dk
                if NORMALIZE or states.z is not None:
                    dk -= _pairs_of_rows(dz)
            if MAP_K != IDENTITY:
                if not WITH_DV and not DECAY_GRAD:
                    fk = load_keys(k_base, t, rows, at.len_k, e, tensors.k.stride_s * UNIT, E, E % BE == 0, MAP_K)
                dk = through_map(dk, fk, MAP_K)
            elif lengths_ptr is not None:
                # Keys that were not read have no gradient; the other maps' slope is 0 there.
                dk = tl.where((t + n < at.len_k)[:, None], dk, 0.0)
            store_chunk(dk_ptr, at, tensors.seqlen_k, head_kv, heads_kv, t, n, e, dk, at.rows_k, E, E % BE == 0)
        if CAUSAL and GROUP == 1:
            if DECAY:
                ds = _to_state(ds * kept, faded(wide, left).to(dtype) if FADES == EXACT else f, dout, common)
                dz *= kept
            else:
                ds = _to_state(ds, f, dout, common)
            if WITH_DK and NORMALIZE and FADES == EXACT:
                dz += tl.sum(wide * (delta * left * common)[:, None], 0)[None, :]
            elif WITH_DK and NORMALIZE:
                dz = _to_sums(dz, w, f, delta, common, C)
        if CAUSAL and GROUP > 1:
            ds, dz = next_ds, next_dz
        if CARRIED:
            # The first chunk again in the end, so that nothing before the segment is read.
            t = tl.maximum(t - C, at.first)
            fk = load_operand(k_base, t, rows, at.len_k, e, tensors.k.stride_s * UNIT, E, E % BE == 0, MAP_K, True)

    if FADES == BY_ROWS:
        ds, dz = ds * tail, dz * tail
    if WITH_DK and states.s_out is not None:
        store_state(states.s_out, states.index, states.lives, e, m, tl.trans(ds), E, M)
        sums_dz = tl.sum(dz, 0) * (-1.0 if FADES == EXACT else -2.0 / C)
        tl.store(states.z_out + states.index * E + e, sums_dz, mask=(e < E) & states.lives)


@triton.jit
def _weights(
    at,
    head,
    heads,
    t,
    rows,
    e,
    m,
    tensors,
    since,
    scale,
    E: tl.constexpr,
    M: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
    MAP_Q: tl.constexpr,
    NORMALIZE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """f over a power of two, as an operand and in fp32, delta, dO and the power, of a chunk's queries of one head.

    Rows of f are weighed by `since`, unless that is None.

    Quotients by large norms would vanish in fp16: a power of two that they have in common stays outside.
    """
    dtype: tl.constexpr = tensors.dout.pointer.dtype.element_ty
    n = tl.arange(0, C)
    q_base = head_base(tensors.q, at, head, UNIT)
    do_base = head_base(tensors.dout, at, head, UNIT)
    fq = load_queries(q_base, t, rows, at.len_q, e, tensors.q.stride_s * UNIT, E, E % BE == 0, MAP_Q)
    dout = load_chunk(do_base, t, rows, m, tensors.dout.stride_s * UNIT, at.len_q, M, M % BM == 0)
    live = t + n < at.len_q
    factor = tl.full([C], 1.0, tl.float32) * scale
    if NORMALIZE:
        factor = scale / tl.load(row_base(tensors.norm, at, head, heads, tensors.seqlen_q) + t + n, mask=live, other=1.0)
    if since is not None:
        factor *= since
    f = fq * factor[:, None]
    common = 1.0
    if dtype == tl.float16:
        # Of the quotients: a query that a map has made zero has a norm of eps, whose reciprocal would take all bits.
        common = power_of_two(tl.max(tl.max(tl.abs(f), 1), 0))
        f = f / common
    delta = tl.zeros([C], tl.float32)
    if NORMALIZE:
        delta = tl.load(row_base(tensors.delta, at, head, heads, tensors.seqlen_q) + t + n, mask=live, other=0.0)
    return f.to(dtype), f, delta, dout, common


@triton.jit
def _to_values(dv, fk, f, dout, pairs, common, C: tl.constexpr):
    """dv, negative, with what the chunk's queries of one head give."""
    n = tl.arange(0, C)
    p = dot(fk, tl.trans(f), None) * -1.0
    if pairs is not None:
        p *= pairs
    p = tl.where(n[:, None] <= n[None, :], p, 0.0)
    return _times_common(p.to(f.dtype), dout, dv, common)


@triton.jit
def _to_keys(dk, v, f, dout, delta, pairs, common, C: tl.constexpr, NORMALIZE: tl.constexpr):
    """dk, negative, with what the chunk's queries of one head give, and their weights in it."""
    n = tl.arange(0, C)
    w = dot(v, tl.trans(dout), None) * -1.0
    if NORMALIZE:
        w += delta[None, :]
    if pairs is not None:
        w *= pairs
    w = tl.where(n[:, None] <= n[None, :], w, 0.0)
    w = w.to(f.dtype)
    return _times_common(w, f, dk, common), w


@triton.jit
def _to_state(ds, f, dout, common):
    return _times_common(tl.trans(dout), f, ds, common)


@triton.jit
def _to_sums(dz, w, f, delta, common, C: tl.constexpr):
    """dz, negative, with what the chunk's queries of one head give.

    Rows 0 to 7 of every 16 are from delta as rounded, the others from what rounding left.

    Rows r and r + 8 of a tensor core's result are one thread's. Of w nothing is taken but its layout, in which the rows are
    a left factor without a way through shared memory.
    """
    n = tl.arange(0, C)
    factor = 1.0
    if f.dtype == tl.float16:
        factor = power_of_two(tl.max(tl.abs(delta), 0))
        delta = delta / factor
    high = delta.to(f.dtype)
    low = (delta - high.to(tl.float32)).to(f.dtype)
    rows = tl.where((n // 8 % 2 == 0)[:, None], high[None, :], low[None, :])
    rows = tl.where((n < 0)[:, None], w, rows)
    return _times_common(rows, f, dz, common * factor)


@triton.jit
def _met(fk, f, w, common, C: tl.constexpr):
    """Products of scores and their gradients of one head's queries and earlier keys, by query and by key; w is negative."""
    n = tl.arange(0, C)
    met = dot(fk, tl.trans(f), None) * w.to(tl.float32) * -common
    met = tl.where(n[:, None] < n[None, :], met, 0.0)
    return tl.sum(met, 0), tl.sum(met, 1)


@triton.jit
def _pairs_of_rows(x):
    """Rows r and r + 8 of every 16 replaced by their sum."""
    groups: tl.constexpr = (x.shape[0] // 16, 2, 8, x.shape[1])
    return tl.reshape(tl.broadcast_to(tl.sum(tl.reshape(x, groups), 1, keep_dims=True), groups), x.shape)


@triton.jit
def _times_common(a, b, acc, common):
    """acc + a @ b * common, which is 1 unless in fp16."""
    if a.dtype == tl.float16:
        return dot(a, b, acc / common) * common
    else:
        return dot(a, b, acc)
