"""Which query tiles keys see under a column mask, and which rows of them: for kernels whose blocks own keys.

Column j hides query rows [lts, lte) and [uts, ute). ``extrema`` of a block of columns are the least and greatest lts, lte, uts
and ute of its columns, in that order, as `warploom.masks.tiles` has them; empty intervals are normalised there.

Imports the CuTe DSL.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import shifted

BOUND_BLOCK = 64  # columns that share their extrema
FAR = 1 << 30  # past every row


class Columns(Fields):
    """A column mask in global memory."""

    vectors: Any  # lts, lte, uts, ute: int32 (batch|1, heads|1, seqlen_k), contiguous and of one shape
    present: Any  # bits of those that exist; another one stands for who does not
    bounds: Any  # extrema: int32 (batch|1, heads|1, blocks, 8), contiguous


def blocks_of(keys: int) -> int:
    """How many blocks of extrema a tile of so many keys reaches at the most, which begins at a multiple of its size."""
    return -(-(keys - gcd(keys, BOUND_BLOCK)) // BOUND_BLOCK) + 1


def mask_row(batch: Any, head: Any, heads: Any, tensor: Any) -> Any:
    """Row of a tensor (batch|1, heads|1, …) that a query head, one of ``heads``, has."""
    of_batch = cutlass.min(batch, tensor.shape[0] - 1)
    return of_batch * tensor.shape[1] + head * tensor.shape[1] // heads


@cute.jit
def extrema_of(bounds, row, key, past, keys):
    """Of columns [key, past), no more than ``keys``, in a row of ``bounds``: of all blocks that they touch."""
    count = bounds.shape[2]
    first = cutlass.min(key // BOUND_BLOCK, count - 1)
    last = cutlass.min((past - 1) // BOUND_BLOCK, count - 1)
    found = []
    for i in cutlass.range_constexpr(blocks_of(keys)):
        block = cutlass.min(first + i, last)
        eight = cute.make_rmem_tensor(8, Int32)
        source = bounds.iterator + (Int64(row) * count + block) * 8
        for half in cutlass.range_constexpr(2):
            four = cute.make_tensor((source + 4 * half).align(16), cute.make_layout(4))
            cute.autovec_copy(four, cute.make_tensor(eight.iterator + 4 * half, cute.make_layout(4)))
        if const_expr(i == 0):
            found = [eight[n] for n in range(8)]
        else:
            found = [(cutlass.max if n % 2 else cutlass.min)(found[n], eight[n]) for n in range(8)]
    return tuple(found)


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
def seen_rows(extrema, seqlen_q):
    """Rows [first, end) outside of which every column hides all."""
    _, lts_max, lte_min, _, _, uts_max, ute_min, _ = extrema
    first, end = Int32(0), Int32(0) + seqlen_q
    for start, stop in ((uts_max, ute_min), (lts_max, lte_min), (uts_max, ute_min)):
        first = choose(start <= first, cutlass.max(first, stop), first)
        end = choose(stop >= end, cutlass.min(end, start), end)
    return first, end


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
def elements_before(row, rows):
    """How many of a thread's elements, in rows 0, 1, 8, 9, 16, … of a tile's ``rows``, stand before ``row``."""
    row = cutlass.min(cutlass.max(row, 0), rows)
    return (row >> 3) * 2 + cutlass.min(row & 7, 2)


@cute.jit
def hidden_elements(start, stop, rows):
    """Bits of a thread's elements of a tile in rows [start, stop), counted from its first."""
    return shifted(-1, elements_before(start, rows)) & ~shifted(-1, elements_before(stop, rows))
