"""Dropout's counters, computed ahead of the consumers by a warpgroup that does nothing else.

The words of a step lie where its dS goes: there as soon as dQ of the step before last is computed, when its dO may be
overwritten too.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward_base import WARPGROUPS
from warploom.attention.hopper.backward_deal import Dealer
from warploom.kernels.cute.basics import WARP
from warploom.kernels.cute.dropout import COUNTED, head_part, keys_part, query_part, rounds_of, store_words, words_of

SERVED = WARPGROUPS  # warps of consumers for which a warp draws


class Drawer(Dealer):
    """The warps that draw, of persistent blocks."""

    place: Any  # the producer's

    @cute.jit
    def draw_blocks(self, given, warp):
        """A drawing warp's part of every block."""
        turn, base = Int32(0), Int32(0)
        n_block = self.next_block(given, turn)
        while n_block >= 0:
            work = self.read_block(given, n_block, turn, base)
            cute.arch.mbarrier_arrive(given.shared.block_empty)
            self.draw_block(work, warp)
            base += self.steps_of(work)
            turn += 1
            n_block = self.next_block(given, turn)

    @cute.jit
    def draw_block(self, work, warp):
        """The words of every step of a key block for two warps of consumers: a counter of 16 keys for each query."""
        shared, dropout, lane = work.shared, work.given.dropout, cute.arch.lane_idx()
        first = work.n_block * (self.tile_n // COUNTED) + dropout.first + warp * SERVED
        targets = [self.ds_rows(shared, warp // 2, warp % 2 * SERVED + w, lane) for w in range(SERVED)]
        for j in cutlass.range(self.steps_of(work), unroll=1):
            head, m, _ = self.place(work, j)
            stage, phase = schedule.ring(work.base + j, self.stages)
            head_high, head_low = head_part(head)
            keys = [keys_part(dropout.seed, head_low, work.sequence, first + w) for w in range(SERVED)]
            cute.arch.mbarrier_wait(shared.do_empty + stage, phase ^ 1)
            into = [self.drawn_from(target + stage * (self.tile_m * self.tile_n)) for target in targets]
            for i in cutlass.range_constexpr(rounds_of(self.tile_m, COUNTED)):
                query = query_part(dropout.seed, head_high, m * self.tile_m + lane + WARP * i)
                for w in cutlass.range_constexpr(SERVED):
                    store_words(into[w][i], words_of(dropout.seed, query, keys[w]))
            cute.arch.mbarrier_arrive(shared.drop_full + stage)

    def drawn_from(self, tile: Any) -> list[Any]:
        """Where a lane's words of a counter go, by rounds: where the last of its dS goes later in the step."""
        sixteens = self.tile_m // 16
        return [tile + i * (16 * 64) for i in range(sixteens - rounds_of(self.tile_m, COUNTED), sixteens)]
