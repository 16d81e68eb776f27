"""How the key blocks of a masked call are handed out: to head_dim 128 long ones in pieces, so that processors end together.

What a block sees is known on the device alone. The kernel before counts the steps of the call's last MOST_BLOCKS blocks and
cuts those that are longer than processors' shares of all steps from there on into pieces as long (guided self-scheduling,
Polychronopoulos and Kuck 1987). So a block that all queries see does not outlast the others, and what is handed out last is
small. The pieces of a block follow each other. Each leaves its sums of dK and dV, and the one that ends last adds them up.

Past 128 the last blocks go longest first instead, and those that would outlast all behind them begin the call.

And where blocks are dealt, who clears which part of dQ: memory has time for that beside the steps, the kernel before has not.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward_base import ROW_THREADS, WARPGROUPS
from warploom.attention.hopper.backward_columns import APART, ColumnWalk
from warploom.attention.hopper.config import CUTS, FIRST_BLOCKS, LAST_BLOCKS, LONGEST, STRETCHES, TABLE
from warploom.kernels.cute.basics import WARP, choose
from warploom.kernels.cute.columns import FAR, extrema_by_lanes, extrema_of, mask_row
from warploom.kernels.cute.memory import count_up, wait_for_least

MOST_BLOCKS = 4096  # that the kernel before looks at, the last ones of the call
MOST_STEPS = (1 << 30) // MOST_BLOCKS
NO_CUT = -(1 << 30)
COUNTED = schedule.MOST_PIECES + 1
HALF = 1 << 16  # two counts share a word: of cut blocks and of the items that they add


class Dealer(ColumnWalk):
    """The table of cut blocks, and who finds an item in it.

    The table stands in ``counters`` before the last one: how many items there are beyond one a block; then of each of CUTS
    cut blocks, the call's last one first, its first item without those beyond one of blocks up to it, its number, its pieces.

    The sums of a block's pieces lie behind those of all before it in the table.
    """

    @cute.jit
    def deal(self, given, counters, processors, slots):
        """Fill the table; ``slots``: pieces that have room for their sums. Each thread of a block looks at some."""

        @cute.struct
        class Storage:
            steps: cute.struct.Align[cute.struct.MemRange[Int32, MOST_BLOCKS], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Int32, ROW_THREADS], 16]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        steps = storage.steps.get_tensor(cute.make_layout(MOST_BLOCKS))
        sums = storage.sums.get_tensor(cute.make_layout(ROW_THREADS))
        table, thread = self.table_at(counters), cute.arch.thread_idx()[0]
        total = given.n_blocks * given.slices
        count, first, past, rest, mean = self.look_at_last(given, steps, sums)
        left, cuts = rest, Int32(0)
        for i in cutlass.range(first, past, unroll=1):
            left += steps[count - 1 - i]
            pieces = schedule.guided_pieces(steps[count - 1 - i], left, mean, processors, self.tile_m, choose)
            cuts += choose(pieces > 1, HALF, 0) + pieces - 1
            steps[count - 1 - i] = pieces  # of this thread alone
        for i in cutlass.range(thread, CUTS, ROW_THREADS, unroll=1):
            counters[table + 1 + 3 * i] = Int32(NO_CUT)
        if thread == 0:
            counters[table] = Int32(0)
        before, _ = self.sums_before(sums, thread, cuts)
        number, more = before // HALF, before % HALF
        for i in cutlass.range(first, past, unroll=1):
            pieces = steps[count - 1 - i]
            if pieces > 1:
                more += pieces - 1
                number += 1
                if number <= CUTS and more + number <= slots:
                    block, at = total - 1 - i, table + 3 * number - 2
                    counters[at], counters[at + 1], counters[at + 2] = block - more, block, pieces
                    cute.arch.atomic_max(counters.iterator + table, more)

    @cute.jit
    def look_at_last(self, given, found, sums):
        """``amount_of`` of the call's last blocks, and what a thread deals out.

        Returns:
            How many blocks they are; its share of them, first and past, counted from the last one; the amount behind that
            share; the mean.
        """
        thread = cute.arch.thread_idx()[0]
        total = given.n_blocks * given.slices
        count = cutlass.min(total, MOST_BLOCKS)
        for i in cutlass.range(thread, count, ROW_THREADS, unroll=1):
            found[i] = self.amount_of(given, total - count + i)
        cute.arch.sync_threads()
        each = cute.ceil_div(count, ROW_THREADS)
        first, past = cutlass.min(thread * each, count), cutlass.min(thread * each + each, count)
        own = Int32(0)
        for i in cutlass.range(first, past, unroll=1):
            own += found[count - 1 - i]
        rest, amount = self.sums_before(sums, thread, own)
        return count, first, past, rest, amount // cutlass.max(count, 1)

    @cute.jit
    def sums_before(self, sums, thread, own):
        """The sum of what the threads before this one have, and of what all have."""
        cute.arch.sync_threads()
        sums[thread] = own
        cute.arch.sync_threads()
        before, total = Int32(0), Int32(0)
        for i in cutlass.range(ROW_THREADS, unroll=16):
            total += sums[i]
            before += choose(i < thread, sums[i], 0)
        return before, total

    @cute.jit
    def amount_of(self, given, index):
        """Query tiles that a block sees, of all heads of a group where blocks are dealt; the first of them stands for all.

        So many at the most that sums stay in 32 bits.
        """
        work = self.describe(given, index)
        amount = self.tiles_seen(work)
        if const_expr(self.config.dealt):
            amount = cutlass.min(work.group_size * amount, MOST_STEPS)
        return amount

    @cute.jit
    def tiles_seen(self, work):
        """Query tiles that a block, or a pair of them, sees of the first head of the group."""
        bounds = work.given.columns.bounds
        row = mask_row(work.batch, work.head * work.group_size, work.heads_q, bounds)
        extrema = extrema_of(bounds, row, *self.columns_of(work, work.n_block), self.span)
        return self.tiles_of(self.runs_of(work, work.n_block, extrema))

    def table_at(self, counters: Any) -> Any:
        """Where the table begins."""
        return counters.shape[0] - 1 - TABLE

    @cute.jit
    def item(self, counters, index):
        """Block, piece of it, its pieces and its place in the table, of an item; lanes of a warp search together."""
        table, lane = self.table_at(counters), cute.arch.lane_idx()
        apart = CUTS // 32
        own = table + 3 * apart * lane
        more = cute.arch.shuffle_sync(counters[own], 0)  # by the address that a lane needs anyway: registers are short
        later = cute.arch.popc(cute.arch.vote_ballot_sync(counters[own + 1] + more > index))
        start = cutlass.max(later - 1, 0) * apart
        behind = counters[table + 1 + 3 * (start + lane % apart)] + more > index
        entry = start + cute.arch.popc(cute.arch.vote_ballot_sync(behind & (lane < apart)))
        block, piece, pieces, slot = index, Int32(0), Int32(1), Int32(0)
        if entry < CUTS:
            at = table + 1 + 3 * entry
            begin = counters[at]
            if begin != NO_CUT:
                block, pieces, piece = counters[at + 1], counters[at + 2], index - begin - more
                slot = block - begin - pieces + 1 + entry
                if piece >= pieces:  # of a whole block behind it
                    block += 1 + piece - pieces
                    piece, pieces = Int32(0), Int32(1)
        return block, piece, pieces, entry, slot, more

    def cut(self, entry: Any, slot: Any, pieces: Any) -> Any:
        """A word of a cut block's place in the table, where its sums begin and how many pieces it has."""
        return (slot * COUNTED + pieces) * CUTS + entry

    def cut_of(self, work: Any) -> tuple[Any, Any, Any]:
        """Those three of a block that was read."""
        word = work.slot
        return word % CUTS, word // CUTS // COUNTED, word // CUTS % COUNTED

    # Zeros for dQ

    @cute.jit
    def clear_ahead(self, work, sums, counters, group):
        """A block's share of the next stretch's dQ begins at zero, a warpgroup's part of it: beside steps memory has time.

        Stretches are key heads in their order, whose tiles follow each other. The kernel before clears the first one. Of a
        block's pieces the first one does it.
        """
        slice_, stretch, blocks = self.stretch_of(work)
        tiles = work.group_size * work.m_blocks  # of a key head
        if work.bounds[0] == 0:
            first = (stretch + 1) * work.given.deal[2] * tiles + slice_ * work.given.n_blocks + work.n_block - stretch * blocks
            past = cutlass.min((stretch + 2) * work.given.deal[2], work.given.slices) * tiles
            for tile in cutlass.range(first, past, blocks, unroll=1):
                at = sums.iterator + (Int64(tile) * WARPGROUPS + group) * self.part
                self.zero(at, self.part, cute.arch.lane_idx(), WARP)
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                count_up(self.cleared(counters, stretch), 1)

    @cute.jit
    def wait_for_zeros(self, work, counters):
        """One thread waits until all dQ of a block's stretch was zero.

        Blocks without steps wait too: so all blocks of a stretch have cleared before the next but one begins, and a counter
        is never one of two stretches at a time.
        """
        _, stretch, blocks = self.stretch_of(work)
        if stretch > 0:
            rounds = (stretch - 1) // STRETCHES + 1
            wait_for_least(self.cleared(counters, stretch - 1), rounds * WARPGROUPS * blocks)

    def stretch_of(self, work: Any) -> tuple[Any, Any, Any]:
        """Number of a block's key head among those of all batches, of its stretch, and how many blocks a stretch has."""
        heads = work.given.deal[2]
        slice_ = work.batch * (work.heads_q // work.group_size) + work.head
        return slice_, slice_ // heads, heads * work.given.n_blocks

    def cleared(self, counters: Any, stretch: Any) -> Any:
        """Where the blocks of a stretch count that they have cleared their share."""
        return counters.iterator + (self.table_at(counters) - STRETCHES + stretch % STRETCHES)

    @cute.jit
    def zero(self, at, count, thread, threads):
        """Zeros for so many fp32, by so many threads."""
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(count // (4 * threads)):
            target = cute.make_tensor((at + (i * threads + thread) * 4).align(16), cute.make_layout(4))
            cute.autovec_copy(zeros, target)

    # The order of heads

    @cute.jit
    def apart(self, work):
        """APART if blocks that run together do not pass the same tiles together, by the mask of the group's first head; else 0.

        That is where the last tile is another one than that of the blocks on either side, as under a window, or where tiles
        that the block does not see lie between others: neighbours come to the second run after different times (block
        diffusion). What they read of one head fits into L2, of all heads abreast it does not.
        """
        side = cute.arch.lane_idx() // 8  # three blocks, eight lanes each
        walker = cutlass.min(cutlass.max(self.walker(work) + cutlass.min(side, 2) - 1, 0), work.given.n_blocks - 1)
        bounds = work.given.columns.bounds
        row = mask_row(work.batch, work.head * work.group_size, work.heads_q, bounds)
        extrema = extrema_by_lanes(bounds, row, *self.columns_of(work, walker), self.span, side * 8)
        runs = self.runs_of(work, walker, extrema)
        last = self.tile_at(runs, self.tiles_of(runs) - 1)
        before, own, after = [cute.arch.shuffle_sync(last, 8 * i) for i in range(3)]
        first, _, gap, past, other, other_past, *_ = runs
        parted = (first < gap and gap < past and past <= last) or (first < other and other < other_past and other_past <= last)
        parted = cute.arch.shuffle_sync(choose(parted, 1, 0), 8)
        return choose((before != own and after != own) or parted == 1, APART, 0)

    @cute.jit
    def heads_to_pass(self, work):
        """As ``heads_abreast``, but one where the block is APART."""
        abreast = self.heads_abreast(work)
        if const_expr(self.config.dealt):
            abreast = choose(work.bounds[1] & APART > 0, 1, abreast)
        return abreast

    # The order of the last key blocks

    @cute.jit
    def order_last(self, given, counters, processors):
        """Numbers of a call's last key blocks, those that see the most query tiles first, and of long ones, for ``last_block``.

        By eighths of the most; within one they keep their order, in which neighbours read the same tiles. Those that outlast
        all work behind them, and see LONGEST times as many tiles as the mean, begin the call. The first head of a group stands
        for all. Each thread of a block looks at some.
        """

        @cute.struct
        class Storage:
            tiles: cute.struct.Align[cute.struct.MemRange[Int32, MOST_BLOCKS], 16]
            seen: cute.struct.Align[cute.struct.MemRange[Int32, LAST_BLOCKS], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Int32, ROW_THREADS], 16]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        tiles = storage.tiles.get_tensor(cute.make_layout(MOST_BLOCKS))
        seen = storage.seen.get_tensor(cute.make_layout(LAST_BLOCKS))
        sums = storage.sums.get_tensor(cute.make_layout(ROW_THREADS))
        thread = cute.arch.thread_idx()[0]
        if thread < FIRST_BLOCKS:
            counters[self.first_at(counters) + thread] = Int32(FAR)
        looked_at, first, past, rest, mean = self.look_at_last(given, tiles, sums)
        total = given.n_blocks * given.slices
        count = cutlass.min(total, LAST_BLOCKS)
        left, found = rest, Int32(0)
        for i in cutlass.range(first, past, unroll=1):
            left += tiles[looked_at - 1 - i]
            found += self.outlasts(tiles[looked_at - 1 - i], left, mean, processors)
        number, _ = self.sums_before(sums, thread, found)
        left = rest
        for i in cutlass.range(first, past, unroll=1):
            at = looked_at - 1 - i
            left += tiles[at]
            if self.outlasts(tiles[at], left, mean, processors) == 1:
                if number < FIRST_BLOCKS:
                    counters[self.first_at(counters) + number] = total - 1 - i
                    tiles[at] = Int32(-1)
                number += 1
        cute.arch.sync_threads()
        own, most, rank = Int32(0), Int32(1), Int32(0)
        if thread < count:
            own = tiles[looked_at - count + thread]
        seen[thread] = own
        cute.arch.sync_threads()
        for i in cutlass.range(LAST_BLOCKS, unroll=16):
            most = cutlass.max(most, seen[i])
        cute.arch.sync_threads()
        own = choose(own < 0, -LAST_BLOCKS, own * 8 // most * LAST_BLOCKS) - thread  # no two alike
        seen[thread] = own
        cute.arch.sync_threads()
        for i in cutlass.range(LAST_BLOCKS, unroll=16):
            rank += choose(seen[i] > own, 1, 0)
        if thread < count:
            counters[self.order_at(counters) + rank] = total - count + thread

    def outlasts(self, tiles: Any, left: Any, mean: Any, processors: Any) -> Any:
        """1 if a block of so many tiles ends after those behind it would, of ``left`` tiles with its own, on all processors."""
        alone = cute.ceil_div(processors, self.span // self.tile_n)
        return choose((tiles > LONGEST * mean) & (tiles > left // alone), 1, 0)

    def first_at(self, counters: Any) -> Any:
        """Where the numbers of the blocks that begin the call stand, the last one first."""
        return self.order_at(counters) - FIRST_BLOCKS

    def order_at(self, counters: Any) -> Any:
        """Where the order of the last key blocks begins."""
        return counters.shape[0] - int(self.config.persistent) - LAST_BLOCKS

    def own_first(self, counters: Any) -> Any:
        """Of the blocks that begin the call, this lane's number, for ``last_block``; FAR where there are fewer."""
        return counters[self.first_at(counters) + cute.arch.lane_idx()]

    @cute.jit
    def last_block(self, counters, own, index, total):
        """The number of the key block that is the ``index``-th to be handed out; ``own``: ``own_first`` of a warp's lanes."""
        block, behind, ordered = index, index, cutlass.max(total - LAST_BLOCKS, 0)
        firsts = cute.arch.popc(cute.arch.vote_ballot_sync(own < total))
        if firsts > 0:
            behind = index - firsts
            block = cute.arch.shuffle_sync(own, cutlass.min(index, FIRST_BLOCKS - 1))
            if behind >= 0:
                ordered -= cute.arch.popc(cute.arch.vote_ballot_sync(own < ordered))  # those are gone before the order begins
                before = own - (firsts - 1 - cute.arch.lane_idx()) <= behind
                block = behind + cute.arch.popc(cute.arch.vote_ballot_sync(before))
        if behind >= ordered and index < total:
            block = counters[self.order_at(counters) + behind - ordered]
        return block
