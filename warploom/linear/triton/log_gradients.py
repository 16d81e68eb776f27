"""The gradient of a decay's logs, from what dQ's and dK's kernels leave: sums over a chunk's tokens, one way and the other."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import exp
from warploom.linear.triton.device import Source, place
from warploom.linear.triton.fading import chunk_of


@triton.jit(
    do_not_specialize=[
        "from_queries_ptr", "terms_ptr", "both_ptr", "decay_ptr", "gradient_ptr", "lengths_ptr", "cu_ptr",
        "stride_gb", "stride_gs", "stride_gh", "sequences", "segments", "seqlen_q", "seqlen_k", "heads_kv", "batches",
        "stride_both",
    ]
)  # fmt: skip
def log_gradients_kernel(
    from_queries_ptr,
    terms_ptr,
    both_ptr,
    decay_ptr,
    gradient_ptr,
    lengths_ptr,
    cu_ptr,
    stride_gb,
    stride_gs,
    stride_gh,
    sequences,
    segments,
    seqlen_q,
    seqlen_k,
    heads_kv,
    batches,
    stride_both,
    M: tl.constexpr,
    DM: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS_Q: tl.constexpr,
    BLOCKS_K: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Gradients (batch, seqlen_k, heads_kv) of logs of a chunk and HEADS key heads; 0 where all is forgotten.

    A log is the factor of every pair of a query at or after its token and a key before it. Args: see `Decay` in
    backward_kernels.py; from_queries_ptr is (BLOCKS_Q, batches, heads, seqlen_q), the others have BLOCKS_K blocks.
    """
    pid = tl.program_id(0)
    head_blocks = tl.cdiv(heads_kv, HEADS)
    head = pid % head_blocks * HEADS + tl.arange(0, HEADS)
    at = place(pid // head_blocks, cu_ptr, lengths_ptr, sequences, segments, C, seqlen_q, seqlen_k)
    if (at.first < 0) | (at.first >= at.rows_k):
        return
    tokens = at.first + tl.arange(0, C)
    heads = (head < heads_kv)[None, :]
    rows = at.start + tokens
    longest = tl.maximum(seqlen_q, seqlen_k)
    asked = tl.zeros([C, HEADS], tl.float32)
    written = tl.zeros([C, HEADS], tl.float32)
    for i in tl.static_range(BLOCKS_Q * GROUP):
        line = (i // GROUP * batches + at.batch) * (heads_kv * GROUP) + head * GROUP + i % GROUP
        base = from_queries_ptr + line[None, :] * seqlen_q + rows[:, None]
        asked += tl.load(base, mask=(tokens < at.rows_q)[:, None] & heads, other=0.0)
    inside = (tokens < tl.maximum(at.rows_q, at.rows_k))[:, None] & heads
    stride = tl.cast(longest, tl.int64) * heads_kv * batches
    m = tl.arange(0, DM)
    both = tl.zeros([HEADS], tl.float32)
    chunk = chunk_of(at, at.first, cu_ptr, longest, C) * heads_kv + head
    for i in tl.static_range(BLOCKS_K):
        base = terms_ptr + 2 * i * stride + (at.batch * heads_kv + head)[None, :] * longest + rows[:, None]
        asked += tl.load(base, mask=inside, other=0.0)
        written += tl.load(base + stride, mask=inside, other=0.0)
        base = both_ptr + tl.cast(stride_both, tl.int64) * i + chunk[:, None] * M + m[None, :]
        both += tl.sum(tl.load(base, mask=(head < heads_kv)[:, None] & (m < M)[None, :], other=0.0), 1)
    found = tl.cumsum(asked, 0, reverse=True) + (tl.cumsum(written, 0) - written) + both[None, :]
    logs = Source(decay_ptr, stride_gb, stride_gs, stride_gh)
    base = logs.pointer + at.batch * logs.stride_b + rows[:, None] * logs.stride_s + head.to(tl.int64)[None, :] * logs.stride_h
    fades = (tokens < at.len_k)[:, None]
    # Whatever rounding left of the terms of what is forgotten.
    found = tl.where(fades & (exp(tl.load(base, mask=fades & heads, other=0.0)) != 0.0), found, 0.0)
    to = gradient_ptr + (at.batch * seqlen_k + rows)[:, None] * heads_kv + head[None, :]
    tl.store(to, found, mask=(tokens < at.rows_k)[:, None] & heads)
