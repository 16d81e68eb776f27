"""The feature maps of linear attention and their slopes, for every Triton kernel that applies them."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import exp

IDENTITY = tl.constexpr(0)
ELU_PLUS_ONE = tl.constexpr(1)
RELU = tl.constexpr(2)
MAPS = {"identity": 0, "elu+1": 1, "relu": 2}  # by the names of warploom.linear.feature_maps


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
def phi_pairs(x):
    """elu(x) + 1 of bf16 numbers in bf16, two at a time: max(x + 1, min(e^x, 1)), also once rounded."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 low, high, one, grown;
            .reg .f32 a, b;
            shl.b32 low, $1, 16;
            and.b32 high, $1, 0xFFFF0000;
            mov.b32 a, low;
            mov.b32 b, high;
            mul.f32 a, a, 0f3FB8AA3B;
            mul.f32 b, b, 0f3FB8AA3B;
            ex2.approx.ftz.f32 a, a;
            ex2.approx.ftz.f32 b, b;
            cvt.rn.bf16x2.f32 $0, b, a;
            mov.b32 one, 0x3F803F80;
            fma.rn.bf16x2 grown, $1, one, one;
            min.NaN.bf16x2 $0, $0, one;
            max.NaN.bf16x2 $0, $0, grown;
        }
        """,
        "=&r,r",
        [x],
        tl.bfloat16,
        True,
        2,
    )


@triton.jit
def only(fx, inside, MAP: tl.constexpr):
    """phi(x) inside, 0 elsewhere, where x was read as 0: only elu + 1 makes something else of it."""
    if MAP == ELU_PLUS_ONE:
        return tl.where(inside, fx, 0.0)
    else:
        return fx


@triton.jit
def through_map(gradient, fx, MAP: tl.constexpr):
    """The gradient of x from that of fx = phi(x); as torch has it, ReLU's passes where x is NaN."""
    if MAP == ELU_PLUS_ONE:
        return gradient * tl.minimum(fx.to(tl.float32), 1.0)
    elif MAP == RELU:
        return tl.where(fx <= 0.0, 0.0, gradient)
    else:
        return gradient
