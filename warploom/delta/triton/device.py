"""What the kernels share: where a program works, loads and stores, decays, operands.

Legend: C tokens of a chunk; E and M, the dims of keys and of values; S, the state (E, M) of a value head, fp32. Chunks have
slots, those of a sequence one after the other; tokens are counted from the sequence's start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import clamp, exp
from warploom.kernels.triton.packed import find_tile, span

# Below it e^x is 0 in fp32: what a decay is raised to, -inf too, so that no difference of sums is inf - inf.
LEAST = tl.constexpr(-128.0)


class Source(NamedTuple):
    """A tensor (batch, seqlen, heads, ...) that is read; strides in units of UNIT elements."""

    pointer: Any
    stride_b: Any
    stride_s: Any
    stride_h: Any


class Shape(NamedTuple):
    """How tokens are laid out; both pointers None: `chunks` slots for each of the batch's sequences, all of seqlen tokens."""

    lengths: Any
    cu: Any
    sequences: Any
    seqlen: Any  # all packed tokens where there is cu
    chunks: Any


class Place(NamedTuple):
    """Where a program works."""

    sequence: tl.tensor  # the number of sequences: tokens past the last packed one
    batch: tl.tensor  # int64
    start: tl.tensor  # int64, row of the sequence's first token in its batch
    first: tl.tensor  # first token of the chunk; negative where the slot holds none
    rows: tl.tensor  # the sequence's tokens
    live: tl.tensor  # those that count
    slot: tl.tensor  # int64, of the sequence's first chunk


@triton.jit
def place_of_slot(slot, shape, C: tl.constexpr):
    """The sequence and chunk of a slot."""
    if shape.cu is None:
        sequence = slot // shape.chunks
        live = shape.seqlen
        if shape.lengths is not None:
            live = clamp(tl.load(shape.lengths + sequence), 0, shape.seqlen)
        zero = tl.zeros([], tl.int64)
        first = (slot - sequence * shape.chunks) * C
        before = (sequence * shape.chunks).to(tl.int64)
        return Place(sequence, sequence.to(tl.int64), zero, first, shape.seqlen, live, before)
    else:
        sequence, first, start, rows = find_tile(slot, shape.cu, shape.sequences, shape.seqlen, C)
        live = tl.where(sequence < shape.sequences, rows, 0)
        before = (start // C + sequence).to(tl.int64)
        return Place(sequence, tl.zeros([], tl.int64), start.to(tl.int64), first, rows, live, before)


@triton.jit
def place_of_sequence(sequence, shape, C: tl.constexpr):
    """A whole sequence; number `sequences` is the tokens past the last packed one, none of which counts."""
    if shape.cu is None:
        live = shape.seqlen
        if shape.lengths is not None:
            live = clamp(tl.load(shape.lengths + sequence), 0, shape.seqlen)
        zero = tl.zeros([], tl.int64)
        before = (sequence * shape.chunks).to(tl.int64)
        return Place(sequence, sequence.to(tl.int64), zero, 0, shape.seqlen, live, before)
    else:
        start, live = span(sequence, shape.cu, shape.sequences, shape.seqlen)
        rows = tl.where(sequence < shape.sequences, live, shape.seqlen - start)
        before = (start // C + sequence).to(tl.int64)
        return Place(sequence, tl.zeros([], tl.int64), start.to(tl.int64), 0, rows, live, before)


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
def load_rows(x, at, head, t, n, other):
    """A number a token of (batch, seqlen, heads), fp32; `other` past the tokens that count."""
    steps = at.batch * x.stride_b + (at.start + t + n) * x.stride_s + tl.cast(head, tl.int64) * x.stride_h
    return tl.load(x.pointer + steps, mask=t + n < at.live, other=other).to(tl.float32)


@triton.jit
def store_chunk(pointer, at, seqlen, head, heads, t, n, dims, values, DIM: tl.constexpr, WHOLE: tl.constexpr):
    """Rows t + n of a contiguous (batch, seqlen, heads, DIM) tensor, where they are the sequence's."""
    base = pointer + ((at.batch * seqlen + at.start + t) * heads + head) * DIM
    inside = (t + n < at.rows)[:, None]
    if not WHOLE:
        inside = inside & (dims < DIM)[None, :]
    offsets = (n * (heads * DIM))[:, None] + dims[None, :]
    tl.store(base + offsets, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def token_rows(pointer, at, seqlen, head, heads, t, n):
    """Pointers to the numbers of tokens t + n in a contiguous (batch, seqlen, heads) tensor."""
    return pointer + (at.batch * seqlen + at.start + t + n) * heads + head


@triton.jit
def square(index, n, C: tl.constexpr):
    """Offsets of matrix `index`, int64, of a contiguous row of C x C matrices."""
    return index * (C * C) + (n[:, None] * C + n[None, :])


@triton.jit
def state_at(index, e, m, E: tl.constexpr, M: tl.constexpr):
    """Offsets of state `index`, int64, and which of them are in it."""
    return index * (E * M) + (e[:, None] * M + m[None, :]), (e < E)[:, None] & (m < M)[None, :]


@triton.jit
def cumulative(decay):
    """Sums of log decays (C,) up to each, both of their parts: multiples of 2^-10, added without an error, and what is left.

    A decay that is small beside those summed before it would lose its bits in one fp32 number, and differences of sums theirs.
    """
    decay = tl.maximum(decay, LEAST, propagate_nan=tl.PropagateNan.ALL)
    coarse = tl.floor(decay * 1024.0 + 0.5) * (1.0 / 1024.0)
    return tl.cumsum(coarse, 0), tl.cumsum(decay - coarse, 0)


@triton.jit
def last_of(x, n, C: tl.constexpr):
    """The last of C numbers."""
    return tl.sum(tl.where(n == C - 1, x, 0.0), 0)


@triton.jit
def between(coarse, fine):
    """e^-|G_i - G_j| of the sums G: the decay from each token to each later one, and the same mirrored. exp of <= 0 only."""
    distance = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return exp(-tl.abs(distance))
