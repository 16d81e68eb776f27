"""ALiBi in the forward: scores of a key tile begin at it, where their product adds to them.

Along a side of the diagonal -slope · |d| rises or falls by constants: what the scores of a thread's columns begin at is the same
for every row and tile, and is written where the registers of the tile before are free, among its exponentials, which leave
issue slots. What else depends on the row and the tile joins the row's maximum. Tiles that the diagonal crosses begin at |d| of
every element. A softcap, which comes before the bias, takes it after the scores are there.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from warploom.attention.hopper.forward_base import ForwardBase
from warploom.kernels.cute.bias import Slopes, slope_of, slopes_of
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import magnitude, pack16, times
from warploom.kernels.cute.wgmma import words


class Lean(Fields):
    """ALiBi of a warpgroup's rows; with several heads in a tile each of a thread's two rows has its own slope."""

    slopes: Slopes
    slope: Any  # as scores are before they are scaled; with a softcap in log2 units
    apart: Any  # of each row: distance to this thread's first column of key tile 0
    right_first: Any  # key tiles from this one on lie right of all queries of the warpgroup


class BiasedScores(ForwardBase):
    """What consumer warpgroups do for a bias."""

    def lean(self, bias: Any) -> Lean | None:
        slopes = slopes_of(bias)
        if slopes is None:
            return None
        return Lean(
            slopes=slopes,
            slope=cute.make_rmem_tensor(2 if self.config.pack_gqa else 1, Float32),
            apart=cute.make_rmem_tensor(2, Float32),
            right_first=cute.make_rmem_tensor(1, Int32),
        )

    @cute.jit
    def set_bias(self, work, batch, places, shift):
        """The slopes and distances of a tile's rows."""
        lean, first_column = work.lean, cute.arch.lane_idx() % 4 * 2
        for r in cutlass.range_constexpr(2):
            query, head = places[r]
            lean.apart[r] = (query + shift + lean.slopes.origin - first_column).to(Float32)
            if const_expr(r < cute.size(lean.slope)):
                slope = slope_of(lean.slopes, batch, head)
                lean.slope[r] = slope if const_expr(self.config.softcap) else slope / work.multiplier

    @cute.jit
    def left_tiles(self, work, rows, seqlen_q, shift):
        """Key tiles to the first that does not lie left of all queries of ``rows``; which lie right is kept."""
        lean, tile_n = work.lean, self.tile_n
        first, past = rows
        if const_expr(not self.config.right):
            last = cutlass.min(past, seqlen_q) - 1 + shift + lean.slopes.origin
            lean.right_first[0] = cute.ceil_div(cutlass.max(last, 0), tile_n)
        return cutlass.max(first + shift + lean.slopes.origin + 1, 0) // tile_n

    def slope_at(self, work: Any, r: int) -> Any:
        slope = work.lean.slope
        return slope[r % cute.size(slope)]

    def columns_at(self, c: int) -> float:
        """A thread's c-th column of a row, counted from its first."""
        return float(c // 2 * 8 + c % 2)

    @cute.jit
    def begin_crossed(self, work, n):
        """Scores of key tile ``n`` begin at the bias."""
        rows = work.rows_s
        for r in cutlass.range_constexpr(2):
            slope = -self.slope_at(work, r)
            apart = work.lean.apart[r] - (n * self.tile_n).to(Float32)
            for c in cutlass.range_constexpr(self.tile_n // 4):
                rows[r, c] = magnitude(apart - self.columns_at(c)) * slope

    @cute.jit
    def pack_and_begin(self, work, n):
        """P as an operand, and in its place what scores of key tile ``n`` begin at, unless the diagonal crosses it."""
        rows, packed = work.rows_s, words(work.p)
        slopes = [self.toward(work, r, n) for r in range(2)]
        last = self.columns_at(self.tile_n // 4 - 1)
        for i in cutlass.range_constexpr(cute.size(packed)):
            r, c = i % 2, i // 2 * 2
            packed[i] = pack16(rows[r, c], rows[r, c + 1], self.dtype)
            for j in cutlass.range_constexpr(2):
                rows[r, c + j] = times(slopes[r], self.columns_at(c + j) - last)

    @cute.jit
    def toward(self, work, r, n):
        """By how much a row's scores rise from a column to the next, in a key tile that the diagonal does not cross."""
        slope = self.slope_at(work, r)
        if const_expr(not self.config.right):
            slope = -slope if n >= work.lean.right_first[0] else slope
        return slope

    @cute.jit
    def row_parts(self, work, n, crossed):
        """What is still to be added to the scores of each row."""
        parts = []
        for r in cutlass.range_constexpr(2):
            if const_expr(crossed):
                parts.append(Float32(0.0))
            else:
                last = self.columns_at(self.tile_n // 4 - 1)
                apart = work.lean.apart[r] - (n * self.tile_n).to(Float32) - last
                parts.append(-apart * self.toward(work, r, n))
        return parts

    @cute.jit
    def add_bias(self, work, n):
        """To capped scores of key tile ``n``."""
        rows = work.rows_s
        for r in cutlass.range_constexpr(2):
            slope = self.slope_at(work, r)
            apart = work.lean.apart[r] - (n * self.tile_n).to(Float32)
            for c in cutlass.range_constexpr(self.tile_n // 4):
                rows[r, c] = rows[r, c] - magnitude(apart - self.columns_at(c)) * slope
