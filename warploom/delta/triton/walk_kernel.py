"""The forward walk: chunk after chunk of a value head with a slice of its state in registers.

prepare_kernel.py has the equations. In a forward pass it writes out and the last state. In a backward pass it leaves, of a
range of chunks, what gradients need: Y and the states before each chunk; and the state before each later range, from which
that range is walked again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.delta.triton.device import (
    Shape,
    Source,
    head_base,
    load_chunk,
    place_of_sequence,
    square,
    state_at,
    store_chunk,
)
from warploom.delta.triton.prepare_kernel import QUERIES, READS, WHOLE, WRITES
from warploom.kernels.triton.numerics import clamp, dot
from warploom.kernels.triton.operands import operand, times

_PLAIN = [
    "lengths_ptr", "cu_ptr", "state_ptr", "last_ptr", "resume_ptr", "factors_ptr",
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "sequences", "seqlen", "chunks", "heads_v", "size", "begin", "end",
]  # fmt: skip


@triton.jit
def chunks_of_range(at, first, last, size, PER_SEQUENCE: tl.constexpr, C: tl.constexpr):
    """Chunks of ranges `first` to `last`, of `size` chunks each, that a sequence has: from, to, all of them, and their origin.

    PER_SEQUENCE ranges count a sequence's chunks, others slots, of which each boundary cuts one sequence at most.
    """
    count = (at.live + C - 1) // C
    origin = at.slot.to(tl.int32)
    if PER_SEQUENCE:
        origin = origin * 0
    return clamp(first * size - origin, 0, count), clamp((last + 1) * size - origin, 0, count), count, origin


@triton.jit(do_not_specialize=_PLAIN)
def walk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lower_ptr,
    weights_ptr,
    rows_ptr,
    state_ptr,
    last_ptr,
    resume_ptr,
    states_ptr,
    factors_ptr,
    missing_ptr,
    lengths_ptr,
    cu_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    sequences,
    seqlen,
    chunks,
    heads_v,
    size,
    begin,
    end,
    E: tl.constexpr,
    M: tl.constexpr,
    DE: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BM columns of the state of one value head of one sequence through ranges `begin` to `end` of `size` chunks.

    lower, weights and rows are prepare_kernel's. Unless None: out, (batch, seqlen, heads_v, M); state and last, the states
    before and after the sequence; resume, the states before ranges 1 and on, (ranges - 1, sequences or 1, heads_v, E, M) fp32;
    and of range `end` states, (chunks, heads_v, E, M), over factors in fp16, and missing, Y (chunks, heads_v, C, M). Blocks of
    one head are neighbours: they share q and k.
    """
    pid = tl.program_id(0)
    blocks: tl.constexpr = (M + BM - 1) // BM
    block = pid % blocks
    pid = pid // blocks
    head = pid % heads_v
    sequence = pid // heads_v
    at = place_of_sequence(sequence, Shape(lengths_ptr, cu_ptr, sequences, seqlen, chunks), C)
    start, stop, count, origin = chunks_of_range(at, begin, end, size, PER_SEQUENCE, C)
    if (out_ptr is None) & (start >= stop):
        return
    n = tl.arange(0, C)
    e = tl.arange(0, DE)
    m = block * BM + tl.arange(0, BM)
    rows = n.to(tl.int64) if WIDE else n
    dtype = k_ptr.dtype.element_ty
    q_base = head_base(Source(q_ptr, stride_qb, stride_qs, stride_qh), at, head // GROUP, UNIT)
    k_base = head_base(Source(k_ptr, stride_kb, stride_ks, stride_kh), at, head // GROUP, UNIT)
    v_base = head_base(Source(v_ptr, stride_vb, stride_vs, stride_vh), at, head, UNIT)
    index = at.sequence.to(tl.int64) * heads_v + head
    lives = at.sequence < sequences

    s = tl.zeros([DE, BM], tl.float32)
    if state_ptr is not None:
        offsets, inside = state_at(index, e, m, E, M)
        s = tl.load(state_ptr + offsets, mask=inside & lives & (start == 0), other=0.0)
    if resume_ptr is not None:
        carriers = tl.where(PER_SEQUENCE, sequences, 1)
        carrier = (tl.where(PER_SEQUENCE, at.sequence, 0)).to(tl.int64)
        if start > 0:
            offsets, inside = state_at(((begin - 1).to(tl.int64) * carriers + carrier) * heads_v + head, e, m, E, M)
            s = tl.load(resume_ptr + offsets, mask=inside, other=0.0)
    for c in tl.range(start, stop, num_stages=STAGES):
        t = c * C
        chunk = (at.slot + c) * heads_v + head
        k = load_chunk(k_base, t, rows, e, stride_ks * UNIT, at.live, E, E == DE)
        v = load_chunk(v_base, t, rows, m, stride_vs * UNIT, at.live, M, M % BM == 0)
        lower = tl.load(lower_ptr + square(chunk, n, C))
        numbers = rows_ptr + chunk * (4 * C) + n
        reads, writes = tl.load(numbers + READS * C), tl.load(numbers + WRITES * C)
        s_operand, s_factor = operand(s, dtype)
        if states_ptr is not None:
            place = origin + c
            if resume_ptr is not None:  # noqa: SIM102 (what is None is known when compiling)
                if (place > begin * size) & (place % size == 0) & (c > start):
                    resumed = ((place // size - 1).to(tl.int64) * carriers + carrier) * heads_v + head
                    offsets, inside = state_at(resumed, e, m, E, M)
                    tl.store(resume_ptr + offsets, s, mask=inside)
            local = (place - end * size).to(tl.int64)
            if PER_SEQUENCE:
                local += at.sequence.to(tl.int64) * size
            if place >= end * size:
                offsets, inside = state_at(local * heads_v + head, e, m, E, M)
                tl.store(states_ptr + offsets, s_operand, mask=inside)
                if factors_ptr is not None:
                    tl.store(factors_ptr + (local * heads_v + head) * blocks + block, s_factor)
        found = v.to(tl.float32) - times(dot(k, s_operand, None), s_factor, dtype) * reads[:, None]
        missing = found + dot(lower, found.to(dtype), None)
        if states_ptr is not None:  # noqa: SIM102
            if place >= end * size:
                to = missing_ptr + (local * heads_v + head) * (C * M) + (n[:, None] * M + m[None, :])
                tl.store(to, missing.to(dtype), mask=(m < M)[None, :] & (n < C)[:, None])
        if out_ptr is not None:
            q = load_chunk(q_base, t, rows, e, stride_qs * UNIT, at.live, E, E == DE)
            weights = tl.load(weights_ptr + square(chunk, n, C))
            queries = tl.load(numbers + QUERIES * C)
            out = times(dot(q, s_operand, None), s_factor, dtype) * queries[:, None]
            # Subtracted: of a sum Triton would make one accumulator of both products, whole in every warpgroup.
            out -= dot(weights, (missing * -1.0).to(dtype), None)
            store_chunk(out_ptr, at, seqlen, head, heads_v, t, n, m, out, M, M % BM == 0)
        whole = tl.max(tl.load(numbers + WHOLE * C), 0)
        written, w_factor = operand(missing * writes[:, None], dtype)
        s = s * whole + times(dot(tl.trans(k), written, None), w_factor, dtype)

    if last_ptr is not None:
        offsets, inside = state_at(index, e, m, E, M)
        tl.store(last_ptr + offsets, s, mask=inside & lives)
    if out_ptr is not None:
        zeros = tl.zeros([C, BM], tl.float32)
        for t in tl.range(count * C, at.rows, C):
            store_chunk(out_ptr, at, seqlen, head, heads_v, t, n, m, zeros, M, M % BM == 0)
