"""The warpgroup of keys that read: what dV gives to the keys that asked states and tokens before them. Imports the CuTe DSL."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from warploom.delta.hopper.config import CHUNK, COLUMNS, OF_K, READS
from warploom.delta.hopper.gradients_base import LONE, OF_READS, GradientBase, numbers_at
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.instructions import from_bfloat16, store_shared
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.tiles import transposed
from warploom.kernels.cute.wgmma import gemm, pack, words


class Read(GradientBase):
    """The part of dk that comes of reading, and for those who write dk's other part the weights between keys."""

    @cute.jit
    def read(self, shared, stage, phase, parity, turn, group, tiles, decays, mmas):
        """A chunk."""
        config = self.config
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = own % 32, cute.arch.make_warp_uniform(own // 32)
        mma_square, mma_state, mma_tokens, _ = mmas
        square, state, tokens = (m.get_slice(0) for m in (mma_square, mma_state, mma_tokens))
        left = mma_square.make_fragment_A(square.partition_A(shared.dv))
        right = mma_square.make_fragment_B(square.partition_B(shared.y))
        states = mma_state.make_fragment_B(state.partition_B(shared.state))
        keys = mma_tokens.make_fragment_B(tokens.partition_B(transposed(shared.k)))
        weights = mma_square.make_fragment_C(square.partition_shape_C((CHUNK, CHUNK)))
        operand, rest = (mma_state.make_fragment_A(state.partition_shape_A((CHUNK, COLUMNS))) for _ in range(2))
        acc = mma_state.make_fragment_C(state.partition_shape_C((CHUNK, config.width)))
        acc.fill(0.0)
        before = [Float32(0.0), Float32(0.0)]
        address, values = shared.k_start.toint(), shared.dv_start.toint()
        for _ in cutlass.range(group, unroll=1):
            cute.arch.mbarrier_wait(shared.numbers_full + parity % 2, parity // 2)
            numbers = numbers_at(shared, parity % 2)
            of_rows = [-x for x in self.factors(numbers, READS, warp, lane)]
            weights.fill(0.0)
            total = Float32(0.0)
            for _ in cutlass.range(tiles, unroll=1):
                cute.arch.mbarrier_wait(shared.full + stage, phase)
                gemm(mma_square, weights, left[None, None, None, stage], right[None, None, None, stage], True)
                self.scaled(values + stage * (2 * CHUNK * COLUMNS), words(operand), of_rows, warp, lane)
                gemm(mma_state, acc, operand, states[None, None, None, stage], True)
                if decays != 0:
                    total = total + self.through(shared, stage, 1)
                warpgroup.wait_group(0)
                release(shared.empty + stage)
                stage, phase = advance(stage, phase, config.stages)
            cute.arch.mbarrier_wait(shared.sums_empty, (parity % 2) ^ 1)
            self.put_diagonal(weights, shared.sums, warp, lane)
            of_rows = [-x for x in self.factors(numbers, OF_K, warp, lane)]
            self.weigh(weights, numbers, of_rows, 1, warp, lane)
            release(shared.numbers_empty + parity % 2)
            pack(weights, operand, self.dtype)
            self.less(weights, words(operand))
            pack(weights, rest, self.dtype)
            cute.arch.mbarrier_wait(shared.read_empty, (parity % 2) ^ 1)
            self.put_square(words(operand), shared.read_start, warp, lane)
            self.put_square(words(rest), shared.read_rest_start, warp, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            release(shared.read_full)
            cute.arch.mbarrier_wait(shared.qk_full, turn)
            gemm(mma_tokens, acc, operand, keys[None, None, None, 0], True)
            gemm(mma_tokens, acc, rest, keys[None, None, None, 0], True)
            warpgroup.wait_group(0)
            after = self.dots(acc, address, warp, lane)
            self.put_rows(shared.sums, OF_READS, [after[r] - before[r] for r in range(2)], warp, lane)
            self.put_through(shared.sums, total, warp, 1, lane)
            cute.arch.sync_warp()
            release(shared.sums_full)
            before[0], before[1] = after[0], after[1]
            parity = (parity + 1) % 4
        release(shared.qk_empty)
        cute.arch.mbarrier_wait(shared.keys_empty, turn ^ 1)
        to = shared.keys.toint() + own * 16
        for i in cutlass.range_constexpr(config.width // 8):
            store_shared(to, i * (16 * WARPGROUP), [acc[4 * i + j] for j in range(4)])
        cute.arch.sync_warp()
        release(shared.keys_full)
        return stage, phase, parity

    @cute.jit
    def less(self, acc, found):
        """An accumulator less its rounded values."""
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] - from_bfloat16(found[i // 2], i % 2)

    @cute.jit
    def put_diagonal(self, acc, sums, warp, lane):
        """dV · Y of each token."""
        row = lane // 4
        for tile in cutlass.range_constexpr(CHUNK // 16):
            if warp == tile:  # noqa: SIM102
                if lane % 4 == row // 2:
                    for r in cutlass.range_constexpr(2):
                        value = acc[8 * tile + 6 * r]
                        if row % 2 == 1:
                            value = acc[8 * tile + 6 * r + 1]
                        (sums + (LONE * CHUNK + 16 * tile + row + 8 * r))[0] = value
