"""Biases that are read by distance in the backward, and the gradient of their table.

As in the forward, scores of query tiles near the keys begin at the values of their distances. Where keys are far to the left of
all queries of a tile it begins at nothing, as rows' lse are less the same number as values are; far to the right one number is
added to all.

dS of a near tile is summed along its diagonals: in registers, where a thread has two keys, then over the lanes of a warp, which
adds the sums to the gradient. Of far tiles a thread sums what it has, for a query head's whole run of them. Sums of warps meet
in global memory in any order.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.attention.hopper.backward_base import BackwardBase
from warploom.kernels.cute.basics import LOG2_E
from warploom.kernels.cute.distances import (
    BASE,
    LEFT_FAR,
    RIGHT,
    RIGHT_FAR,
    Distances,
    add_to,
    distances_of,
    load_two,
    spread_out,
    values_at,
)
from warploom.kernels.cute.fields import Fields
from warploom.kernels.distances import HEADER, PAD, head_length

# Where a query tile lies: near the keys, or so far that all its values are one.
NEAR, FAR = "near", "far"


class KeyDistances(Fields):
    """A table as a warpgroup reads it, whose values rise with the distance."""

    given: Distances
    head: Any  # of the steps; addresses are found anew where they are needed: their registers are the steps'
    apart: Any  # distance of the block's first query tile's first query to the warpgroup's first key
    right: Any  # log2 units: what all values far right are; then, without a limit on the right, those of the far left: 0
    ends: Any  # query tiles before the first lie far right of it, from the second on far left
    far: Any  # this thread's sum of a run of far tiles


def first_of_head(distances: Distances, head: Any) -> Any:
    """Of a head's spread values; of one past the last any."""
    heads, entries = distances.table.shape
    return distances.spread.iterator + Int64(cutlass.min(head, heads - 1)) * head_length(entries)


class DistanceSteps(BackwardBase):
    """What the kernels do for a table of distances."""

    @cute.kernel
    def spread(self, distances: tuple[Any, ...], scale: Float32):
        """The table of each head, spread out."""
        spread_out(distances_of(distances), scale, True)

    def level_base(self, distances: Any, head: Any) -> Any:
        """What scores are less, in log2 units: so are the rows' lse."""
        return cute.make_tensor(first_of_head(distances, head), cute.make_layout(HEADER))[BASE] * LOG2_E

    def distances(self, given: Any) -> KeyDistances | None:
        """Of a call; None without a table."""
        if not self.reads_distances:
            return None
        return KeyDistances(
            given=given.distances,
            head=cute.make_rmem_tensor(1, Int32),
            apart=cute.make_rmem_tensor(1, Int32),
            right=cute.make_rmem_tensor(1, Float32),
            ends=cute.make_rmem_tensor(2, Int32),
            far=cute.make_rmem_tensor(1, Float32),
        )

    @cute.jit
    def take_distances(self, r, work, head):
        """The steps that follow are of this query head."""
        own, tile_m = r.distances, self.tile_m
        given = own.given
        entries = given.table.shape[1]
        start = first_of_head(given, head)
        facts = cute.make_tensor(start, cute.make_layout(HEADER))
        words = cute.recast_tensor(facts, Int32)
        key = work.n_block * self.tile_n + r.group * 64
        apart = work.shift + given.origin - key
        own.head[0] = head
        own.apart[0] = apart
        own.right[0] = facts[RIGHT] * r.multiplier
        # Far right are tiles whose last query is no farther than its nearest key; far left those whose first is past the table.
        right = cutlass.max(1 - apart, 0) // tile_m
        left = cute.ceil_div(cutlass.max(entries - 1 + 63 - apart, 0), tile_m)
        own.ends[0] = right if words[RIGHT_FAR] == 1 else Int32(0)
        own.ends[1] = left if words[LEFT_FAR] == 1 else Int32(1 << 28)
        own.far[0] = Float32(0.0)

    def gradient_of_head(self, own: KeyDistances) -> Any:
        """Address of the gradient's first entry."""
        heads, entries = own.given.table.shape
        return (own.given.gradient.iterator + Int64(cutlass.min(own.head[0], heads - 1)) * entries).toint()

    @cute.jit
    def begin_near(self, r, m):
        """Scores of query tile ``m`` begin at the values of their distances."""
        own, rows = r.distances, r.rows_s
        head = (first_of_head(own.given, own.head[0]) + HEADER).toint()
        place, to_thread = PAD + own.apart[0] + m * self.tile_m, r.column + r.group * 64 - r.row
        address = values_at(head, own.given.table.shape[1], place, to_thread, self.tile_m)
        for n in cutlass.range_constexpr(self.tile_m // 8):
            for i in cutlass.range_constexpr(2):
                rows[i, 2 * n], rows[i, 2 * n + 1] = load_two(address, 32 * (n - i))

    # The gradient

    @cute.jit
    def add_far(self, r):
        """Sum a far tile's dS, which all belong to one entry."""
        sums = [Float32(0.0), Float32(0.0)]
        for c in cutlass.range_constexpr(self.tile_m // 4):
            for i in cutlass.range_constexpr(2):
                sums[i] = sums[i] + r.rows_dp[i, c]
        r.distances.far[0] = r.distances.far[0] + (sums[0] + sums[1])

    @cute.jit
    def leave_far(self, r, entry):
        """Add the sum of a run of far tiles to the entry of that side; what comes is not far right."""
        own = r.distances
        own.right[0] = Float32(0.0)
        if const_expr(self.config.bias_grad):
            total = cute.arch.warp_reduction_sum(own.far[0])
            if cute.arch.lane_idx() == 0:
                add_to(self.gradient_of_head(own) + Int64(4 * entry), total)
            own.far[0] = Float32(0.0)

    @cute.jit
    def add_near(self, r, m):
        """Add a near tile's dS to the entries of their distances.

        Lane 4 g + q has columns 2 q + b of each eight and keys g and g + 8: distances 8 k + b + 2 q - g from the warp's first.
        """
        own, lane, count = r.distances, cute.arch.lane_idx(), self.tile_m // 8
        g, q = lane // 4, lane % 4
        # Of k from -2 on: where b + 2 q - g is below 0, eights begin one earlier.
        along = [[self.along(r, k, b) for k in range(-2, count + 1)] for b in range(2)]
        sums = []
        for k in cutlass.range_constexpr(count + 2):
            total = Float32(0.0)
            for b in cutlass.range_constexpr(2):
                earlier = b + 2 * q < g
                own_sum = along[b][k + 1] if earlier else along[b][k]
                # Lane 4 d + q gets those that are d past a multiple of 8.
                total += cute.arch.shuffle_sync(own_sum, ((b + 2 * q - g) & 7) * 4 + q)
            sums.append(total)
        sums += [Float32(0.0)] * (-len(sums) % 4)
        for bit in cutlass.range_constexpr(1, -1, -1):
            half = len(sums) // 2
            upper = (q >> bit) & 1
            kept = []
            for n in cutlass.range_constexpr(half):
                own_part = sums[half + n] if upper == 1 else sums[n]
                other = sums[n] if upper == 1 else sums[half + n]
                kept.append(own_part + cute.arch.shuffle_sync_bfly(other, 1 << bit))
            sums = kept
        entries, gradient = own.given.table.shape[1], self.gradient_of_head(own)
        warp = cute.arch.thread_idx()[0] % 128 // 32 * 16
        first = own.apart[0] - warp + m * self.tile_m + 8 * (q * len(sums) - 2) + g
        for n in cutlass.range_constexpr(len(sums)):
            entry = cutlass.min(cutlass.max(first + 8 * n, 0), entries - 1)
            add_to(gradient + Int64(4 * entry), sums[n])

    def along(self, r: Any, k: int, b: int) -> Any:
        """A thread's dS that are 8 k + b from its first key's first: of column k of its first key, k + 1 of its second."""
        count, found = self.tile_m // 8, None
        for i in range(2):
            if 0 <= k + i < count:
                value = r.rows_dp[i, 2 * (k + i) + b]
                found = value if found is None else found + value
        return Float32(0.0) if found is None else found
