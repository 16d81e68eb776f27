"""Which tiles of rows a block of keys meets: for kernels that walk rows by blocks of columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.attention.triton.device import Extrema
from warploom.kernels.triton.numerics import clamp


@triton.jit
def _blocks_before(row, count, len_q, M: tl.constexpr):
    """Row tiles that end at or before `row`; the last one ends at len_q."""
    return tl.where(row >= len_q, count, tl.maximum(row, 0) // M)


@triton.jit
def _blocks_begun(row, len_q, M: tl.constexpr):
    """Row tiles that begin before `row`."""
    return tl.cdiv(clamp(row, 0, len_q), M)


@triton.jit
def _hidden_run(start, stop, begin, end, count, len_q, M: tl.constexpr):
    """Row tiles within [begin, end) that rows [start, stop) cover; both `begin` where none."""
    a = tl.maximum(_blocks_begun(start, len_q, M), begin)
    b = tl.minimum(_blocks_before(stop, count, len_q, M), end)
    return tl.where(a < b, a, begin), tl.where(a < b, b, begin)


class Runs(NamedTuple):
    """Row tiles [begin, a0), [b0, a1) and [b1, end): what is left between two hidden runs."""

    begin: Any
    a0: Any
    b0: Any
    a1: Any
    b1: Any
    end: Any


@triton.jit
def extrema_of(lts, lte, uts, ute):
    """Of columns themselves."""
    lts_min, lts_max, lte_min, lte_max = tl.min(lts, 0), tl.max(lts, 0), tl.min(lte, 0), tl.max(lte, 0)
    return Extrema(lts_min, lts_max, lte_min, lte_max, tl.min(uts, 0), tl.max(uts, 0), tl.min(ute, 0), tl.max(ute, 0))


@triton.jit
def visible_runs(extrema, begin, end, count, len_q, M: tl.constexpr):
    """What is left of row tiles [begin, end) where every column hides rows: two runs, or one where the intervals meet."""
    lts_max, lte_min, uts_max, ute_min = extrema.lts_max, extrema.lte_min, extrema.uts_max, extrema.ute_min
    meet = (ute_min >= lts_max) & (lte_min >= uts_max)
    start0 = tl.where(meet, tl.minimum(lts_max, uts_max), uts_max)
    stop0 = tl.where(meet, tl.maximum(lte_min, ute_min), ute_min)
    a0, b0 = _hidden_run(start0, stop0, begin, end, count, len_q, M)
    a1, b1 = _hidden_run(lts_max, tl.where(meet, 0, lte_min), begin, end, count, len_q, M)
    swap = b1 < b0  # disjoint, so ends order them; an unused one comes first
    a0, a1 = tl.where(swap, a1, a0), tl.where(swap, a0, a1)
    b0, b1 = tl.where(swap, b1, b0), tl.where(swap, b0, b1)
    return Runs(begin, a0, b0, a1, b1, end)


@triton.jit
def run_of(runs, part):
    """The first and past-the-last tile of a run."""
    a = tl.where(part == 0, runs.begin, tl.where(part == 1, runs.b0, runs.b1))
    b = tl.where(part == 0, runs.a0, tl.where(part == 1, runs.a1, runs.end))
    return a, b


@triton.jit
def band_rows(n0, n1, shift, band, count, seqlen_q, lengths, M: tl.constexpr):
    """Of columns [n0, n1): row tiles [begin, end) that the band shows to some column, and rows that show every column.

    Tiles that begin from the third number on, and up to the fourth, show all of their rows every column, as far as the band
    goes.
    """
    begin, end = 0, count
    if band.right is not None:
        begin = _blocks_before(n0 - band.right - shift, count, lengths.q, M)
    if band.left is not None:
        end = _blocks_begun(n1 + band.left - shift, lengths.q, M)
    end = tl.where(n0 < lengths.k, tl.maximum(begin, end), begin)
    if band.left is not None and band.right is not None:
        end = tl.where(band.left < -band.right, begin, end)
    all_from, all_until = 0, seqlen_q
    if band.right is not None:
        all_from = n1 - 1 - shift - band.right
    if band.left is not None:
        all_until = n0 - shift + band.left - (M - 1)
    return begin, end, all_from, all_until
