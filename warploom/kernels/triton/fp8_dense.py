"""The kernel that makes FP8 numbers of dense bf16 q, k and v, a scale a block: that of `fp8.quantize_kernel`, as a loop.

At head_dim 256 a tile's rotated numbers take half of a multiprocessor's registers, so that one program runs on each. It goes
from tile to tile and asks for the next one's numbers before it works on its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.fp8 import BLOCK, DOMINATES, _product, e4m3_bits, e4m3_number, scale_of
from warploom.kernels.triton.numerics import INTERPRETED

WIDTH = tl.constexpr(64)  # columns of a slice
# Numbers are read as pairs: one by one, those that are asked for ahead would take twice the registers.
PAIRS = tl.constexpr(32)  # of a slice
STEP = tl.constexpr(4)  # pairs in 16 bytes, of which strides are multiples
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
    EARLY: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """As `fp8.quantize_kernel`, of q, k and v with SLICES · 64 columns and strides in units of 16 bytes.

    A tile is a block of rows of one head. v's are dealt out from the program on at which those of q and k end. With EARLY the
    next tile is asked for before a tile is rounded, else when it is written. AGAIN, of at most two slices: rows are rounded
    twice.
    """
    first, step = tl.program_id(0), tl.num_programs(0)
    q_ptr, k_ptr = q_ptr.to(tl.pointer_type(tl.int32)), k_ptr.to(tl.pointer_type(tl.int32))
    v_ptr = v_ptr.to(tl.pointer_type(tl.int32))
    DIM: tl.constexpr = SLICES * WIDTH
    r, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    at = matrix_ptr + column[:, None] * WIDTH + column[None, :]
    m0 = tl.load(at)
    m1, m2, m3 = m0, m0, m0
    if SLICES >= 2:
        m1 = tl.load(at + WIDTH * WIDTH)
    if SLICES == 4:
        m2 = tl.load(at + 2 * WIDTH * WIDTH)
        m3 = tl.load(at + 3 * WIDTH * WIDTH)
    nothing = tl.zeros((BLOCK, WIDTH), tl.float32)
    rotated = tiles_q + tiles_k
    sequence, row, head, x0, x1, x2, x3 = _rotated_tile(
        q_ptr, k_ptr, first, tiles_q, rotated, rows_q, rows_k, heads_q, heads_kv, stride_qb, stride_qs, stride_qh,
        stride_kb, stride_ks, stride_kh, r, SLICES,
    )  # fmt: skip
    for tile in tl.range(first, rotated, step, num_stages=1):
        of_q = tile < tiles_q
        heads = tl.where(of_q, heads_q, heads_kv)
        rows = tl.where(of_q, rows_q, rows_k)
        scale_ptr = tl.where(of_q, q_scale_ptr, k_scale_ptr) + _block(sequence, row, rows) * heads + head
        out_ptr = tl.where(of_q, q_out_ptr, k_out_ptr) + ((sequence.to(tl.int64) * rows + row) * heads + head) * DIM
        out = tl.multiple_of(out_ptr, 16) + r[:, None] * (heads * DIM) + column[None, :]
        kept = (r < rows - row)[:, None]
        largest = 0
        if AGAIN and not of_q:  # every row of q is rounded again
            largest = _largest(x0, x1, SLICES)
        a = _product(_numbers(x0), m0, nothing)
        b, c, d = a, a, a
        if SLICES >= 2:
            b = _product(_numbers(x1), m1, nothing)
        if SLICES == 4:
            c = _product(_numbers(x2), m2, nothing)
            d = _product(_numbers(x3), m3, nothing)
        if EARLY:
            sequence, row, head, x0, x1, x2, x3 = _rotated_tile(
                q_ptr, k_ptr, tile + step, tiles_q, rotated, rows_q, rows_k, heads_q, heads_kv, stride_qb, stride_qs, stride_qh,
                stride_kb, stride_ks, stride_kh, r, SLICES,
            )  # fmt: skip
        if SLICES >= 2:
            a, b = a + b, a - b
        if SLICES == 4:
            c, d = c + d, c - d
            a, b, c, d = a + c, b + d, a - c, b - d
        top = tl.max(_sizes(a, b, c, d, False, SLICES))
        if not (top < float("inf")):
            top = tl.max(_sizes(a, b, c, d, True, SLICES))
        scale = scale_of(top * NORM)
        tl.store(scale_ptr, scale)
        if SLICES == 2:
            a *= NORM
            b *= NORM
            divisor = scale
        else:  # the factor is a power of two
            divisor = scale * (1.0 / NORM)
        if divisor < SMALL:
            a, b, c, d, divisor = a * LIFT, b * LIFT, c * LIFT, d * LIFT, divisor * LIFT
        if AGAIN:
            least = tl.where(of_q, -1.0, scale * DOMINATES)
            if largest > least.to(tl.int32, bitcast=True):
                _, _, _, w0, w1, _, _ = _rotated_tile(
                    q_ptr, k_ptr, tile, tiles_q, rotated, rows_q, rows_k, heads_q, heads_kv, stride_qb, stride_qs, stride_qh,
                    stride_kb, stride_ks, stride_kh, r, SLICES,
                )  # fmt: skip
                _write_again(out, a, b, w0, w1, m0, divisor, kept, least, SLICES)
                if EARLY:  # once more: kept, they would take registers here
                    sequence, row, head, x0, x1, x2, x3 = _rotated_tile(
                        q_ptr, k_ptr, tile + step, tiles_q, rotated, rows_q, rows_k, heads_q, heads_kv, stride_qb, stride_qs,
                        stride_qh, stride_kb, stride_ks, stride_kh, r, SLICES,
                    )  # fmt: skip
            else:
                _write(out, a, b, c, d, divisor, kept, SLICES)
        else:
            _write(out, a, b, c, d, divisor, kept, SLICES)
        if not EARLY:
            sequence, row, head, x0, x1, x2, x3 = _rotated_tile(
                q_ptr, k_ptr, tile + step, tiles_q, rotated, rows_q, rows_k, heads_q, heads_kv, stride_qb, stride_qs, stride_qh,
                stride_kb, stride_ks, stride_kh, r, SLICES,
            )  # fmt: skip
    first -= rotated % step
    first = tl.where(first < 0, first + step, first)
    padded = sixteens.to(tl.int64) * 4  # fours of rows
    # A thread has a tile's rows that are a quarter of it apart: four neighbours, whose bytes are then one word.
    fours = r % (BLOCK // 4) * 4 + r // (BLOCK // 4)
    pair, four = tl.arange(0, PAIRS), tl.arange(0, BLOCK // 4)
    v_out_ptr = v_out_ptr.to(tl.pointer_type(tl.int32))
    sequence, row, head, x0, x1, x2, x3 = _tile(
        v_ptr, first, first < tiles_k, rows_k, heads_kv, stride_vb, stride_vs, stride_vh, fours, SLICES
    )
    for tile in tl.range(first, tiles_k, step, num_stages=1):
        scale_ptr = v_scale_ptr + _block(sequence, row, rows_k) * heads_kv + head
        out_ptr = v_out_ptr + (sequence.to(tl.int64) * heads_kv + head) * DIM * padded + row // 4
        out = tl.multiple_of(out_ptr, 16) + 2 * pair[:, None] * padded + four[None, :]
        kept = (four < padded - row // 4)[None, :]
        a, b, c, d = x0, x1, x2, x3
        sequence, row, head, x0, x1, x2, x3 = _tile(
            v_ptr, tile + step, tile + step < tiles_k, rows_k, heads_kv, stride_vb, stride_vs, stride_vh, fours, SLICES
        )
        top = tl.max(_pair_sizes(a, b, c, d, False, SLICES))
        if not (top < float("inf")):
            top = tl.max(_pair_sizes(a, b, c, d, True, SLICES))
        scale = scale_of(top)
        tl.store(scale_ptr, scale)
        if scale < SMALL:
            _write_turned(out, padded, a, b, c, d, scale * LIFT, kept, LIFT, SLICES)
        else:
            _write_turned(out, padded, a, b, c, d, scale, kept, 1.0, SLICES)


# Tiles


@triton.jit
def _rotated_tile(
    q_ptr, k_ptr, tile, tiles_q, tiles, rows_q, rows_k, heads_q, heads_kv, qb, qs, qh, kb, ks, kh, r, SLICES: tl.constexpr
):
    """``_tile`` of q, and of k behind it."""
    of_q = tile < tiles_q
    return _tile(
        tl.where(of_q, q_ptr, k_ptr), tl.where(of_q, tile, tile - tiles_q), tile < tiles, tl.where(of_q, rows_q, rows_k),
        tl.where(of_q, heads_q, heads_kv), tl.where(of_q, qb, kb), tl.where(of_q, qs, ks), tl.where(of_q, qh, kh), r, SLICES,
    )  # fmt: skip


@triton.jit
def _tile(x_ptr, tile, inside, rows, heads, sb, ss, sh, r, SLICES: tl.constexpr):
    """Sequence, row and head of a tile, and pairs of rows ``r`` of its slices; zeros where it is not ``inside``."""
    slot = tile // heads
    head = tile % heads
    each = tl.cdiv(rows, BLOCK)
    sequence = slot // each
    row = (slot % each) * BLOCK
    pair = tl.arange(0, PAIRS)
    x_ptr = tl.multiple_of(x_ptr + (sequence * sb + row * ss + head * sh) * STEP, 16)
    x_ptr += r[:, None] * (ss * STEP) + pair[None, :]
    read = (r < tl.where(inside, rows - row, 0))[:, None]
    x0 = tl.load(x_ptr, mask=read, other=0)
    x1, x2, x3 = x0, x0, x0
    if SLICES >= 2:
        x1 = tl.load(x_ptr + PAIRS, mask=read, other=0)
    if SLICES == 4:
        x2 = tl.load(x_ptr + 2 * PAIRS, mask=read, other=0)
        x3 = tl.load(x_ptr + 3 * PAIRS, mask=read, other=0)
    return sequence, row, head, x0, x1, x2, x3


@triton.jit
def _block(sequence, row, rows):
    """A tile's block among those of all sequences."""
    return sequence.to(tl.int64) * tl.cdiv(rows, BLOCK) + row // BLOCK


@triton.jit
def _numbers(x):
    """bf16 columns of pairs."""
    even = (x & 65535).to(tl.int16).to(tl.bfloat16, bitcast=True)
    odd = (x >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.interleave(even, odd)


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
def _pair_sizes(a, b, c, d, FINITE: tl.constexpr, SLICES: tl.constexpr):
    """``_sizes`` of pairs."""
    even = _sizes(_even(a), _even(b), _even(c), _even(d), FINITE, SLICES)
    return tl.maximum(even, _sizes(_odd(a), _odd(b), _odd(c), _odd(d), FINITE, SLICES))


@triton.jit
def _size(y, FINITE: tl.constexpr):
    size = tl.abs(y)
    if FINITE:
        size = tl.where(size < float("inf"), size, 0.0)
    return size


@triton.jit
def _largest(a, b, SLICES: tl.constexpr):
    """Bits of the largest of the slices' pairs of numbers without signs; NaN counts as more than infinity."""
    a &= 0x7FFF7FFF
    if SLICES == 2:
        a = _most(a, b & 0x7FFF7FFF)
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
def _write_again(out, a, b, x0, x1, m0, divisor, kept, least, SLICES: tl.constexpr):
    """``_write``, rows of numbers above ``least`` as `e4m3.rounded_again` rounds them; ``x0``, ``x1``: those, in pairs."""
    tl.static_assert(SLICES <= 2, "rows of four slices are rounded once")
    key = _channels(x0, 0)
    if SLICES == 2:
        key = tl.maximum(key, _channels(x1, 1))
    key = tl.max(key, 1)
    again = (key & 0x7FFF0000).to(tl.float32, bitcast=True) > least
    channel = 255 - (key & 255)
    place = channel % WIDTH
    # The channel's row of the matrix is one row of the first slice's, with one sign a slice: the Hadamard matrix of slices'. A
    # sign that all slices share falls out, as the row is multiplied by itself.
    unit = tl.where(tl.arange(0, WIDTH)[None, :] == place[:, None], 1.0, 0.0).to(tl.bfloat16)
    along = _product(unit, m0, tl.zeros((BLOCK, WIDTH), tl.float32))
    inverse = tl.div_rn(1.0, divisor)
    error = _error_along(a, along, divisor, inverse)
    of_b = tl.where(channel < WIDTH, 1.0, -1.0)
    if SLICES == 2:
        error += of_b * _error_along(b, along, divisor, inverse)
    error = tl.where(again & (tl.abs(error) < float("inf")), error * (1.0 / (SLICES * WIDTH)), 0.0)
    tl.store(out, _rounded_less(a, along, error, divisor, inverse), mask=kept)
    if SLICES == 2:
        tl.store(out + WIDTH, _rounded_less(b, along, error * of_b, divisor, inverse), mask=kept)


@triton.jit
def _channels(x, AT: tl.constexpr):
    """Of slice AT's pairs the larger number without its sign, and below it how far its channel is from 255."""
    far = 255 - AT * WIDTH - 2 * tl.arange(0, PAIRS)[None, :]
    return tl.maximum((x & 0x7FFF0000) | (far - 1), ((x << 16) & 0x7FFF0000) | far)


@triton.jit
def _error_along(y, along, divisor, inverse):
    """What rounding adds to the quotients of y, times ``along``, summed over columns."""
    z = _quotient(y, divisor, inverse)
    return tl.sum((e4m3_number(z) - z) * along, 1)


@triton.jit
def _rounded_less(y, along, error, divisor, inverse):
    return e4m3_bits(_quotient(y, divisor, inverse) - error[:, None] * along)


@triton.jit
def _write(out, a, b, c, d, divisor, kept, SLICES: tl.constexpr):
    """e4m3 of the slices' numbers over ``divisor``."""
    inverse = tl.div_rn(1.0, divisor)
    tl.store(out, _rounded(a, divisor, inverse, 1.0), mask=kept)
    if SLICES >= 2:
        tl.store(out + WIDTH, _rounded(b, divisor, inverse, 1.0), mask=kept)
    if SLICES == 4:
        tl.store(out + 2 * WIDTH, _rounded(c, divisor, inverse, 1.0), mask=kept)
        tl.store(out + 3 * WIDTH, _rounded(d, divisor, inverse, 1.0), mask=kept)


@triton.jit
def _write_turned(out, padded, a, b, c, d, divisor, kept, BY: tl.constexpr, SLICES: tl.constexpr):
    """``_write`` of pairs of v, columns as rows of ``padded`` words of four numbers."""
    inverse = tl.div_rn(1.0, divisor)
    _write_pairs(out, padded, a, divisor, inverse, kept, BY)
    if SLICES >= 2:
        _write_pairs(out + WIDTH * padded, padded, b, divisor, inverse, kept, BY)
    if SLICES == 4:
        _write_pairs(out + 2 * WIDTH * padded, padded, c, divisor, inverse, kept, BY)
        _write_pairs(out + 3 * WIDTH * padded, padded, d, divisor, inverse, kept, BY)


@triton.jit
def _write_pairs(out, padded, x, divisor, inverse, kept, BY: tl.constexpr):
    tl.store(out, tl.trans(_fours(_rounded(_even(x), divisor, inverse, BY))), mask=kept)
    tl.store(out + padded, tl.trans(_fours(_rounded(_odd(x), divisor, inverse, BY))), mask=kept)


@triton.jit
def _fours(bits):
    """Words of the bytes of four neighbouring rows, which are a quarter of the tile apart."""
    QUARTER: tl.constexpr = bits.shape[0] // 4
    place = tl.arange(0, bits.shape[0])[:, None] // QUARTER * 8
    return tl.sum(tl.reshape(bits.to(tl.int32) << place, (4, QUARTER, bits.shape[1])), 0)


@triton.jit
def _rounded(y, divisor, inverse, BY: tl.constexpr):
    """Bits of e4m3(y * BY / divisor)."""
    return e4m3_bits(_quotient(y * BY, divisor, inverse))


@triton.jit
def _quotient(y, divisor, inverse):
    """y / divisor, corrected as that of `fp8._quotient`."""
    z = y * inverse
    return tl.fma(tl.fma(-z, tl.broadcast_to(divisor, y.shape), y), tl.broadcast_to(inverse, y.shape), z)
