"""The warpgroup of queries: what out's gradient asks of tokens and of states. Imports the CuTe DSL."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from warploom.delta.hopper.config import CHUNK, COLUMNS, OF_Q, QUERIES
from warploom.delta.hopper.gradients_base import OF_QUERIES, GradientBase, numbers_at
from warploom.delta.hopper.walk_base import rows_of
from warploom.kernels.cute.barriers import DeltaBarrier, wait
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.tiles import tma_views, transposed
from warploom.kernels.cute.wgmma import gemm, pack, words


class Asked(GradientBase):
    """dq, and for those who write dk the weights between queries and keys."""

    @cute.jit
    def ask(self, shared, at, stage, phase, parity, turn, group, tiles, decays, normalize, eps, dq, tma_dq, mmas):
        """A chunk."""
        config = self.config
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = own % 32, cute.arch.make_warp_uniform(own // 32)
        mma_square, mma_state, mma_tokens, _ = mmas
        square, state, tokens = (m.get_slice(0) for m in (mma_square, mma_state, mma_tokens))
        left = mma_square.make_fragment_A(square.partition_A(shared.dout))
        right = mma_square.make_fragment_B(square.partition_B(shared.y))
        states = mma_state.make_fragment_B(state.partition_B(shared.state))
        keys = mma_tokens.make_fragment_B(tokens.partition_B(transposed(shared.k)))
        weights = mma_square.make_fragment_C(square.partition_shape_C((CHUNK, CHUNK)))
        operand = mma_state.make_fragment_A(state.partition_shape_A((CHUNK, COLUMNS)))
        acc = mma_state.make_fragment_C(state.partition_shape_C((CHUNK, config.width)))
        acc.fill(0.0)
        before = [Float32(0.0), Float32(0.0)]
        queries, douts = shared.q_start.toint(), shared.dout_start.toint()
        for _ in cutlass.range(group, unroll=1):
            cute.arch.mbarrier_wait(shared.numbers_full + parity % 2, parity // 2)
            numbers = numbers_at(shared, parity % 2)
            of_rows = self.factors(numbers, QUERIES, warp, lane)
            weights.fill(0.0)
            total = Float32(0.0)
            for _ in cutlass.range(tiles, unroll=1):
                cute.arch.mbarrier_wait(shared.full + stage, phase)
                gemm(mma_square, weights, left[None, None, None, stage], right[None, None, None, stage], True)
                self.scaled(douts + stage * (2 * CHUNK * COLUMNS), words(operand), of_rows, warp, lane)
                gemm(mma_state, acc, operand, states[None, None, None, stage], True)
                if decays != 0:
                    total = total + self.through(shared, stage, 0)
                warpgroup.wait_group(0)
                release(shared.empty + stage)
                stage, phase = advance(stage, phase, config.stages)
            of_rows = self.factors(numbers, OF_Q, warp, lane)
            self.weigh(weights, numbers, of_rows, 0, warp, lane)
            release(shared.numbers_empty + parity % 2)
            pack(weights, operand, self.dtype)
            cute.arch.mbarrier_wait(shared.asked_empty, (parity % 2) ^ 1)
            self.put_square(words(operand), shared.asked_start, warp, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            release(shared.asked_full)
            cute.arch.mbarrier_wait(shared.qk_full, turn)
            gemm(mma_tokens, acc, operand, keys[None, None, None, 0], True)
            warpgroup.wait_group(0)
            after = self.dots(acc, queries, warp, lane)
            cute.arch.mbarrier_wait(shared.sums_empty, (parity % 2) ^ 1)
            self.put_rows(shared.sums, OF_QUERIES, [after[r] - before[r] for r in range(2)], warp, lane)
            self.put_through(shared.sums, total, warp, 0, lane)
            cute.arch.sync_warp()
            release(shared.sums_full)
            before[0], before[1] = after[0], after[1]
            parity = (parity + 1) % 4
        factors = [Float32(0.0), Float32(0.0)]
        if normalize != 0:
            sums = self.squares(queries, warp, lane)
            for r in cutlass.range_constexpr(2):
                factors[r] = before[r] / (sums[r] + eps)
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        wait(DeltaBarrier.OUT_FREE, WARPGROUP)
        self.put_gradient(acc, queries, factors, shared.dq_start, warp, lane)
        release(shared.qk_empty)
        cute.arch.fence_view_async_shared()
        wait(DeltaBarrier.OUT_WRITTEN, WARPGROUP)
        if warp == 0:
            rows = rows_of(dq, at.head, at.batch, at.start, at.live)
            store = tma_views(tma_dq, shared.dq, cute.local_tile(rows, (CHUNK, COLUMNS), (None, None)))
            for box in cutlass.range_constexpr(self.boxes):
                cute.copy(store.atom, store.shared[None, box], store.tiles[(None, at.first // CHUNK, box)])
            cute.arch.cp_async_bulk_commit_group()
        return stage, phase, parity
