"""Arithmetic that kernels of several families need: bounds, exponentials, products, scores.

Scores are in units of log2, so that exp2 needs no multiply.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def clamp(x, low, high):
    """x within [low, high]; high where low is above it."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def exp(x):
    """e^x, 0 where it is subnormal: keeping those would take three instructions more."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2E], tl.float32, True, 1)


@triton.jit
def tanh(x):
    """An odd polynomial near 0, where 1 - 2 / (e^2x + 1) cancels."""
    square = x * x
    p = 2.06390887954e-2 - 5.70498872745e-3 * square
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    near = x + x * square * p
    far = 1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def narrowed(b):
    """A bias in fp32, in which a finite number, however low, does not become -inf: that hides."""
    if b.dtype == tl.float64:
        b = tl.where((b < -3.0e38) & (b != float("-inf")), -3.0e38, b)
    return b.to(tl.float32)


@triton.jit
def in_log2(b):
    """An fp32 bias in log2 units, finite where it is: what dtypes hold would pass the lowest number, which hides."""
    return tl.maximum(b * LOG2E, -3.0e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def capped(products, scale, softcap):
    """softcap * tanh(scale * products / softcap) in log2 units, and the tanh, of which the derivative is made."""
    bent = tanh(products * (scale / softcap))
    return bent * (softcap * LOG2E), bent


@triton.jit
def dot(a, b, acc):
    """a @ b + acc in fp32, acc None for 0; fp32 operands as three TF32 products, which keep their 24 bits."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def opaque_zeros(M: tl.constexpr, N: tl.constexpr):
    """Zeros for an accumulator of wgmma that the compiler takes for results.

    Known zeros are written into the accumulator's registers wherever a path skips a loop of products. Where such a path meets
    the loop's end ahead of its wait, ptxas gives up and waits for each product before the next (its note C7515).
    """
    zeros = tl.zeros([M, N], tl.float32)
    if not INTERPRETED:
        zeros = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [zeros], tl.float32, False, 1)
    return zeros
