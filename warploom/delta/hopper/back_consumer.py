"""The warpgroups of the walk back, each with COLUMNS columns of the state's gradient.

As in `walk_consumer` every left factor is in registers, and the state's gradient transposed.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.delta.hopper.back_base import TILE, BackBase, entry
from warploom.delta.hopper.config import BETA, CHUNK, COLUMNS, NUMBERS, QUERIES, READS, WHOLE, WRITES
from warploom.delta.hopper.walk_base import rows_of
from warploom.kernels.cute.barriers import DeltaBarrier, wait
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.instructions import load_shared
from warploom.kernels.cute.memory import bulk_store
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.tiles import tma_views, transposed
from warploom.kernels.cute.wgmma import gemm, pack, words


class BackConsumer(BackBase):
    """What each of the warpgroups runs."""

    @cute.jit
    def play(
        self, given, shared, group, dv, last, first, carry, dstates, current, per_sequence, tma_dv, mma, mma_turned, mma_update
    ):
        """dv of each chunk, the state's gradient after it, and at the end that of the state before them all."""
        config = self.config
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = own % 32, own // 32
        part, update, turned = mma.get_slice(0), mma_update.get_slice(0), mma_turned.get_slice(0)
        keys = mma.make_fragment_B(part.partition_B(shared.k))
        matrices = mma_turned.make_fragment_B(turned.partition_B(transposed(shared.matrices)))
        keys_turned, queries_turned = (
            mma_update.make_fragment_B(update.partition_B(transposed(t))) for t in (shared.k, shared.q)
        )
        s = mma_update.make_fragment_C(update.partition_shape_C((COLUMNS, config.width)))
        s_operand = mma.make_fragment_A(part.partition_shape_A((COLUMNS, config.width)))
        y, weighted = (mma.make_fragment_C(part.partition_shape_C((COLUMNS, CHUNK))) for _ in range(2))
        operand, asked, given_out = (mma.make_fragment_A(part.partition_shape_A((COLUMNS, CHUNK))) for _ in range(3))
        column = (given.block + group) * COLUMNS + warp * 16 + lane // 4
        matrix = lane // 8
        # Where this lane's row of the first four 8 x 8 tiles of this warp lies: tokens, or key dims, down, columns across.
        tiles = (matrix // 2 * 8 + lane % 8) * 64 + ((warp * 2 + matrix % 2) ^ lane % 8) * 8
        kept = shared.kept + group * (config.width * COLUMNS)
        target = shared.dv_start + (group * TILE + tiles)
        douts = (shared.dout_start + (group * TILE + tiles)).toint()
        rows = rows_of(dv, given.head, given.batch, given.start, given.live)
        store_dv = tma_views(tma_dv, shared.dv, cute.local_tile(rows, (CHUNK, COLUMNS), (None, None)))
        s.fill(0.0)
        if given.high == given.count:
            if last.shape[0] > given.sequence:
                self.get_state(s, last, given.sequence, given.head, column, lane)
        elif given.low < given.high:
            taken = given.carrier
            if per_sequence == 0:
                taken = current % 2
            self.take_held(s, carry, given, taken, group)
        stage, phase = Int32(0), Int32(0)
        for i in cutlass.range(given.high - given.low, unroll=1):
            n = given.high - 1 - i
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            numbers = (shared.numbers + stage * NUMBERS).toint() + lane % 4 * 8
            pack(s, s_operand, self.dtype)
            gemm(mma, y, s_operand, keys[None, None, None, stage], False)
            self.take_tile(douts + stage * (2 * config.warpgroups * TILE), words(given_out))
            gemm(mma_turned, weighted, given_out, matrices[None, None, None, 2 * stage + 1], False)
            self.scaled_words(words(given_out), words(asked), self.line(numbers, QUERIES))
            whole = load_shared(numbers, WHOLE * CHUNK * 4, 1)[0]
            # Two warpgroups have too few registers to hold both while they wait.
            if const_expr(config.warpgroups == 1):
                until, betas = self.line(numbers, WRITES), self.line(numbers, BETA)
            for j in cutlass.range_constexpr(cute.size(s)):
                s[j] = s[j] * whole
            warpgroup.wait_group(0)
            gemm(mma_update, s, asked, queries_turned[None, None, None, stage], True)
            if const_expr(config.warpgroups == 2):
                until, betas = self.line(numbers, WRITES), self.line(numbers, BETA)
            self.join(y, weighted, until, betas)
            pack(y, operand, self.dtype)
            self.rounded(y, words(operand))
            gemm(mma_turned, y, operand, matrices[None, None, None, 2 * stage], True)
            reads = [-x for x in self.line(numbers, READS)]
            warpgroup.wait_group(0)
            pack(y, given_out, self.dtype)
            self.scaled(y, reads)
            pack(y, operand, self.dtype)
            gemm(mma_update, s, operand, keys_turned[None, None, None, stage], True)
            self.clear_way(group, warp)
            self.put_tile(words(s_operand), kept + tiles)
            self.send(given, group, kept, target, words(given_out), dstates, store_dv, n, warp)
            warpgroup.wait_group(0)
            release(shared.empty + stage)
            stage, phase = advance(stage, phase, config.stages)
        if given.low < given.high or given.count == 0:
            if given.low == 0:
                if first.shape[0] > given.sequence:
                    self.put_state(s, first, given.sequence, given.head, column, lane)
            else:
                left = given.carrier
                if per_sequence == 0:
                    left = (current + 1) % 2
                self.hold(s, carry, given, left, group)
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def join(self, y, weighted, until, betas):
        """The gradient of Y, as without the inverse: beta times what the state and out give to what is written."""
        for i in cutlass.range_constexpr(cute.size(y)):
            column = i // 4 * 2 + i % 2
            y[i] = betas[column] * (y[i] * until[column] + weighted[i])

    @cute.jit
    def send(self, given, group, kept, target, of_dv, dstates, store_dv, n, warp):
        """dv by way of shared memory, and with it the gradient of the state after the chunk, which is there."""
        config = self.config
        self.put_tile(of_dv, target)
        cute.arch.fence_view_async_shared()
        wait(DeltaBarrier.OUT_WRITTEN, WARPGROUP, group)
        if warp == 0:
            cute.copy(store_dv.atom, store_dv.shared[None, group], store_dv.tiles[(None, n, given.block + group)])
            with cute.arch.elect_one():
                at = dstates.iterator + entry(given, n, group) * (config.width * COLUMNS)
                bulk_store(at, kept, 2 * config.width * COLUMNS)
            cute.arch.cp_async_bulk_commit_group()
