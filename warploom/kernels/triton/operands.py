"""fp32 matrices as operands of products in the inputs' dtype: fp16 needs them scaled, the others do not."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(x):
    """The power of two below a positive x; 1 where x is 0, subnormal, infinite or NaN."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def operand(x, dtype: tl.constexpr):
    """An fp32 matrix as a product's operand, and what the product is to be multiplied by.

    fp16 holds neither large states nor small gradients: there the operand is the matrix over a power of two near its largest
    element.
    """
    if dtype == tl.float16:
        factor = power_of_two(tl.max(tl.max(tl.abs(x), 1), 0))
        return (x / factor).to(dtype), factor
    else:
        return x.to(dtype), 1.0


@triton.jit
def times(product, factor, dtype: tl.constexpr):
    """The product of an `operand`, scaled back."""
    if dtype == tl.float16:
        return product * factor
    else:
        return product
