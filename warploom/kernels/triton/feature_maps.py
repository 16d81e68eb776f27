"""The feature maps of linear attention and their slopes, for every Triton kernel that applies them."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)

IDENTITY = tl.constexpr(0)
ELU_PLUS_ONE = tl.constexpr(1)
RELU = tl.constexpr(2)
MAPS = {"identity": 0, "elu+1": 1, "relu": 2}  # by the names of warploom.linear.feature_maps


@triton.jit
def exp(x):
    """e^x, 0 where it is subnormal: keeping those would take three instructions more."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2E], tl.float32, True, 1)


@triton.jit
def phi(x, MAP: tl.constexpr):
    """phi(x) in fp32."""
    y = x.to(tl.float32)
    if MAP == ELU_PLUS_ONE:
        y = tl.where(y > 0.0, y + 1.0, exp(y))
    elif MAP == RELU:
        # Not a maximum: that would turn a NaN into 0.
        y = tl.where(y < 0.0, 0.0, y)
    return y


@triton.jit
def through_map(gradient, fx, MAP: tl.constexpr):
    """The gradient of x from that of fx = phi(x); as torch has it, ReLU's passes where x is NaN."""
    if MAP == ELU_PLUS_ONE:
        return gradient * tl.minimum(fx.to(tl.float32), 1.0)
    elif MAP == RELU:
        return tl.where(fx <= 0.0, 0.0, gradient)
    else:
        return gradient
