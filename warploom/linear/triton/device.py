"""What the kernels share: where a program works, loads through feature maps, states as operands.

Legend: C tokens of a chunk; E and M, the dims of mapped keys and of values; S = sum of phi(k) outer v (E, M) and
z = sum of phi(k) (E,), both fp32. A slot is one segment of one sequence; tokens are counted from the sequence's start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.kernels.triton import numerics
from warploom.kernels.triton.feature_maps import ELU_PLUS_ONE, only, phi, phi_pairs
from warploom.kernels.triton.numerics import INTERPRETED, clamp
from warploom.kernels.triton.operands import power_of_two
from warploom.kernels.triton.packed import find_tile

# Terms of one sum on tensor cores where operands are fp32: each step of eight or fewer rounds towards zero.
DEPTH = tl.constexpr(32)


class Source(NamedTuple):
    """A tensor (batch, seqlen, heads, ·) that is read; strides in units of UNIT elements."""

    pointer: Any
    stride_b: Any
    stride_s: Any
    stride_h: Any


class Place(NamedTuple):
    """Where a program works."""

    sequence: tl.tensor  # the number of sequences: tokens past the last one, which hold no keys and no queries
    batch: tl.tensor  # int64
    start: tl.tensor  # int64, row of the sequence's first token in its batch
    first: tl.tensor  # first token of the segment; negative where the slot holds none
    rows_q: tl.tensor  # rows of the sequence to write
    rows_k: tl.tensor
    len_q: tl.tensor  # those that may be read
    len_k: tl.tensor


@triton.jit
def place(slot, cu_ptr, lengths_ptr, sequences, segments, segment, seqlen_q, seqlen_k):
    """The slot's sequence and segment. seqlen_q and seqlen_k are totals where the call is packed.

    Segments of packed sequence i take the slots from cu[i] // segment + i on: more than enough, and the host knows the total.
    """
    if cu_ptr is None:
        sequence = slot // segments
        first = slot % segments * segment
        len_k = seqlen_k
        if lengths_ptr is not None:
            len_k = clamp(tl.load(lengths_ptr + sequence), 0, seqlen_k)
        zero = tl.zeros([], tl.int64)
        return Place(sequence, sequence.to(tl.int64), zero, first, seqlen_q, seqlen_k, seqlen_q, len_k)
    else:
        sequence, first, start, rows = find_tile(slot, cu_ptr, sequences, seqlen_q, segment)
        live = tl.where(sequence < sequences, rows, 0)
        return Place(sequence, tl.zeros([], tl.int64), start.to(tl.int64), first, rows, rows, live, live)


@triton.jit
def head_base(x, at, head, UNIT: tl.constexpr):
    """The head's first token of the sequence."""
    steps = at.batch * x.stride_b + at.start * x.stride_s + tl.cast(head, tl.int64) * x.stride_h
    return x.pointer + steps * UNIT


@triton.jit
def load_chunk(base, t, n, dims, stride, length, DIM: tl.constexpr, WHOLE: tl.constexpr):
    """Rows t + n of (C, dims), zeros past `length` and, unless WHOLE, past DIM."""
    inside = (t + n < length)[:, None]
    if not WHOLE:
        inside = inside & (dims < DIM)[None, :]
    pointers = base + tl.cast(t, tl.int64) * stride + (n[:, None] * stride + dims[None, :])
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_chunk(pointer, at, seqlen, head, heads, t, n, dims, values, rows, DIM: tl.constexpr, WHOLE: tl.constexpr):
    """Rows t + n of a contiguous (batch, seqlen, heads, DIM) tensor, where they belong to the sequence."""
    base = pointer + ((at.batch * seqlen + at.start + t) * heads + head) * DIM
    inside = (t + n < rows)[:, None]
    if not WHOLE:
        inside = inside & (dims < DIM)[None, :]
    offsets = (n * (heads * DIM))[:, None] + dims[None, :]
    tl.store(base + offsets, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def row_base(pointer, at, head, heads, seqlen):
    """The head's first row of a contiguous (batch, heads, seqlen) tensor."""
    return pointer + (at.batch * heads + head) * seqlen + at.start


@triton.jit
def load_queries(base, t, n, length, dims, stride, DIM: tl.constexpr, WHOLE: tl.constexpr, MAP: tl.constexpr):
    """phi of rows t + n in fp32; 0 past DIM."""
    fx = phi(load_chunk(base, t, n, dims, stride, length, DIM, WHOLE), MAP)
    return fx if WHOLE else only(fx, (dims < DIM)[None, :], MAP)


@triton.jit
def load_keys(base, t, n, length, dims, stride, DIM: tl.constexpr, WHOLE: tl.constexpr, MAP: tl.constexpr):
    """phi of rows t + n in fp32; 0 past `length` too."""
    return only(load_queries(base, t, n, length, dims, stride, DIM, WHOLE, MAP), (t + n < length)[:, None], MAP)


@triton.jit
def kept(x, rows):
    """x where its row is one of `rows`, (C,), else 0; both halves of a register at once."""
    mask = tl.where(rows, -1, 0).to(tl.int16)[:, None]
    mask = tl.broadcast_to(mask, x.shape)
    return tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], tl.bfloat16, True, 2)


@triton.jit
def load_operand(
    base, t, n, length, dims, stride, DIM: tl.constexpr, WHOLE: tl.constexpr, MAP: tl.constexpr, KEYS: tl.constexpr
):
    """phi of rows t + n in their dtype, as a product's operand; of KEYS 0 past `length`."""
    dtype = base.dtype.element_ty
    if MAP == ELU_PLUS_ONE and dtype == tl.bfloat16 and WHOLE and not INTERPRETED:
        fx = phi_pairs(load_chunk(base, t, n, dims, stride, length, DIM, WHOLE))
        return kept(fx, t + n < length) if KEYS else fx
    elif KEYS:
        return load_keys(base, t, n, length, dims, stride, DIM, WHOLE, MAP).to(dtype)
    else:
        return load_queries(base, t, n, length, dims, stride, DIM, WHOLE, MAP).to(dtype)


@triton.jit
def dot(a, b, acc):
    """a @ b, plus acc; fp32 operands as three TF32 products.

    Tensor cores truncate each sum of a few terms, always downwards where all are positive: of fp32 operands no more than
    DEPTH terms are summed so, and those sums by fp32 additions.
    """
    if a.dtype != tl.float32 or a.shape[1] <= DEPTH:
        return numerics.dot(a, b, acc)
    else:
        parts: tl.constexpr = a.shape[1] // DEPTH
        left = tl.permute(tl.reshape(a, (a.shape[0], parts, DEPTH)), (1, 0, 2))
        right = tl.reshape(b, (parts, DEPTH, b.shape[1]))
        product = tl.sum(numerics.dot(left, right, None), 0)
        return product if acc is None else acc + product


@triton.jit
def columns_operand(z, dtype: tl.constexpr):
    """Sixteen equal columns of an fp32 vector as a right factor, and the factor to be multiplied by.

    The vector is given as the sum of two numbers of the dtype, eight columns each: a product's columns add up to eight times
    the vector's.
    """
    factor = 1.0
    if dtype == tl.float16:
        factor = power_of_two(tl.max(tl.max(tl.abs(z), 1), 0))
        z = z / factor
    high = z.to(dtype)
    low = (z - high.to(tl.float32)).to(dtype)
    columns = tl.arange(0, 16)[None, :]
    return tl.where(columns < 8, high, low), factor


@triton.jit
def load_state(s_ptr, index, lives, e, m, E: tl.constexpr, M: tl.constexpr):
    """Rows e and columns m of state `index`, int64; zeros where it is not one that `lives`."""
    inside = (e < E)[:, None] & (m < M)[None, :] & lives
    return tl.load(s_ptr + index * (E * M) + e[:, None] * M + m[None, :], mask=inside, other=0.0)


@triton.jit
def store_state(s_ptr, index, lives, e, m, values, E: tl.constexpr, M: tl.constexpr):
    """Rows e and columns m of state `index`, where it is one that `lives`."""
    inside = (e < E)[:, None] & (m < M)[None, :] & lives
    tl.store(s_ptr + index * (E * M) + e[:, None] * M + m[None, :], values, mask=inside)
