"""The walk back: the state's gradient from the last chunk of a range to the first, and dV on the way.

With dS the gradient after a chunk, in the terms of prepare_kernel.py:

    d(beta Y) = (scale P)^T dout + e^(G_last - G) beta k dS,    dV = (I + A)^-T d(beta Y),
    dS before the chunk = e^G_last dS + q^T (scale e^G dout) - k^T (e^G dV).
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
from warploom.delta.triton.walk_kernel import chunks_of_range
from warploom.kernels.triton.numerics import dot
from warploom.kernels.triton.operands import operand, times

_PLAIN = [
    "lengths_ptr", "cu_ptr", "last_ptr", "first_ptr", "carry_ptr", "factors_ptr",
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_ob", "stride_os", "stride_oh",
    "sequences", "seqlen", "chunks", "heads_v", "size", "current",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def back_kernel(
    q_ptr,
    k_ptr,
    dout_ptr,
    dv_ptr,
    lower_ptr,
    weights_ptr,
    rows_ptr,
    last_ptr,
    first_ptr,
    carry_ptr,
    states_ptr,
    factors_ptr,
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
    sequences,
    seqlen,
    chunks,
    heads_v,
    size,
    current,
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
    """BM columns of the gradient of one value head's state through range `current` of `size` chunks, from the end.

    dv is (batch, seqlen, heads_v, M); last and first, unless None, gradients of the last and the initial states; states take
    dS after each chunk, (chunks, heads_v, E, M), over factors in fp16. carry, None where there is one range, holds dS between
    ranges: (sequences, heads_v, E, M), or (2, heads_v, E, M) that ranges use by turns, as one may read it and another write.
    """
    pid = tl.program_id(0)
    blocks: tl.constexpr = (M + BM - 1) // BM
    block = pid % blocks
    pid = pid // blocks
    head = pid % heads_v
    sequence = pid // heads_v
    at = place_of_sequence(sequence, Shape(lengths_ptr, cu_ptr, sequences, seqlen, chunks), C)
    start, stop, count, origin = chunks_of_range(at, current, current, size, PER_SEQUENCE, C)
    # A sequence without tokens passes its gradient on, in whatever range.
    if (start >= stop) & (count > 0):
        return
    n = tl.arange(0, C)
    e = tl.arange(0, DE)
    m = block * BM + tl.arange(0, BM)
    rows = n.to(tl.int64) if WIDE else n
    dtype = k_ptr.dtype.element_ty
    q_base = head_base(Source(q_ptr, stride_qb, stride_qs, stride_qh), at, head // GROUP, UNIT)
    k_base = head_base(Source(k_ptr, stride_kb, stride_ks, stride_kh), at, head // GROUP, UNIT)
    do_base = head_base(Source(dout_ptr, stride_ob, stride_os, stride_oh), at, head, UNIT)
    index = at.sequence.to(tl.int64) * heads_v + head

    ds = tl.zeros([DE, BM], tl.float32)
    if last_ptr is not None:
        offsets, inside = state_at(index, e, m, E, M)
        ds = tl.load(last_ptr + offsets, mask=inside & (stop == count), other=0.0)
    if carry_ptr is not None:
        taken, given = index, index
        if not PER_SEQUENCE:
            taken = (current % 2).to(tl.int64) * heads_v + head
            given = ((current + 1) % 2).to(tl.int64) * heads_v + head
        if stop < count:
            offsets, inside = state_at(taken, e, m, E, M)
            ds = tl.load(carry_ptr + offsets, mask=inside, other=0.0)
    for i in tl.range(0, stop - start, num_stages=STAGES):
        c = stop - 1 - i
        t = c * C
        chunk = (at.slot + c) * heads_v + head
        local = (origin + c - current * size).to(tl.int64)
        if PER_SEQUENCE:
            local += at.sequence.to(tl.int64) * size
        ds_operand, ds_factor = operand(ds, dtype)
        offsets, inside = state_at(local * heads_v + head, e, m, E, M)
        tl.store(states_ptr + offsets, ds_operand, mask=inside)
        if factors_ptr is not None:
            tl.store(factors_ptr + (local * heads_v + head) * blocks + block, ds_factor)
        k = load_chunk(k_base, t, rows, e, stride_ks * UNIT, at.live, E, E == DE)
        q = load_chunk(q_base, t, rows, e, stride_qs * UNIT, at.live, E, E == DE)
        dout = load_chunk(do_base, t, rows, m, stride_os * UNIT, at.live, M, M % BM == 0)
        lower = tl.load(lower_ptr + square(chunk, n, C))
        weights = tl.load(weights_ptr + square(chunk, n, C))
        numbers = rows_ptr + chunk * (4 * C) + n
        reads, writes, queries = tl.load(numbers + READS * C), tl.load(numbers + WRITES * C), tl.load(numbers + QUERIES * C)
        dy = times(dot(k, ds_operand, None), ds_factor, dtype) * writes[:, None]
        dy += dot(tl.trans(weights), dout, None)
        dy_operand, dy_factor = operand(dy, dtype)
        dv = dy + times(dot(tl.trans(lower), dy_operand, None), dy_factor, dtype)
        store_chunk(dv_ptr, at, seqlen, head, heads_v, t, n, m, dv, M, M % BM == 0)
        whole = tl.max(tl.load(numbers + WHOLE * C), 0)
        asked, a_factor = operand(dout.to(tl.float32) * queries[:, None], dtype)
        read, r_factor = operand(dv * reads[:, None], dtype)
        ds = ds * whole + times(dot(tl.trans(q), asked, None), a_factor, dtype)
        ds -= times(dot(tl.trans(k), read, None), r_factor, dtype)

    if first_ptr is not None:
        offsets, inside = state_at(index, e, m, E, M)
        tl.store(first_ptr + offsets, ds, mask=inside & (start == 0))
    if carry_ptr is not None:
        offsets, inside = state_at(given, e, m, E, M)
        tl.store(carry_ptr + offsets, ds, mask=inside & (start > 0))
