"""e4m3 caches beside queries of 16 bits: numbers are read in pairs, widened to fp16 in registers, and multiplied in fp16.

A pair is an int16, so that shared memory gives it out as it gives out a number of 16 bits, transposed where values need it;
by single bytes Triton 3.6 would read values one at a time. Its low byte is an even column, its high byte the odd one behind
it, so each tile is two operands: one of even columns, one of odd ones. fp16 holds e4m3 exactly, NaN too, and the conversion to
bf16 takes several instructions, one of them at a quarter of the rate.

What fp16 cannot hold are queries of any size, and weights times a scale a token. Queries are halved until their row's largest
number is near 2^15 (`halves`). A scale f · 2^e gives its e to the exponent of its key's weight and its f to the product
(`weigh_scaled`): of a softmax over s + e the weights are at most 1, and 2^-e gives back what the total needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.decode.triton.parts import weighed
from warploom.kernels.triton.numerics import INTERPRETED, clamp
from warploom.kernels.triton.operands import power_of_two
from warploom.kernels.triton.softmax import finite

# Weights reach up to 2^14, so that those of 2^-28 of the largest one are still normal numbers in fp16.
_ROOM = tl.constexpr(14)
_EXPONENT = tl.constexpr(0x7F800000)  # its bits in fp32
_ONE = tl.constexpr(0x3F800000)
_STEP = tl.constexpr(0x00800000)
_LEAST = tl.constexpr(0x1F800000)  # 2^-64
_MOST = tl.constexpr(0x7E800000)  # 2^126


@triton.jit
def widened(pairs):
    """The numbers of the low and of the high bytes of int16 pairs, in fp16."""
    if INTERPRETED:
        return _number(pairs & 0xFF), _number((pairs >> 8) & 0xFF)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 sorted; .reg .b16 low, high; prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {low, high}, sorted; "
            "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [pairs],
            (tl.float16, tl.float16),
            True,
            2,
        )


@triton.jit
def _number(byte):
    """What `widened` gives of a byte in Triton's interpreter, which takes NaN for 480."""
    x = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), x)


@triton.jit
def columns(ptr, offset, live, DIM: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """Even and odd columns, fp16, of a tile of rows that start at ``offset`` (rows, 1) and have DIM numbers, in tiles of D.

    WHOLE: ``ptr`` points to pairs; otherwise to int8, anywhere.
    """
    pair = tl.arange(0, D // 2)
    at = offset + pair[None, :]
    mask = live[:, None] & (pair < DIM // 2)[None, :]
    if WHOLE:
        pairs = tl.load(ptr + at, mask=mask, other=0, eviction_policy="evict_first")
    else:
        at = tl.where(mask, at + pair[None, :], 0)  # where nothing is live, the first number is read
        pairs = tl.where(mask, _byte(ptr + at) | (_byte(ptr + at + 1) << 8), 0)
    return widened(pairs)


@triton.jit
def _byte(pointers):
    """A byte as int16. A load of 8 bits would have tensor cores take the columns of a product in another order."""
    if INTERPRETED:
        return tl.load(pointers).to(tl.int16) & 0xFF
    else:
        return tl.inline_asm_elementwise(
            "ld.global.u8 $0, [$1];", "=h,l", [pointers.to(tl.int64)], tl.int16, is_pure=True, pack=1
        )


@triton.jit
def rows_of_queries(ptr, offset, live, DIM: tl.constexpr, D: tl.constexpr):
    """Rows of queries as `halves`."""
    at = 2 * tl.arange(0, D // 2)
    mask = live[:, None] & (at < DIM)[None, :]
    even = tl.load(ptr + offset[:, None] + at[None, :], mask=mask, other=0.0)
    odd = tl.load(ptr + offset[:, None] + at[None, :] + 1, mask=mask, other=0.0)
    return halves(even, odd)


@triton.jit
def halves(even, odd):
    """Even and odd columns of rows in fp16, over a power of two, and that power of each row."""
    even = even.to(tl.float32)
    odd = odd.to(tl.float32)
    top = power_of_two(tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1)))
    # One after the other: the quotient of both powers may lie outside fp32.
    even = even / top[:, None] * 16384.0
    odd = odd / top[:, None] * 16384.0
    return even.to(tl.float16), odd.to(tl.float16), top / 16384.0


@triton.jit
def parted(scale):
    """A scale as f · 2^e with |f| in [1, 2): f, e and 2^-e. Of infinity, NaN and scales below 2^-64 e is -64."""
    # A step up, the exponent of infinity and NaN is a negative number.
    power = (scale.to(tl.int32, bitcast=True) & _EXPONENT) + _STEP
    # Within these bounds a sum of 2^-e times weights, and each of them, is a normal number.
    power = clamp(power, _LEAST + _STEP, _MOST + _STEP) - _STEP
    e = ((power >> 23) - 127).to(tl.float32)
    inverse = (-power + 2 * _ONE).to(tl.float32, bitcast=True)
    return scale * inverse, e, inverse


@triton.jit
def weigh_scaled(s, e, inverse, f, top, total, taken):
    """What `parts.weigh` gives, of weights times a scale f · 2^e a key, in fp16; ``inverse`` is 2^-e.

    ``taken``: rows that may hold queries, or None where all do. Of the others nothing is computed that no other row shares.
    """
    s = _of(taken, s + e[None, :], float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) - _ROOM)
    base = finite(new_top)
    w = tl.exp2(s - base[:, None])
    rescale = tl.exp2(top - base)
    total = weighed(_of(taken, w * inverse[None, :], 0.0), total, rescale)
    return _of(taken, w * f[None, :], 0.0).to(tl.float16), rescale, total, new_top


@triton.jit
def _of(rows, x, other):
    """x of these rows, all where they are None."""
    if rows is None:
        return x
    else:
        return tl.where(rows[:, None], x, other)
