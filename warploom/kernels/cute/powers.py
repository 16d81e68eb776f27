"""Powers of two by polynomials, on the pipes that add and multiply, beside those of the special function unit.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.kernels.cute.instructions import assembly

FLOOR = 120.0  # powers below 2^-FLOOR count as that
# What rounds a sum to an integer n, -FLOOR <= n <= 0, and leaves the exponent field of 2^n in its last eight bits.
ROUNDER = float(3 << 22) + 127.0
# Coefficients of 2^x for |x| <= 1/2, lowest first, of least relative error: 2.7e-6 in fp32.
COEFFICIENTS = (0.9999992614457123, 0.6931218147366893, 0.24024744827863667, 0.055917860319387246, 0.009570101911169622)


@dsl_user_op
def saturated(x: Float32, factor: Float32, add: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x · factor + add, cut to [0, 1]; NaN gives 0."""
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, factor, add)]
    return Float32(assembly(T.f32(), values, "fma.rn.ftz.sat.f32 $0, $1, $2, $3;", "=f,f,f,f"))


@dsl_user_op
def at_most_zero(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The lesser of x and 0; NaN stays NaN."""
    return Float32(assembly(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "min.NaN.f32 $0, $1, 0f00000000;", "=f,f"))


@dsl_user_op
def fused(x: Float32, y: Float32, z: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x · y + z."""
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, y, z)]
    return Float32(assembly(T.f32(), values, "fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f"))


@dsl_user_op
def exponent_shifted(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The last eight bits of a word as an exponent field: of ROUNDER + n, 2^n."""
    text = "{ .reg .b32 a; mov.b32 a, $1; shl.b32 a, a, 23; mov.b32 $0, a; }"
    return Float32(assembly(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], text, "=f,f"))


def add_power(total: Any, x: Any, factor: Any, add: Any, rounder: Any) -> Any:
    """``total`` plus 2^-(FLOOR · y), where y is x · factor + add cut to [0, 1]: of a polynomial.

    ``rounder`` is ROUNDER; where it is NaN, so is the result.
    """
    y = saturated(x, factor, add)
    moved = fused(y, Float32(-FLOOR), rounder)
    rest = fused(y, Float32(-FLOOR), Float32(ROUNDER) - moved)
    *others, last = COEFFICIENTS
    value = Float32(last)
    for coefficient in reversed(others):
        value = fused(value, rest, Float32(coefficient))
    return fused(value, exponent_shifted(moved), total)
