"""The column vectors of a mask on the device: loads, and their normal form, of which blocks of columns keep the extrema.

A vector that is None does not exist; which do is known when compiling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import clamp

# Columns of a block of `bounds`: the widest tile that forward and dQ visit. One unit of skipping.
BOUND_BLOCK = tl.constexpr(64)


# Offsets of rows are held to it, so that sums with lengths and limits of the band stay in 32 bits.
MOST_OFFSET = tl.constexpr(2**29)


class Band(NamedTuple):
    """-right <= row + shift - column <= left; None is unlimited."""

    left: Any
    right: Any


class Columns(NamedTuple):
    """Pointers to the column vectors of one (batch, head), at the sequence's first key; None where absent."""

    lts: Any
    lte: Any
    uts: Any
    ute: Any


@triton.jit
def shifted(pointer, by):
    """pointer + by; nothing where there is no pointer."""
    if pointer is not None:
        return pointer + by


@triton.jit
def load_columns(columns, cols):
    """lts, lte, uts, ute at `cols`; an absent one is `cols` itself, and `columns` says which are."""
    lts, lte, uts, ute = cols, cols, cols, cols
    if columns.lts is not None:
        lts = tl.load(columns.lts + cols)
    if columns.lte is not None:
        lte = tl.load(columns.lte + cols)
    if columns.uts is not None:
        uts = tl.load(columns.uts + cols)
    if columns.ute is not None:
        ute = tl.load(columns.ute + cols)
    return lts, lte, uts, ute


@triton.jit
def load_offset(offset_ptr, batch, inside):
    """The row of the whole sequence at which a chunk begins; None where the call has no offsets, 0 where not `inside`."""
    if offset_ptr is not None:
        return clamp(tl.load(offset_ptr + batch, mask=inside, other=0), 0, MOST_OFFSET)


@triton.jit
def of_chunk(vectors, columns, offset, len_q):
    """Vectors of the whole sequence by rows of a chunk, cut to [0, len_q]; as they are where there is no offset."""
    if offset is None:
        return vectors
    else:
        lts, lte, uts, ute = vectors
        end = offset + len_q
        if columns.lts is not None:
            lts = clamp(lts, offset, end) - offset
        if columns.lte is not None:
            lte = clamp(lte, offset, end) - offset
        if columns.uts is not None:
            uts = clamp(uts, offset, end) - offset
        if columns.ute is not None:
            ute = clamp(ute, offset, end) - offset
        return lts, lte, uts, ute


@triton.jit
def normalised(vectors, columns, cols, band, len_q, shift):
    """lts, lte, uts, ute as warploom.masks.tiles.normalised defines them, and which columns show no row.

    Row i of len_q sits at key position i + shift.
    """
    diagonal = cols - shift
    none = tl.zeros_like(cols)
    every = none + len_q
    first, last = none, every
    if band.right is not None:
        first = clamp(diagonal - band.right, 0, len_q)
    if band.left is not None:
        last = clamp(diagonal + (band.left + 1), 0, len_q)
    last = tl.maximum(first, last)
    lts, lte, uts, ute = vectors
    if columns.lts is None:
        lts, lte = every, none
    else:
        if columns.lte is None:
            lte = every
        lts, lte = _interval(lts, lte, first, last, len_q)
    if columns.ute is None:
        uts, ute = every, none
    else:
        if columns.uts is None:
            uts = none
        uts, ute = _interval(uts, ute, first, last, len_q)
    dead = (first >= last) | ((lts == 0) & (lte == len_q)) | ((uts == 0) & (ute == len_q))
    dead = dead | ((uts == 0) & (ute >= lts) & (lte == len_q)) | ((lts == 0) & (lte >= uts) & (ute == len_q))
    lts, lte = tl.where(dead, 0, lts), tl.where(dead, len_q, lte)
    uts, ute = tl.where(dead, 0, uts), tl.where(dead, len_q, ute)
    return lts, lte, uts, ute, dead


@triton.jit
def _interval(start, stop, first, last, len_q):
    empty = (start >= stop) | (start >= len_q) | (stop <= 0)
    start = tl.where(empty, len_q, tl.where(start <= first, 0, start))
    stop = tl.where(empty, 0, tl.where(stop >= last, len_q, stop))
    return start, stop
