"""The forward kernel: one segment of one query head and a block of its value columns.

Walks over chunks of C tokens with S in registers: out = tril(phi(q) phi(k)^T) v + phi(q) S, then S += phi(k)^T v. The
denominator comes along: row sums of the same products, plus phi(q).z. With a decay products, S and z fade as fading.py has it.

S is held transposed, (M, E), so that v^T, left factor of its update, is taken from shared memory as it was loaded. The two
products of out are added after scaling: one accumulator for both, Triton would give to every warpgroup whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.kernels.triton.feature_maps import IDENTITY
from warploom.kernels.triton.logs import exp2
from warploom.kernels.triton.numerics import exp
from warploom.kernels.triton.operands import operand, times
from warploom.linear.triton.device import (
    Source,
    columns_operand,
    dot,
    head_base,
    load_chunk,
    load_operand,
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
    chunk_sums,
    faded,
    fading,
    left_at,
    left_at_end,
    left_by_rows,
    load_for_both,
    load_logs,
    steep,
    weighed,
)
from warploom.linear.triton.lookback import own_sums, sums_before

_PLAIN = [
    "norm_ptr", "s_ptr", "z_ptr", "s_out_ptr", "z_out_ptr", "flags_ptr", "lengths_ptr", "cu_ptr", "decay_ptr", "sums_ptr",
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "stride_gb", "stride_gs", "stride_gh",
    "sequences", "segments", "segment", "seqlen_q", "seqlen_k", "heads", "group",
]  # fmt: skip


class Queries(NamedTuple):
    """A head's queries: where the sequence's begin, how many may be read, their stride; where results go; numbers."""

    q: Any
    length: Any
    stride: Any
    out: Any
    norm: Any
    seqlen: Any
    head: Any
    heads: Any
    scale: Any
    eps: Any


class Keys(NamedTuple):
    """A head's keys and values, likewise."""

    k: Any
    v: Any
    length: Any
    stride_k: Any
    stride_v: Any


# Only the large tensors' pointers are specialised, on their alignment: one binary serves every size. Strides come in
# units of UNIT elements, which tells the compiler how far they align.
@triton.jit(do_not_specialize=_PLAIN)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    norm_ptr,
    s_ptr,
    z_ptr,
    s_out_ptr,
    z_out_ptr,
    flags_ptr,
    own_ptr,
    lengths_ptr,
    cu_ptr,
    decay_ptr,
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
    sequences,
    segments,
    segment,
    seqlen_q,
    seqlen_k,
    heads,
    group,
    scale,
    eps,
    E: tl.constexpr,
    M: tl.constexpr,
    DE: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
    MAP_Q: tl.constexpr,
    MAP_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PER_SLOT: tl.constexpr,
    A_HEAD: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out and norm = scale * phi(q).z + eps of one segment, and the state after it.

    s_ptr and z_ptr hold the states that segments start from, one a slot if PER_SLOT, else one a sequence; None is zeros.
    s_out_ptr and z_out_ptr take the states after the sequences; segments are then whole sequences, or look back. Unless CAUSAL
    the state is that of all keys, and k and v are not read. Blocks of one head are neighbours: they share q and k.

    With flags_ptr, 1 + slots * heads * blocks zeros, segments look back for the states that they start from, through own_ptr
    (lookback.py); s_ptr and z_ptr are then one a sequence, and there are as many keys as queries, and heads of both.

    decay_ptr, (batch, seqlen_k, heads_kv) by its strides in elements, fades S and z; causal then. It is weighed in rows where
    A_HEAD, one constant a head, or where sums_ptr has the sums of sums_kernel, unless a chunk is too steep for that; only there
    segments may look back.
    """
    pid = tl.program_id(0)
    if flags_ptr is not None:
        pid = tl.atomic_add(flags_ptr, 1, sem="relaxed")
    blocks: tl.constexpr = (M + BM - 1) // BM
    block = pid % blocks
    pid = pid // blocks
    head = pid % heads
    slot = pid // heads
    at = place(slot, cu_ptr, lengths_ptr, sequences, segments, segment, seqlen_q, seqlen_k)
    stop = at.rows_q
    if s_out_ptr is not None:
        stop = tl.maximum(stop, at.len_k)
    if (at.first < 0) | ((at.first > 0) & (at.first >= stop)):
        return
    lives = at.sequence < sequences
    last = at.first + segment >= stop
    stop = tl.minimum(stop, at.first + segment)
    head_kv = head // group
    state_index = (tl.where(PER_SLOT, slot, at.sequence).to(tl.int64) * (heads // group)) + head_kv

    n = tl.arange(0, C)
    e = tl.arange(0, DE)
    m = block * BM + tl.arange(0, BM)
    rows = n.to(tl.int64) if WIDE else n
    q_base = head_base(Source(q_ptr, stride_qb, stride_qs, stride_qh), at, head, UNIT)
    k_base = head_base(Source(k_ptr, stride_kb, stride_ks, stride_kh), at, head_kv, UNIT)
    v_base = head_base(Source(v_ptr, stride_vb, stride_vs, stride_vh), at, head_kv, UNIT)

    DECAY: tl.constexpr = decay_ptr is not None
    ROWS: tl.constexpr = A_HEAD or sums_ptr is not None
    if DECAY:
        tl.static_assert(CAUSAL and (ROWS or flags_ptr is None))
    fades = Fading(decay_ptr, stride_gs, sums_ptr, None, None, None)
    if DECAY:
        fades = fading(
            decay_ptr, sums_ptr, stride_gb, stride_gs, stride_gh, at, head_kv, heads // group, seqlen_q, seqlen_k, A_HEAD
        )  # fmt: skip

    s = tl.zeros([BM, DE], tl.float32)
    z = tl.zeros([DE], tl.float32)
    # Rows past the last sequence get 0 / 1.
    eps = tl.where(lives, eps, 1.0)
    if s_ptr is not None:
        s = tl.trans(load_state(s_ptr, state_index, lives, e, m, E, M))
        z = tl.load(z_ptr + state_index * E + e, mask=(e < E) & lives, other=0.0)
    WITH_Z: tl.constexpr = NORMALIZE or s_out_ptr is not None
    if flags_ptr is not None:
        # Nothing starts from the sums of a sequence's last segment.
        own_s, own_z, passed = own_sums(
            k_base, v_base, at.first, tl.where(last, 0, tl.minimum(at.len_k, stop)), e, m, stride_ks * UNIT, stride_vs * UNIT,
            fades, E, M, DE, BM, C, MAP_K, WITH_Z, DECAY, A_HEAD, WIDE, STAGES,
        )  # fmt: skip
        s, z = sums_before(
            flags_ptr + 1, own_ptr, own_s, own_z, passed, s, z, slot, at.first // segment,
            head * blocks + block, heads * blocks, DE, BM, 4 if BM * DE <= 4096 else 2, DECAY,
        )  # fmt: skip

    len_q, len_k = tl.minimum(at.len_q, stop), tl.minimum(at.len_k, stop)
    queries = Queries(q_base, len_q, stride_qs * UNIT, out_ptr, norm_ptr, seqlen_q, head, heads, scale, eps)
    keys = Keys(k_base, v_base, len_k, stride_ks * UNIT, stride_vs * UNIT)
    if not ROWS:
        s, z = _walk(
            at, stop, block, rows, e, m, s, z, queries, keys, fades, E, M, C, MAP_Q, MAP_K, CAUSAL, NORMALIZE, WITH_Z,
            EXACT if DECAY else NONE, A_HEAD, STAGES,
        )  # fmt: skip
    elif steep(fades.sums, fades.constant, at.first, stop, fades.rows, C, A_HEAD):
        s, z = _walk(
            at, stop, block, rows, e, m, s, z, queries, keys, fades, E, M, C, MAP_Q, MAP_K, CAUSAL, NORMALIZE, WITH_Z,
            EXACT, A_HEAD, 1,
        )  # fmt: skip
    else:
        s, z = _walk(
            at, stop, block, rows, e, m, s, z, queries, keys, fades, E, M, C, MAP_Q, MAP_K, CAUSAL, NORMALIZE, WITH_Z,
            BY_ROWS, A_HEAD, STAGES,
        )  # fmt: skip

    if s_out_ptr is not None:
        lives = lives & (head % group == 0) & last
        store_state(s_out_ptr, state_index, lives, e, m, tl.trans(s), E, M)
        tl.store(z_out_ptr + state_index * E + e, z, mask=(e < E) & lives & (block == 0))


@triton.jit
def _walk(
    at,
    stop,
    block,
    rows,
    e,
    m,
    s,
    z,
    queries,
    keys,
    fades,
    E: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    MAP_Q: tl.constexpr,
    MAP_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WITH_Z: tl.constexpr,
    FADES: tl.constexpr,
    A_HEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Outputs and norms of tokens at.first to stop from the state before; the state after."""
    DE: tl.constexpr = e.shape[0]
    BM: tl.constexpr = m.shape[0]
    DECAY: tl.constexpr = FADES != NONE
    n = tl.arange(0, C)
    dtype = keys.v.dtype.element_ty
    # Sixteen equal columns: the narrowest right factor of a tensor core. By weights of pairs one, which registers multiply:
    # beside the operands that those take, ptxas 12.8 would mix up the address of so narrow a one with another's.
    Z: tl.constexpr = 1 if FADES == EXACT else 16
    z = tl.zeros([DE, Z], tl.float32) + z[:, None]
    ones = tl.full([C, 16], 1.0, dtype)
    scale = queries.scale
    len_q, len_k = queries.length, keys.length
    if not CAUSAL:
        s_operand, s_factor = operand(s, dtype)

    # Mapped queries and keys come from the iteration before: Triton takes a left factor that the loop carries from shared
    # memory, and one computed on the spot from registers, mapped anew by every warpgroup. Unmapped ones are used as loaded.
    BOTH: tl.constexpr = FADES == EXACT and NORMALIZE
    if FADES == BY_ROWS:
        sums = chunk_sums(fades.sums, fades.constant, at.first, n, fades.rows, fades.length, A_HEAD)
        tail = tl.full([], 1.0, tl.float32)
    if MAP_Q != IDENTITY:
        fq = load_operand(queries.q, at.first, rows, len_q, e, queries.stride, E, E == DE, MAP_Q, False)
    if CAUSAL and MAP_K != IDENTITY:
        fk = load_operand(keys.k, at.first, rows, len_k, e, keys.stride_k, E, E == DE, MAP_K, True)
        if FADES == BY_ROWS:
            fk = weighed(fk, exp2(sums.middle - sums.each))
    for t in tl.range(at.first, stop, C, num_stages=STAGES):
        if MAP_Q == IDENTITY and BOTH:
            fq = load_for_both(queries.q, t, rows, len_q, e, queries.stride, E, E == DE, MAP_Q, False)
        elif MAP_Q == IDENTITY:
            fq = load_chunk(queries.q, t, rows, e, queries.stride, len_q, E, E == DE)
        if CAUSAL:
            if MAP_K == IDENTITY and FADES == EXACT:
                fk = load_for_both(keys.k, t, rows, len_k, e, keys.stride_k, E, E == DE, MAP_K, True)
            elif MAP_K == IDENTITY:
                fk = load_chunk(keys.k, t, rows, e, keys.stride_k, len_k, E, E == DE)
            v = load_chunk(keys.v, t, rows, m, keys.stride_v, len_k, M, M % BM == 0)
            if FADES == BY_ROWS:
                if MAP_K == IDENTITY:
                    sums = chunk_sums(fades.sums, fades.constant, t, n, fades.rows, fades.length, A_HEAD)
                    fk = weighed(fk, exp2(sums.middle - sums.each))
                p = tl.where(n[:, None] >= n[None, :], dot(fq, tl.trans(fk), None), 0.0)
                since, left = exp2(sums.each - sums.middle), exp2(sums.each) * tail
                kept = exp2(sums.middle) * tail
                tail = exp2(sums.last - sums.middle)
            elif DECAY:
                logs = load_logs(fades.logs, t, n, fades.stride, len_k)
                left, kept = left_at(logs), exp(logs.all_high)
                p = tl.where(n[:, None] >= n[None, :], dot(fq, tl.trans(fk), None) * left_by_rows(logs), 0.0)
                joining = faded(fk, left_at_end(logs))
            else:
                p = tl.where(n[:, None] >= n[None, :], dot(fq, tl.trans(fk), None), 0.0)
            s_operand, s_factor = operand(s, dtype)
            if FADES == BY_ROWS:
                joining = fk
            if DECAY:
                s = dot(tl.trans(v), joining, s * kept)
            else:
                s = dot(tl.trans(v), fk, s)
        factor = tl.full([C], 1.0, tl.float32) * scale
        if NORMALIZE:
            if FADES == EXACT:
                norm = tl.sum(fq.to(tl.float32) * tl.sum(z, 1)[None, :], 1) * left
            else:
                z_operand, z_factor = columns_operand(z, dtype)
                norm = tl.sum(times(dot(fq, z_operand, None), z_factor, dtype), 1) / 8
            if FADES == BY_ROWS:
                norm = norm * left + tl.sum(p, 1) * since
            elif CAUSAL:
                norm += tl.sum(p, 1)
            norm = norm * scale + queries.eps
            to = row_base(queries.norm, at, queries.head, queries.heads, queries.seqlen) + t + n
            tl.store(to, norm, mask=(t + n < at.rows_q) & (block == 0))
            factor = scale / norm
        before = factor * left if DECAY else factor
        if FADES == BY_ROWS:
            factor *= since
        out = times(dot(fq, tl.trans(s_operand), None), s_factor, dtype) * before[:, None]
        if CAUSAL:
            out -= dot((p * (factor * -1.0)[:, None]).to(dtype), v, None)
            if WITH_Z and FADES == EXACT:
                z = z * kept + tl.sum(joining.to(tl.float32), 0)[:, None]
            elif WITH_Z and DECAY:
                z = dot(tl.trans(fk), ones, z * kept)
            elif WITH_Z:
                z = dot(tl.trans(fk), ones, z)
        store_chunk(queries.out, at, queries.seqlen, queries.head, queries.heads, t, n, m, out, at.rows_q, M, M % BM == 0)
        if MAP_Q != IDENTITY:
            fq = load_operand(queries.q, t + C, rows, len_q, e, queries.stride, E, E == DE, MAP_Q, False)
        if CAUSAL and MAP_K != IDENTITY:
            fk = load_operand(keys.k, t + C, rows, len_k, e, keys.stride_k, E, E == DE, MAP_K, True)
            if FADES == BY_ROWS:
                sums = chunk_sums(fades.sums, fades.constant, t + C, n, fades.rows, fades.length, A_HEAD)
                fk = weighed(fk, exp2(sums.middle - sums.each))
    if FADES == BY_ROWS:
        s, z = s * tail, z * tail
    return s, tl.sum(z, 1) / Z
