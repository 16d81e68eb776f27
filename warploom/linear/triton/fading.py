"""What a decay does within a chunk: how much is left of one token's key at another, or at the chunk's end.

With c_i the sum of the logs up to token i of a chunk, its own among them: exp(c_i) is left at token i of the sums before the
chunk, exp(c_i - c_j) of key j, exp(c_end - c_j) of key j at the chunk's end. No exponent is above 0, and none is a
difference of infinities: logs are held to a lowest one, of which exp() is 0.

Sums of logs are kept as two fp32 numbers. After a token that forgets (-inf, or a few of -20) one number would have no bits
left for the small logs that follow it, while the difference of two such sums is exact.

Those are weights of every pair of tokens. Cheaper, and as good in bf16, are weights of rows: with m midway between the first
and the last sum, 2^(m - c_j) multiplies key j as it is rounded, for products within the chunk and for the state alike, and
2^(c_i - m) the rows of results. Both may pass 1; where a chunk is so steep that they might pass fp32's range, a program weighs
pairs. The state is then held before the fading from m to the chunk's end, which is a number that the next chunk's factors take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.kernels.triton.feature_maps import IDENTITY
from warploom.kernels.triton.logs import held, sums_in_log2
from warploom.kernels.triton.numerics import INTERPRETED, LOG2E, exp
from warploom.linear.triton.device import Source, head_base, load_chunk, load_operand, place, row_base

# How a walk fades: not; by weights of every pair of tokens; by weights of rows.
NONE, EXACT, BY_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# By how much, in log2, what is left may shrink from a chunk's first token to its last where rows are weighed.
STEEPEST = tl.constexpr(120.0)


class Logs(NamedTuple):
    """Of a chunk's tokens: their logs, two numbers that add up to the sum of logs up to each, and two of the whole chunk."""

    own: Any
    high: Any
    low: Any
    all_high: Any
    all_low: Any


@triton.jit
def load_logs(base, t, n, stride, length):
    """Logs of tokens t + n, 0 from `length` on."""
    own = tl.load(base + (tl.cast(t, tl.int64) + n) * stride, mask=t + n < length, other=0.0)
    own = held(own)
    wide = own.to(tl.float64)
    sums, everything = tl.cumsum(wide, 0), tl.sum(wide, 0)
    high, all_high = sums.to(tl.float32), everything.to(tl.float32)
    low, all_low = (sums - high.to(tl.float64)).to(tl.float32), (everything - all_high.to(tl.float64)).to(tl.float32)
    return Logs(own, high, low, all_high, all_low)


@triton.jit
def left_at(logs):
    """What is left at each token of the sums before the chunk."""
    return exp(logs.high)


@triton.jit
def left_at_end(logs):
    """What is left of each key at the chunk's end."""
    return exp((logs.all_high - logs.high) + (logs.all_low - logs.low))


@triton.jit
def left_by_rows(logs):
    """What is left at token i of key j <= i, row i and column j; elsewhere something finite."""
    n = tl.arange(0, logs.high.shape[0])
    apart = (logs.high[:, None] - logs.high[None, :]) + (logs.low[:, None] - logs.low[None, :])
    return exp(tl.where(n[:, None] >= n[None, :], apart, 0.0))


@triton.jit
def left_by_columns(logs):
    """What is left at token i of key j <= i, row j and column i; elsewhere something finite."""
    n = tl.arange(0, logs.high.shape[0])
    apart = (logs.high[None, :] - logs.high[:, None]) + (logs.low[None, :] - logs.low[:, None])
    return exp(tl.where(n[:, None] <= n[None, :], apart, 0.0))


@triton.jit
def faded(x, left):
    """Rows of an operand times what is left of them."""
    return (x.to(tl.float32) * left[:, None]).to(x.dtype)


@triton.jit
def load_for_both(
    base, t, n, length, dims, stride, DIM: tl.constexpr, WHOLE: tl.constexpr, MAP: tl.constexpr, KEYS: tl.constexpr
):
    """phi of rows t + n as an operand that registers read too; of KEYS 0 past `length`.

    Of a tile that a product takes from where it was loaded, and registers read, Triton 3.6 keeps a buffer too few: unmapped
    rows go through an instruction that it cannot see through, so that the product's copy is one of its own.
    """
    dtype = base.dtype.element_ty
    if MAP != IDENTITY or dtype == tl.float32 or INTERPRETED:
        return load_operand(base, t, n, length, dims, stride, DIM, WHOLE, MAP, KEYS)
    else:
        x = load_chunk(base, t, n, dims, stride, length, DIM, WHOLE)
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype, True, 2)


@triton.jit
def chunk_of(at, t, cu_ptr, seqlen, C: tl.constexpr):
    """The number of the chunk at token t among all chunks of all sequences, in int64; seqlen is that of the longest."""
    if cu_ptr is None:
        return at.batch * tl.cdiv(seqlen, C) + t // C
    else:
        # As segments are placed: more than enough.
        return at.start // C + at.sequence + t // C


class Fading(NamedTuple):
    """A head of a sequence: its logs, their sums by sums_kernel or its one log in log2; tokens, and those that fade."""

    logs: Any
    stride: Any
    sums: Any
    constant: Any
    rows: Any
    length: Any


@triton.jit
def fading(decay_ptr, sums_ptr, stride_b, stride_s, stride_h, at, head, heads, seqlen_q, seqlen_k, A_HEAD: tl.constexpr):
    """`Fading` of a head of keys, of which there are so many."""
    logs = head_base(Source(decay_ptr, stride_b, stride_s, stride_h), at, head, 1)
    constant, sums = 0.0, logs
    if A_HEAD:
        constant = held(tl.load(logs)) * LOG2E
    if sums_ptr is not None:
        sums = row_base(sums_ptr, at, head, heads, tl.maximum(seqlen_q, seqlen_k))
    return Fading(logs, stride_s, sums, constant, tl.maximum(at.rows_q, at.rows_k), at.len_k)


class Sums(NamedTuple):
    """Of a chunk's tokens, in log2: sums of logs up to each, up to the first, up to the last, and one midway."""

    each: Any
    first: Any
    last: Any
    middle: Any


@triton.jit
def chunk_sums(base, constant, t, n, rows, length, A_HEAD: tl.constexpr):
    """Sums of the chunk of tokens t + n, which fade up to `length`.

    Args:
        base: the sums of the sequence's head, where they are not one constant's, of `rows` tokens.
        constant: that of the head, in log2.
    """
    C: tl.constexpr = n.shape[0]
    if A_HEAD:
        fade = tl.maximum(tl.minimum(length - t, C), 0)
        each = tl.minimum(n + 1, fade).to(tl.float32) * constant
        first = tl.minimum(fade, 1).to(tl.float32) * constant
        last = fade.to(tl.float32) * constant
    else:
        at = base + tl.cast(t, tl.int64)
        each = tl.load(at + n, mask=t + n < rows, other=0.0)
        first = tl.load(at, mask=t < rows, other=0.0)
        last = tl.load(at + tl.maximum(tl.minimum(C, rows - t) - 1, 0), mask=t < rows, other=0.0)
        each = tl.where(t + n < rows, each, last)
    return Sums(each, first, last, 0.5 * (first + last))


@triton.jit
def steep(base, constant, first, stop, rows, C: tl.constexpr, A_HEAD: tl.constexpr):
    """Whether a chunk of tokens first to stop fades by more than STEEPEST; NaN does."""
    if A_HEAD:
        return (constant * (1 - C) <= STEEPEST) == 0
    else:
        odd = tl.zeros([], tl.int32)
        for t in range(first, stop, 64 * C):
            starts = t + tl.arange(0, 64) * C
            inside = starts < stop
            high = tl.load(base + starts, mask=inside, other=0.0)
            low = tl.load(base + tl.minimum(starts + C, rows) - 1, mask=inside, other=0.0)
            odd += tl.sum((high - low <= STEEPEST).to(tl.int32), 0) - 64
        return odd < 0


@triton.jit
def weighed(x, weights):
    """Rows of an operand times fp32 weights."""
    return (x.to(tl.float32) * weights[:, None]).to(x.dtype)


@triton.jit(
    do_not_specialize=[
        "lengths_ptr", "cu_ptr", "stride_gb", "stride_gs", "stride_gh",
        "sequences", "segments", "seqlen_q", "seqlen_k", "heads",
    ]
)  # fmt: skip
def sums_kernel(
    decay_ptr,
    sums_ptr,
    lengths_ptr,
    cu_ptr,
    stride_gb,
    stride_gs,
    stride_gh,
    sequences,
    segments,
    seqlen_q,
    seqlen_k,
    heads,
    C: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Sums of logs, in log2, up to every token within its chunk: (batch, heads, the longer of seqlen_q and seqlen_k)."""
    blocks = tl.cdiv(heads, HEADS)
    pid = tl.program_id(0)
    head = pid % blocks * HEADS + tl.arange(0, HEADS)
    at = place(pid // blocks, cu_ptr, lengths_ptr, sequences, segments, C, seqlen_q, seqlen_k)
    rows = tl.maximum(at.rows_q, at.rows_k)
    if (at.first < 0) | (at.first >= rows):
        return
    tokens = at.first + tl.arange(0, C)
    base = decay_ptr + at.batch * stride_gb + (at.start + tokens)[:, None] * stride_gs + head.to(tl.int64)[None, :] * stride_gh
    logs = tl.load(base, mask=(tokens < at.len_k)[:, None] & (head < heads)[None, :], other=0.0)
    sums = sums_in_log2(logs)
    longest = tl.maximum(seqlen_q, seqlen_k)
    to = sums_ptr + (at.batch * heads + head)[None, :] * longest + (at.start + tokens)[:, None]
    tl.store(to, sums, mask=(tokens < rows)[:, None] & (head < heads)[None, :])
