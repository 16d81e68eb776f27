"""The consumer warpgroups of the backward: S, dP, P and dS of 64 keys each, their dK and dV, and a half of every dQ.

First the loops over a block's query tiles and the store of its dK and dV, then what a warpgroup keeps in registers, then
``step``, which is one query tile, and its parts. Head dims past 128 have other consumers, those of ``backward_roles``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward_base import (
    BOTH,
    DQ_ODD,
    DQ_THREADS,
    TURN_BIT,
    WARPGROUPS,
    Operands,
    Work,
)
from warploom.attention.hopper.backward_columns import DEAD
from warploom.attention.hopper.backward_deal import Dealer
from warploom.attention.hopper.backward_distances import FAR, NEAR
from warploom.attention.hopper.backward_dropout import DropoutSteps
from warploom.kernels.cute.barriers import BackwardBarrier, StepBarrier, arrive, wait
from warploom.kernels.cute.basics import WARPGROUP, choose
from warploom.kernels.cute.epilogue import quad_words, store_words
from warploom.kernels.cute.instructions import exp2, has_come, hold, negative, pack16, store_matrices
from warploom.kernels.cute.memory import count_up, wait_until
from warploom.kernels.cute.rings import release
from warploom.kernels.cute.softmax import capped_and_slope, multipliers
from warploom.kernels.cute.tiles import transposed
from warploom.kernels.cute.wgmma import accumulator_rows, gemm, pack, part_of, words


class StepOperands(Operands):
    """Of a warpgroup that computes S, dP, P and dS of its keys."""

    mma_values: Any
    mma_keys: Any
    k: Any
    v: Any
    q: Any
    dout: Any
    q_turned: Any
    do_turned: Any
    p: Any
    ds: Any
    dq_a: Any
    dq_b: Any
    acc_dp: Any
    acc_dk: Any
    acc_dv: Any
    hidden: Any  # what is added to a row's lse, without a band
    hidden_bits: Any  # which elements of a tile this thread's keys hide under a column mask
    ds_target: Any
    stats: Any
    past: Any  # the step past a block's last
    alibi: Any  # ALiBi of its keys, or None
    distances: Any  # a table of distances, or None


@cute.jit
def add(four, source):
    """Add four fp32 in memory."""
    found = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(source, found)
    for n in cutlass.range_constexpr(4):
        four[n] += found[n]


class Consumers(Dealer, DropoutSteps):
    """What both consumer warpgroups run; ``compute_blocks`` is of persistent blocks."""

    # A block

    @cute.jit
    def compute(self, work, dk, dv, products, scale, softcap, left, right):
        """dK and dV of a warpgroup's share of the block's keys, and a half of every dQ."""
        cute.arch.setmaxregister_increase(self.consumer_registers)
        r = self.operands(work, products, scale, softcap)
        self.begin_ping_pong(r.group)
        self.compute_block(r, work, dk, dv, scale, left, right)

    @cute.jit
    def compute_blocks(self, given, dk, dv, products, scale, softcap):
        """A consumer warpgroup's part of every block."""
        cute.arch.setmaxregister_increase(self.consumer_registers)
        r = self.operands(given, products, scale, softcap)
        self.begin_ping_pong(r.group)
        turn, base = Int32(0), Int32(0)
        n_block = self.next_block(given, turn)
        while n_block >= 0:
            work = self.read_block(given, n_block, turn, base)
            if const_expr(self.numbers_steps):
                work = work.but(base=work.slot)
            cute.arch.mbarrier_arrive(given.shared.block_empty)
            self.compute_block(r, work, dk, dv, scale, given.left, given.right)
            if const_expr(self.numbers_steps):
                turn = (work.base + self.steps_of(work)) >> TURN_BIT
            else:
                base += self.steps_of(work)
            turn += 1
            n_block = self.next_block(given, turn)

    @cute.jit
    def compute_block(self, r, work, dk, dv, scale, left, right):
        """All steps of a block, and its dK and dV."""
        shared = work.shared
        r = r.but(past=work.base + self.steps_of(work))
        if const_expr(not self.config.columns):
            self.set_limits(r, work, left, right)
        self.set_apart(r, work)
        r.acc_dk.fill(0.0)
        r.acc_dv.fill(0.0)
        if const_expr(self.config.persistent):
            cute.arch.mbarrier_wait(shared.k_full, work.turn & 1)
            cute.arch.mbarrier_wait(shared.v_full, work.turn & 1)
            if self.steps_of(work) == 0:
                release(shared.v_empty)
                release(shared.k_empty)
        self.steps(r, work)
        if const_expr(self.config.columns):
            if const_expr(self.numbers_steps):
                work = work.but(turn=r.past >> TURN_BIT)
            self.finish(r, self.again(work), dk, dv, scale)
        elif const_expr(self.reads_again):
            n_block = self.block_word(work.given, work.turn)  # read again, as all else: their registers are the steps'
            self.finish(r, self.read_block(work.given, n_block, work.turn, work.base), dk, dv, scale)
        else:
            self.finish(r, work, dk, dv, scale)

    @cute.jit
    def steps(self, r, work):
        """All query tiles, masked ones in loops of their own."""
        config, shared = self.config, work.shared
        first, whole_first, whole_end, end = work.bounds
        j = work.base
        if const_expr(self.keys_first):  # noqa: SIM102
            if first < end:
                cute.arch.mbarrier_wait(shared.k_full, 0)
                cute.arch.mbarrier_wait(shared.v_full, 0)
        if const_expr(config.columns and not config.pair):  # noqa: SIM102
            if whole_first & DEAD > 0 and first < end:
                self.clear_dead(r, work)
        if const_expr(self.reads_distances):  # noqa: SIM102
            if first < end:
                self.clear_hidden_keys(r, work)
        parts = [(first, whole_first, True), (whole_first, whole_end, False)]
        if const_expr(config.left):
            parts.append((whole_end, end, True))
        if const_expr(self.abreast and not config.columns):
            lengths = [(upper - lower, masked) for lower, upper, masked in reversed(parts)]
            if const_expr(self.both_ways):
                begins, ends = whole_first - first, end - whole_end
                rising = work.rising == 1
                lengths = [
                    (choose(rising, begins, ends), True),
                    (whole_end - whole_first, False),
                    (choose(rising, ends, begins), True),
                ]
            m, onward, member = end - 1, Int32(-1), Int32(0)
            if const_expr(self.both_ways):
                m, onward = choose(rising, first, m), choose(rising, 1, -1)
            for length, masked in lengths:
                for _ in cutlass.range(length * work.group_size, unroll=1):
                    self.take_member(r, work, member)
                    self.step(r, m, j, masked)
                    j += 1
                    member += 1
                    if member == work.group_size:
                        member = Int32(0)
                        m += onward
        elif const_expr(config.columns):
            self.masked_steps(r, work)
        elif const_expr(config.stream_k and self.reads_distances):
            self.shared_steps_by_distance(r, work)
        elif const_expr(config.stream_k):
            begin = work.base - first
            for lower, upper, masked in parts:
                for step in cutlass.range(begin + lower, begin + upper, unroll=1):
                    m = Int32(0)  # without a band all query tiles are masked alike
                    if const_expr(config.dropout):
                        m = self.take_tile(r, work, step - begin)
                    self.step(r, m, step, masked)
        else:
            for member in cutlass.range(work.group_size, unroll=1):
                self.take_member(r, work, member)
                if const_expr(self.reads_distances):
                    j = self.steps_by_distance(r, work.bounds, j)
                else:
                    for lower, upper, masked in parts:
                        for m in cutlass.range(lower, upper, unroll=1):
                            self.step(r, m, j, masked)
                            j += 1

    @cute.jit
    def shared_steps_by_distance(self, r, work):
        """A piece of a block's steps under a table: the query tiles of each query head that are in it."""
        first, plain, _, end = work.bounds
        m_blocks = work.m_blocks
        j, member = Int32(0) + work.base, first // m_blocks
        for _ in cutlass.range(cute.ceil_div(end, m_blocks) - member, unroll=1):
            before = member * m_blocks
            lower, upper = cutlass.max(first - before, 0), cutlass.min(end - before, m_blocks)
            self.take_member(r, work, member)
            j = self.steps_by_distance(r, (lower, choose(plain == first, lower, upper), upper, upper), j)
            member += 1

    @cute.jit
    def steps_by_distance(self, r, bounds, j):
        """Query tiles of a query head under a table: far right, near or partial, far left and, of a window, partial."""
        first, near, left, past, end = self.near_and_far(r, bounds)
        if const_expr(self.config.right and not self.config.left):
            for m in cutlass.range(near, left, unroll=1):
                self.step(r, m, j, True)
                j += 1
            for m in cutlass.range(left, past, unroll=1):
                self.step(r, m, j, False, None, FAR)
                j += 1
        else:
            # Far tiles of either side by one loop, and all others: ptxas has no registers for more.
            m, far, close = first, near, left
            for _ in cutlass.range(2, unroll=1):
                for _ in cutlass.range(far - m, unroll=1):
                    self.step(r, m, j, False, None, FAR)
                    j += 1
                    m += 1
                if const_expr(not self.config.right):
                    self.leave_right(r)
                for _ in cutlass.range(close - m, unroll=1):
                    self.step(r, m, j, True)
                    j += 1
                    m += 1
                far, close = past, end
        return j

    def near_and_far(self, r: Any, bounds: Any) -> tuple[Any, ...]:
        """Where those begin, and where the last end."""
        first, whole_first, whole_end, end = bounds
        near, left = r.distances.ends[0], r.distances.ends[1]
        if self.config.right:
            near = first
        else:
            near = choose(whole_first == first, cutlass.min(cutlass.max(near, first), whole_end), first)
        left = cutlass.max(cutlass.min(cutlass.max(left, whole_first), end), near)
        return first, near, left, cutlass.max(whole_end, left), end

    @cute.jit
    def set_limits(self, r, work, left, right):
        """The first visible query row, and the one past the last, of each of this thread's keys.

        Without a band, what is to be added to a row's lse: infinity where there is no key.
        """
        for i in cutlass.range_constexpr(2):
            key = work.n_block * self.tile_n + r.row + 8 * i
            r.hidden[i] = Float32(0.0) if key < work.seqlen_k else Float32.inf
            visible = Int32(0)
            if const_expr(self.config.right):
                visible = key - work.shift - right - r.column
            r.limits[i, 0] = choose(key < work.seqlen_k, visible, 1 << 30)
            if const_expr(self.config.left):
                r.limits[i, 1] = key + left - work.shift + 1 - r.column

    @cute.jit
    def finish(self, r, work, dk, dv, scale):
        """Store dK and dV; of a block's piece only if it is the last, which has the sums of the others."""
        warpgroup.wait_group(0)
        first, _, steps, end = work.bounds
        if const_expr(self.config.stream_k):
            if first > 0:
                self.take_sums(r, work, first)
            if end < work.group_size * work.m_blocks:
                self.pass_sums(r, work, end - first)
            else:
                self.store_gradients(r, work, dk, dv, scale)
        elif const_expr(self.config.dealt):
            last = Int32(1)
            if end - first < steps:
                last = self.add_up(r, work)
            if last == 1:
                self.store_gradients(r, work, dk, dv, scale)
        else:
            self.store_gradients(r, work, dk, dv, scale)

    @cute.jit
    def add_up(self, r, work):
        """Leave the sums of a cut block's piece; 1 for the warp whose piece ends last, which then has those of all.

        It adds them in their order, its own among them, so that the bits are the same whoever ends last. Were each piece to
        add to the one before, it would wait for that one: steps take longer where no other block is near.
        """
        first, _, steps, _ = work.bounds
        entry, start, pieces = self.cut_of(work)
        piece = (first * pieces + steps - 1) // steps
        for i, four in self.sums(r):
            cute.autovec_copy(four, self.sums_of(work, start + piece, i))
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()
        found, last = Int32(0), Int32(0)
        if cute.arch.lane_idx() == 0:
            found = cute.arch.atomic_add(self.sums_count(work, entry), Int32(1), sem="acq_rel", scope="gpu")
        if cute.arch.shuffle_sync(found, 0) == pieces - 1:
            last = Int32(1)
            cute.arch.fence_acq_rel_gpu()
            for i, four in self.sums(r):
                cute.autovec_copy(self.sums_of(work, start, i), four)
            for other in cutlass.range(1, pieces, unroll=1):
                for i, four in self.sums(r):
                    add(four, self.sums_of(work, start + other, i))
        return last

    @cute.jit
    def take_sums(self, r, work, steps):
        """Add what the pieces before have summed up, once that is all ``steps`` before this one."""
        wait_until(self.sums_count(work, work.slot), steps)
        for i, four in self.sums(r):
            add(four, self.sums_of(work, work.slot, i))

    @cute.jit
    def pass_sums(self, r, work, steps):
        """Leave the sums to the next piece; they hold so many steps more."""
        for i, four in self.sums(r):
            cute.autovec_copy(four, self.sums_of(work, work.slot, i))
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            count_up(self.sums_count(work, work.slot), steps)

    def sums(self, r: Any) -> list[tuple[int, Any]]:
        """A thread's part of dV and dK by fours, numbered."""
        fours = [
            cute.make_tensor(acc.iterator + 4 * i, cute.make_layout(4))
            for acc in (r.acc_dv, r.acc_dk)
            for i in range(cute.size(acc) // 4)
        ]
        return list(enumerate(fours))

    def sums_of(self, work: Any, slot: Any, index: int) -> Any:
        """Where four numbers of a thread lie: those of a warp next to each other."""
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        start = slot * (self.tile_n * sum(self.dims)) + (index * WARPGROUPS * WARPGROUP + thread) * 4
        return cute.make_tensor((work.given.partial.iterator + start).align(16), cute.make_layout(4))

    def sums_count(self, work: Any, slot: Any) -> Any:
        """How many steps are in a warp's sums, or how many pieces have left theirs."""
        return work.given.counters.iterator + (slot * (4 * WARPGROUPS) + cute.arch.warp_idx() - 4)

    @cute.jit
    def store_gradients(self, r, work, dk, dv, scale):
        row = work.n_block * self.tile_n + r.row
        self.epilogue(r.acc_dv, dv, work, row, 0, Float32(self.kept_scale(r)))
        self.epilogue(r.acc_dk, dk, work, row, 0, scale)

    @cute.jit
    def epilogue(self, acc, target, work, row, first_column, factor):
        """Store rows of dK or dV: quads transpose their columns, so that each lane writes 16 bytes of a row."""
        lane = cute.arch.lane_idx()
        columns = 2 * cute.size(acc)
        rows = accumulator_rows(acc, columns)
        for i in cutlass.range_constexpr(2):
            for chunk in cutlass.range_constexpr(columns // 32):
                pairs = [(rows[i, chunk * 8 + j], rows[i, chunk * 8 + j + 1]) for j in range(0, 8, 2)]
                row_words = quad_words(pairs, factor, self.dtype, lane)
                here, column = row + 8 * i, first_column + chunk * 32 + lane % 4 * 8
                if here < work.seqlen_k and column < target.shape[-1]:
                    store_words(self.element(target, work.batch, work.k_start + here, work.head, column), row_words)

    # What a warpgroup keeps

    def operands(self, work: Any, products: Any, scale: Any, softcap: Any) -> StepOperands:
        """Descriptors, accumulators and constants of one warpgroup."""
        mma_scores, mma_values, mma_keys, mma_queries = products
        shared = work.shared
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        own = cute.arch.thread_idx()[0] % WARPGROUP
        config, tile_m = self.config, self.tile_m
        multiplier, cap_in = multipliers(self.config, scale, softcap)
        scores, values, keys, queries = (m.get_slice(0) for m in (mma_scores, mma_values, mma_keys, mma_queries))
        q_turned, do_turned, k_turned = (transposed(t) for t in (shared.q, shared.dout, shared.k))
        acc_s = mma_scores.make_fragment_C(scores.partition_shape_C((64, tile_m)))
        acc_dp = mma_scores.make_fragment_C(scores.partition_shape_C((64, tile_m)))
        acc_dq = mma_queries.make_fragment_C(queries.partition_shape_C((64, tile_m if self.swapped else self.columns)))
        if const_expr(self.swapped):
            k_part = part_of(mma_queries.make_fragment_A(queries.partition_A(k_turned)), group)
            dq_a = k_part[None, None, None, 0]
            dq_b = mma_queries.make_fragment_B(queries.partition_B(shared.ds))
        else:
            dq_a = mma_queries.make_fragment_A(queries.partition_A(shared.ds))
            dq_b = mma_queries.make_fragment_B(queries.partition_B(k_turned))
            dq_a = part_of(dq_a, group if const_expr(self.by_rows) else 0)
            dq_b = part_of(dq_b, 0 if const_expr(self.by_rows) else group)[None, None, None, 0]
        return StepOperands(
            shared=shared,
            group=group,
            multiplier=multiplier,
            cap_in=cap_in,
            mma_scores=mma_scores,
            mma_values=mma_values,
            mma_keys=mma_keys,
            mma_queries=mma_queries,
            k=part_of(mma_scores.make_fragment_A(scores.partition_A(shared.k)), group)[None, None, None, 0],
            v=part_of(mma_scores.make_fragment_A(scores.partition_A(shared.v)), group)[None, None, None, 0],
            q=mma_scores.make_fragment_B(scores.partition_B(shared.q)),
            dout=mma_scores.make_fragment_B(scores.partition_B(shared.dout)),
            q_turned=mma_keys.make_fragment_B(keys.partition_B(q_turned)),
            do_turned=mma_values.make_fragment_B(values.partition_B(do_turned)),
            p=mma_values.make_fragment_A(values.partition_shape_A((64, tile_m))),
            ds=mma_keys.make_fragment_A(keys.partition_shape_A((64, tile_m))),
            dq_a=dq_a,
            dq_b=dq_b,
            acc_s=acc_s,
            acc_dp=acc_dp,
            acc_dq=acc_dq,
            acc_dk=mma_keys.make_fragment_C(keys.partition_shape_C((64, config.head_dim))),
            acc_dv=mma_values.make_fragment_C(values.partition_shape_C((64, config.head_dim_v))),
            rows_s=accumulator_rows(acc_s, tile_m),
            rows_dp=accumulator_rows(acc_dp, tile_m),
            limits=cute.make_rmem_tensor((2, 2), Int32),
            hidden=cute.make_rmem_tensor(2, Float32),
            hidden_bits=cute.make_rmem_tensor(2, Int32) if config.columns else None,
            ds_target=self.ds_rows(shared, group, own // 32, own % 32),
            drops=self.drops(work),
            alibi=self.alibi(work),
            distances=self.distances(work.given if isinstance(work, Work) else work),
            dq_target=(shared.dq + group * self.part + own * 4).align(16),
            stats=(shared.stats + own % 4 * 2).align(8),
            row=group * 64 + own // 32 * 16 + own % 32 // 4,  # key of the block, and that + 8
            column=own % 4 * 2,
            past=None,
        )

    # A step

    @cute.jit
    def masked_steps(self, r, work):
        """The query tiles of a block under a column mask, as the loader announces them.

        Elements are tested in steps of their own: a branch while products are under way would make ptxas wait for each. Those
        without tests have a loop of their own, down to the next one that has some: in one loop with the others ptxas computes
        descriptors anew between the products of each step.
        """
        j, tested = Int32(0) + work.base, Int32(0)
        if j < r.past:
            tested = self.await_step(r, j)
        while j < r.past:
            while tested == 0:
                self.step(r, self.next_tile(r, work, j), j, False, work)
                tested = self.end_step(r, j)
                j += 1
            if j < r.past:
                m = self.next_tile(r, work, j)
                self.clear_unseeing(r, j)
                self.step(r, m, j, True, work)
                tested = self.end_step(r, j)
                j += 1

    @cute.jit
    def await_step(self, r, j):
        """1 if elements of a step are to be tested, once its queries are there."""
        stage, phase = schedule.ring(j, self.stages)
        cute.arch.mbarrier_wait(r.shared.q_full + stage, phase)
        self.look_at(r, stage)
        return self.announced(r.shared.words, stage)[1]

    def look_at(self, r: Any, stage: Any) -> None:
        """What a step begins with."""
        if self.fold and self.looks_ahead:
            self.begin_at_delta(r, self.statistics(r, stage, 1))

    @cute.jit
    def end_step(self, r, j):
        """Wait for the step's last product, and under it look at the next one, as ``await_step`` has it; 1 past the last."""
        tested, there = Int32(0), Int32(0)
        if const_expr(self.looks_ahead):
            stage, phase = schedule.ring(j + 1, self.stages)
            there = has_come(r.shared.q_full + stage, phase)
            self.look_at(r, stage)
            tested = self.announced(r.shared.words, stage)[1]
            # Lanes ask one by one: what one saw too early all read again.
            there = choose(cute.arch.vote_all_sync(there == 1), 1, 0)
            warpgroup.wait_group(0)
            release(r.shared.q_empty + schedule.ring(j, self.stages)[0])
        if j + 1 == r.past:
            tested = Int32(1)
        elif there == 0:
            tested = self.await_step(r, j + 1)
        return tested

    @cute.jit
    def next_tile(self, r, work, j):
        """Query tile of a step that is there; its head is noted for dropout."""
        stage, _ = schedule.ring(j, self.stages)
        if const_expr(self.config.dropout):
            block = work if const_expr(self.config.pair) else self.again(work)
            tile = r.shared.words[self.step_word(stage) + 2]
            self.take_head(r, block, tile // block.m_blocks - block.batch * block.heads_q)
        return self.announced(r.shared.words, stage)[0]

    @cute.jit
    def step(self, r, m, j, masked, work=None, place=NEAR):
        """One query tile: five GEMMs; while the tensor cores run those of one warpgroup, the other computes P and dS.

        Row statistics are asked for before the wait for S, under which their latency hides. Under a column mask the first wait
        is over, and ``work`` is the block's. ``place``: of the tile in a table of distances.
        """
        shared, config = r.shared, self.config
        stage, phase = schedule.ring(j, self.stages)
        r = self.at_slot(r, stage, phase)
        near = const_expr(self.reads_distances and place == NEAR)
        if const_expr(not config.columns):
            cute.arch.mbarrier_wait(shared.q_full + stage, phase)
        if const_expr(near):  # noqa: SIM102
            if self.hides(r.distances):  # then no tile is far, for neither warpgroup
                self.clear_unseeing(r, j)
        if const_expr(config.columns and masked):
            self.find_hidden(r, work, m, stage)
        if const_expr(self.fold and not self.looks_ahead):
            self.begin_at_delta(r, self.statistics(r, stage, 1))
        if const_expr(near):
            self.begin_near(r, m)
        if const_expr(self.ping_pong):
            self.wait_ping_pong(r.group)
        gemm(r.mma_scores, r.acc_s, r.k, r.q[None, None, None, stage], near)
        # Slopes of a softcap, or Philox, leave no registers for that, nor bits of a mask: ptxas would wait for each product.
        spare = const_expr(not (config.softcap or config.dropout or self.biased or near))
        # Nor has the gradient of far tiles' sums at head_dim 128.
        late = const_expr(not spare or (config.columns and masked) or (config.bias_grad and not config.right and self.swapped))
        if const_expr(not late):
            level = self.level(r, stage, place)
        cute.arch.mbarrier_wait(shared.do_full + stage, phase)
        gemm(r.mma_scores, r.acc_dp, r.v, r.dout[None, None, None, stage], self.fold)
        if const_expr(self.ping_pong):
            self.pass_ping_pong(r.group)
        self.draw(r, m)
        warpgroup.wait_group(1)
        if const_expr(config.columns and masked):
            self.hide(r)
        if const_expr(late):
            level = self.level(r, stage, place)
        # Of long steps a half each before and behind the wait for dP, with its own row statistics: eight registers less.
        halves = const_expr(config.columns and self.by_rows)
        if const_expr(halves):
            self.probabilities(r, m, level, masked, 0)
        else:
            self.probabilities(r, m, level, masked)
        delta = None
        if const_expr(spare and not self.fold and not halves):
            delta = self.statistics(r, stage, 1)
        for i in cutlass.range_constexpr(self.held):
            hold([r.acc_s[4 * i + n] for n in range(4)], r.ds_target)
        warpgroup.wait_group(0)
        if const_expr(config.persistent):
            self.release_last(r, j, shared.v_empty)
        if const_expr(halves):
            level = self.statistics(r, stage, 0)
            self.probabilities(r, m, level, masked, 1)
        if const_expr((not spare or halves) and not (self.fold or config.dropout)):
            delta = self.statistics(r, stage, 1)
        if const_expr(config.dropout):
            self.share_kept(r)
        else:
            self.differentiate(r, delta)
            pack(r.acc_dp, r.ds, self.dtype)
            self.share(r, stage)
        if const_expr(config.bias_grad):  # behind that: before dS is packed ptxas spills more at 128
            if const_expr(near):
                self.add_near(r, m)
            elif const_expr(not config.right):
                self.add_far(r)
        # Not before dS is there: under the wait for the other warpgroup's, where nothing else could run.
        gemm(r.mma_values, r.acc_dv, r.p, r.do_turned[None, None, None, stage], True)
        cute.arch.fence_view_async_shared()
        wait(BackwardBarrier.DS_READY, BOTH)
        if const_expr(self.swapped):
            gemm(r.mma_queries, r.acc_dq, r.dq_a, r.dq_b[None, None, None, stage], False)
        else:
            gemm(r.mma_queries, r.acc_dq, r.dq_a[None, None, None, stage], r.dq_b, False)
        gemm(r.mma_keys, r.acc_dk, r.ds, r.q_turned[None, None, None, stage], True)
        warpgroup.wait_group(1)
        release(shared.do_empty + stage)
        if const_expr(config.persistent):
            self.release_last(r, j, shared.k_empty)
        self.hand_over(r, j)
        if const_expr(not config.columns):
            warpgroup.wait_group(0)
            release(shared.q_empty + stage)

    def wait_ping_pong(self, group: Any) -> None:
        """Wait until the other warpgroup has issued its products."""
        wait(StepBarrier.PING_PONG, BOTH, group)

    def pass_ping_pong(self, group: Any) -> None:
        """Let the other warpgroup issue its products."""
        arrive(StepBarrier.PING_PONG, BOTH, group ^ 1)

    @cute.jit
    def begin_ping_pong(self, group):
        """The first warpgroup begins."""
        if const_expr(self.ping_pong):  # noqa: SIM102
            if group == 1:
                self.pass_ping_pong(group)

    def level(self, r: Any, stage: Any, place: str) -> Any:
        """lse of this thread's queries; of a tile far to the right of which that is less all its values."""
        if self.reads_distances and place == FAR and not self.config.right:
            r = r.but(stats=r.stats + cute.assume(r.distances.right[0], divby=2))
        return self.statistics(r, stage, 0)

    @cute.jit
    def statistics(self, r, stage, which, first=0, queries=0):
        """A row statistic of this thread's queries, or of ``queries`` from the ``first`` on, in the order of columns."""
        groups = (queries or self.tile_m) // 8
        source = r.stats + cute.assume(stage * self.stage_statistics, divby=2) + (which * self.tile_m + first)
        values = cute.make_rmem_tensor((2, groups), Float32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout((2, groups), stride=(1, 8))), values)
        return cute.make_tensor(values.iterator, cute.make_layout(2 * groups))

    @cute.jit
    def probabilities(self, r, m, level, masked, half=-1):
        """P from the raw scores and lse, as an operand and, times the softcap's derivative, in the scores' place.

        ``half``: 0 or 1 for those of the first or the last queries alone.
        """
        config = self.config
        for i in cutlass.range_constexpr(2):
            if const_expr(masked and not (config.stream_k or config.columns)):
                first = r.limits[i, 0] - m * self.tile_m
                for c in cutlass.range_constexpr(self.tile_m // 4):
                    r.rows_s[i, c] = r.rows_s[i, c] if c // 2 * 8 + c % 2 >= first else -Float32.inf
                if const_expr(self.config.left):
                    past = r.limits[i, 1] - m * self.tile_m
                    for c in cutlass.range_constexpr(self.tile_m // 4):
                        r.rows_s[i, c] = r.rows_s[i, c] if c // 2 * 8 + c % 2 < past else -Float32.inf
        p_words = words(r.p)
        if const_expr(self.biased):
            level_of = self.level_of(r, m, masked)
        elements = [(c, i) for c in range(0, self.tile_m // 4, 2) for i in range(2)]
        if const_expr(half >= 0):
            elements = elements[half * len(elements) // 2 : (half + 1) * len(elements) // 2]
        for c, i in elements:
            p = []
            for j in (0, 1):
                above = level[c + j] + r.hidden[i] if const_expr(masked and config.stream_k) else level[c + j]
                if const_expr(self.biased):
                    above = level_of(above, i, c + j)
                weight, slope = self.weigh(r, r.rows_s[i, c + j], above, masked)
                r.rows_s[i, c + j] = weight * slope if const_expr(self.config.softcap) else weight
                p.append(weight)
            p_words[i + c] = pack16(p[0], p[1], self.dtype)

    @cute.jit
    def weigh(self, r, raw, level, masked):
        """P of a raw score whose row has this lse, and the softcap's derivative there."""
        score, slope = raw * r.multiplier, Float32(1.0)
        if const_expr(self.config.softcap):
            score, slope = capped_and_slope(raw, r.multiplier, r.cap_in)
            if const_expr(masked):
                score = -Float32.inf if raw == -Float32.inf else score
        return exp2(score - level), slope

    @cute.jit
    def begin_at_delta(self, r, delta):
        """What dP is to be less, where its product adds to it: under S, and not behind dP."""
        for c in cutlass.range_constexpr(self.tile_m // 4):
            for i in cutlass.range_constexpr(2):
                r.rows_dp[i, c] = negative(delta[c])

    @cute.jit
    def differentiate(self, r, delta):
        """dS / scale from P and dP, in dP's place."""
        for c in cutlass.range_constexpr(self.tile_m // 4):
            for i in cutlass.range_constexpr(2):
                if const_expr(delta is None):
                    r.rows_dp[i, c] = r.rows_s[i, c] * r.rows_dp[i, c]
                else:
                    r.rows_dp[i, c] = r.rows_s[i, c] * (r.rows_dp[i, c] - delta[c])

    def share(self, r: Any, slot: Any, sixteens: Any = None) -> None:
        """dS, rows now queries, where both warpgroups read it; of some ``sixteens`` of queries alone."""
        target = r.ds_target + slot * (self.tile_m * self.tile_n)
        for i in sixteens or range(self.tile_m // 16):
            four = [words(r.ds)[4 * i + j] for j in range(4)]
            store_matrices(target + i * (16 * 64), four, transposed=True)

    @cute.jit
    def hand_over(self, r, j=0, parts=1):
        """dQ to the writer warp, in accumulator order, as much at a time as its buffer holds."""
        full = BackwardBarrier.DQ_FULL + r.group
        if const_expr(self.config.deterministic):
            full += (j & 1) * DQ_ODD
        count = cute.size(r.acc_dq) // (4 * parts)
        for part in cutlass.range_constexpr(parts):
            wait(BackwardBarrier.DQ_EMPTY, DQ_THREADS, r.group)
            if const_expr(self.config.columns and not self.config.pair):
                self.name_tile(r.shared.words, schedule.ring(j, self.stages)[0], r.group)
            for i in cutlass.range_constexpr(count):
                four = cute.make_tensor(r.acc_dq.iterator + 4 * (part * count + i), cute.make_layout(4))
                cute.autovec_copy(four, cute.make_tensor(r.dq_target + i * 4 * WARPGROUP, cute.make_layout(4)))
            cute.arch.fence_view_async_shared()
            arrive(full, DQ_THREADS)

    @cute.jit
    def release_last(self, r, j, barrier):
        """As ``release``, in a block's last step."""
        if cute.arch.lane_idx() == 0 and j + 1 == r.past:
            cute.arch.mbarrier_arrive(barrier)
