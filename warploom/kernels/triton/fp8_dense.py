"""The kernel that makes FP8 numbers of dense bf16 q, k and v, a scale a block: that of `fp8.quantize_kernel`, as a loop.

A program goes from tile to tile. Copies of later tiles to shared memory are under way meanwhile, products read them there,
and what a thread has of their results are sixteen neighbours of a row, whose bytes it stores at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.fp8 import BLOCK, DOMINATES, _product, e4m3_bits, e4m3_number, scale_of
from warploom.kernels.triton.numerics import INTERPRETED

WIDTH = tl.constexpr(64)  # columns of a slice
# v's numbers are read as pairs, and q's and k's one by one.
PAIRS = tl.constexpr(32)  # of a slice
STEP = tl.constexpr(8)  # numbers in 16 bytes, of which strides are multiples
STAGES = tl.constexpr(3)  # of copies: two tiles are asked for ahead
SMALL, LIFT = tl.constexpr(2.0**-100), tl.constexpr(2.0**60)  # a divisor near what is subnormal, and what brings it away


@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
        "rows_q", "rows_k", "sixteens", "heads_q", "heads_kv", "tiles_q", "tiles_k",
    ]
)  # fmt: skip
def quantize_dense_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    matrix_ptr,
    stride_qb: tl.int64,
    stride_qs: tl.int64,
    stride_qh: tl.int64,
    stride_kb: tl.int64,
    stride_ks: tl.int64,
    stride_kh: tl.int64,
    stride_vb: tl.int64,
    stride_vs: tl.int64,
    stride_vh: tl.int64,
    rows_q,
    rows_k,
    sixteens,
    heads_q,
    heads_kv,
    tiles_q,
    tiles_k,
    SLICES: tl.constexpr,
    NORM: tl.constexpr,
    AGAIN: tl.constexpr,
    WARPS: tl.constexpr,
):
    """As `fp8.quantize_kernel`, of q, k and v with SLICES · 64 columns and strides in units of 16 bytes.

    A tile is a block of rows of one head. v's are dealt out from the program on at which those of q and k end. AGAIN, of at
    most two slices: rows are rounded twice. WARPS is what the kernel is compiled for.
    """
    first, step = tl.program_id(0), tl.num_programs(0)
    DIM: tl.constexpr = SLICES * WIDTH
    r, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    # A thread has two of each eight columns of a product. So the matrix's columns lie apart, and are neighbours in a thread.
    near = column // 2 % 4 * 16 + column // 8 * 2 + column % 2
    at = matrix_ptr + column[:, None] * WIDTH + near[None, :]
    m0 = tl.load(at)
    m1, m2, m3 = m0, m0, m0
    if SLICES >= 2:
        m1 = tl.load(at + WIDTH * WIDTH)
    if SLICES == 4:
        m2 = tl.load(at + 2 * WIDTH * WIDTH)
        m3 = tl.load(at + 3 * WIDTH * WIDTH)
    nothing = tl.zeros((BLOCK, WIDTH), tl.float32)
    # Row and column of numbers in the order in which threads have them.
    place = tl.arange(0, BLOCK * WIDTH)
    own_row, own_column = _row(place // WIDTH, WARPS), place % WIDTH
    rotated = tiles_q + tiles_k
    for tile in tl.range(first, rotated, step, num_stages=STAGES):
        of_q = tile < tiles_q
        heads = tl.where(of_q, heads_q, heads_kv)
        rows = tl.where(of_q, rows_q, rows_k)
        stride_b, stride_s = tl.where(of_q, stride_qb, stride_kb), tl.where(of_q, stride_qs, stride_ks)
        sequence, row, head = _tile(tl.where(of_q, tile, tile - tiles_q), rows, heads)
        x_ptr = tl.where(of_q, q_ptr, k_ptr)
        x_ptr += (sequence * stride_b + row * stride_s + head * tl.where(of_q, stride_qh, stride_kh)) * STEP
        x_ptr = tl.multiple_of(x_ptr, 16) + r[:, None] * (stride_s * STEP) + column[None, :]
        read = (r < rows - row)[:, None]
        x0 = tl.load(x_ptr, mask=read, other=0.0)
        x1, x2, x3 = x0, x0, x0
        if SLICES >= 2:
            x1 = tl.load(x_ptr + WIDTH, mask=read, other=0.0)
        if SLICES == 4:
            x2 = tl.load(x_ptr + 2 * WIDTH, mask=read, other=0.0)
            x3 = tl.load(x_ptr + 3 * WIDTH, mask=read, other=0.0)
        if AGAIN:
            key = _channels(x0, 0)
            if SLICES == 2:
                key = tl.maximum(key, _channels(x1, 1))
            key = tl.max(key, 1)
        a = _product(x0, m0, nothing)
        b, c, d = a, a, a
        if SLICES >= 2:
            b = _product(x1, m1, nothing)
        if SLICES == 4:
            c = _product(x2, m2, nothing)
            d = _product(x3, m3, nothing)
        if SLICES >= 2:
            a, b = a + b, a - b
        if SLICES == 4:
            c, d = c + d, c - d
            a, b, c, d = a + c, b + d, a - c, b - d
        sizes = _sizes(a, b, c, d, False, SLICES)
        if AGAIN:
            sizes = tl.max(sizes, 1)
            key = tl.where(sizes < 0.0, 0, key)  # never, but so keys are read by the threads that have the product's rows
            top, most = tl.reduce((sizes, key), 0, _larger)
        else:
            top, most = tl.max(sizes), 0
        if not (top < float("inf")):
            top = tl.max(_sizes(a, b, c, d, True, SLICES))
        scale = scale_of(top * NORM)
        tl.store(tl.where(of_q, q_scale_ptr, k_scale_ptr) + _block(sequence, row, rows) * heads + head, scale)
        lift = tl.where(scale < SMALL, LIFT, 1.0)
        if SLICES == 2:
            a, b = a * (NORM * lift), b * (NORM * lift)
            divisor = scale * lift
        else:  # the factor is a power of two
            divisor = scale * lift * (1.0 / NORM)
            if scale < SMALL:
                a, b, c, d = a * LIFT, b * LIFT, c * LIFT, d * LIFT
        inverse = tl.div_rn(1.0, divisor)
        out_ptr = tl.where(of_q, q_out_ptr, k_out_ptr) + ((sequence.to(tl.int64) * rows + row) * heads + head) * DIM
        out = tl.multiple_of(out_ptr, 16) + own_row * (heads * DIM) + own_column
        kept = own_row < rows - row
        least = tl.where(of_q, -1.0, scale * DOMINATES)  # every row of q is rounded again
        if AGAIN and (most & 0x7FFF0000) > least.to(tl.int32, bitcast=True):
            keys = tl.permute(tl.reshape(key, (BLOCK // (16 * WARPS), WARPS, 2, 8)), (0, 2, 1, 3))
            keys = tl.reshape(keys, (BLOCK,))[:, None, None]
            _write_again(out, a, b, keys, divisor, inverse, kept, least, SLICES, WARPS)
        else:
            _write(out, a, b, c, d, divisor, inverse, kept, SLICES, WARPS)
    first -= rotated % step
    first = tl.where(first < 0, first + step, first)
    padded = sixteens.to(tl.int64) * 4  # fours of rows
    # A thread has a tile's rows that are a quarter of it apart: four neighbours, whose bytes are then one word.
    fours = r % (BLOCK // 4) * 4 + r // (BLOCK // 4)
    pair, four = tl.arange(0, PAIRS), tl.arange(0, BLOCK // 4)
    v_ptr, v_out_ptr = v_ptr.to(tl.pointer_type(tl.int32)), v_out_ptr.to(tl.pointer_type(tl.int32))
    for tile in tl.range(first, tiles_k, step, num_stages=STAGES):
        sequence, row, head = _tile(tile, rows_k, heads_kv)
        x_ptr = v_ptr + (sequence * stride_vb + row * stride_vs + head * stride_vh) * (STEP // 2)
        x_ptr = tl.multiple_of(x_ptr, 16) + fours[:, None] * (stride_vs * (STEP // 2)) + pair[None, :]
        read = (fours < rows_k - row)[:, None]
        a = tl.load(x_ptr, mask=read, other=0)
        b, c, d = a, a, a
        if SLICES >= 2:
            b = tl.load(x_ptr + PAIRS, mask=read, other=0)
        if SLICES == 4:
            c = tl.load(x_ptr + 2 * PAIRS, mask=read, other=0)
            d = tl.load(x_ptr + 3 * PAIRS, mask=read, other=0)
        top = _largest(a, b, c, d, SLICES).to(tl.float32, bitcast=True)
        if not (top < float("inf")):
            even = _sizes(_even(a), _even(b), _even(c), _even(d), True, SLICES)
            top = tl.max(tl.maximum(even, _sizes(_odd(a), _odd(b), _odd(c), _odd(d), True, SLICES)))
        scale = scale_of(top)
        tl.store(v_scale_ptr + _block(sequence, row, rows_k) * heads_kv + head, scale)
        out_ptr = v_out_ptr + (sequence.to(tl.int64) * heads_kv + head) * DIM * padded + row // 4
        out = tl.multiple_of(out_ptr, 16) + tl.arange(0, DIM)[:, None] * padded + four[None, :]
        kept = (four < padded - row // 4)[None, :]
        if scale < SMALL:
            tl.store(out, _turned(a, b, c, d, scale * LIFT, LIFT, SLICES), mask=kept)
        else:
            tl.store(out, _turned(a, b, c, d, scale, 1.0, SLICES), mask=kept)


# Tiles


@triton.jit
def _tile(tile, rows, heads):
    """Sequence, row and head of a tile."""
    slot = tile // heads
    each = tl.cdiv(rows, BLOCK)
    return slot // each, slot % each * BLOCK, tile % heads


@triton.jit
def _block(sequence, row, rows):
    """A tile's block among those of all sequences."""
    return sequence.to(tl.int64) * tl.cdiv(rows, BLOCK) + row // BLOCK


@triton.jit
def _row(i, WARPS: tl.constexpr):
    """Which row of a product is the i-th, if a warp's first eight rows come before all warps' second eight."""
    return i // (16 * WARPS) * (16 * WARPS) + i // 8 % WARPS * 16 + i // (8 * WARPS) % 2 * 8 + i % 8


@triton.jit
def _in_order(y, WARPS: tl.constexpr):
    """A product as (rows by ``_row``, 4, 16): what a thread has of a row lies along the last dimension. Nothing moves."""
    y = tl.reshape(y, (BLOCK // (16 * WARPS), WARPS, 2, 8, 8, 4, 2))
    return tl.reshape(tl.permute(y, (0, 2, 1, 3, 5, 4, 6)), (BLOCK, 4, 16))


@triton.jit
def _even(x):
    """fp32 of the first number of each pair."""
    return (x << 16).to(tl.float32, bitcast=True)


@triton.jit
def _odd(x):
    """fp32 of the second number of each pair."""
    return (x & -65536).to(tl.float32, bitcast=True)


# The largest number


@triton.jit
def _sizes(a, b, c, d, FINITE: tl.constexpr, SLICES: tl.constexpr):
    """The largest of the slices' numbers without signs; NaN where all are, with FINITE 0 where none is finite."""
    size = _size(a, FINITE)
    if SLICES >= 2:
        size = tl.maximum(size, _size(b, FINITE))
    if SLICES == 4:
        size = tl.maximum(size, tl.maximum(_size(c, FINITE), _size(d, FINITE)))
    return size


@triton.jit
def _size(y, FINITE: tl.constexpr):
    size = tl.abs(y)
    if FINITE:
        size = tl.where(size < float("inf"), size, 0.0)
    return size


@triton.jit
def _larger(a, x, b, y):
    return tl.maximum(a, b), tl.maximum(x, y)


@triton.jit
def _largest(a, b, c, d, SLICES: tl.constexpr):
    """Bits of the largest of the slices' pairs of numbers without signs; NaN counts as more than infinity."""
    a &= 0x7FFF7FFF
    if SLICES >= 2:
        a = _most(a, b & 0x7FFF7FFF)
    if SLICES == 4:
        a = _most(a, _most(c & 0x7FFF7FFF, d & 0x7FFF7FFF))
    return tl.max(tl.maximum(a & 0x7FFF0000, a << 16))


@triton.jit
def _most(a, b):
    """The larger of either half of words, which are not negative."""
    if INTERPRETED:
        return tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000) | tl.maximum(a & 0x7FFF, b & 0x7FFF)
    else:
        return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


# Rounding


@triton.jit
def _channels(x, AT: tl.constexpr):
    """Of slice AT's numbers the size, and below it how far its channel is from 255."""
    far = 255 - AT * WIDTH - tl.arange(0, WIDTH)[None, :]
    return ((x.to(tl.int16, bitcast=True).to(tl.int32) << 16) & 0x7FFF0000) | far


@triton.jit
def _write_again(
    out, a, b, key, divisor, inverse, kept, least, SLICES: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """``_write``, rows of numbers above ``least`` as `e4m3.rounded_again` rounds them."""
    tl.static_assert(SLICES <= 2, "rows of four slices are rounded once")
    a, b = _in_order(_quotient(a, divisor, inverse), WARPS), _in_order(_quotient(b, divisor, inverse), WARPS)
    again = (key & 0x7FFF0000).to(tl.float32, bitcast=True) > least
    channel = 255 - (key & 255)
    along = _along(channel % WIDTH)
    error = _error_along(a, along)
    # The channel's row of the matrix is one row of the first slice's, with one sign a slice: the Hadamard matrix of slices'. A
    # sign that all slices share falls out, as the row is multiplied by itself.
    of_b = tl.where(channel < WIDTH, 1.0, -1.0)
    if SLICES == 2:
        error += of_b * _error_along(b, along)
    error = tl.where(again & (tl.abs(error) < float("inf")), error * (1.0 / (SLICES * WIDTH)), 0.0)
    tl.store(out, tl.reshape(e4m3_bits(a - error * along), (BLOCK * WIDTH,)), mask=kept)
    if SLICES == 2:
        tl.store(out + WIDTH, tl.reshape(e4m3_bits(b - error * of_b * along), (BLOCK * WIDTH,)), mask=kept)


@triton.jit
def _along(channel):
    """Rows of the Hadamard matrix of 64: -1 where column and channel share an odd number of binary digits that are 1."""
    four, sixteen = tl.arange(0, 4)[None, :, None], tl.arange(0, 16)[None, None, :]
    low = (-(channel & 1) & 0xAAAA) ^ (-(channel >> 1 & 1) & 0xCCCC)
    low ^= (-(channel >> 2 & 1) & 0xF0F0) ^ (-(channel >> 3 & 1) & 0xFF00)
    high = (channel >> 4 & four & 1) ^ (channel >> 5 & four >> 1 & 1)
    return (((low ^ -high) << (31 - sixteen) & -2147483648) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _error_along(z, along):
    """What rounding adds to quotients, times ``along``, summed over columns."""
    return tl.sum(tl.sum((e4m3_number(z) - z) * along, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _write(out, a, b, c, d, divisor, inverse, kept, SLICES: tl.constexpr, WARPS: tl.constexpr):
    """e4m3 of the slices' numbers over ``divisor``."""
    tl.store(out, _rounded(a, divisor, inverse, WARPS), mask=kept)
    if SLICES >= 2:
        tl.store(out + WIDTH, _rounded(b, divisor, inverse, WARPS), mask=kept)
    if SLICES == 4:
        tl.store(out + 2 * WIDTH, _rounded(c, divisor, inverse, WARPS), mask=kept)
        tl.store(out + 3 * WIDTH, _rounded(d, divisor, inverse, WARPS), mask=kept)


@triton.jit
def _rounded(y, divisor, inverse, WARPS: tl.constexpr):
    """Bits of e4m3(y / divisor), in order."""
    return tl.reshape(_in_order(e4m3_bits(_quotient(y, divisor, inverse)), WARPS), (BLOCK * WIDTH,))


@triton.jit
def _turned(a, b, c, d, divisor, BY: tl.constexpr, SLICES: tl.constexpr):
    """e4m3(x * BY / divisor) of the slices' pairs of v, columns as rows of words of four numbers."""
    inverse = tl.div_rn(1.0, divisor)
    words = _words(a, divisor, inverse, BY)
    if SLICES >= 2:
        words = _beside(words, _words(b, divisor, inverse, BY))
    if SLICES == 4:
        words = _beside(words, _beside(_words(c, divisor, inverse, BY), _words(d, divisor, inverse, BY)))
    return tl.trans(words)


@triton.jit
def _beside(a, b):
    both = tl.permute(tl.join(a, b), (0, 2, 1))
    return tl.reshape(both, (both.shape[0], 2 * both.shape[2]))


@triton.jit
def _words(x, divisor, inverse, BY: tl.constexpr):
    """Words of the bytes of four neighbouring rows, which are a quarter of the tile apart, (words, columns)."""
    QUARTER: tl.constexpr = x.shape[0] // 4
    first, second = tl.split(tl.permute(tl.reshape(x, (2, 2, QUARTER, x.shape[1])), (2, 3, 1, 0)))
    a, b = tl.split(first)
    c, d = tl.split(second)
    even = _word(_even(a), _even(b), _even(c), _even(d), divisor, inverse, BY)
    return tl.interleave(even, _word(_odd(a), _odd(b), _odd(c), _odd(d), divisor, inverse, BY))


@triton.jit
def _word(a, b, c, d, divisor, inverse, BY: tl.constexpr):
    """e4m3(y * BY / divisor) of four numbers."""
    a, b = _quotient(a * BY, divisor, inverse), _quotient(b * BY, divisor, inverse)
    c, d = _quotient(c * BY, divisor, inverse), _quotient(d * BY, divisor, inverse)
    if INTERPRETED:
        low = e4m3_bits(a).to(tl.int32) | (e4m3_bits(b).to(tl.int32) << 8)
        return low | (e4m3_bits(c).to(tl.int32) << 16) | (e4m3_bits(d).to(tl.int32) << 24)
    else:
        code: tl.constexpr = """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }"""
        return tl.inline_asm_elementwise(code, "=r,f,f,f,f", [a, b, c, d], tl.int32, True, 1)


@triton.jit
def _quotient(y, divisor, inverse):
    """y / divisor, corrected as that of `fp8._quotient`."""
    z = y * inverse
    rest = tl.fma(z, tl.broadcast_to(-divisor, y.shape), y)
    return tl.fma(rest, tl.broadcast_to(inverse, y.shape), z)
