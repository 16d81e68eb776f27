"""How the blocks of a masked call that run at one time come to pass the same query tiles at one time, up to head_dim 128.

What such blocks read stays in L2 then. A block begins with the tile at which the block before it stands, if it sees it: it
walks from there to its first tile, and then from its last one to where it began. Blocks that begin later, as the ones before
end, would else pass each tile so much later, and under a causal mask none would find it in L2. Each slice has a word in
global memory: the block that began last in it, and that block's tile.

Where a block sees a second run of tiles, the last run and what comes before it take turns: where keys see two halves of the
queries (block diffusion) blocks would else reach the second run after different times.

Under a window the last tile moves from block to block, so that no tile is passed by many at a time. Such blocks take one head
of their group after the other: what they read of one head fits into L2, of all heads abreast it does not.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward_columns import RUNS, ColumnWalk
from warploom.attention.hopper.config import PLACES, TABLE
from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.columns import extrema_by_lanes, mask_row
from warploom.kernels.cute.memory import load_acquire

BEFORE, SKIPPED, LEFT = range(RUNS, RUNS + 3)  # numbers of a head behind its runs
DEAD, SLIDES = 1, 2  # bits of a block's word: keys may be dead, its last tile moves from block to block


class JoinedWalk(ColumnWalk):
    """The walk of blocks that may be handed out in pieces."""

    @property
    def kept(self) -> int:
        """As ``ColumnWalk`` has it."""
        return RUNS + 3 if self.config.dealt else RUNS

    @cute.jit
    def slides(self, work):
        """SLIDES if the last tile of the group's first head is another one than that of the blocks on either side, else 0."""
        side = cute.arch.lane_idx() // 8
        walker = cutlass.min(cutlass.max(self.walker(work) + cutlass.min(side, 2) - 1, 0), work.given.n_blocks - 1)
        bounds = work.given.columns.bounds
        row = mask_row(work.batch, work.head * work.group_size, work.heads_q, bounds)
        extrema = extrema_by_lanes(bounds, row, *self.columns_of(work, walker), self.span, side * 8)
        runs = self.runs_of(work, walker, extrema)
        last = self.tile_at(runs, self.tiles_of(runs) - 1)
        before, own, after = [cute.arch.shuffle_sync(last, 8 * i) for i in range(3)]
        return choose((before != own) & (after != own), SLIDES, 0)

    @cute.jit
    def heads_to_pass(self, work):
        """As ``heads_abreast``, but one where the last tile slides."""
        abreast = self.heads_abreast(work)
        if const_expr(self.config.dealt):
            abreast = choose(work.bounds[1] & SLIDES > 0, 1, abreast)
        return abreast

    @cute.jit
    def more_runs(self, work, runs):
        """Tiles before the last run, 0 where those do not take turns with it; tiles to skip; the word to leave, 0: none."""
        found = []
        if const_expr(self.config.dealt):
            before, skipped, left = Int32(0), Int32(0), Int32(0)
            piece_first, bits, steps, piece_end = work.bounds
            if bits & SLIDES == 0 and self.heads_abreast(work) == work.group_size:
                before = self.tiles_before(runs)
                if piece_end - piece_first == steps:
                    tiles = self.tiles_of(runs)
                    word = load_acquire(self.place_of(work))
                    index = self.index_of(runs, word & 0xFFFF)
                    if word != 0 and index >= before and index < tiles:
                        skipped = schedule.place_in_turns(index, tiles, before, choose)
                    left = self.word_of(work, self.tile_at(runs, schedule.in_turns(skipped, tiles, before, choose)))
                    if cute.arch.lane_idx() == 0:
                        cute.arch.atomic_max(self.place_of(work), left)
            found = [before, skipped, left]
        return found

    @cute.jit
    def tile_to_come(self, work, runs, at, beside):
        """As ``ColumnWalk`` has it: runs in turns, what was skipped last; leaves word of it, if none of the slice began since."""
        m = Int32(0)
        if const_expr(self.config.dealt):
            words, (before, skipped, left) = work.shared.words, runs[RUNS:]
            tiles = self.tiles_of(runs)
            number = tiles - at + skipped
            index = schedule.in_turns(choose(number >= tiles, number - tiles, number), tiles, before, choose)
            m = self.tile_at(runs, index)
            if left != 0 and beside == 0 and index >= before:
                word, place = self.word_of(work, m), self.place_of(work)
                if cute.arch.lane_idx() == 0:
                    cute.arch.atomic_cas(place, cmp=left, val=word)
                    words[self.runs_at + LEFT] = word
                cute.arch.sync_warp()
        else:
            m = self.tile_at(runs, at - 1)
        return m

    @cute.jit
    def tiles_before(self, runs):
        """How many tiles of a head a block sees before the last run of them."""
        first, end, gap, past, other, other_past, *_ = runs
        before = Int32(0)
        if past < end and gap < past:
            before = gap - first
        if other_past < end and other < other_past:
            before = gap - first + other - past
        return before

    @cute.jit
    def index_of(self, runs, m):
        """Which of the tiles that a block sees a tile is, below 0: none."""
        first, end, gap, past, other, other_past, *_ = runs
        index = m - first
        if m >= past:
            index -= past - gap
        if m >= other_past:
            index -= other_past - other
        if m < first or m >= end or (m >= gap and m < past) or (m >= other and m < other_past):
            index = Int32(-1)
        return index

    def place_of(self, work: Any) -> Any:
        """Where the place of a slice's last block stands."""
        counters = work.given.counters
        slice_ = work.batch * work.given.k_shape[2] + work.head
        return counters.iterator + (counters.shape[0] - 1 - TABLE - PLACES + slice_ % PLACES)

    def word_of(self, work: Any, m: Any) -> Any:
        """What names a block, the later one by the greater number, and its tile; of millions of tokens it may name others."""
        return ((work.n_block + 1) & 0x7FFF) << 16 | (m & 0xFFFF)
