"""Which rows keys see under a column mask: for kernels whose blocks own keys. Imports the CuTe DSL."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.instructions import shifted


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
def elements_before(row, rows):
    """How many of a thread's elements, in rows 0, 1, 8, 9, 16, … of a tile's ``rows``, stand before ``row``."""
    row = cutlass.min(cutlass.max(row, 0), rows)
    return (row >> 3) * 2 + cutlass.min(row & 7, 2)


@cute.jit
def hidden_elements(start, stop, rows):
    """Bits of a thread's elements of a tile in rows [start, stop), counted from its first."""
    return shifted(-1, elements_before(start, rows)) & ~shifted(-1, elements_before(stop, rows))
