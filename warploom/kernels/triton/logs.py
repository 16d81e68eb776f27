"""Logs of what is left of sums that fade, and their sums within a chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import INTERPRETED

# exp() of it is 0 in fp32, its subnormal numbers among them.
LOWEST = tl.constexpr(-128.0)


@triton.jit
def held(logs):
    """Logs from LOWEST on, so that no difference of their sums is one of infinities; NaN stays, which a maximum would lose."""
    return tl.where(logs < LOWEST, LOWEST, logs)


@triton.jit
def sums_in_log2(logs):
    """Sums of logs, in log2, up to each row of a chunk of rows, exact to the last bit."""
    return (tl.cumsum(held(logs).to(tl.float64), 0) * 1.4426950408889634).to(tl.float32)


@triton.jit
def exp2(x):
    """2^x, 0 where it is subnormal."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
