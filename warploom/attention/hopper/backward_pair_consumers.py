"""The consumer warpgroups of the backward in pairs of blocks: one computes S, P and dV, the other dP, dS and dK.

Each adds a quarter of dQ, that of VALUES in the next step, where it runs under the exponentials.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward_base import BOTH, WARPGROUPS, Operands
from warploom.attention.hopper.backward_consumers import Consumers
from warploom.attention.hopper.backward_pair_base import KEYS, OTHER, OWN, PARTS, VALUES, PairBase
from warploom.kernels.cute.barriers import BackwardBarrier, PairBarrier, arrive, wait
from warploom.kernels.cute.basics import WARPGROUP, choose
from warploom.kernels.cute.dropout import kept, kept_halves, rounds_of
from warploom.kernels.cute.instructions import from_half, pack16
from warploom.kernels.cute.memory import bulk_send
from warploom.kernels.cute.rings import release, release_other
from warploom.kernels.cute.softmax import multipliers
from warploom.kernels.cute.tiles import transposed
from warploom.kernels.cute.wgmma import accumulator_rows, gemm, pack, part_of, words


class PairOperands(Operands):
    """Of a warpgroup of a block of a pair."""

    role: int  # VALUES or KEYS
    rank: Any
    mma_gradient: Any
    left: Any  # operands of S or dP: K or V,
    right: Any  # Q or dO
    operand: Any  # of the gradient: dO or Q
    p: Any  # or dS
    ds: Any
    own_ds: Any
    other_ds: Any
    own_k: Any
    other_k: Any
    acc: Any
    hidden: Any
    hidden_bits: Any  # which elements of a tile this thread's keys hide under a column mask
    ds_target: Any
    p_target: Any
    stats: Any
    begin: Any  # the first step of a block, and the one past its last
    past: Any


class PairConsumers(PairBase, Consumers):
    """What the consumer warpgroups run."""

    def operands(self, work: Any, products: Any, scale: Any, softcap: Any, role: int = VALUES) -> PairOperands:  # type: ignore[override]
        """Descriptors, accumulators and constants of one warpgroup."""
        mma_scores, mma_gradient, mma_queries = products
        scores, gradient, queries = (m.get_slice(0) for m in (mma_scores, mma_gradient, mma_queries))
        shared = work.shared
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane = own % 32
        left, right = (shared.k, shared.q) if role == VALUES else (shared.v, shared.dout)
        operand = shared.dout if role == VALUES else shared.q
        operand_turned, k_turned, other_turned = (transposed(t) for t in (operand, shared.k, shared.other))
        acc_s = mma_scores.make_fragment_C(scores.partition_shape_C((64, self.tile_m)))
        multiplier, cap_in = multipliers(self.config, scale, softcap)
        ds = part_of(mma_queries.make_fragment_A(queries.partition_A(shared.ds)), 0)
        own_k = mma_queries.make_fragment_B(queries.partition_B(k_turned))
        other_k = mma_queries.make_fragment_B(queries.partition_B(other_turned))
        weights = mma_gradient.make_fragment_A(gradient.partition_shape_A((64, self.tile_m)))
        chunk = own // 32 * 2 + lane // 8 % 2
        rows = accumulator_rows(acc_s, self.tile_m)
        return PairOperands(
            role=role,
            rank=work.rank,
            shared=shared,
            group=role,
            multiplier=multiplier,
            cap_in=cap_in,
            mma_scores=mma_scores,
            mma_gradient=mma_gradient,
            mma_queries=mma_queries,
            left=mma_scores.make_fragment_A(scores.partition_A(left))[None, None, None, 0],
            right=mma_scores.make_fragment_B(scores.partition_B(right)),
            operand=mma_gradient.make_fragment_B(gradient.partition_B(operand_turned)),
            p=weights,  # or dS
            ds=weights,
            own_ds=ds[None, None, None, OWN],
            other_ds=ds[None, None, None, OTHER],
            own_k=part_of(own_k, work.rank * WARPGROUPS + role)[None, None, None, 0],
            other_k=part_of(other_k, role)[None, None, None, 0],
            acc_s=acc_s,  # or dP
            acc_dq=mma_queries.make_fragment_C(queries.partition_shape_C((64, self.half // WARPGROUPS))),
            acc=mma_gradient.make_fragment_C(gradient.partition_shape_C((64, self.config.head_dim))),
            rows_s=rows,
            rows_dp=rows,
            limits=cute.make_rmem_tensor((2, 2), Int32),
            hidden=cute.make_rmem_tensor(2, Float32),
            hidden_bits=cute.make_rmem_tensor(2, Int32) if self.config.columns else None,
            ds_target=shared.ds_start + (lane // 16 * 8 + lane % 8) * 64 + (chunk ^ lane % 8) * 8,
            p_target=shared.p + own * 4,
            dq_target=(shared.dq + role * (self.quarter // PARTS[VALUES]) + own * 4).align(16),
            drops=self.drops(work),
            stats=(shared.stats + own % 4 * 2).align(8),
            row=own // 32 * 16 + lane // 4,  # key of the block, and that + 8
            column=own % 4 * 2,
            begin=None,
            past=None,
        )

    @cute.jit
    def play(self, role, given, target, products, scale, softcap):
        """All pairs' steps of one warpgroup, and its gradient: VALUES computes S, P and dV, KEYS dP, dS and dK."""
        r = self.operands(given, products, scale, softcap, role)
        turn, base, loads = Int32(0), Int32(0), Int32(0)
        total = given.n_blocks * given.slices
        index = self.next_pair(given, turn)
        if const_expr(role == KEYS):
            arrive(PairBarrier.P_TAKEN, BOTH)
        while index < total:
            work = self.share_of(given, index, base, loads)
            self.take(given)
            if const_expr(role == VALUES):
                self.block_values(r, work, target, given.left, given.right)
            else:
                self.block_keys(r, work, target, scale)
            base += self.steps_of(work)
            loads += choose(self.steps_of(work) > 0, 1, 0)
            turn += 1
            index = self.next_pair(given, turn)

    @cute.jit
    def block_values(self, r, work, dv, left, right):
        """The warpgroup's part of a pair."""
        shared, base = work.shared, work.base
        past = base + self.steps_of(work)
        r = r.but(begin=base, past=past)
        if const_expr(not self.config.columns):
            self.set_limits(r, work, left, right)
        r.acc.fill(0.0)
        if base < past:
            stage, phase = schedule.ring(base, self.stages)
            cute.arch.mbarrier_wait(shared.k_full, work.loads & 1)
            if const_expr(self.config.columns):  # noqa: SIM102
                if work.bounds[1] == 1:
                    self.clear_dead(r, work)
            cute.arch.mbarrier_wait(shared.q_full + stage, phase)
            gemm(r.mma_scores, r.acc_s, r.left, r.right[None, None, None, stage], False)
            warpgroup.wait_group(0)
        self.steps(r, work)
        if base < past:
            self.wait_for_ds(r, past - 1)
            self.gemm_dq(r)
            warpgroup.wait_group(0)
            release(shared.k_empty)
            self.pass_dq(r, past - 1)
        self.epilogue(r.acc, dv, work, work.n_block * self.tile_n + r.row, 0, Float32(2.0**-self.lift * self.kept_scale(r)))

    @cute.jit
    def step(self, r, m, j, masked, work=None):
        """One query tile of the warpgroup of dV, and dQ of the one before: that runs under the exponentials.

        Under a column mask ``work`` is the block's; elements are tested before anything is issued, as registers hold no bits.
        """
        shared = r.shared
        stage, _ = schedule.ring(j, self.stages)
        dout_stage, dout_phase = schedule.ring(j, self.dout_stages)
        if const_expr(self.config.columns and masked):
            self.find_hidden(r, work, m, stage)
            self.hide(r)
        if const_expr(not self.config.dropout):
            level = self.statistics(r, stage, 0)
        if j > r.begin:
            self.wait_for_ds(r, j - 1)
        self.gemm_dq(r)  # in the first step nobody reads it
        self.draw(r, m)
        if const_expr(self.config.dropout):  # not before: Philox needs the registers
            level = self.statistics(r, stage, 0)
        self.probabilities(r, m, level, masked)
        self.drop(r)
        wait(PairBarrier.P_TAKEN, BOTH)
        self.release_both(r, shared.q_empty + stage)  # all lanes have read the row statistics
        for i in cutlass.range_constexpr(self.tile_m * self.tile_n // (8 * WARPGROUP)):
            four = cute.make_rmem_tensor(4, Int32)
            for n in cutlass.range_constexpr(4):
                at = 8 * i + 2 * n
                four[n] = pack16(r.acc_s[at], r.acc_s[at + 1], Float16)
            cute.autovec_copy(four, cute.make_tensor((r.p_target + i * 4 * WARPGROUP).align(16), cute.make_layout(4)))
        arrive(PairBarrier.P_READY, BOTH)
        cute.arch.mbarrier_wait(shared.do_full + dout_stage, dout_phase)
        gemm(r.mma_gradient, r.acc, r.p, r.operand[None, None, None, dout_stage], True)
        warpgroup.wait_group(1)
        if j > r.begin:
            self.pass_dq(r, j - 1)
        following, phase = schedule.ring(j + 1, self.stages)
        if j + 1 < r.past:
            cute.arch.mbarrier_wait(shared.q_full + following, phase)
        gemm(r.mma_scores, r.acc_s, r.left, r.right[None, None, None, following], False)
        warpgroup.wait_group(1)
        self.release_both(r, shared.do_empty + dout_stage)
        warpgroup.wait_group(0)

    @cute.jit
    def wait_for_ds(self, r, j):
        """dS of both blocks is there."""
        wait(BackwardBarrier.DS_READY, BOTH)
        cute.arch.mbarrier_wait(r.shared.came, j & 1)

    @cute.jit
    def gemm_dq(self, r):
        """A quarter of dQ, one group."""
        atom = cute.make_mma_atom(r.mma_queries.op)
        warpgroup.fence()
        for n, (a, b) in enumerate(((r.own_ds, r.own_k), (r.other_ds, r.other_k))):
            for i in cutlass.range_constexpr(cute.size(b, mode=[2])):
                atom.set(warpgroup.Field.ACCUMULATE, n + i > 0)
                cute.gemm(atom, r.acc_dq, a[None, None, i], b[None, None, i], r.acc_dq)
        warpgroup.commit_group()

    @cute.jit
    def pass_dq(self, r, j):
        """dQ of VALUES has ended: it may be handed over, and dS overwritten."""
        self.release_both(r, r.shared.taken)
        self.hand_over(r, j, PARTS[r.role])

    @cute.jit
    def block_keys(self, r, work, dk, scale):
        """The warpgroup's part of a pair."""
        shared, base = work.shared, work.base
        past = base + self.steps_of(work)
        r = r.but(past=past)
        r.acc.fill(0.0)
        if base < past:
            stage, phase = schedule.ring(base, self.dout_stages)
            cute.arch.mbarrier_wait(shared.v_full, work.loads & 1)
            if const_expr(self.config.columns):
                if work.bounds[1] == 1:
                    self.clear_dead(r, work)
                self.clear_gradients(r, base)
            cute.arch.mbarrier_wait(shared.do_full + stage, phase)
            gemm(r.mma_scores, r.acc_s, r.left, r.right[None, None, None, stage], False)
            warpgroup.wait_group(0)
            self.release_both(r, shared.do_empty + stage)
            cute.arch.mbarrier_wait(shared.k_full, work.loads & 1)
        for j in cutlass.range(base, past, unroll=1):
            self.step_keys(r, j)
        if base < past:
            release(shared.k_empty)
        self.epilogue(r.acc, dk, work, work.n_block * self.tile_n + r.row, 0, scale)

    @cute.jit
    def step_keys(self, r, j):
        """One query tile of the warpgroup of dK, and dP of the next one."""
        shared = r.shared
        stage, phase = schedule.ring(j, self.stages)
        cute.arch.mbarrier_wait(shared.q_full + stage, phase)
        delta = self.statistics(r, stage, 1)
        for at in cutlass.range_constexpr(cute.size(r.acc_s)):  # pairs of columns, rows, groups of 8 columns
            if const_expr(self.config.dropout):
                r.acc_s[at] = r.acc_s[at] * (r.drops.given.scale * 2.0**-self.lift)
            else:
                r.acc_s[at] = (r.acc_s[at] - delta[at // 4 * 2 + at % 2]) * 2.0**-self.lift
        wait(PairBarrier.P_READY, BOTH)
        for i in cutlass.range_constexpr(self.tile_m * self.tile_n // (8 * WARPGROUP)):
            four = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(cute.make_tensor((r.p_target + i * 4 * WARPGROUP).align(16), cute.make_layout(4)), four)
            for n in cutlass.range_constexpr(8):
                weight = from_half(four[n // 2], n % 2)
                if const_expr(self.config.dropout):
                    at = 8 * i + n
                    r.acc_s[at] = self.signed_weight(weight, r.acc_s[at], delta[at // 4 * 2 + at % 2])
                else:
                    r.acc_s[8 * i + n] = weight * r.acc_s[8 * i + n]
        if j + 1 == r.past:  # dP has been computed for the last time
            release(shared.v_empty)
        arrive(PairBarrier.P_TAKEN, BOTH)
        pack(r.acc_s, r.ds, self.dtype)
        if j > 0:
            cute.arch.mbarrier_wait(shared.taken, (j & 1) ^ 1)
        self.share(r, OWN)
        cute.arch.fence_view_async_shared()
        wait(PairBarrier.DS_WRITTEN, WARPGROUP)
        arrive(BackwardBarrier.DS_READY, BOTH)
        self.send(r)
        gemm(r.mma_gradient, r.acc, r.ds, r.operand[None, None, None, stage], True)
        gemm(r.mma_queries, r.acc_dq, r.own_ds, r.own_k, False)
        cute.arch.mbarrier_wait(shared.came, j & 1)
        gemm(r.mma_queries, r.acc_dq, r.other_ds, r.other_k, True)
        warpgroup.wait_group(0)
        release_other(shared.taken, r.rank)
        self.release_both(r, shared.q_empty + stage)
        self.hand_over(r, j, PARTS[r.role])  # before the wait for dO, which may be long
        dout_stage, dout_phase = schedule.ring(j + 1, self.dout_stages)
        if j + 1 < r.past:
            if const_expr(self.config.columns):
                self.clear_gradients(r, j + 1)
            cute.arch.mbarrier_wait(shared.do_full + dout_stage, dout_phase)
        gemm(r.mma_scores, r.acc_s, r.left, r.right[None, None, None, dout_stage], False)
        warpgroup.wait_group(0)
        if j + 1 < r.past:
            self.release_both(r, shared.do_empty + dout_stage)

    def drawn(self, r: Any) -> list[Any]:
        """Where this thread's words of a counter go: where its P goes later in the step, as KEYS has read the last one."""
        return [r.p_target + i * 4 * WARPGROUP for i in range(rounds_of(self.tile_m, 16))]

    @cute.jit
    def drop(self, r):
        """Zeros in the operand P for what dropout drops, of which P as it passes to KEYS is negative."""
        if const_expr(self.config.dropout):
            bound, p_words = r.drops.given.bound, words(r.p)
            for n, target in enumerate(self.drawn(r)):
                for i, c, pair in self.pairs(target, n):
                    p_words[i + c] = kept_halves(p_words[i + c], pair, bound)
                    p = [r.rows_s[i, c + j] for j in (0, 1)]
                    r.rows_s[i, c], r.rows_s[i, c + 1] = kept(pair, bound, p, [-x for x in p])

    @cute.jit
    def signed_weight(self, weight, dp, delta):
        """dS from a P that VALUES has made negative where dropout drops it, and dP and its row's delta."""
        kept_dp = dp if weight > 0.0 else Float32(0.0)
        return cute.arch.fmax(weight, -weight) * (kept_dp - delta * 2.0**-self.lift)

    @cute.jit
    def send(self, r):
        """This block's dS to the other one, whose own is expected here."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 8:
            tile = self.tile_m * self.tile_n
            start = r.shared.ds_start
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(r.shared.came, 2 * tile)
                bulk_send(start + OTHER * tile, start + OWN * tile, 2 * tile, r.shared.came, r.rank ^ 1)

    # Column masks

    @cute.jit
    def clear_dead(self, r, work):
        """Zeros for keys that no query of the group sees, the other block's too, by VALUES, and for their values by KEYS.

        Each does it before its first product; the other's products read them as well.
        """
        shared, config = work.shared, self.config
        rows = self.quad_rows(r)
        dead = self.find_dead(work, [work.n_block * self.tile_n + row for row in rows])
        if const_expr(r.role == VALUES):
            others = self.find_dead(work, [(work.n_block ^ 1) * self.tile_n + row for row in rows])
        _, box_k, box_v, _ = config.boxes
        for i in cutlass.range_constexpr(2):
            if const_expr(r.role == VALUES):
                if dead[i] == 1:
                    self.clear_row(shared.k_start, rows[i], self.tile_n, config.head_dim, box_k)
                if others[i] == 1:
                    self.clear_row(shared.other_start, rows[i], self.tile_n, self.half, box_k)
            else:
                if dead[i] == 1:
                    self.clear_row(shared.v_start, rows[i], self.tile_n, config.head_dim_v, box_v)
        cute.arch.fence_view_async_shared()
        wait(BackwardBarrier.CLEARED, BOTH)

    @cute.jit
    def clear_gradients(self, r, j):
        """What KEYS clears of a step, before its dP: VALUES comes there at the step's beginning."""
        stage, phase = schedule.ring(j, self.stages)
        cute.arch.mbarrier_wait(r.shared.q_full + stage, phase)
        _, tested = self.announced(r.shared.words, stage)
        if tested == 1:
            self.clear_unseeing(r, j)

    @cute.jit
    def clear_queries(self, r, levels, j):
        """As ``ColumnWalk`` has it: VALUES, whose S hides them all, clears the queries, and KEYS their dO."""
        shared, config, tile_m = r.shared, self.config, self.tile_m
        box_q, _, _, box_do = config.boxes
        quad = cute.arch.thread_idx()[0] % WARPGROUP // 4
        if const_expr(r.role == VALUES):
            wait(PairBarrier.SCORED, WARPGROUP)
            stage, _ = schedule.ring(j, self.stages)
            start, columns, box = shared.q_start + stage * (tile_m * config.head_dim), config.head_dim, box_q
        else:
            stage, phase = schedule.ring(j, self.dout_stages)
            cute.arch.mbarrier_wait(shared.do_full + stage, phase)
            start, columns, box = shared.do_start + stage * (tile_m * config.head_dim_v), config.head_dim_v, box_do
        for i in cutlass.range_constexpr(tile_m // (WARPGROUP // 4)):
            row = i * (WARPGROUP // 4) + quad
            if levels[row] == Float32.inf:
                self.clear_row(start, row, tile_m, columns, box)
        cute.arch.fence_view_async_shared()
        wait(BackwardBarrier.CLEARED, BOTH)
