"""The kernel that makes FP8 numbers of q, k and v: rotated, scaled by the largest of a block of rows and head, rounded.

A program takes a block of rows of one head, of q, k or v. Queries and keys are rotated as `warploom.kernels.e4m3.rotate`
does: the inner dimensions of its matrix by tensor cores, in slices of columns, and the outermost steps of the Hadamard matrix
as sums and differences of slices. Numbers are cut into bf16 parts, whose products are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels import e4m3
from warploom.kernels.triton.numerics import INTERPRETED
from warploom.kernels.triton.packed import find_tile

BLOCK = tl.constexpr(128)  # rows that share a scale
LARGEST = tl.constexpr(448.0)  # of e4m3
DOMINATES = tl.constexpr(e4m3.DOMINATES)
TURNED = tl.constexpr(32)  # columns of v that are transposed at once


@triton.jit(
    do_not_specialize=[
        "cu_q_ptr", "cu_k_ptr", "used_q_ptr", "used_k_ptr",
        "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
        "rows_q", "rows_k", "sixteens", "heads_q", "heads_kv", "sequences", "programs_q", "programs_k",
    ]
)  # fmt: skip
def quantize_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    top_ptr,
    matrix_ptr,
    cu_q_ptr,
    cu_k_ptr,
    used_q_ptr,
    used_k_ptr,
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
    sequences,
    programs_q,
    programs_k,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_V: tl.constexpr,
    SLICES: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    MATRIX_PARTS: tl.constexpr,
    NORM: tl.constexpr,
    AGAIN: tl.constexpr,
    BY: tl.constexpr,
    TOPS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """e4m3 numbers and fp32 scales of q, k and v.

    q and k are (batch, rows, heads, DIM), packed (rows, heads, DIM) with cu_*_ptr, by their strides in UNIT elements, the last
    one 1 element; out likewise, contiguous. Out of v is (batch, heads, DIM_V, 16 · sixteens), packed (heads, …), with 0 past
    the rows. matrix_ptr holds `warploom.kernels.e4m3.slice_matrices`; None: nothing is rotated.
    BY "block": a scale each slot and head. Else top_ptr has room, zeroed, for the bits of the largest number of each head, or
    of q, of k and of v: a launch with TOPS fills it and writes nothing else, one without reads it.
    """
    pid = tl.program_id(0)
    if pid < programs_q:
        _block_of(
            pid, q_ptr, q_out_ptr, q_scale_ptr, top_ptr, matrix_ptr, cu_q_ptr, used_q_ptr, stride_qb, stride_qs, stride_qh,
            rows_q, rows_q, heads_q, sequences, 0,
            DIM, COLUMNS, False, SLICES, WIDTH, PARTS, MATRIX_PARTS, NORM, AGAIN, True, BY, TOPS, UNIT,
        )  # fmt: skip
    elif pid < programs_q + programs_k:
        first = heads_q if BY == "head" else 1
        _block_of(
            pid - programs_q, k_ptr, k_out_ptr, k_scale_ptr, top_ptr, matrix_ptr, cu_k_ptr, used_k_ptr, stride_kb, stride_ks,
            stride_kh, rows_k, rows_k, heads_kv, sequences, first,
            DIM, COLUMNS, False, SLICES, WIDTH, PARTS, MATRIX_PARTS, NORM, AGAIN, False, BY, TOPS, UNIT,
        )  # fmt: skip
    else:
        first = heads_q + heads_kv if BY == "head" else 2
        _block_of(
            pid - programs_q - programs_k, v_ptr, v_out_ptr, v_scale_ptr, top_ptr, None, cu_k_ptr, used_k_ptr, stride_vb,
            stride_vs, stride_vh, rows_k, sixteens * 16, heads_kv, sequences, first,
            DIM_V, COLUMNS_V, True, SLICES, WIDTH, PARTS, MATRIX_PARTS, NORM, False, False, BY, TOPS, UNIT,
        )  # fmt: skip


@triton.jit
def _block_of(
    pid, x_ptr, out_ptr, scale_ptr, top_ptr, matrix_ptr, cu_ptr, used_ptr, stride_b, stride_s, stride_h,
    rows, padded, heads, sequences, first_top,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, SLICES: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, MATRIX_PARTS: tl.constexpr, NORM: tl.constexpr, AGAIN: tl.constexpr, EVERY: tl.constexpr,
    BY: tl.constexpr, TOPS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head. Of the rows from its first on, `counted` are read and `written` are written."""
    stride_b, stride_s, stride_h = stride_b * UNIT, stride_s * UNIT, stride_h * UNIT
    slot = pid // heads
    head = pid % heads
    if cu_ptr is None:
        each = (rows + BLOCK - 1) // BLOCK
        slots = slot + 1
        sequence = slot // each
        row = (slot % each) * BLOCK
        x_ptr += sequence * stride_b + row * stride_s
        place = sequence.to(tl.int64) * heads + head
        target = (sequence.to(tl.int64) * rows + row) * heads + head
        counted = rows - row
        written = padded - row
        if used_ptr is not None:
            counted = tl.minimum(tl.load(used_ptr + sequence) - row, counted)
    else:
        slots = rows // BLOCK + tl.maximum(sequences, 1)
        sequence, row, start, length = find_tile(slot, cu_ptr, sequences, rows, BLOCK)
        inside = sequence < sequences
        # What lies behind the last sequence becomes 0, and v's storage ends later than its rows.
        counted = tl.where(inside, length - row, 0)
        written = tl.where(inside, length, padded - start) - row
        written = tl.where(row < 0, 0, written)
        if used_ptr is not None:
            counted = tl.minimum(tl.load(used_ptr + sequence, mask=inside, other=0) - row, counted)
        row += start
        x_ptr += row * stride_s
        place = head.to(tl.int64)
        target = row.to(tl.int64) * heads + head
    x_ptr += head * stride_h
    counted = tl.minimum(counted, written)
    r = tl.arange(0, BLOCK)
    x_ptr += r[:, None] * stride_s
    read = (r < counted)[:, None]
    kept = (r < written)[:, None]
    if TRANSPOSED:
        x = _read(x_ptr, read, DIM, COLUMNS)
        top = _largest_of(x, True)
        scale = _scale(top, scale_ptr, top_ptr, slot, slots, head, heads, first_top, BY, TOPS)
        if not TOPS:
            into = out_ptr + (place * DIM * padded + row) + r[None, :]
            for first in range(0, DIM, TURNED):  # read again, from L1: kept, they would take 150 registers more
                d = first + tl.arange(0, TURNED)
                y = tl.load(x_ptr + d[None, :], mask=read & (d < DIM)[None, :], other=0.0)
                at = into + d[:, None].to(tl.int64) * padded
                tl.store(at, tl.trans(_rounded(y, 1.0, scale)), mask=(d < DIM)[:, None] & (r < written)[None, :])
    else:
        COUNT: tl.constexpr = 1 if matrix_ptr is None else SLICES
        PART: tl.constexpr = DIM // COUNT
        FACTOR: tl.constexpr = 1.0 if matrix_ptr is None else NORM
        SIZES: tl.constexpr = AGAIN and not TOPS
        if matrix_ptr is None:
            a = _read(x_ptr, read, DIM, COLUMNS)
            largest = tl.zeros((BLOCK,), tl.float32)
        else:
            a, largest = _slice(x_ptr, matrix_ptr, read, 0, PART, SLICES, WIDTH, PARTS, MATRIX_PARTS, SIZES)
        b, c, d = a, a, a
        if COUNT >= 2:
            b, size = _slice(x_ptr, matrix_ptr, read, 1, PART, SLICES, WIDTH, PARTS, MATRIX_PARTS, SIZES)
            largest = tl.maximum(largest, size)
            a, b = a + b, a - b
        if COUNT == 4:
            c, _ = _slice(x_ptr, matrix_ptr, read, 2, PART, SLICES, WIDTH, PARTS, MATRIX_PARTS, False)
            d, _ = _slice(x_ptr, matrix_ptr, read, 3, PART, SLICES, WIDTH, PARTS, MATRIX_PARTS, False)
            c, d = c + d, c - d
            a, b, c, d = a + c, b + d, a - c, b - d
        top = _largest(a, b, c, d, COUNT) * FACTOR
        scale = _scale(top, scale_ptr, top_ptr, slot, slots, head, heads, first_top, BY, TOPS)
        if not TOPS:
            out_ptr += target * DIM + r[:, None] * (heads * DIM)
            if AGAIN:
                again = (largest > scale * DOMINATES) | EVERY
                if tl.max(again.to(tl.int32), 0) != 0:
                    a, b = _corrected(
                        a, b, x_ptr, matrix_ptr, read, scale, largest, again, COUNT, PART, WIDTH, MATRIX_PARTS, NORM
                    )
            _write(out_ptr, a, FACTOR, scale, kept, PART)
            if COUNT >= 2:
                _write(out_ptr + PART, b, FACTOR, scale, kept, PART)
            if COUNT == 4:
                _write(out_ptr + 2 * PART, c, FACTOR, scale, kept, PART)
                _write(out_ptr + 3 * PART, d, FACTOR, scale, kept, PART)


@triton.jit
def _read(x_ptr, read, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of DIM numbers from x_ptr on."""
    c = tl.arange(0, COLUMNS)[None, :]
    return tl.load(x_ptr + c, mask=read & (c < DIM), other=0.0)


@triton.jit
def _slice(
    x_ptr, matrix_ptr, read, AT: tl.constexpr, PART: tl.constexpr, SLICES: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, MATRIX_PARTS: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Columns AT * PART on, times the slice's matrix: products of parts to 2^-24 of the largest; with SIZES rows' largest."""
    x = _read(x_ptr + AT * PART, read, PART, WIDTH)
    largest = tl.zeros((BLOCK,), tl.float32)
    if SIZES:
        largest = tl.max(tl.abs(x.to(tl.float32)), 1)
    c = tl.arange(0, WIDTH)
    at = AT * WIDTH * WIDTH + c[:, None] * WIDTH + c[None, :]
    y = tl.zeros((BLOCK, WIDTH), tl.float32)
    if PARTS == 1:
        for j in tl.static_range(MATRIX_PARTS):
            y = _product(x, tl.load(matrix_ptr + j * SLICES * WIDTH * WIDTH + at), y)
    else:
        rest = x.to(tl.float32)
        for i in tl.static_range(PARTS):
            # The leading 8 bits, cut rather than rounded, which could overflow.
            part = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
            rest -= part
            for j in tl.static_range(MATRIX_PARTS):
                if i + j < 3:
                    y = _product(part.to(tl.bfloat16), tl.load(matrix_ptr + j * SLICES * WIDTH * WIDTH + at), y)
    return y, largest


@triton.jit
def _corrected(
    a, b, x_ptr, matrix_ptr, read, scale, largest, again, COUNT: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr,
    MATRIX_PARTS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Slices less what rounding makes of the largest channel of each row that is rounded ``again`` (`e4m3.rounded_again`)."""
    tl.static_assert(COUNT <= 2, "rows of four slices are rounded once")
    channel = tl.full((BLOCK,), COUNT * WIDTH, tl.int32)
    at = tl.arange(0, WIDTH)[None, :]
    for n in tl.static_range(COUNT):
        x = tl.abs(_read(x_ptr + n * PART, read, PART, WIDTH).to(tl.float32))
        channel = tl.minimum(channel, tl.min(tl.where(x == largest[:, None], at + n * WIDTH, COUNT * WIDTH), 1))
    # The channel's row of the matrix: its slices are one slice's row, by the signs that sums and differences of slices have.
    along = tl.zeros((BLOCK, WIDTH), tl.float32)
    for n in tl.static_range(COUNT):
        unit = tl.where(at + n * WIDTH == channel[:, None], 1.0, 0.0).to(tl.bfloat16)
        for j in tl.static_range(MATRIX_PARTS):
            place = (j * COUNT + n) * WIDTH * WIDTH + tl.arange(0, WIDTH)[:, None] * WIDTH + at
            along = _product(unit, tl.load(matrix_ptr + place), along)
    along *= NORM
    odd = tl.where(channel < WIDTH, 1.0, -1.0)
    error = _error_along(a, along, scale, NORM)
    if COUNT >= 2:
        error += odd * _error_along(b, along, scale, NORM)
    error = tl.where(again & (tl.abs(error) < float("inf")), error, 0.0) * (scale / NORM)
    a -= error[:, None] * along
    if COUNT >= 2:
        b -= (odd * error)[:, None] * along
    return a, b


@triton.jit
def _error_along(y, along, scale, FACTOR: tl.constexpr):
    """What rounding adds to y * FACTOR / scale, times ``along``, summed over columns."""
    z = _quotient(y, FACTOR, scale)
    return tl.sum((e4m3_number(z) - z) * along, 1)


@triton.jit
def _product(a, b, y):
    if INTERPRETED:  # which multiplies bf16 as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), y, input_precision="ieee")
    else:
        return tl.dot(a, b, y)


@triton.jit
def _largest(a, b, c, d, COUNT: tl.constexpr):
    """The largest finite number of the first COUNT tiles, without its sign."""
    top = _largest_of(a, False)
    if COUNT >= 2:
        top = tl.maximum(top, _largest_of(b, False))
    if COUNT == 4:
        top = tl.maximum(top, tl.maximum(_largest_of(c, False), _largest_of(d, False)))
    if not (top < float("inf")):
        top = _largest_of(a, True)
        if COUNT >= 2:
            top = tl.maximum(top, _largest_of(b, True))
        if COUNT == 4:
            top = tl.maximum(top, tl.maximum(_largest_of(c, True), _largest_of(d, True)))
    return top


@triton.jit
def _largest_of(y, FINITE: tl.constexpr):
    """A tile's largest size, NaN only where all are; of its finite numbers, 0 where none is."""
    size = tl.abs(y.to(tl.float32))
    if FINITE:
        size = tl.where(size < float("inf"), size, 0.0)
    return tl.max(tl.max(size, 1), 0)


@triton.jit
def _scale(
    top, scale_ptr, top_ptr, slot, slots, head, heads, first_top, BY: tl.constexpr, TOPS: tl.constexpr
):  # fmt: skip
    """The block's scale, written where it belongs; with TOPS only its largest number is."""
    if BY == "block":
        scale = scale_of(top)
        tl.store(scale_ptr + slot.to(tl.int64) * heads + head, scale, mask=slot < slots)
    else:
        at = head if BY == "head" else 0
        if TOPS:
            # Bits of numbers that are not negative are in their order.
            tl.atomic_max(top_ptr + first_top + at, top.to(tl.int32, bitcast=True), sem="relaxed")
            scale = top
        else:
            scale = scale_of(tl.load(top_ptr + first_top + at).to(tl.float32, bitcast=True))
            tl.store(scale_ptr + at, scale, mask=(slot == 0) & (head == at))
    return scale


@triton.jit
def scale_of(top):
    scale = tl.div_rn(top, LARGEST)
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def _rounded(y, FACTOR: tl.constexpr, scale):
    """The bits of e4m3(y * FACTOR / scale): saturated, and NaN where y is not finite."""
    return e4m3_bits(_quotient(y, FACTOR, scale))


@triton.jit
def _quotient(y, FACTOR: tl.constexpr, scale):
    """y * FACTOR / scale.

    A quotient by the reciprocal, corrected once, is the rounded quotient (Markstein, Computation of elementary functions on
    the IBM RISC System/6000, 1990); of an infinite number the correction is NaN.
    """
    away = tl.where(scale < 1.0, 2.0**60, 1.0)  # from what is subnormal
    y = y.to(tl.float32) * (away * FACTOR)
    scale *= away
    inverse = tl.div_rn(1.0, scale)
    z = y * inverse
    return tl.fma(tl.fma(-z, tl.broadcast_to(scale, y.shape), y), tl.broadcast_to(inverse, y.shape), z)


@triton.jit
def e4m3_bits(z):
    """uint8: the e4m3 number next to each of fp32, ties to even, saturated."""
    if INTERPRETED:  # which carries no rounding into an exponent and knows no NaN
        exponent, eighths = _eighths(z)
        code = tl.minimum(exponent * 8 + 48 + eighths.to(tl.int32), 126)
        sign = (z.to(tl.int32, bitcast=True) >> 24) & 128
        return tl.where(z != z, 127, code | sign).to(tl.uint8)
    else:
        return z.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_number(z):
    """fp32 of what `e4m3_bits` makes of z."""
    if INTERPRETED:
        exponent, eighths = _eighths(z)
        size = tl.minimum(eighths * tl.exp2(exponent.to(tl.float32) - 3.0), 448.0)
        return tl.where(z < 0, -size, tl.where(z != z, z, size))
    else:
        return z.to(tl.float8e4nv).to(tl.float32)


@triton.jit
def _eighths(z):
    """An exponent and the number of eighths of its power of two that z is, rounded by what a sum of this size drops."""
    size = tl.minimum(tl.abs(z), 448.0)
    exponent = tl.maximum(((z.to(tl.int32, bitcast=True) >> 23) & 255) - 127, -6)
    return exponent, size * tl.exp2(3.0 - exponent.to(tl.float32)) + 12582912.0 - 12582912.0


@triton.jit
def _write(out_ptr, y, FACTOR: tl.constexpr, scale, kept, DIM: tl.constexpr):
    """The first DIM columns of a tile, rounded, to rows from out_ptr on."""
    c = tl.arange(0, y.shape[1])[None, :]
    tl.store(out_ptr + c, _rounded(y, FACTOR, scale), mask=kept & (c < DIM))
