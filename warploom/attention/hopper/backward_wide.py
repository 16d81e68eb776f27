"""The backward of head dims past 128: a block owns 64 keys, whose dK and dV two warpgroups share by columns.

As registers hold no more than 64 keys of dK and dV, each warpgroup keeps half of the head dims of all of them. S and dP are
computed once, 32 keys a warpgroup, and P and dS pass through shared memory, where both read them.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward import DS_READY, WARPGROUP, WARPGROUPS, HopperBackward, Names
from warploom.attention.hopper.config import BackwardConfig
from warploom.attention.hopper.primitives import store_matrices
from warploom.runtime.instructions import pack16

P_READY = 6  # named barrier: both warpgroups have written their P
DS_SLOT = 2  # tiles of P take turns in slots 0 and 1
BOTH = WARPGROUPS * WARPGROUP


class WideBackward(HopperBackward):
    """As ``HopperBackward``, for tiles of 64 queries by 64 keys."""

    def __init__(self, config: BackwardConfig):
        super().__init__(config)
        self.keys_each = config.tile_n // WARPGROUPS
        self.slots = 3

    def products(self) -> tuple[Any, Any, Any, Any]:
        smem = warpgroup.OperandSource.SMEM
        by_k, by_mn = OperandMajorMode.K, OperandMajorMode.MN
        scores = self.mma((64, self.keys_each, 16), smem, by_k, by_k)
        values = self.mma((64, self.config.head_dim_v // 2, 16), smem, by_mn, by_mn)
        keys = self.mma((64, self.config.head_dim // 2, 16), smem, by_mn, by_mn)
        return scores, values, keys, self.mma((64, self.columns, 16), smem, by_k, by_mn)

    @cute.jit
    def set_limits(self, r, work, left, right):
        """Keys of this thread, counted from its first one: past the last, and by a row's number behind and before its band."""
        key = work.n_block * self.tile_n + r.column + r.group * self.keys_each
        r.limits[0, 0] = work.seqlen_k - key
        r.limits[0, 1] = work.shift + right + 1 - key
        r.limits[1, 0] = work.shift - left - key

    @cute.jit
    def finish(self, r, work, dk, dv, scale):
        warpgroup.wait_group(0)
        row = work.n_block * self.tile_n + r.row
        self.epilogue(r.acc_dv, dv, work, row, r.group * (self.config.head_dim_v // 2), Float32(1.0))
        self.epilogue(r.acc_dk, dk, work, row, r.group * (self.config.head_dim // 2), scale)

    def registers(self, work: Any, products: Any, scale: Any, softcap: Any) -> Names:
        mma_scores, mma_values, mma_keys, mma_queries = products
        scores, values, keys, queries = (m.get_slice(0) for m in products)
        shared, config = work.shared, self.config
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane = own % 32
        q_turned, do_turned, k_turned, tiles_turned = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 0, 2]))
            for t in (shared.q, shared.dout, shared.k, shared.ds)
        )
        acc_s = mma_scores.make_fragment_C(scores.partition_shape_C((64, self.keys_each)))
        acc_dp = mma_scores.make_fragment_C(scores.partition_shape_C((64, self.keys_each)))
        multiplier, cap_in = self.multipliers(scale, softcap)
        # A warp's 16 queries × 16 keys of P or dS go out as four 8 × 8 tiles, those of the first 8 keys first; lane l
        # addresses row l % 8 of tile l // 8 in rows of 64 keys, eight swizzled chunks of 16 bytes.
        row, chunk = own // 32 * 16 + lane // 8 % 2 * 8 + lane % 8, group * (self.keys_each // 8) + lane // 16
        return Names(
            shared=shared,
            group=group,
            multiplier=multiplier,
            cap_in=cap_in,
            mma_scores=mma_scores,
            mma_values=mma_values,
            mma_keys=mma_keys,
            mma_queries=mma_queries,
            q=self.part_of(mma_scores.make_fragment_A(scores.partition_A(shared.q)), 0),
            dout=self.part_of(mma_scores.make_fragment_A(scores.partition_A(shared.dout)), 0),
            k=self.part_of(mma_scores.make_fragment_B(scores.partition_B(shared.k)), group)[None, None, None, 0],
            v=self.part_of(mma_scores.make_fragment_B(scores.partition_B(shared.v)), group)[None, None, None, 0],
            p=self.part_of(mma_values.make_fragment_A(values.partition_A(tiles_turned)), 0),
            do_turned=self.part_of(mma_values.make_fragment_B(values.partition_B(do_turned)), group),
            ds=self.part_of(mma_keys.make_fragment_A(keys.partition_A(tiles_turned)), 0)[None, None, None, DS_SLOT],
            q_turned=self.part_of(mma_keys.make_fragment_B(keys.partition_B(q_turned)), group),
            dq_a=self.part_of(mma_queries.make_fragment_A(queries.partition_A(shared.ds)), 0)[None, None, None, DS_SLOT],
            dq_b=self.part_of(mma_queries.make_fragment_B(queries.partition_B(k_turned)), group)[None, None, None, 0],
            acc_s=acc_s,
            acc_dp=acc_dp,
            acc_dq=mma_queries.make_fragment_C(queries.partition_shape_C((64, self.columns))),
            acc_dk=mma_keys.make_fragment_C(keys.partition_shape_C((64, config.head_dim // 2))),
            acc_dv=mma_values.make_fragment_C(values.partition_shape_C((64, config.head_dim_v // 2))),
            rows_s=cute.make_tensor(acc_s.iterator, self.row_view(self.keys_each)),
            rows_dp=cute.make_tensor(acc_dp.iterator, self.row_view(self.keys_each)),
            limits=cute.make_rmem_tensor((2, 2), Int32),
            slopes=cute.make_rmem_tensor((2, self.keys_each // 4), Float32),
            targets=[shared.ds_start + row * 64 + ((chunk + 2 * i) ^ lane % 8) * 8 for i in range(self.keys_each // 16)],
            dq_target=(shared.dq + group * self.piece + own * 4).align(16),
            row=own // 32 * 16 + lane // 4,  # of the query tile, and that + 8
            column=own % 4 * 2,
        )

    @cute.jit
    def step(self, r, m, j, masked):
        """One query tile. P passes through one of two slots, so that nobody overwrites what the other warpgroup's dV reads;
        dS has one: who writes it has met the other after that one's last dK.
        """
        shared = r.shared
        stage, phase = schedule.ring(j, self.stages)
        dout_stage, dout_phase = schedule.ring(j, self.dout_stages)
        slot = j & 1
        cute.arch.mbarrier_wait(shared.q_full + stage, phase)
        self.gemm(r.mma_scores, r.acc_s, r.q[None, None, None, stage], r.k, False)
        cute.arch.mbarrier_wait(shared.do_full + dout_stage, dout_phase)
        self.gemm(r.mma_scores, r.acc_dp, r.dout[None, None, None, dout_stage], r.v, False)
        warpgroup.wait_group(1)
        if j > 0:  # dK of the step before has ended
            self.release(shared.q_empty + (stage ^ 1))
        self.probabilities(r, m, self.statistics(r, stage, 0), masked)
        self.share(r, r.acc_s, slot)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=P_READY, number_of_threads=BOTH)
        self.gemm(r.mma_values, r.acc_dv, r.p[None, None, None, slot], r.do_turned[None, None, None, dout_stage], True)
        warpgroup.wait_group(1)
        self.differentiate(r, self.statistics(r, stage, 1))
        self.share(r, r.acc_dp, DS_SLOT)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_READY, number_of_threads=BOTH)
        self.gemm(r.mma_queries, r.acc_dq, r.dq_a, r.dq_b, False)
        self.gemm(r.mma_keys, r.acc_dk, r.ds, r.q_turned[None, None, None, stage], True)
        warpgroup.wait_group(1)
        self.release(shared.do_empty + dout_stage)
        self.hand_over(r)

    @cute.jit
    def statistics(self, r, stage, which):
        """A row statistic of this thread's two queries."""
        source = r.shared.stats + stage * (2 * self.tile_m) + which * self.tile_m + r.row
        rows = cute.make_tensor(source, cute.make_layout(2, stride=8))
        return [rows[0], rows[1]]

    @cute.jit
    def probabilities(self, r, m, level, masked):
        """P from the raw scores and lse; with a softcap its derivative too, times which dS takes P."""
        for i in cutlass.range_constexpr(2):
            row = m * self.tile_m + r.row + 8 * i
            past, first = r.limits[0, 0], row + r.limits[1, 0]
            if const_expr(self.config.right):
                past = cutlass.min(past, row + r.limits[0, 1])
            for c in cutlass.range_constexpr(self.keys_each // 4):
                raw, at = r.rows_s[i, c], c // 2 * 8 + c % 2
                if const_expr(masked):
                    raw = raw if at < past else -Float32.inf
                    if const_expr(self.config.left):
                        raw = raw if at >= first else -Float32.inf
                weight, slope = self.weigh(r, raw, level[i], masked)
                r.rows_s[i, c] = weight
                if const_expr(self.config.softcap):
                    r.slopes[i, c] = slope

    @cute.jit
    def differentiate(self, r, mean):
        """dS / scale from P and dP, in dP's place."""
        for i in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(self.keys_each // 4):
                weight = r.rows_s[i, c] * r.slopes[i, c] if const_expr(self.config.softcap) else r.rows_s[i, c]
                r.rows_dp[i, c] = weight * (r.rows_dp[i, c] - mean[i])

    @cute.jit
    def share(self, r, acc, slot):
        """P or dS, in the input dtype, where both warpgroups read it."""
        for i in cutlass.range_constexpr(self.keys_each // 16):
            words = [pack16(acc[2 * j], acc[2 * j + 1], self.dtype) for j in range(4 * i, 4 * i + 4)]
            store_matrices(r.targets[i] + slot * (self.tile_m * self.tile_n), words)
