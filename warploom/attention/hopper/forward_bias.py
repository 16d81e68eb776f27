"""ALiBi in the forward: what it adds to the scores of a key tile, for one instruction an element where that is enough.

-slope · |d| falls or rises by constants along a row, so scores are counted in slopes: u = raw · ratio ± k, where k is an
immediate. What is the same for a thread's elements of a row joins the row's maximum instead. Tiles that the diagonal crosses,
and all of a negative slope, take |d| of every element.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from warploom.attention.hopper.forward_base import ForwardBase
from warploom.kernels.cute.bias import LEAST, Slopes, slope_of, slopes_of
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import magnitude
from warploom.kernels.cute.softmax import capped

CROSSED, LEFT, RIGHT = 0, 1, -1  # where a key tile lies: keys before all queries of the rows, after them, or neither


class Lean(Fields):
    """ALiBi of a warpgroup's rows; with several heads in a tile each of a thread's two rows has its own slope."""

    slopes: Slopes
    unit: Any  # |slope| in log2 units: what scores are counted in
    ratio: Any  # of a raw score, or of the softcap's, to that
    sign: Any  # of the bias: 1 where the slope is negative
    apart: Any  # of each row: distance to this thread's first column of key tile 0


class BiasedScores(ForwardBase):
    """What consumer warpgroups do for a bias."""

    def lean(self, bias: Any) -> Lean | None:
        slopes = slopes_of(bias)
        if slopes is None:
            return None
        heads = 2 if self.config.pack_gqa else 1
        unit, ratio, sign, apart = (cute.make_rmem_tensor(n, Float32) for n in (heads, heads, heads, 2))
        return Lean(slopes=slopes, unit=unit, ratio=ratio, sign=sign, apart=apart)

    def units(self, work: Any) -> list[Any]:
        """What a score of each of a thread's two rows is worth in log2 units."""
        if self.biased:
            unit = work.lean.unit
            return [unit[0], unit[cute.size(unit) - 1]]
        scale = Float32(1.0) if self.config.softcap else work.multiplier
        return [scale, scale]

    @cute.jit
    def set_bias(self, work, batch, places, shift):
        """The slopes and distances of a tile's rows."""
        lean, first_column = work.lean, cute.arch.lane_idx() % 4 * 2
        for r in cutlass.range_constexpr(2):
            query, head = places[r]
            lean.apart[r] = (query + shift + lean.slopes.origin - first_column).to(Float32)
            if const_expr(r < cute.size(lean.unit)):
                slope = slope_of(lean.slopes, batch, head)
                lean.unit[r] = cute.arch.fmax(magnitude(slope), Float32(LEAST))
                lean.ratio[r] = work.multiplier / lean.unit[r]
                lean.sign[r] = 1.0 if slope < 0.0 else -1.0

    @cute.jit
    def sides(self, work, batch, m_block, head, members, rows, seqlen_q, shift):
        """Key tiles from the first on that lie right of all queries of ``rows``, and to the first on that does not lie left."""
        lean, tile_n = work.lean, self.tile_n
        first, past = rows
        local = cute.arch.lane_idx() * (self.tile_m // 32)
        own = slope_of(lean.slopes, batch, self.place(m_block, head, local, members, seqlen_q)[1])
        far = first + shift + lean.slopes.origin
        left_end = cutlass.max(far + 1, 0) // tile_n
        far = cutlass.min(past, seqlen_q) - 1 + shift + lean.slopes.origin
        right_first = cute.ceil_div(cutlass.max(far, 0), tile_n)
        if cute.arch.vote_any_sync(own < 0.0):
            left_end, right_first = 0, 1 << 30
        return right_first, left_end

    @cute.jit
    def add_bias(self, work, n, side):
        """Scores of key tile ``n`` in slopes, and what is to be added to those of each row."""
        lean, rows = work.lean, work.rows_s
        frames = []
        for r in cutlass.range_constexpr(2):
            ratio, sign = lean.ratio[r % cute.size(lean.ratio)], lean.sign[r % cute.size(lean.sign)]
            apart = lean.apart[r] - (n * self.tile_n).to(Float32)
            for c in cutlass.range_constexpr(self.tile_n // 4):
                column = float(c // 2 * 8 + c % 2)
                if const_expr(side == CROSSED):
                    added = magnitude(apart - column) * sign
                else:
                    added = Float32(column * side)
                if const_expr(self.config.softcap):
                    rows[r, c] = capped(rows[r, c], ratio, work.cap_in) + added
                else:
                    rows[r, c] = rows[r, c] * ratio + added
            frames.append(apart * float(-side))
        return frames
