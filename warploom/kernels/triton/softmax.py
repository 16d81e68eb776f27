"""A running softmax (acc, total, top): values and their weights relative to 2^top, the largest score so far in log2 units.

It begins as (0, 0, -inf), which is also what hidden keys alone leave. Rows are dimension 0 where acc has columns too.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite(top):
    """What to take scores relative to: 0 where all of them are -inf, whose difference would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def by_row(x, acc):
    """A number a row as a factor of acc."""
    if len(acc.shape) == 2:
        return x[:, None]
    else:
        return x


@triton.jit
def add_sink(acc, total, top, sink):
    """A sink joins: a key of score `sink`, in log2 units, without a value.

    tl.fma leaves the compiler no choice of what to contract: every kernel of a call then has the same bits.
    """
    new_top = tl.maximum(top, sink)
    base = finite(new_top)
    shrink = tl.exp2(top - base)
    total = tl.fma(total, shrink, tl.exp2(sink - base))
    return acc * by_row(shrink, acc), total, new_top


@triton.jit
def divisor(total):
    """What acc is divided by in the end; 1 where there is no weight."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def log_sum(total, top, UNIT: tl.constexpr):
    """The logarithm of the sum of all weights, in log2 units times UNIT; -inf where there is none."""
    found = top + tl.log2(divisor(total))
    if UNIT != 1.0:
        found *= UNIT
    return tl.where(total == 0.0, float("-inf"), found)
