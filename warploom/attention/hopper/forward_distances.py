"""Biases that are read by distance in the forward: the accumulators of scores begin at them, and QKᵀ adds to them.

Key tiles that lie farther left of a warpgroup's queries than the table reaches begin at nothing, as values are kept less that
of the far left; what is far right is a part of the rows' maxima. Tiles in between begin at the values of their distances,
which a thread loads by pairs into the registers of its scores, at fixed offsets from one address.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.attention.hopper.forward_base import ForwardBase
from warploom.kernels.cute.barriers import ForwardBarrier, wait
from warploom.kernels.cute.basics import LOG2_E, WARPGROUP
from warploom.kernels.cute.distances import (
    BASE,
    HIDES,
    LEFT_FAR,
    RIGHT,
    RIGHT_FAR,
    Distances,
    distances_of,
    load_two,
    spread_out,
    values_at,
    with_shown,
)
from warploom.kernels.cute.fields import Fields
from warploom.kernels.distances import HEADER, PAD, head_length

# Where a key tile lies: its scores begin at values of the table; far left or far right of all queries.
NEAR, FAR_LEFT, FAR_RIGHT = "near", "far left", "far right"


class DistanceRows(Fields):
    """What a warpgroup keeps of a table; spread out it runs from the far left to the far right."""

    given: Distances
    head: Any  # address of the head's values
    places: Any  # in them, of the warpgroup's first query and key tile 0; from there to this thread's first element
    base: Any  # log2 units that scores are less
    right: Any  # what all values far right are, in raw scores' units
    ends: Any  # key tiles before the first lie far left, from the second on far right; 1 if values may hide


class DistanceScores(ForwardBase):
    """What consumer warpgroups do for a table of distances."""

    @cute.kernel
    def spread(self, distances: tuple[Any, ...], scale: Float32):
        """The table of each head, spread out."""
        spread_out(distances_of(distances), scale, False)

    def distances(self, bias: Any) -> DistanceRows | None:
        given = distances_of(bias) if self.reads_distances else None
        if given is None:
            return None
        return DistanceRows(
            given=given,
            head=cute.make_rmem_tensor(1, Int64),
            places=cute.make_rmem_tensor(2, Int32),
            base=cute.make_rmem_tensor(1, Float32),
            right=cute.make_rmem_tensor(1, Float32),
            ends=cute.make_rmem_tensor(3, Int32),
        )

    @cute.jit
    def set_distances(self, work, top, places, shift):
        """The values of a tile's head, and where its rows' lie."""
        own = work.distances
        given, tile_n = own.given, self.tile_n
        heads, entries = given.table.shape
        query, head = places[0]
        start = given.spread.iterator + Int64(cutlass.min(head, heads - 1)) * head_length(entries)
        facts = cute.make_tensor(start, cute.make_layout(HEADER))
        first = top + shift + given.origin  # distance of the first query to key 0
        own.head[0] = (start + HEADER).toint()
        own.places[0] = PAD + entries - 1 - first
        own.places[1] = top - query + cute.arch.lane_idx() % 4 * 2
        own.base[0] = facts[BASE] * LOG2_E
        own.right[0] = facts[RIGHT]
        left = cutlass.max(first - entries + 2, 0) // tile_n
        right = cute.ceil_div(cutlass.max(first + 63, 0), tile_n)
        words = cute.recast_tensor(facts, Int32)
        own.ends[0] = left if words[LEFT_FAR] == 1 else Int32(0)
        own.ends[1] = right if words[RIGHT_FAR] == 1 else Int32(1 << 30)
        own.ends[2] = words[HIDES]

    @cute.jit
    def begin_near(self, work, n, masked):
        """Scores of key tile ``n`` begin at the values of their distances; and of a masked tile which do not hide."""
        own, rows, words, hides = work.distances, work.rows_s, work.mask_words, work.distances.ends[2]
        place = own.places[0] + n * self.tile_n
        address = values_at(own.head[0], own.given.table.shape[1], place, own.places[1], -self.tile_n)
        for i in cutlass.range_constexpr(self.tile_n // 8):
            for r in cutlass.range_constexpr(2):
                rows[r, 2 * i], rows[r, 2 * i + 1] = load_two(address, 32 * (i - r))
        words.fill(-1)
        if const_expr(masked):  # noqa: SIM102
            if hides == 1:
                for r in cutlass.range_constexpr(2):
                    shown = Int32(0)
                    for c in cutlass.range_constexpr(self.tile_n // 4):
                        shown = with_shown(shown, c, rows[r, c])
                    words[r] = shown

    @cute.jit
    def clear_unseen(self, work, n, stage, phase, rows):
        """Zero the values of key tile ``n``'s keys that no query of the tile sees, if the table may hide some.

        Else NaN among them would not vanish against P = 0. Each warpgroup does it for itself. ``rows``: the tile's first, how
        many the sequence has, by how much their positions are more, and the limits.
        """
        own, shared = work.distances, work.shared
        hides, group, full = own.ends[2], work.group, shared.v_full + stage
        head, given, values = own.head[0], own.given, shared.v[None, None, stage]
        if hides == 1:
            cute.arch.mbarrier_wait(full, phase)
            thread = cute.arch.thread_idx()[0] % WARPGROUP
            if thread < self.tile_n:
                seen = self.sees_key(head, given, n * self.tile_n + thread, rows)
                if seen == 0:
                    for d in cutlass.range(self.config.head_dim_v, unroll=1):
                        values[thread, d] = self.dtype(0.0)
            cute.arch.fence_view_async_shared()
            wait(ForwardBarrier.CLEARED, WARPGROUP, group)

    @cute.jit
    def sees_key(self, head, given, key, rows):
        """1 if a query of the tile sees a key; ``head``: address of the head's values."""
        first, seqlen_q, shift, left, right = rows
        past = cutlass.min(first + self.tile_m, seqlen_q)
        if const_expr(self.config.right):
            first = cutlass.max(first, key - shift - right)
        if const_expr(self.config.left):
            past = cutlass.min(past, key - shift + left + 1)
        entries = given.table.shape[1]
        length = entries + 2 * PAD
        pointer = cute.make_ptr(Float32, head, cute.AddressSpace.gmem, assumed_align=4)
        values = cute.make_tensor(pointer, cute.make_layout((length,)))
        seen = Int32(0)
        for row in cutlass.range(first, past, unroll=1):
            place = PAD + entries - 1 - (row + shift + given.origin - key)
            value = values[cutlass.min(cutlass.max(place, 0), length - 1)]
            seen = seen if value == -Float32.inf else Int32(1)
        return seen
