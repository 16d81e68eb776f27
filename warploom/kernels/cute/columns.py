"""Column masks on the device: the extrema of blocks of columns, what they say of rows, and the bits of a tile's rows.

Column j hides query rows [lts, lte) and [uts, ute). ``extrema`` of a block of columns are the least and greatest lts, lte, uts
and ute of its columns, in that order, as `warploom.masks.tiles` has them; empty intervals are normalised there.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import rotated, shifted

BLOCK, COARSE_BLOCK = 64, 2048  # columns that share their extrema
FAR = 1 << 30  # past every row
MOST_OFFSET = 1 << 29  # of a batch entry's first row


class Columns(Fields):
    """A column mask in global memory."""

    vectors: Any  # lts, lte, uts, ute: int32 (batch|1, heads|1, seqlen_k), contiguous and of one shape
    present: Any  # bits of those that exist; another one stands for who does not
    bounds: Any  # extrema: int32 (batch|1, heads|1, blocks and behind them coarse ones, 8), contiguous
    offsets: Any  # int32 (batch,): rows of each entry before its first one, by which vectors count; or None


def columns_of(mask: Any) -> Columns:
    """Of the tuple that the host passes: lts, lte, uts, ute, bounds, present, and query offsets where there are any."""
    (*vectors, bounds, present), offsets = mask[:6], mask[6:]
    return Columns(vectors=vectors, bounds=bounds, present=present, offsets=offsets[0] if offsets else None)


def query_offset(columns: Any, batch: Any) -> Any:
    """A batch entry's, held to what sums of row and column numbers have room for."""
    return cutlass.min(cutlass.max(columns.offsets[batch], 0), MOST_OFFSET)


def mask_row(batch: Any, head: Any, heads: Any, tensor: Any) -> Any:
    """Row of a tensor (batch|1, heads|1, …) that a query head, one of ``heads``, has."""
    of_batch = cutlass.min(batch, tensor.shape[0] - 1)
    return of_batch * tensor.shape[1] + head * tensor.shape[1] // heads


class Blocks(Fields):
    """Numbers of the first and the last block, and of the first and the last coarse one, of the keys of a sequence."""

    first: Any
    last: Any
    first_coarse: Any
    last_coarse: Any


def dense_blocks(bounds: Any, seqlen_k: Any) -> Blocks:
    """Of a dense call's keys in ``bounds``."""
    count = cute.ceil_div(seqlen_k, BLOCK)
    return Blocks(first=0, last=count - 1, first_coarse=count, last_coarse=bounds.shape[2] - 1)


def first_block(sequence: Any, start: Any) -> Any:
    """Of the keys of a packed sequence from key ``start`` on, as `warploom.attention.bounds` places them."""
    return start // BLOCK + sequence


def sequence_blocks(sequence: Any, sequences: Any, start: Any, length: Any, total: Any) -> Blocks:
    """Of ``length`` keys of a packed sequence from key ``start`` of ``total`` on, as `warploom.attention.bounds` places them.

    Where there are no keys, there are no blocks: the last comes before the first.
    """
    first = first_block(sequence, start)
    coarse = total // BLOCK + sequences + start // COARSE_BLOCK + sequence
    return Blocks(
        first=first,
        last=first + cute.ceil_div(length, BLOCK) - 1,
        first_coarse=coarse,
        last_coarse=coarse + cute.ceil_div(length, COARSE_BLOCK) - 1,
    )


def blocks_of(keys: int) -> int:
    """How many blocks of extrema a tile of so many keys reaches at the most, which begins at a multiple of its size."""
    return -(-(keys - gcd(keys, BLOCK)) // BLOCK) + 1


@cute.jit
def extrema_of(bounds, row, key, past, keys):
    """Of columns [key, past), no more than ``keys`` and all there, in a row of ``bounds``: of all blocks that they touch."""
    first, last = key // BLOCK, (past - 1) // BLOCK
    found = []
    for i in cutlass.range_constexpr(blocks_of(keys)):
        eight = block_extrema(bounds, row, cutlass.min(first + i, last))
        if const_expr(i == 0):
            found = list(eight)
        else:
            found = [(cutlass.max if n % 2 else cutlass.min)(found[n], eight[n]) for n in range(8)]
    return tuple(found)


@cute.jit
def extrema_by_lanes(bounds, row, key, past, keys, first_lane=0):
    """As ``extrema_of``, for all lanes of a warp the same, or for each eight from ``first_lane`` on: one reads one number."""
    first, last, lane = key // BLOCK, (past - 1) // BLOCK, cute.arch.lane_idx()
    own = Int32(0)
    for i in cutlass.range_constexpr(blocks_of(keys)):
        block = cutlass.min(first + i, last)
        source = bounds.iterator + ((Int64(row) * bounds.shape[2] + block) * 8 + lane % 8)
        number = cute.make_tensor(source, cute.make_layout(1))[0]
        both = choose(lane % 2 == 1, cutlass.max(own, number), cutlass.min(own, number))
        own = both if const_expr(i > 0) else number
    return tuple([cute.arch.shuffle_sync(own, first_lane + n) for n in range(8)])


@cute.jit
def block_extrema(bounds, row, block):
    """Of one block in a row of ``bounds``."""
    eight = cute.make_rmem_tensor(8, Int32)
    source = bounds.iterator + (Int64(row) * bounds.shape[2] + block) * 8
    for half in cutlass.range_constexpr(2):
        four = cute.make_tensor((source + 4 * half).align(16), cute.make_layout(4))
        cute.autovec_copy(four, cute.make_tensor(eight.iterator + 4 * half, cute.make_layout(4)))
    return tuple([eight[n] for n in range(8)])


@cute.jit
def hides_all(extrema, row, past):
    """Whether every column hides rows [row, past)."""
    _, lts_max, lte_min, _, _, uts_max, ute_min, _ = extrema
    lower, upper = lts_max <= row, uts_max <= row
    to_lower, to_upper = past <= lte_min, past <= ute_min
    alone = (lower and to_lower) or (upper and to_upper)
    return alone or (upper and ute_min >= lts_max and to_lower) or (lower and lte_min >= uts_max and to_upper)


@cute.jit
def hides_some(extrema, row, past):
    """Whether some column may hide some of rows [row, past)."""
    lts_min, _, _, lte_max, uts_min, _, _, ute_max = extrema
    return (row < lte_max and past > lts_min) or (row < ute_max and past > uts_min)


@cute.jit
def may_hold_dead(extrema, seqlen_q):
    """Whether a column may be there that no query sees: its intervals, normalised, hide all rows each."""
    lts_min, _, _, lte_max, uts_min, _, _, ute_max = extrema
    return lts_min <= 0 and uts_min <= 0 and lte_max >= seqlen_q and ute_max >= seqlen_q


@cute.jit
def sees_none(first, end, lts, lte, uts, ute):
    """Whether both intervals together hide rows [first, end) of a column."""
    for start, stop in ((lts, lte), (uts, ute), (lts, lte)):
        first = choose(start <= first, cutlass.max(first, stop), first)
    return first >= end


@cute.jit
def intervals(columns, at):
    """Rows [start, stop) and [start, stop) that the ``at``-th column of all masks hides; FAR: past the last row."""
    found = []
    for v, absent in ((0, FAR), (1, FAR), (2, 0), (3, 0)):
        number = Int32(absent)
        if (columns.present & (1 << v)) != 0:
            number = cute.make_tensor(columns.vectors[v].iterator + at, cute.make_layout(1))[0]
        found.append(number)
    return tuple(found)


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
def limits_in_tile(columns, at, inside, top, rows, apart=2):
    """Where a lane's columns ``at`` and ``at + apart`` hide rows, counted from row ``top`` and kept within ``rows``.

    A word for each column: starts and stops of its two intervals, eight bits each. Columns that are not among the
    ``inside`` first ones are not read, and hide all rows.
    """
    words = [Int32(0), Int32(0)]
    for v, absent in ((0, FAR), (1, FAR), (2, 0), (3, 0)):
        found = cute.make_rmem_tensor(2, Int32)
        found.fill(absent)
        if (columns.present & (1 << v)) != 0:
            own = cute.make_tensor(columns.vectors[v].iterator + at, cute.make_layout(2, stride=apart))
            for i in cutlass.range_constexpr(2):
                if apart * i < inside:
                    found[i] = own[i]
        for i in cutlass.range_constexpr(2):
            words[i] = words[i] | (in_tile(found[i], top, rows) << (8 * v))
    return [choose(apart * i < inside, words[i], rows << 8) for i in range(2)]


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
