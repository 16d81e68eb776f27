"""Biases that are read by distance in the backward, and the gradient of their table.

As in the forward, scores of query tiles near the keys begin at the values of their distances. Where keys are far to the left of
all queries of a tile it begins at nothing, as rows' lse are less the same number as values are; far to the right too, where
rows have an lse of their own.

dS of a near tile is summed along its diagonals: in registers, where a thread has two keys, then over the lanes of a warp, which
adds the sums to the gradient. What lies past the right end of the table is one sum of a warp and step: all warps add it to one
number. Of tiles far right a thread sums what it has, for a query head's whole run of them. What lies past the left end, most of
a long call, is not summed: dS of a row adds up to 0, so that end gets what all others get, less. Sums of warps meet in global
memory in any order.

Keys and values that no query of the group sees for -inf are cleared before the first product of a block; so are queries that
see nothing, and their dO, if they hold anything but numbers: P and dS are 0 there, but 0 times NaN is NaN. Far tiles have no
such queries, as values far away are numbers.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from warploom.attention.hopper.backward_columns import ColumnWalk
from warploom.kernels.cute.basics import LOG2_E
from warploom.kernels.cute.distances import (
    BASE,
    HIDES,
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
from warploom.kernels.cute.instructions import assembly
from warploom.kernels.distances import HEADER, PAD, head_length

# Where a query tile lies: near the keys, or so far that all its values are one.
NEAR, FAR = "near", "far"
# In the place of the first query tile that lies far left: none does; and values may hide.
NEVER, HIDING = 1 << 28, 1 << 29


class KeyDistances(Fields):
    """A table as a warpgroup reads it, whose values rise with the distance."""

    given: Distances
    head: Any  # of the steps; addresses are found anew where they are needed: their registers are the steps'
    apart: Any  # distance of the block's first query tile's first query to the warpgroup's first key
    right: Any  # from a row's lse to that which tiles far right take; once those are done: 0
    ends: Any  # query tiles before the first lie far right of it, from the second on far left
    far: Any  # this thread's sum of tiles far right


def first_of_head(distances: Distances, head: Any) -> Any:
    """Of a head's spread values; of one past the last any."""
    heads, entries = distances.table.shape
    return distances.spread.iterator + Int64(cutlass.min(head, heads - 1)) * head_length(entries)


def facts_of(distances: Distances, head: Any) -> Any:
    """The header of a head's spread values."""
    return cute.make_tensor(first_of_head(distances, head), cute.make_layout(HEADER))


@dsl_user_op
def add_inside(address: Int64, offset: int, x: Float32, entry: Int32, last: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Add ``x``, unless it is 0, to the fp32 so many bytes behind ``address``, that of an ``entry`` between 0 and ``last``."""
    text = (
        "{ .reg .pred p; setp.neu.f32 p, $1, 0f00000000; setp.gt.and.s32 p, $2, 0, p; setp.lt.and.s32 p, $2, $3, p; "
        f"@p red.relaxed.gpu.global.add.f32 [$0+{offset}], $1; }}"
    )
    values = [t.ir_value(loc=loc, ip=ip) for t in (Int64(address), Float32(x), Int32(entry), Int32(last))]
    assembly(None, values, text, "l,f,r,r,~{memory}", side_effects=True)


class DistanceSteps(ColumnWalk):
    """What the kernels do for a table of distances."""

    @cute.kernel
    def spread(self, distances: tuple[Any, ...], scale: Float32):
        """The table of each head, spread out."""
        spread_out(distances_of(distances), scale, True)

    def levels(self, distances: Any, head: Any, multiplier: Any) -> tuple[Any, Any]:
        """What scores are less, in log2 units, and so rows' lse; and what of those far right, in units of ``multiplier``."""
        facts = facts_of(distances, head)
        return facts[BASE] * LOG2_E, Float32(0.0) if multiplier is None else facts[RIGHT] * multiplier

    def distances(self, given: Any) -> KeyDistances | None:
        """Of a call; None without a table."""
        if not self.reads_distances:
            return None
        return KeyDistances(
            given=given.distances,
            head=cute.make_rmem_tensor(1, Int32),
            apart=cute.make_rmem_tensor(1, Int32),
            right=cute.make_rmem_tensor(1, Int32),
            ends=cute.make_rmem_tensor(2, Int32),
            far=cute.make_rmem_tensor(1, Float32),
        )

    @cute.jit
    def take_distances(self, r, work, head):
        """The steps that follow are of this query head."""
        own, tile_m = r.distances, self.tile_m
        given = own.given
        entries = given.table.shape[1]
        words = cute.recast_tensor(facts_of(given, head), Int32)
        hides = words[HIDES] == 1
        key = work.n_block * self.tile_n + r.group * 64
        apart = work.shift + given.origin - key
        own.head[0] = head
        own.apart[0] = apart
        own.right[0] = Int32(2 * tile_m)
        # Far right are tiles whose last query is no farther than its nearest key; far left those whose first is past the table.
        right = cutlass.max(1 - apart, 0) // tile_m
        left = cute.ceil_div(cutlass.max(entries - 1 + 63 - apart, 0), tile_m)
        # Where values may hide, queries of all tiles are looked at: none counts as far.
        own.ends[0] = right if words[RIGHT_FAR] == 1 and not hides else Int32(0)
        own.ends[1] = left if words[LEFT_FAR] == 1 else Int32(NEVER)
        own.ends[1] = Int32(HIDING) if hides else own.ends[1]
        own.far[0] = Float32(0.0)

    def hides(self, own: KeyDistances) -> Any:
        """Whether values of the head's table may be -inf."""
        return own.ends[1] == HIDING

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

    # What -inf hides

    @cute.jit
    def clear_hidden_keys(self, r, work):
        """Zeros for keys and values that no query of the group sees, if the tables of all its heads may hide some."""
        given, hides = r.distances.given, Int32(1)
        for member in cutlass.range(work.group_size, unroll=1):
            hides &= self.may_hide(given, work.head * work.group_size + member)
        if hides == 1:
            rows = self.quad_rows(r)
            self.clear_keys(r, rows, self.hidden_keys(given, work, [work.n_block * self.tile_n + row for row in rows]))

    @cute.jit
    def hidden_keys(self, given, work, keys):
        """Of two keys of this thread's quad: 1 where no query of the group sees them; lanes look at every fourth entry."""
        heads, entries = given.table.shape
        hidden = cute.make_rmem_tensor(2, Int32)
        hidden.fill(1)
        for member in cutlass.range(work.group_size, unroll=1):
            head = cutlass.min(work.head * work.group_size + member, heads - 1)
            for i in cutlass.range_constexpr(2):
                first, end = self.band_rows(work, keys[i])
                apart = work.shift + given.origin - keys[i]
                entry = cutlass.min(cutlass.max(first + apart, 0), entries - 1) + cute.arch.lane_idx() % 4
                past = cutlass.min(cutlass.max(end - 1 + apart, 0), entries - 1) + 1
                past = past if first < end else Int32(0)
                while entry < past:
                    entry += 4
                    if given.table[head, entry - 4] != -Float32.inf:
                        hidden[i] = Int32(0)
                        entry = past
        for i in cutlass.range_constexpr(2):
            for other in cutlass.range_constexpr(1, 3):
                hidden[i] = hidden[i] & cute.arch.shuffle_sync_bfly(hidden[i], other)
        return hidden

    def may_hide(self, given: Distances, head: Any) -> Any:
        """1 if a value of the head's table is -inf."""
        return cute.recast_tensor(facts_of(given, head), Int32)[HIDES]

    # The gradient

    @cute.jit
    def add_far(self, r):
        """Sum the dS of a tile far right, which all belong to one entry; of one far left nothing."""
        own, sums = r.distances, [Float32(0.0), Float32(0.0)]
        for c in cutlass.range_constexpr(self.tile_m // 4):
            for i in cutlass.range_constexpr(2):
                sums[i] = sums[i] + r.rows_dp[i, c]
        own.far[0] = own.far[0] + (sums[0] + sums[1] if own.right[0] > 0 else Float32(0.0))

    @cute.jit
    def leave_right(self, r):
        """Tiles far right are done: what they sum up to is added to the entry of that side, and taken from the other one."""
        own = r.distances
        right = own.right[0]
        if const_expr(self.config.bias_grad):
            gradient, last = self.gradient_of_head(own), own.given.table.shape[1] - 1
            total = cute.arch.warp_reduction_sum(own.far[0])
            if cute.arch.lane_idx() == 0 and right > 0:
                add_to(gradient, total)
                add_to(gradient + Int64(last) * 4, -total)
        own.right[0] = Int32(0)

    @cute.jit
    def add_near(self, r, m):
        """Add a near tile's dS to the entries of their distances.

        Lane 4 g + q has columns 2 q + b of each eight and keys g and g + 8: distances 8 k + b + 2 q - g from the warp's first.
        What it has of b = 0 meets that of b = 1 from lane (g + 1, q), or where g is odd from (g - 1, q - 1). Then it keeps a
        half of what it and lane (g + 4, q + 2) have, and of that and lane (g + 2, q + 1)'s: lanes alike modulo 8.
        """
        own, lane, count = r.distances, cute.arch.lane_idx(), self.tile_m // 8
        g, q = lane // 4, lane % 4
        partner = (g ^ 1) * 4 + ((q - g % 2) & 3)
        turned = (g % 2 == 0) & (q == 3)  # where lane (g + 1, 0) is the one to meet, an eight on
        met = []
        for k in cutlass.range_constexpr(-1, count + 1):
            before, here = self.along(r, k - 1, 1), self.along(r, k, 1)
            sent = before if turned else here
            met.append(self.along(r, k, 0) + cute.arch.shuffle_sync(sent, partner))
        # Of k from -2 on: where 2 q - g is below 0, eights begin one earlier.
        sums, earlier = [], 2 * q < g
        for k in cutlass.range_constexpr(count + 2):
            sooner = met[k]
            later = met[k - 1] if const_expr(k > 0) else Float32(0.0)
            sums.append(sooner if earlier else later)
        sums += [Float32(0.0)] * (-len(sums) % 4)
        for bit in cutlass.range_constexpr(1, -1, -1):
            half = len(sums) // 2
            upper = (q >> bit) & 1
            step = (2 << bit) * (1 - 2 * upper)
            other = ((g + step) & 7) * 4 + (q ^ (1 << bit))
            kept = []
            for n in cutlass.range_constexpr(half):
                own_part = sums[half + n] if upper == 1 else sums[n]
                others = sums[n] if upper == 1 else sums[half + n]
                kept.append(own_part + cute.arch.shuffle_sync(others, other))
            sums = kept
        last, gradient = own.given.table.shape[1] - 1, self.gradient_of_head(own)
        nearest = own.apart[0] - cute.arch.thread_idx()[0] % 128 // 32 * 16 + m * self.tile_m
        first = nearest + 8 * (q * len(sums) - 2) + ((2 * q - g) & 7)
        address = gradient + Int64(first) * 4
        for n in cutlass.range_constexpr(len(sums)):
            add_inside(address, 32 * n, sums[n], first + 8 * n, last)
        if nearest - 15 <= 0:
            past = Float32(0.0)
            for n in cutlass.range_constexpr(len(sums)):
                past += sums[n] if first + 8 * n <= 0 else Float32(0.0)
            self.add_past(gradient, past)
        inside = Float32(0.0)
        for n in cutlass.range_constexpr(len(sums)):
            inside -= sums[n] if first + 8 * n < cutlass.max(last, 1) else Float32(0.0)
        table, head, hides = own.given.table, own.head[0], self.hides(own)
        if hides:
            value = table[cutlass.min(head, table.shape[0] - 1), last]
            inside = Float32(0.0) if value == -Float32.inf else inside
        self.add_past(gradient + Int64(last) * 4, inside)

    @cute.jit
    def add_past(self, address, part):
        """Add the warp's sum of what lies past an end of the table, or at it, to that end."""
        total = cute.arch.warp_reduction_sum(part)
        if cute.arch.lane_idx() == 0:
            add_to(address, total)

    def along(self, r: Any, k: int, b: int) -> Any:
        """A thread's dS that are 8 k + b from its first key's first: of column k of its first key, k + 1 of its second."""
        count, found = self.tile_m // 8, None
        for i in range(2):
            if 0 <= k + i < count:
                value = r.rows_dp[i, 2 * (k + i) + b]
                found = value if found is None else found + value
        return Float32(0.0) if found is None else found
