"""Column masks on the device: classes of key tiles from the bounds of their columns, and the bits of a tile's rows.

The vectors and their bounds are those of ``warploom.masks``: a column hides rows [lts, lte) and [uts, ute), and a block of
BLOCK columns keeps the extrema of its vectors in their normal form (``warploom.masks.tiles``, ``warploom.attention.bounds``).

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import rotated, shifted

BLOCK = 64  # columns of a block of bounds
LTS, LTE, UTS, UTE = 1, 2, 4, 8  # bits of the word that says which vectors there are
FAR = (1 << 31) - 1  # a row past all others


class Columns(Fields):
    """The column vectors of a call, as its kernel gets them."""

    vectors: Any  # lts, lte, uts, ute: int32 (batch|1, heads|1, seqlen_k) flat; any of them where one does not exist
    bounds: Any  # int32 (batch|1, heads|1, blocks, 8)
    present: Any  # a word of the bits above


def columns_of(mask: Any) -> Columns:
    """Of the tuple that the host passes: lts, lte, uts, ute, bounds, present."""
    *vectors, bounds, present = mask
    return Columns(vectors=vectors, bounds=bounds, present=present)


@cute.jit
def mask_row(columns, batch, head, heads_q):
    """Batch entry and head of the mask that a query head of a batch entry has."""
    batches, heads, _, _ = columns.bounds.shape
    return choose(batches > 1, batch, 0), head // (heads_q // heads)


@cute.jit
def classify(bounds, block, top, past, seqlen_q):
    """Whether the columns of a block hide all rows [top, past), touch some, and may hold one that no row of the call sees.

    As ``warploom.masks.tiles.classify_row_block`` has it; the band is not looked at. ``bounds`` are of one head.
    """
    found = cute.make_rmem_tensor(8, Int32)
    block = cutlass.min(block, bounds.shape[0] - 1)
    source = (bounds.iterator + block * 8).align(16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), found)
    lts_min, lts_max, lte_min, lte_max, uts_min, uts_max, ute_min, ute_max = (found[i] for i in range(8))
    hidden = ((lts_max <= top) & (lte_min >= past)) | ((uts_max <= top) & (ute_min >= past))
    hidden = hidden | ((uts_max <= top) & (ute_min >= lts_max) & (lte_min >= past))
    hidden = hidden | ((lts_max <= top) & (lte_min >= uts_max) & (ute_min >= past))
    touched = ((lte_max > top) & (lts_min < past)) | ((ute_max > top) & (uts_min < past))
    edge = (lts_min == 0) & (lte_max == seqlen_q) & (uts_min == 0) & (ute_max == seqlen_q)
    return hidden, touched, edge


@cute.jit
def intervals(columns, at):
    """Rows [start, stop) and [start, stop) that the ``at``-th column of all masks hides; FAR: past the last row."""
    lower_start, lower_stop, upper_start, upper_stop = Int32(FAR), Int32(FAR), Int32(0), Int32(0)
    if columns.present & LTS:
        lower_start = columns.vectors[0][at]
    if columns.present & LTE:
        lower_stop = columns.vectors[1][at]
    if columns.present & UTS:
        upper_start = columns.vectors[2][at]
    if columns.present & UTE:
        upper_stop = columns.vectors[3][at]
    return lower_start, lower_stop, upper_start, upper_stop


@cute.jit
def band_rows(config, column, shift, left, right):
    """Rows [first, past) that see a column by the band."""
    first, past = Int32(0), Int32(FAR)
    if const_expr(config.right):
        first = cutlass.max(column - shift - right, 0)
    if const_expr(config.left):
        past = column - shift + left + 1
    return first, past


@cute.jit
def unseen(hidden, first, past, seqlen_q):
    """Whether no row sees a column that hides these intervals and is seen by rows [first, past) of the band."""
    lower_start, lower_stop, upper_start, upper_stop = hidden
    row = cutlass.max(first, 0)
    row = cutlass.max(row, lower_stop) if lower_start <= row else row
    row = cutlass.max(row, upper_stop) if upper_start <= row else row
    row = cutlass.max(row, lower_stop) if lower_start <= row else row
    return row >= cutlass.min(past, seqlen_q)


@cute.jit
def limits_in_tile(columns, at, inside, top, rows):
    """Where a lane's four columns ``at``, ``at`` + 2, … hide rows, counted from row ``top`` and kept within ``rows``.

    A word for each column: starts and stops of its two intervals, eight bits each. Columns that are not among the
    ``inside`` first ones are not read, and hide all rows.
    """
    words = [Int32(0) for _ in range(4)]
    for v, absent in ((0, FAR), (1, FAR), (2, 0), (3, 0)):
        found = cute.make_rmem_tensor(4, Int32)
        found.fill(absent)
        if (columns.present & (1 << v)) != 0:
            own = cute.make_tensor(columns.vectors[v].iterator + at, cute.make_layout(4, stride=2))
            for i in cutlass.range_constexpr(4):
                if 2 * i < inside:
                    found[i] = own[i]
        for i in cutlass.range_constexpr(4):
            words[i] = words[i] | (in_tile(found[i], top, rows) << (8 * v))
    return [choose(2 * i < inside, words[i], rows << 8) for i in range(4)]


@cute.jit
def in_tile(row, top, rows):
    """A row counted from ``top``, kept within [0, ``rows``]."""
    return cutlass.min(cutlass.max(row, top) - top, rows)


@cute.jit
def shown_rows(config, word, diagonal, start, left, right):
    """Of 32 rows those that see a column, as bits; the first is ``start``, counted in the tile.

    ``word`` is of ``limits_in_tile``; ``diagonal`` is the row at the column's position, counted from the tile's first.
    """
    limits = [shifted(Int32(-1), cutlass.max(((word >> (8 * i)) & 0xFF) - start, 0)) for i in range(4)]
    shown = ~((limits[0] & ~limits[1]) | (limits[2] & ~limits[3]))
    if const_expr(config.right):
        shown = shown & shifted(Int32(-1), cutlass.max(diagonal - start - right, 0))
    if const_expr(config.left):
        shown = shown & ~shifted(Int32(-1), cutlass.max(diagonal - start + left + 1, 0))
    return shown


@cute.jit
def turned(word):
    """The 32 × 32 bits whose row l is lane l's word, transposed: bit i of the result is bit l of lane i's."""
    lane = cute.arch.lane_idx()
    for distance, low in ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        other = cute.arch.shuffle_sync_bfly(word, distance)
        upper = (lane & distance) != 0
        own = choose(upper, ~low, low)
        word = (word & own) | (rotated(other, choose(upper, 32 - distance, distance)) & ~own)
    return word
