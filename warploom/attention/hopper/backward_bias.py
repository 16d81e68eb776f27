"""ALiBi in the backward, whose accumulators have keys down and queries across.

Left of the diagonal -slope · (p - j) is a part of the query's and one of the key's. The kernel before has put into a row's lse
what depends on its place in the query tile; the rest is one number for each of a thread's two keys and a step. Tiles with keys
on the right of a query take twice the slope off for each of those.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from warploom.attention.hopper.backward_base import BackwardBase, Work
from warploom.kernels.cute.bias import Slopes, slope_of
from warploom.kernels.cute.fields import Fields


class KeyAlibi(Fields):
    """ALiBi of a warpgroup's keys."""

    slopes: Slopes
    slope: Any  # of the head that steps are of, in log2 units
    apart: Any  # how far this thread's first key lies past the position of the first query


class BiasSteps(BackwardBase):
    """What the kernels do for a bias."""

    def alibi(self, work: Any) -> KeyAlibi | None:
        """Of a block, or of a call; None without a bias."""
        if not self.biased:
            return None
        given = work.given if isinstance(work, Work) else work
        return KeyAlibi(
            slopes=given.slopes, slope=cute.make_rmem_tensor(1, Float32), apart=cute.make_rmem_tensor(1, Int32)
        )

    @cute.jit
    def take_slope(self, r, work, head):
        """The steps that follow are of this query head, counted in the call."""
        if const_expr(self.biased):
            r.alibi.slope[0] = slope_of(r.alibi.slopes, work.sequence, head)

    @cute.jit
    def set_apart(self, r, work):
        """Of a block's keys."""
        if const_expr(self.biased):
            r.alibi.apart[0] = work.n_block * self.tile_n + r.row - work.shift - r.alibi.slopes.origin

    def level_of(self, r: Any, m: Any, masked: bool) -> Any:
        """What makes of a row's statistic, by its column and the key, what a score is less in the exponent."""
        slope = r.alibi.slope[0]
        apart = r.alibi.apart[0] - m * self.tile_m
        first = slope * apart.to(Float32)
        near = [first, first + slope * 8.0]
        twice = (2 * (apart - r.column)).to(Float32)

        def level(found: Any, i: int, c: int) -> Any:
            if not masked:
                return found - near[i]
            past = cute.arch.fmax(twice + float(16 * i - 2 * (c // 2 * 8 + c % 2)), 0.0)
            return found - near[i] + past * slope

        return level

    def row_bias(self, slopes: Slopes | None, batch: Any, head: Any, in_tile: Any) -> Any:
        """What is added to a row's lse in log2 units."""
        return slope_of(slopes, batch, head) * in_tile.to(Float32)
