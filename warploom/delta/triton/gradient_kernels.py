"""Gradients of queries, keys, beta and decay, chunk by chunk at once, from what the walks left of a range of chunks.

In the terms of prepare_kernel.py, with S0 the state before the chunk and dS the gradient of the one after it:

    dq = scale (e^G dout S0^T + (P' . dout Y^T) k),    P' = D beta for j <= i,
    dk = scale (P' . dout Y^T)^T q - e^G dV S0^T + e^(G_last - G) beta Y dS^T - (N + N^T) k,    N = D beta . dV Y^T for j < i,
    dbeta_j = sum_i D_ij (scale q_i . k_j dout_i . Y_j - k_i . k_j dV_i . Y_j) + e^(G_last - G_j) k_j dS . Y_j
            = dV_j . Y_j / beta_j,

and the gradient of G from the same sums. The quotient has the rounding error of one dV, the sum that of all later ones, which
under equal keys do not cancel as they do. It is taken unless beta is small.

Triton 3.6 for Hopper makes wrong code of a product whose left factor is the transpose of another product's result (fla's issues
640 and 984: their gradients of keys, beta and decay). No result is transposed here: where both a matrix of products and its
transpose are needed, both are multiplied out of tiles that were loaded, of which shared memory gives either order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.delta.triton.device import (
    Place,
    Shape,
    Source,
    between,
    cumulative,
    head_base,
    last_of,
    load_chunk,
    load_rows,
    place_of_slot,
    state_at,
    store_chunk,
    token_rows,
)
from warploom.delta.triton.prepare_kernel import norms
from warploom.kernels.triton.numerics import dot, exp
from warploom.kernels.triton.operands import operand, times

# From this beta on its gradient is a quotient: below it what fp16's subnormals lose of dV would count for more.
_LARGE = tl.constexpr(0.125)

_PLAIN = [
    "factors_ptr", "dfactors_ptr", "beta_ptr", "decay_ptr", "dbeta_ptr", "ddecay_ptr", "lengths_ptr", "cu_ptr",
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_ob", "stride_os", "stride_oh",
    "stride_bb", "stride_bs", "stride_bh", "stride_db", "stride_ds", "stride_dh",
    "sequences", "seqlen", "chunks", "heads", "size", "current",
]  # fmt: skip


@triton.jit
def place_of_entry(entry, shape, size, current, PER_SEQUENCE: tl.constexpr, C: tl.constexpr):
    """The place of chunk `entry` of range `current` of `size` chunks (walk_kernel.py); its first token may be past all."""
    if PER_SEQUENCE:
        at = place_of_slot(entry // size * shape.chunks, shape, C)
        first = (current * size + entry % size) * C
    else:
        slot = current * size + entry
        # The last range may be longer than what is left: packed sequences end in a place of tokens past them, others do not.
        inside = slot >= 0
        if shape.cu is None:
            inside = slot < shape.sequences * shape.chunks
        at = place_of_slot(tl.where(inside, slot, 0), shape, C)
        first = tl.where(inside, at.first, -1)
    return Place(at.sequence, at.batch, at.start, first, at.rows, at.live, at.slot)


@triton.jit(do_not_specialize=_PLAIN)
def dq_kernel(
    q_ptr,
    k_ptr,
    dout_ptr,
    missing_ptr,
    states_ptr,
    factors_ptr,
    dstates_ptr,
    dfactors_ptr,
    beta_ptr,
    decay_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dbeta_ptr,
    ddecay_ptr,
    lengths_ptr,
    cu_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_ob,
    stride_os,
    stride_oh,
    stride_bb,
    stride_bs,
    stride_bh,
    stride_db,
    stride_ds,
    stride_dh,
    sequences,
    seqlen,
    chunks,
    heads,
    size,
    current,
    scale,
    eps,
    E: tl.constexpr,
    M: tl.constexpr,
    DE: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq of one chunk of one key head, summed over its value heads.

    ddecay takes what queries and the states that pass through give to the gradient of G, for dk_kernel. Where no token of the
    chunk counts, all gradients are written here, zeros.
    """
    pid = tl.program_id(0)
    head = pid % heads
    entry = pid // heads
    at = place_of_entry(entry, Shape(lengths_ptr, cu_ptr, sequences, seqlen, chunks), size, current, PER_SEQUENCE, C)
    if (at.first < 0) | (at.first >= at.rows):
        return
    n = tl.arange(0, C)
    e = tl.arange(0, DE)
    blocks: tl.constexpr = (M + BM - 1) // BM
    if at.first >= at.live:
        zeros = tl.zeros([C, DE], tl.float32)
        store_chunk(dq_ptr, at, seqlen, head, heads, at.first, n, e, zeros, E, E == DE)
        store_chunk(dk_ptr, at, seqlen, head, heads, at.first, n, e, zeros, E, E == DE)
        for g in range(GROUP):
            head_v = head * GROUP + g
            written = at.first + n < at.rows
            to = token_rows(dbeta_ptr, at, seqlen, head_v, heads * GROUP, at.first, n)
            tl.store(to, tl.zeros([C], tl.float32), mask=written)
            if ddecay_ptr is not None:
                to = token_rows(ddecay_ptr, at, seqlen, head_v, heads * GROUP, at.first, n)
                tl.store(to, tl.zeros([C], tl.float32), mask=written)
            for block in range(blocks):
                m = block * BM + tl.arange(0, BM)
                nothing = tl.zeros([C, BM], tl.float32)
                store_chunk(dv_ptr, at, seqlen, head_v, heads * GROUP, at.first, n, m, nothing, M, M % BM == 0)
        return
    rows = n.to(tl.int64) if WIDE else n
    dtype = k_ptr.dtype.element_ty
    q_base = head_base(Source(q_ptr, stride_qb, stride_qs, stride_qh), at, head, UNIT)
    k_base = head_base(Source(k_ptr, stride_kb, stride_ks, stride_kh), at, head, UNIT)
    q = load_chunk(q_base, at.first, rows, e, stride_qs * UNIT, at.live, E, E == DE)
    k = load_chunk(k_base, at.first, rows, e, stride_ks * UNIT, at.live, E, E == DE)
    counts = at.first + n < at.live
    norm_q, norm_k = norms(q, counts, eps, NORMALIZE), norms(k, counts, eps, NORMALIZE)
    wide_q = q.to(tl.float32)
    dq = tl.zeros([C, DE], tl.float32)
    for g in range(GROUP):
        head_v = head * GROUP + g
        do_base = head_base(Source(dout_ptr, stride_ob, stride_os, stride_oh), at, head_v, UNIT)
        index = entry.to(tl.int64) * (heads * GROUP) + head_v
        inner = tl.zeros([C, C], tl.float32)
        read = tl.zeros([C, DE], tl.float32)
        through = tl.zeros([DE], tl.float32)
        for block in tl.range(0, blocks, num_stages=STAGES):
            m = block * BM + tl.arange(0, BM)
            dout = load_chunk(do_base, at.first, rows, m, stride_os * UNIT, at.live, M, M % BM == 0)
            missing = load_chunk(missing_ptr + index * (C * M), 0, n, m, M, C, M, M % BM == 0)
            offsets, inside = state_at(index, e, m, E, M)
            state = tl.load(states_ptr + offsets, mask=inside, other=0.0)
            inner = dot(dout, tl.trans(missing), inner)
            factor = 1.0
            if factors_ptr is not None:
                factor = tl.load(factors_ptr + index * blocks + block)
                read += dot(dout, tl.trans(state), None) * factor
            else:
                read = dot(dout, tl.trans(state), read)
            if decay_ptr is not None:
                dstate = tl.load(dstates_ptr + offsets, mask=inside, other=0.0)
                if dfactors_ptr is not None:
                    factor *= tl.load(dfactors_ptr + index * blocks + block)
                through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1) * factor
        beta = load_rows(Source(beta_ptr, stride_bb, stride_bs, stride_bh), at, head_v, at.first, n, 0.0)
        coarse, fine = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        if decay_ptr is not None:
            decay = load_rows(Source(decay_ptr, stride_db, stride_ds, stride_dh), at, head_v, at.first, n, 0.0)
            coarse, fine = cumulative(decay)
        read *= (exp(coarse + fine) * scale)[:, None]
        if ddecay_ptr is not None:
            # What passes through the whole chunk counts for each of its tokens, and so as the last one's.
            last = n == tl.minimum(at.live - at.first, C) - 1
            passing = exp(tl.zeros([C], tl.float32) + last_of(coarse, n, C) + last_of(fine, n, C)) * tl.sum(through, 0)
            to = token_rows(ddecay_ptr, at, seqlen, head_v, heads * GROUP, at.first, n)
            tl.store(to, norm_q * tl.sum(wide_q * read, 1) + tl.where(last, passing, 0.0), mask=at.first + n < at.rows)
        inner *= between(coarse, fine) * (beta * norm_k * -scale)[None, :]
        inner, factor = operand(tl.where(n[:, None] >= n[None, :], inner, 0.0), dtype)
        dq += read
        # Subtracted: of a sum Triton would make one accumulator of both products, whole in every warpgroup.
        dq -= times(dot(inner, k, None), factor, dtype)
    if NORMALIZE:
        dq = norm_q[:, None] * (dq - wide_q * (norm_q * norm_q * tl.sum(wide_q * dq, 1))[:, None])
    dq = tl.where((at.first + n < at.live)[:, None], dq, 0.0)
    store_chunk(dq_ptr, at, seqlen, head, heads, at.first, n, e, dq, E, E == DE)


@triton.jit(do_not_specialize=_PLAIN)
def dk_kernel(
    q_ptr,
    k_ptr,
    dout_ptr,
    dv_ptr,
    missing_ptr,
    states_ptr,
    factors_ptr,
    dstates_ptr,
    dfactors_ptr,
    beta_ptr,
    decay_ptr,
    dk_ptr,
    dbeta_ptr,
    ddecay_ptr,
    lengths_ptr,
    cu_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_ob,
    stride_os,
    stride_oh,
    stride_bb,
    stride_bs,
    stride_bh,
    stride_db,
    stride_ds,
    stride_dh,
    sequences,
    seqlen,
    chunks,
    heads,
    size,
    current,
    scale,
    eps,
    E: tl.constexpr,
    M: tl.constexpr,
    DE: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dk of one chunk of one key head, and dbeta and ddecay of each of its value heads; ddecay holds dq_kernel's share."""
    pid = tl.program_id(0)
    head = pid % heads
    entry = pid // heads
    at = place_of_entry(entry, Shape(lengths_ptr, cu_ptr, sequences, seqlen, chunks), size, current, PER_SEQUENCE, C)
    if (at.first < 0) | (at.first >= at.live):
        return
    n = tl.arange(0, C)
    e = tl.arange(0, DE)
    blocks: tl.constexpr = (M + BM - 1) // BM
    rows = n.to(tl.int64) if WIDE else n
    dtype = k_ptr.dtype.element_ty
    heads_v = heads * GROUP
    q_base = head_base(Source(q_ptr, stride_qb, stride_qs, stride_qh), at, head, UNIT)
    k_base = head_base(Source(k_ptr, stride_kb, stride_ks, stride_kh), at, head, UNIT)
    q = load_chunk(q_base, at.first, rows, e, stride_qs * UNIT, at.live, E, E == DE)
    k = load_chunk(k_base, at.first, rows, e, stride_ks * UNIT, at.live, E, E == DE)
    counts = at.first + n < at.live
    norm_q, norm_k = norms(q, counts, eps, NORMALIZE), norms(k, counts, eps, NORMALIZE)
    dk = tl.zeros([C, DE], tl.float32)
    for g in range(GROUP):
        head_v = head * GROUP + g
        do_base = head_base(Source(dout_ptr, stride_ob, stride_os, stride_oh), at, head_v, UNIT)
        dv_base = dv_ptr + ((at.batch * seqlen + at.start + at.first) * heads_v + head_v) * M
        index = entry.to(tl.int64) * heads_v + head_v
        beta = load_rows(Source(beta_ptr, stride_bb, stride_bs, stride_bh), at, head_v, at.first, n, 0.0)
        coarse, fine = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        if decay_ptr is not None:
            decay = load_rows(Source(decay_ptr, stride_db, stride_ds, stride_dh), at, head_v, at.first, n, 0.0)
            coarse, fine = cumulative(decay)

        # Products of states first and those of tokens after them: together they would need more registers than there are.
        read = tl.zeros([C, DE], tl.float32)
        wrote = tl.zeros([C, DE], tl.float32)
        for block in tl.range(0, blocks, num_stages=STAGES):
            m = block * BM + tl.arange(0, BM)
            missing = load_chunk(missing_ptr + index * (C * M), 0, n, m, M, C, M, M % BM == 0)
            dv = load_chunk(dv_base, 0, n, m, heads_v * M, at.live - at.first, M, M % BM == 0)
            offsets, inside = state_at(index, e, m, E, M)
            state = tl.load(states_ptr + offsets, mask=inside, other=0.0)
            dstate = tl.load(dstates_ptr + offsets, mask=inside, other=0.0)
            if factors_ptr is not None:
                read += dot(dv, tl.trans(state), None) * tl.load(factors_ptr + index * blocks + block)
                wrote += dot(missing, tl.trans(dstate), None) * tl.load(dfactors_ptr + index * blocks + block)
            else:
                read = dot(dv, tl.trans(state), read)
                wrote = dot(missing, tl.trans(dstate), wrote)
        whole_coarse, whole_fine = last_of(coarse, n, C), last_of(fine, n, C)
        # Queries and keys are loaded again where they are used: kept through a loop, they would take the registers it needs.
        k = load_chunk(k_base, at.first, rows, e, stride_ks * UNIT, at.live, E, E == DE)
        wide_k = k.to(tl.float32)
        read *= exp(coarse + fine)[:, None]
        wrote *= exp((whole_coarse - coarse) + (whole_fine - fine))[:, None]
        read_sum = norm_k * tl.sum(wide_k * read, 1)
        wrote_sum = norm_k * tl.sum(wide_k * wrote, 1)
        dk += wrote * beta[:, None] - read

        asked = tl.zeros([C, C], tl.float32)
        later = tl.zeros([C, C], tl.float32)
        earlier = tl.zeros([C, C], tl.float32)
        for block in tl.range(0, blocks, num_stages=STAGES):
            m = block * BM + tl.arange(0, BM)
            dout = load_chunk(do_base, at.first, rows, m, stride_os * UNIT, at.live, M, M % BM == 0)
            missing = load_chunk(missing_ptr + index * (C * M), 0, n, m, M, C, M, M % BM == 0)
            dv = load_chunk(dv_base, 0, n, m, heads_v * M, at.live - at.first, M, M % BM == 0)
            asked = dot(missing, tl.trans(dout), asked)
            later = dot(missing, tl.trans(dv), later)
            earlier = dot(dv, tl.trans(missing), earlier)
        lone = tl.sum(tl.where(n[:, None] == n[None, :], later, 0.0), 1)
        q = load_chunk(q_base, at.first, rows, e, stride_qs * UNIT, at.live, E, E == DE)
        k = load_chunk(k_base, at.first, rows, e, stride_ks * UNIT, at.live, E, E == DE)
        pairs = between(coarse, fine)
        # Rows are keys, columns queries, or other keys.
        asked = tl.where(n[:, None] <= n[None, :], asked * (pairs * (norm_q * scale)[None, :]), 0.0)
        later = tl.where(n[:, None] < n[None, :], later * pairs, 0.0)
        # The same products as in the forward pass, again rather than kept.
        share = asked * dot(k, tl.trans(q), None) * norm_k[:, None]
        share -= later * dot(k, tl.trans(k), None) * (norm_k[:, None] * norm_k[None, :])
        large = tl.abs(beta) >= _LARGE
        dbeta = tl.where(large, lone / tl.where(large, beta, 1.0), tl.sum(share, 1) + wrote_sum)
        to = token_rows(dbeta_ptr, at, seqlen, head_v, heads_v, at.first, n)
        tl.store(to, tl.where(counts, dbeta, 0.0), mask=at.first + n < at.rows)
        if ddecay_ptr is not None:
            share *= beta[:, None]
            within = tl.sum(share, 0) - tl.sum(share, 1)
            to = token_rows(ddecay_ptr, at, seqlen, head_v, heads_v, at.first, n)
            own = tl.load(to, mask=counts, other=0.0)
            # A token's decay stands between all before it and all from it on: pairs across it, what was written before it,
            # and what is read after it.
            from_here = n[:, None] <= n[None, :]
            ddecay = tl.sum(tl.where(from_here, (own - read_sum + within)[None, :], (wrote_sum * beta)[None, :]), 1)
            tl.store(to, tl.where((decay == float("-inf")) | (counts == 0), 0.0, ddecay), mask=at.first + n < at.rows)
        asked, factor = operand(asked * (beta * -1.0)[:, None], dtype)
        # Subtracted, as in dq_kernel.
        dk -= times(dot(asked, q, None), factor, dtype)
        both = later * beta[:, None] + tl.where(n[:, None] > n[None, :], earlier * pairs * beta[None, :], 0.0)
        both, factor = operand(both * norm_k[None, :], dtype)
        dk -= times(dot(both, k, None), factor, dtype)
    if NORMALIZE:
        wide_k = load_chunk(k_base, at.first, rows, e, stride_ks * UNIT, at.live, E, E == DE).to(tl.float32)
        dk = norm_k[:, None] * (dk - wide_k * (norm_k * norm_k * tl.sum(wide_k * dk, 1))[:, None])
    dk = tl.where((at.first + n < at.live)[:, None], dk, 0.0)
    store_chunk(dk_ptr, at, seqlen, head, heads, at.first, n, e, dk, E, E == DE)
