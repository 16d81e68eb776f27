"""The producer warpgroup of the backward: a warp that hands out key blocks, one that loads, two that add dQ to its sums.

The loader and the writers walk the query tiles of a block in the order that ``place`` gives. Without persistent blocks the
warp that hands them out only clears rows of packed sequences that no query sees.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward_base import DQ_ODD, DQ_THREADS, TURN_BIT, WARPGROUPS
from warploom.attention.hopper.backward_drops import Drawer
from warploom.kernels.cute.barriers import BackwardBarrier, arrive, wait
from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.epilogue import store_words
from warploom.kernels.cute.memory import bulk_add, bulk_load, bulk_store, claim, count_up, load_acquire, pass_on, wait_for
from warploom.kernels.cute.packed import sequence_rows
from warploom.kernels.cute.rings import expect, publish
from warploom.kernels.cute.tiles import load_tile, tma_views


class Producer(Drawer):
    """The roles of the producer's warps; ``hand_out``, ``load_blocks`` and ``write_blocks`` are those of persistent blocks."""

    # The order of query tiles

    @cute.jit
    def place(self, work, j):
        """Query head, query tile in it and number of that tile in the workspaces, of a block's j-th step.

        Tiles in order, a head after the other. Where key blocks queue for dQ all heads of the group pass a tile before the
        next one, since the elders, which see more tiles, would else reach the second head long after this block. And either
        the last tile comes first, which all blocks reach at the same time and leave one after the other. Or, under a causal
        mask, tiles rise from the diagonal and the last key block is the eldest: then a block's elders are ahead of it from
        the start, by more than a turn takes. But its longest block starts last, so the call's last section does not. Nor do
        the sections of calls whose heads would be too far apart then, as ``schedule.in_turns`` has it.
        """
        first, _, _, end = work.bounds
        if const_expr(self.abreast):
            i = j // work.group_size
            member = j - i * work.group_size
            if const_expr(self.config.waves):  # blocks that come to a tile together begin with other heads
                member = (member + work.n_block) % work.group_size
            m = choose(work.rising == 1, first + i, end - 1 - i)
        elif const_expr(self.config.stream_k):
            member = (first + j) // work.m_blocks
            m = first + j - member * work.m_blocks
        else:
            member = j // (end - first)
            m = first + j - member * (end - first)
        head = work.head * work.group_size + member
        return head, m, (work.batch * work.heads_q + head) * work.m_blocks + work.first_tile + m

    # The scheduler warp

    @cute.jit
    def hand_out(self, given, counters, dk, dv):
        """The scheduler warp: key blocks in their order to whoever asks first.

        It asks once the loader is done with the block before, which leaves that one's last two steps, or ``ahead`` steps
        earlier. Blocks of packed sequences that do not exist, counted generously, are left out.
        """
        shared, varlen = given.shared, const_expr(self.config.varlen)
        counter = counters.iterator + (counters.shape[0] - 1)
        total = given.n_blocks * given.slices
        items = total
        turn, index, base = Int32(0), Int32(0), Int32(0)
        while index < items:
            cute.arch.mbarrier_wait(shared.block_empty, turn & 1 ^ 1)
            if cute.arch.lane_idx() == 0:
                index = cute.arch.atomic_add(counter, Int32(1))
            index = cute.arch.shuffle_sync(index, 0)
            at, piece, pieces, last = index, Int32(0), Int32(1), Int32(0)
            if const_expr(self.config.dealt):
                at, piece, pieces, entry, slot, more = self.item(counters, index)
                items = total + more
            work = self.describe(given, cutlass.min(at, total - 1))
            if const_expr(self.config.columns):
                steps, dead = self.count_steps(work)
                if const_expr(self.config.dealt):
                    dead |= self.apart(work)
                if const_expr(self.numbers_steps):
                    dead |= work.group_size << 2
                pieces = cutlass.min(pieces, cutlass.max(steps, 1))
                first, end = steps * piece // pieces, steps * (piece + 1) // pieces
                work = work.but(bounds=(first, dead, steps, end))
                if const_expr(self.config.dealt):
                    last = self.cut(entry, slot, pieces)
            n_block = choose(index < items, work.n_block, -1)
            if const_expr(not self.config.dealt):
                last = work.rising
            if const_expr(self.numbers_steps):
                last = (base & 3) | (turn & 1) << TURN_BIT
                base += steps
            words = [n_block, work.head, work.sequence if self.numbered else work.batch, *work.bounds, last]
            if const_expr(varlen):
                words += [work.q_start, work.k_start, work.seqlen_q, work.seqlen_k, work.shift, work.first_tile]
            if const_expr(self.config.q_offset):
                words += [work.shift]
            if n_block * self.tile_n < work.seqlen_k and piece < pieces:
                publish(shared.words, self.words_at(turn), words, shared.block_full)
                turn += 1
            if const_expr(varlen):  # noqa: SIM102
                if index < total:
                    self.clear_hidden(work, dk, dv)

    @cute.jit
    def hand_out_own(self, given, counters):
        """As ``hand_out``, under a column mask, to blocks that are launched one for each key block: the block's own."""
        index = cute.arch.block_idx()[0]
        if const_expr(self.config.ordered > 0):
            index = self.last_block(counters, self.own_first(counters), index, given.n_blocks * given.slices)
        work = self.describe(given, index)
        steps, dead = self.count_steps(work)
        words = [work.n_block, work.head, work.batch, Int32(0), dead, Int32(0), steps, work.rising]
        if const_expr(self.config.q_offset):
            words += [work.shift]
        publish(given.shared.words, self.words_at(Int32(0)), words, given.shared.block_full)

    @cute.jit
    def hand_out_stream_k(self, given, counters):
        """As ``hand_out``, the last blocks by stream-K: in shares of as many steps."""
        shared = given.shared
        counter = counters.iterator + (counters.shape[0] - 1)
        whole, split, each, steps = given.deal
        turn, index = Int32(0), Int32(0)
        while index < given.items:
            cute.arch.mbarrier_wait(shared.block_empty, turn & 1 ^ 1)
            if cute.arch.lane_idx() == 0:
                index = cute.arch.atomic_add(counter, Int32(1))
            index = cute.arch.shuffle_sync(index, 0)
            for i in cutlass.range(schedule.PIECES, unroll=1):
                slot, first, end = schedule.handed_out(index, i, whole, split, each, steps, choose)
                if index >= given.items:  # no more, which is said once
                    first, end = Int32(0), i // (schedule.PIECES - 1)
                if first < end:
                    work = self.describe(given, whole + slot)
                    n_block = choose(index < given.items, work.n_block, -1)
                    plain = choose(work.bounds[1] == 0, first, end)  # no masks from there on
                    cute.arch.mbarrier_wait(shared.block_empty, turn & 1 ^ 1)
                    words = [n_block, work.head, work.batch, first, plain, end, end, slot]
                    publish(shared.words, self.words_at(turn), words, shared.block_full)
                    turn += 1

    @cute.jit
    def clear_hidden(self, work, dk, dv):
        """Zeros in a packed sequence's rows of the block that are not keys its queries see."""
        first, past, start = work.hidden, work.hidden + work.seqlen_k, work.k_start - work.hidden
        begin = work.n_block * self.tile_n
        end = cutlass.min(begin + self.tile_n, work.whole)
        before, after = cutlass.max(cutlass.min(end, first) - begin, 0), cutlass.max(past, begin)
        for i in cutlass.range(before + cutlass.max(end - after, 0), unroll=1):
            row = choose(i < before, begin + i, after + i - before)
            for t in (dk, dv):
                for at in cutlass.range(cute.arch.lane_idx(), t.shape[2] // 8, 32, unroll=1):
                    store_words(self.element(t, 0, start + row, work.head, at * 8), [Int32(0)] * 4)

    # The loader warp

    @cute.jit
    def load_blocks(self, given, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do):
        """The loader warp's part of every block."""
        turn, base = Int32(0), Int32(0)
        n_block = self.next_block(given, turn)
        while n_block >= 0:
            work = self.read_block(given, n_block, turn, base)
            self.load(work, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do)
            if const_expr(self.ahead > 0):
                if self.steps_of(work) < self.ahead:
                    cute.arch.mbarrier_arrive(given.shared.block_empty)
            else:
                cute.arch.mbarrier_arrive(given.shared.block_empty)
            base += self.steps_of(work)
            turn += 1
            n_block = self.next_block(given, turn)

    @cute.jit
    def load(self, work, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do):
        """K and V once; Q with the row statistics, and dO, for every query tile.

        Where blocks are persistent, K and V come after the first Q and dO: the block before is done with those earlier.
        """
        shared, config = work.shared, self.config
        tk, tv = (self.sequence(t, work.head, work.batch, work.k_start, work.seqlen_k) for t in (k, v))
        gk = cute.local_tile(tk, (self.tile_n, config.head_dim), (work.n_block, 0))
        gv = cute.local_tile(tv, (self.tile_n, config.head_dim_v), (work.n_block, 0))
        keys, values = tma_views(tma_k, shared.k, gk), tma_views(tma_v, shared.v, gv)
        steps = self.steps_of(work)
        if const_expr(config.persistent):
            if steps == 0:  # others count on a load in every block
                self.load_keys(work, keys, values)
        else:
            if steps > 0:  # else nobody waits for what would still be on its way when the block ends
                expect(shared.k_full, 2 * self.tile_n * config.head_dim)
                load_tile(keys, None, 0, shared.k_full)
        queries_bytes, stats_bytes = 2 * self.tile_m * config.head_dim, 4 * self.stage_statistics
        if const_expr(config.columns):
            abreast, at, beside = self.heads_to_pass(work), Int32(0), Int32(0)
            member, turned, place = -abreast, Int32(0), Int32(0)
            if const_expr(not config.deterministic):
                turned = work.n_block % abreast
            if const_expr(config.dealt):
                rest, _, _, _ = work.bounds  # steps of the pieces before
                while rest > 0:
                    member += abreast
                    tiles = self.keep_runs(work, member)
                    if rest < tiles * abreast:
                        at = tiles - rest // abreast
                        beside = rest % abreast
                    rest -= tiles * abreast
        for j in cutlass.range(steps, unroll=1):
            if const_expr(self.ahead > 0):  # noqa: SIM102
                if j + self.ahead == steps:
                    cute.arch.mbarrier_arrive(shared.block_empty)
            if const_expr(config.columns):
                head, m, tile, tested, member, at, beside, place = self.walk_on(
                    work, abreast, turned, member, at, beside, place
                )
            else:
                head, m, tile = self.place(work, j)
            tq, tdo = (self.sequence(t, head, work.batch, work.q_start, work.seqlen_q) for t in (q, dout))
            gq = cute.local_tile(tq, (self.tile_m, config.head_dim), (m, 0))
            gdo = cute.local_tile(tdo, (self.tile_m, config.head_dim_v), (m, 0))
            queries, gradients = tma_views(tma_q, shared.q, gq), tma_views(tma_do, shared.dout, gdo)
            stage, phase = schedule.ring(work.base + j, self.stages)
            cute.arch.mbarrier_wait(shared.q_empty + stage, phase ^ 1)
            if const_expr(config.columns):
                self.announce(work, stage, m, tested, head, tile, place, queries_bytes + stats_bytes)
            else:
                expect(shared.q_full + stage, queries_bytes + stats_bytes)
            load_tile(queries, None, stage, shared.q_full, stage)
            with cute.arch.elect_one():
                source = stats.iterator + Int64(tile) * self.stage_statistics
                bulk_load(shared.stats + stage * self.stage_statistics, source, stats_bytes, shared.q_full + stage)
            if const_expr(not config.persistent):  # noqa: SIM102
                if j == 0:
                    expect(shared.v_full, 2 * self.tile_n * config.head_dim_v)
                    load_tile(values, None, 0, shared.v_full)
            stage, phase = schedule.ring(work.base + j, self.dout_stages)
            cute.arch.mbarrier_wait(shared.do_empty + stage, phase ^ 1)
            expect(shared.do_full + stage, 2 * self.tile_m * config.head_dim_v)
            load_tile(gradients, None, stage, shared.do_full, stage)
            if const_expr(config.persistent):  # noqa: SIM102
                if j == 0:
                    self.load_keys(work, keys, values)

    @cute.jit
    def load_keys(self, work, keys, values):
        """V, then K, each once the block before has read its own for the last time."""
        shared, config = work.shared, self.config
        phase = work.turn & 1 ^ 1
        cute.arch.mbarrier_wait(shared.v_empty, phase)
        expect(shared.v_full, 2 * self.tile_n * config.head_dim_v)
        load_tile(values, None, 0, shared.v_full)
        cute.arch.mbarrier_wait(shared.k_empty, phase)
        expect(shared.k_full, 2 * self.tile_n * config.head_dim)
        load_tile(keys, None, 0, shared.k_full)

    def sequence(self, t: Any, head: Any, batch: Any, start: Any, length: Any) -> Any:
        """(rows, head_dim) of a head, of a batch or of the packed sequence there."""
        if const_expr(self.config.varlen):
            return sequence_rows(t, head, start + length, length)
        return t[None, None, head, batch]

    # The writer warps

    @cute.jit
    def write_blocks(self, given, sums, counters, warp):
        """A writer warp's part of every block."""
        turn, base = Int32(0), Int32(0)
        n_block = self.next_block(given, turn)
        while n_block >= 0:
            work = self.read_block(given, n_block, turn, base)
            cute.arch.mbarrier_arrive(given.shared.block_empty)
            self.write(work, sums, counters, warp, given.left, given.right)
            base += self.steps_of(work)
            turn += 1
            n_block = self.next_block(given, turn)

    @cute.jit
    def write(self, work, sums, counters, warp, left, right):
        """A writer warp's part of a block."""
        if const_expr(self.config.deterministic):
            self.write_in_order(work, sums, counters, warp, left, right)
        else:
            self.write_part(work, sums, counters, warp)

    @cute.jit
    def write_part(self, work, sums, counters, group):
        """Add dQ of one consumer warpgroup to the accumulator, tile after tile.

        Where blocks claim tiles, the first at one stores; others wait until that is there, for as long as a store takes.
        """
        shared = work.shared
        source = shared.dq + group * self.part
        steps = self.steps_of(work)
        if steps > 0:
            arrive(BackwardBarrier.DQ_EMPTY, DQ_THREADS, group)
        if const_expr(self.config.dealt):
            self.clear_ahead(work, sums, counters, group)
            if cute.arch.lane_idx() == 0:
                self.wait_for_zeros(work, counters)
            cute.arch.sync_warp()
        for j in cutlass.range(steps, unroll=1):
            tile = Int32(0)
            if const_expr(not self.config.columns):
                _, _, tile = self.place(work, j)
            part = Int64(tile) * WARPGROUPS + group
            found, first = Int32(0), Int32(0)
            if const_expr(self.config.claims):  # noqa: SIM102
                if cute.arch.lane_idx() == 0:
                    found = load_acquire(counters.iterator + part)  # its latency hides under the wait for dQ
            wait(BackwardBarrier.DQ_FULL, DQ_THREADS, group)
            if const_expr(self.config.columns):
                part = Int64(shared.words[self.tile_word(group)]) * WARPGROUPS + group
            if cute.arch.lane_idx() == 0:
                if const_expr(self.config.claims):
                    first = claim(counters.iterator + part, found)
                    self.leave(first, sums.iterator + part * self.part, source, 4 * self.part)
                else:
                    bulk_add(sums.iterator + part * self.part, source, 4 * self.part)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            if j + 1 < steps:
                arrive(BackwardBarrier.DQ_EMPTY, DQ_THREADS, group)
            if const_expr(self.config.claims):
                if cute.arch.lane_idx() == 0 and first == 1:
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    pass_on(counters.iterator + part)
                cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def leave(self, first, target, source, size):
        """Bytes of dQ: stored where nothing is yet, else added to what is there."""
        if first == 1:
            bulk_store(target, source, size)
        else:
            bulk_add(target, source, size)

    @cute.jit
    def write_in_order(self, work, sums, counters, parity, left, right):
        """As ``write_part`` when deterministic: key blocks add to a tile in their order.

        The next one finds their number in ``counters``, or under a column mask that of the last one. They start in that
        order, so a block never waits for one that waits for a processor. One warp has the even steps, one the odd ones, of
        both warpgroups: from waiting for a turn to passing it on takes longer than a step, most of it until the adds have
        arrived.
        """
        shared = work.shared
        steps, ahead = self.steps_of(work), (work.base + parity) & 1
        if ahead == 1 and steps > 0:  # who had the step before, of another block
            for group in cutlass.range_constexpr(WARPGROUPS):
                arrive(BackwardBarrier.DQ_EMPTY, DQ_THREADS, group)
        for j in cutlass.range(ahead, steps, 2, unroll=1):
            m, tile, turn = Int32(0), Int32(0), Int32(0)
            if const_expr(not self.config.columns):
                _, m, tile = self.place(work, j)
            for group in cutlass.range_constexpr(WARPGROUPS):
                wait(BackwardBarrier.DQ_FULL, DQ_THREADS, DQ_ODD * parity + group)
                if const_expr(self.config.columns and group == 0):
                    tile, turn = shared.words[self.tile_word(group)], shared.words[self.turn_word(group)]
                counter = counters.iterator + Int64(tile) * WARPGROUPS
                if cute.arch.lane_idx() == 0:
                    if const_expr(group == 0 and self.config.columns):
                        wait_for(counter, turn)
                    elif const_expr(group == 0):
                        wait_for(counter, self.rank(work, m, left, right))
                    target = sums.iterator + (Int64(tile) * WARPGROUPS + group) * self.part
                    bulk_add(target, shared.dq + group * self.part, 4 * self.part)
                    cute.arch.cp_async_bulk_commit_group()
            for group in cutlass.range_constexpr(WARPGROUPS):
                if cute.arch.lane_idx() == 0:
                    cute.arch.cp_async_bulk_wait_group(WARPGROUPS - 1 - group, read=True)
                cute.arch.sync_warp()
                if j + 1 < steps:
                    arrive(BackwardBarrier.DQ_EMPTY, DQ_THREADS, group)
            if cute.arch.lane_idx() == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                if const_expr(self.config.columns):
                    self.leave_turn(counter, work.n_block + 1 - turn)
                else:
                    pass_on(counter)
            cute.arch.sync_warp()

    @cute.jit
    def leave_turn(self, counter, amount):
        """One thread counts up after the bulk copies that it has waited for."""
        cute.arch.fence_proxy("async.global")
        cute.arch.fence_acq_rel_gpu()
        count_up(counter, amount)

    @cute.jit
    def rank(self, work, m, left, right):
        """How many key blocks add to a query tile before this one: those before it, or where all tiles rise those after it."""
        n_block = work.n_block // (self.span // self.tile_n)
        rank = n_block
        if const_expr(self.config.left):
            rank -= cutlass.max(m * self.tile_m + work.shift - left, 0) // self.span
        if const_expr(self.mixed):
            last = cutlass.max((m + 1) * self.tile_m - 1 + work.shift + right, 0) // self.span
            last = cutlass.min(last, (work.seqlen_k - 1) // self.span)
            rank = choose(work.rising == 1, choose(work.given.section > 0, last - n_block, rank), rank)
        return rank
