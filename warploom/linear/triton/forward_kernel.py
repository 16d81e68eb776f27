"""The forward kernel: one segment of one query head and a block of its value columns.

Walks over chunks of C tokens with S in registers: out = tril(phi(q) phi(k)^T) v + phi(q) S, then S += phi(k)^T v. The
denominator comes along: row sums of the same products, plus phi(q).z. With a decay products, S and z fade as fading.py has it.

S is held transposed, (M, E), so that v^T, left factor of its update, is taken from shared memory as it was loaded. The two
products of out are added after scaling: one accumulator for both, Triton would give to every warpgroup whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.feature_maps import IDENTITY
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
from warploom.linear.triton.fading import faded, left_at, left_at_end, left_by_rows, load_for_both, load_logs
from warploom.linear.triton.lookback import own_sums, sums_before

_PLAIN = [
    "norm_ptr", "s_ptr", "z_ptr", "s_out_ptr", "z_out_ptr", "flags_ptr", "lengths_ptr", "cu_ptr", "decay_ptr",
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "stride_gb", "stride_gs", "stride_gh",
    "sequences", "segments", "segment", "seqlen_q", "seqlen_k", "heads", "group",
]  # fmt: skip


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

    decay_ptr, (batch, seqlen_k, heads_kv) by its strides in elements, fades S and z; causal then, and none looks back.
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
    dtype = v_ptr.dtype.element_ty
    q_base = head_base(Source(q_ptr, stride_qb, stride_qs, stride_qh), at, head, UNIT)
    k_base = head_base(Source(k_ptr, stride_kb, stride_ks, stride_kh), at, head_kv, UNIT)
    v_base = head_base(Source(v_ptr, stride_vb, stride_vs, stride_vh), at, head_kv, UNIT)

    DECAY: tl.constexpr = decay_ptr is not None
    if DECAY:
        tl.static_assert(CAUSAL and flags_ptr is None)
        g_base = head_base(Source(decay_ptr, stride_gb, stride_gs, stride_gh), at, head_kv, 1)

    s = tl.zeros([BM, DE], tl.float32)
    # Sixteen equal columns: the narrowest right factor of a tensor core. With a decay one, which registers multiply: beside the
    # operands that a decay takes, ptxas 12.8 would mix up the address of so narrow a one with another's.
    Z: tl.constexpr = 1 if DECAY else 16
    z = tl.zeros([DE, Z], tl.float32)
    ones = tl.full([C, 16], 1.0, dtype)
    # Rows past the last sequence get 0 / 1.
    eps = tl.where(lives, eps, 1.0)
    if s_ptr is not None:
        s = tl.trans(load_state(s_ptr, state_index, lives, e, m, E, M))
        z += tl.load(z_ptr + state_index * E + e, mask=(e < E) & lives, other=0.0)[:, None]
    WITH_Z: tl.constexpr = NORMALIZE or s_out_ptr is not None
    if flags_ptr is not None:
        # Nothing starts from the sums of a sequence's last segment.
        own_s, own_z = own_sums(
            k_base, v_base, at.first, tl.where(last, 0, tl.minimum(at.len_k, stop)), e, m, stride_ks * UNIT, stride_vs * UNIT,
            E, M, DE, BM, C, MAP_K, WITH_Z, WIDE, STAGES,
        )  # fmt: skip
        s, before_z = sums_before(
            flags_ptr + 1, own_ptr, own_s, own_z, s, tl.sum(z, 1) / Z, slot, at.first // segment, head * blocks + block,
            heads * blocks, DE, BM, 4 if BM * DE <= 4096 else 2,
        )  # fmt: skip
        z = tl.zeros([DE, Z], tl.float32) + before_z[:, None]
    if not CAUSAL:
        s_operand, s_factor = operand(s, dtype)

    # Mapped queries and keys come from the iteration before: Triton takes a left factor that the loop carries from shared
    # memory, and one computed on the spot from registers, mapped anew by every warpgroup. Unmapped ones are used as loaded.
    len_q, len_k = tl.minimum(at.len_q, stop), tl.minimum(at.len_k, stop)
    BOTH: tl.constexpr = DECAY and NORMALIZE
    if MAP_Q != IDENTITY:
        fq = load_operand(q_base, at.first, rows, len_q, e, stride_qs * UNIT, E, E == DE, MAP_Q, False)
    if CAUSAL and MAP_K != IDENTITY:
        fk = load_operand(k_base, at.first, rows, len_k, e, stride_ks * UNIT, E, E == DE, MAP_K, True)
    for t in tl.range(at.first, stop, C, num_stages=STAGES):
        if MAP_Q == IDENTITY and BOTH:
            fq = load_for_both(q_base, t, rows, len_q, e, stride_qs * UNIT, E, E == DE, MAP_Q, False)
        elif MAP_Q == IDENTITY:
            fq = load_chunk(q_base, t, rows, e, stride_qs * UNIT, len_q, E, E == DE)
        if CAUSAL:
            if MAP_K == IDENTITY and DECAY:
                fk = load_for_both(k_base, t, rows, len_k, e, stride_ks * UNIT, E, E == DE, MAP_K, True)
            elif MAP_K == IDENTITY:
                fk = load_chunk(k_base, t, rows, e, stride_ks * UNIT, len_k, E, E == DE)
            v = load_chunk(v_base, t, rows, m, stride_vs * UNIT, len_k, M, M % BM == 0)
            if DECAY:
                logs = load_logs(g_base, t, n, stride_gs, len_k)
                left, kept = left_at(logs), exp(logs.all_high)
                p = tl.where(n[:, None] >= n[None, :], dot(fq, tl.trans(fk), None) * left_by_rows(logs), 0.0)
                joining = faded(fk, left_at_end(logs))
            else:
                p = tl.where(n[:, None] >= n[None, :], dot(fq, tl.trans(fk), None), 0.0)
            s_operand, s_factor = operand(s, dtype)
            if DECAY:
                s = dot(tl.trans(v), joining, s * kept)
            else:
                s = dot(tl.trans(v), fk, s)
        factor = tl.full([C], 1.0, tl.float32) * scale
        if NORMALIZE:
            if DECAY:
                norm = tl.sum(fq.to(tl.float32) * tl.sum(z, 1)[None, :], 1) * left
            else:
                z_operand, z_factor = columns_operand(z, dtype)
                norm = tl.sum(times(dot(fq, z_operand, None), z_factor, dtype), 1) / 8
            if CAUSAL:
                norm += tl.sum(p, 1)
            norm = norm * scale + eps
            tl.store(row_base(norm_ptr, at, head, heads, seqlen_q) + t + n, norm, mask=(t + n < at.rows_q) & (block == 0))
            factor = scale / norm
        before = factor * left if DECAY else factor
        out = times(dot(fq, tl.trans(s_operand), None), s_factor, dtype) * before[:, None]
        if CAUSAL:
            out -= dot((p * (factor * -1.0)[:, None]).to(dtype), v, None)
            if WITH_Z and DECAY:
                z = z * kept + tl.sum(joining.to(tl.float32), 0)[:, None]
            elif WITH_Z:
                z = dot(tl.trans(fk), ones, z)
        store_chunk(out_ptr, at, seqlen_q, head, heads, t, n, m, out, at.rows_q, M, M % BM == 0)
        if MAP_Q != IDENTITY:
            fq = load_operand(q_base, t + C, rows, len_q, e, stride_qs * UNIT, E, E == DE, MAP_Q, False)
        if CAUSAL and MAP_K != IDENTITY:
            fk = load_operand(k_base, t + C, rows, len_k, e, stride_ks * UNIT, E, E == DE, MAP_K, True)

    if s_out_ptr is not None:
        lives = lives & (head % group == 0) & last
        store_state(s_out_ptr, state_index, lives, e, m, tl.trans(s), E, M)
        tl.store(z_out_ptr + state_index * E + e, tl.sum(z, 1) / Z, mask=(e < E) & lives & (block == 0))
