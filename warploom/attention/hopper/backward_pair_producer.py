"""The producer warpgroup of the backward in pairs of blocks: who hands out pairs, loads, and adds dQ to its sums.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward_base import DQ_ODD, DQ_THREADS, WARPGROUPS
from warploom.attention.hopper.backward_pair_base import KEYS, PAIR, PARTS, VALUES, PairBase
from warploom.attention.hopper.backward_producer import Producer
from warploom.kernels.cute.barriers import BackwardBarrier, arrive, wait
from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.memory import bulk_add, bulk_load, claim, load_acquire, pass_on, wait_for
from warploom.kernels.cute.rings import expect
from warploom.kernels.cute.tiles import load_tile, tma_views


class PairProducer(PairBase, Producer):
    """The roles of the producer's warps."""

    @cute.jit
    def hand_out(self, given, counters):
        """A warp of the first block: the next pair to both blocks, once each loader is done with the one before."""
        shared = given.shared
        counter = counters.iterator + (counters.shape[0] - 1)
        total = given.n_blocks * given.slices
        turn, index, own = Int32(0), Int32(0), Int32(0)
        if const_expr(self.config.ordered > 0):
            own = self.own_first(counters)
        while index < total:
            cute.arch.mbarrier_wait(shared.block_empty, turn & 1 ^ 1)
            lane = cute.arch.lane_idx()
            if lane == 0:
                index = cute.arch.atomic_add(counter, Int32(1))
            index = cute.arch.shuffle_sync(index, 0)
            at, words = index, [index]
            if const_expr(self.config.columns):
                if const_expr(self.config.ordered > 0):
                    at = self.last_block(counters, own, index, total)
                work = self.describe(given, cutlass.min(at, total - 1))
                steps, dead = self.count_steps(work.but(n_block=PAIR * work.n_block))
                words = [at, 2 * steps + dead]
            if lane < PAIR:
                cute.arch.mbarrier_arrive_and_expect_tx(shared.block_full, 4 * len(words), lane)
                for i in cutlass.range_constexpr(len(words)):
                    cute.arch.store_async_dsmem(shared.index + i, words[i], shared.block_full, lane)
            turn += 1

    @cute.jit
    def load_blocks(self, given, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do):
        """The loader warp's part of every pair."""
        turn, base, loads = Int32(0), Int32(0), Int32(0)
        total = given.n_blocks * given.slices
        index = self.next_pair(given, turn)
        while index < total:
            work = self.share_of(given, index, base, loads)
            self.load(work, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do)
            self.take(given)
            steps = self.steps_of(work)
            base += steps
            loads += choose(steps > 0, 1, 0)
            turn += 1
            index = self.next_pair(given, turn)

    @cute.jit
    def load(self, work, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do):
        """K with the other block's half, and V, once; half of Q and of dO for both blocks, and row statistics, every tile."""
        shared, config, rank = work.shared, self.config, work.rank
        tk, tv = (self.sequence(t, work.head, work.batch, work.k_start, work.seqlen_k) for t in (k, v))
        tile = (self.tile_m, self.half)
        steps = self.steps_of(work)
        own, other = work.n_block, work.n_block ^ 1
        if const_expr(config.varlen):  # a box beside all rows of a sequence may fault: the last one's rows are masked as well
            last = (work.seqlen_k - 1) // self.tile_n
            own, other = cutlass.min(own, last), cutlass.min(other, last)
        stats_bytes = 8 * self.tile_m
        mask = Int16(3)
        if const_expr(config.columns):
            abreast, at, beside = self.heads_abreast(work), Int32(0), Int32(0)
            member, turned, turn = -abreast, Int32(0), Int32(0)
            if const_expr(not config.deterministic):
                turned = self.walker(work) % abreast
        for j in cutlass.range(steps, unroll=1):
            if const_expr(config.columns):
                head, m, number, tested, member, at, beside, turn = self.walk_on(
                    work, abreast, turned, member, at, beside, turn
                )
            else:
                head, m, number = self.place(work, j)
            tq, tdo = (self.sequence(t, head, work.batch, work.q_start, work.seqlen_q) for t in (q, dout))
            queries = tma_views(tma_q, shared.halves_q, cute.local_tile(tq, tile, (m, rank)))
            gradients = tma_views(tma_do, shared.halves_do, cute.local_tile(tdo, tile, (m, rank)))
            stage, phase = schedule.ring(work.base + j, self.stages)
            cute.arch.mbarrier_wait(shared.q_empty + stage, phase ^ 1)
            queries_bytes = 2 * self.tile_m * config.head_dim + stats_bytes
            if const_expr(config.columns):
                self.keep_tile(work, work.base + j, number, turn)
                self.announce(work, stage, m, tested, head, number, turn, queries_bytes)
            else:
                expect(shared.q_full + stage, queries_bytes)
            load_tile(queries, None, 2 * stage + rank, shared.q_full, stage, mask)
            with cute.arch.elect_one():
                source = stats.iterator + Int64(number) * (2 * self.tile_m)
                bulk_load(shared.stats + stage * (2 * self.tile_m), source, stats_bytes, shared.q_full + stage)
            if j == 0:
                cute.arch.mbarrier_wait(shared.v_empty, work.loads & 1 ^ 1)
                expect(shared.v_full, 2 * self.tile_n * config.head_dim_v)
                gv = cute.local_tile(tv, (self.tile_n, config.head_dim_v), (own, 0))
                load_tile(tma_views(tma_v, shared.v, gv), None, 0, shared.v_full)
            stage, phase = schedule.ring(work.base + j, self.dout_stages)
            cute.arch.mbarrier_wait(shared.do_empty + stage, phase ^ 1)
            expect(shared.do_full + stage, 2 * self.tile_m * config.head_dim_v)
            load_tile(gradients, None, 2 * stage + rank, shared.do_full, stage, mask)
            if j == 0:
                cute.arch.mbarrier_wait(shared.k_empty, work.loads & 1 ^ 1)
                expect(shared.k_full, 2 * self.tile_n * (config.head_dim + self.half))
                for i in cutlass.range_constexpr(2):
                    load_tile(tma_views(tma_k, shared.halves_k, cute.local_tile(tk, tile, (own, i))), None, i, shared.k_full)
                load_tile(tma_views(tma_k, shared.other, cute.local_tile(tk, tile, (other, rank))), None, 0, shared.k_full)

    @cute.jit
    def keep_tile(self, work, j, tile, turn):
        """Leave the number of a step's tile, and its turn, to the writer warps."""
        with cute.arch.elect_one():
            work.shared.words[self.kept_tile(j)] = tile
            work.shared.words[self.kept_tile(j) + 1] = turn

    @cute.jit
    def write_blocks(self, given, sums, counters, warp):
        """A writer warp's part of every pair."""
        turn, base = Int32(0), Int32(0)
        total = given.n_blocks * given.slices
        index = self.next_pair(given, turn)
        while index < total:
            work = self.share_of(given, index, base, Int32(0))
            self.take(given)
            if const_expr(self.config.columns):
                base += self.steps_of(work)
            if const_expr(self.config.deterministic):
                self.write_in_order(work, sums, counters, warp, given.left, given.right)
            else:
                self.write_quarters(work, sums, counters, warp)
            turn += 1
            index = self.next_pair(given, turn)
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def write_quarters(self, work, sums, counters, role):
        """Add a warpgroup's quarter of dQ to the accumulator, tile after tile; or store it where blocks claim tiles."""
        size = self.quarter // PARTS[role]
        shared = work.shared
        source = shared.dq + role * (self.quarter // PARTS[VALUES])
        steps = self.steps_of(work)
        if steps > 0:
            arrive(BackwardBarrier.DQ_EMPTY, DQ_THREADS, role)
        for j in cutlass.range(steps, unroll=1):
            tile, start = Int32(0), Int64(0)
            if const_expr(not self.config.columns):
                _, _, tile = self.place(work, j)
                start = self.quarter_start(work, tile, role)
            found, first = Int32(0), Int32(0)
            if const_expr(self.config.claims):  # noqa: SIM102
                if cute.arch.lane_idx() == 0:
                    found = load_acquire(self.state(work, counters, tile, role))  # its latency hides under the wait for dQ
            for part in cutlass.range_constexpr(PARTS[role]):
                wait(BackwardBarrier.DQ_FULL, DQ_THREADS, role)
                if const_expr(self.config.columns and part == 0):
                    start = self.quarter_start(work, shared.words[self.kept_tile(work.base + j)], role)
                if cute.arch.lane_idx() == 0:
                    target = sums.iterator + (start + part * size)
                    if const_expr(self.config.claims):
                        if const_expr(part == 0):
                            first = claim(self.state(work, counters, tile, role), found)
                        self.leave(first, target, source, 4 * size)
                    else:
                        bulk_add(target, source, 4 * size)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                if part + 1 < PARTS[role] or j + 1 < steps:
                    arrive(BackwardBarrier.DQ_EMPTY, DQ_THREADS, role)
            if const_expr(self.config.claims):
                if cute.arch.lane_idx() == 0 and first == 1:
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    pass_on(self.state(work, counters, tile, role))
                cute.arch.sync_warp()

    @cute.jit
    def state(self, work, counters, tile, role):
        """What is there of a warpgroup's quarter of a tile's dQ."""
        return counters.iterator + (Int64(tile) * self.config.states + work.rank * WARPGROUPS + role)

    @cute.jit
    def quarter_start(self, work, tile, role):
        """Where in the sums a warpgroup's quarter of a tile's dQ begins: this block's half of the columns, and half of that."""
        return (Int64(tile) * WARPGROUPS + work.rank) * self.part + role * self.quarter

    @cute.jit
    def write_in_order(self, work, sums, counters, parity, left, right):
        """As ``Producer`` has it: pairs add to a tile in their order, for each half of its columns.

        dK's warpgroup hands its quarter over first: the other's runs under the exponentials of the next step.
        """
        shared = work.shared
        steps, ahead = self.steps_of(work), parity
        if const_expr(self.config.columns):
            ahead = (work.base + parity) & 1
        if ahead == 1 and steps > 0:
            for group in cutlass.range_constexpr(WARPGROUPS):
                arrive(BackwardBarrier.DQ_EMPTY, DQ_THREADS, group)
        for j in cutlass.range(ahead, steps, 2, unroll=1):
            m, tile, turn = Int32(0), Int32(0), Int32(0)
            if const_expr(not self.config.columns):
                _, m, tile = self.place(work, j)
            counter = counters.iterator + (Int64(tile) * WARPGROUPS + work.rank)
            for group in cutlass.range_constexpr(WARPGROUPS - 1, -1, -1):
                size = self.quarter // PARTS[group]
                for part in cutlass.range_constexpr(PARTS[group]):
                    wait(BackwardBarrier.DQ_FULL, DQ_THREADS, group + parity * DQ_ODD)
                    if const_expr(self.config.columns and group == KEYS and part == 0):
                        at = self.kept_tile(work.base + j)
                        tile, turn = shared.words[at], shared.words[at + 1]
                        counter = counters.iterator + (Int64(tile) * WARPGROUPS + work.rank)
                    if cute.arch.lane_idx() == 0:
                        if const_expr(group == KEYS and part == 0):
                            if const_expr(self.config.columns):
                                wait_for(counter, turn)
                            else:
                                wait_for(counter, self.rank(work, m, left, right))
                        target = sums.iterator + (self.quarter_start(work, tile, group) + part * size)
                        bulk_add(target, shared.dq + group * (self.quarter // PARTS[VALUES]), 4 * size)
                        cute.arch.cp_async_bulk_commit_group()
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                    if part + 1 < PARTS[group] or j + 1 < steps:
                        arrive(BackwardBarrier.DQ_EMPTY, DQ_THREADS, group)
            if cute.arch.lane_idx() == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                if const_expr(self.config.columns):
                    self.leave_turn(counter, self.walker(work) + 1 - turn)
                else:
                    pass_on(counter)
            cute.arch.sync_warp()
