"""Which rows keys see under a column mask: for kernels whose blocks own keys. Imports the CuTe DSL."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.columns import FAR
from warploom.kernels.cute.instructions import shifted


@cute.jit
def hidden_runs(extrema, seqlen_q, rows):
    """Tiles [a, b) and [c, d) of so many ``rows`` that every column hides whole: a <= b <= c <= d.

    The intervals that all columns have in common, or where those touch, what reaches from the one to the other.
    """
    _, lts_max, lte_min, _, _, uts_max, ute_min, _ = extrema
    there, also = lts_max < lte_min, uts_max < ute_min
    one = there and also and ute_min >= lts_max and lte_min >= uts_max
    low, low_end = choose(one, cutlass.min(lts_max, uts_max), lts_max), choose(one, cutlass.max(lte_min, ute_min), lte_min)
    found = []
    for start, stop, is_there in ((low, low_end, there), (uts_max, ute_min, also and not one)):
        past = choose(stop >= seqlen_q, (seqlen_q + rows - 1) // rows, stop // rows)
        first = cutlass.min((start + rows - 1) // rows, past)
        found.append((choose(is_there, first, FAR), choose(is_there, past, FAR)))
    (a, b), (c, d) = found
    turned = c < a
    return choose(turned, c, a), choose(turned, d, b), choose(turned, a, c), choose(turned, b, d)


@cute.jit
def elements_before(row, rows):
    """How many of a thread's elements, in rows 0, 1, 8, 9, 16, … of a tile's ``rows``, stand before ``row``."""
    row = cutlass.min(cutlass.max(row, 0), rows)
    return (row >> 3) * 2 + cutlass.min(row & 7, 2)


@cute.jit
def hidden_elements(start, stop, rows):
    """Bits of a thread's elements of a tile in rows [start, stop), counted from its first."""
    return shifted(-1, elements_before(start, rows)) & ~shifted(-1, elements_before(stop, rows))
