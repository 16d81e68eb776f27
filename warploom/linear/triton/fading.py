"""What a decay does within a chunk: how much is left of one token's key at another, or at the chunk's end.

With c_i the sum of the logs up to token i of a chunk, its own among them: exp(c_i) is left at token i of the sums before the
chunk, exp(c_i - c_j) of key j, exp(c_end - c_j) of key j at the chunk's end. No exponent is above 0, and none is a
difference of infinities: logs are held to LOWEST, of which exp() is 0.

Sums of logs are kept as two fp32 numbers. After a token that forgets (-inf, or a few of -20) one number would have no bits left
for the small logs that follow it, while the difference of two such sums is exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.kernels.triton.feature_maps import IDENTITY
from warploom.kernels.triton.numerics import INTERPRETED, exp
from warploom.linear.triton.device import load_chunk, load_operand

# exp() of it is 0 in fp32, its subnormal numbers among them.
LOWEST = tl.constexpr(-128.0)


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
    # Not a maximum: that would turn a NaN into a number.
    own = tl.where(own < LOWEST, LOWEST, own)
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
