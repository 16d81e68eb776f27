"""What becomes of a warpgroup's part: put together with those of other splits, and stored.

A sequence's splits are the leaves of a binary tree, in their order. A block has a subtree of it, and `merge` puts the blocks'
together by the same instructions: it changes no bit how many blocks there are.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.decode.hopper.latent_base import EVEN, LatentBase
from warploom.decode.hopper.latent_config import HALF, HEAD_DIM_V, ROWS, STATE_FLOATS, THREADS
from warploom.kernels.cute.barriers import LatentBarrier, wait
from warploom.kernels.cute.epilogue import quad_words, store_words
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import exp2, reciprocal, weighted_sum
from warploom.kernels.cute.softmax import finite, log_sum_exp


class Outputs(Fields):
    """Where results go."""

    out: Any  # (batch, row, column)
    lse: Any  # (batch, head, query)
    parts: Any  # fp32: O of each block's rows
    stats: Any  # and their references and sums
    kept: Any  # fp32: what a block keeps of its splits
    levels: Any  # of a block


class LatentResults(LatentBase):
    """The end of a split, and of a sequence."""

    def clear(self, work: Any) -> None:
        """Nothing so far."""
        work.acc.fill(0.0)
        work.reference.fill(-Float32.inf)
        work.row_sum.fill(0.0)

    @cute.jit
    def add_sums(self, work, shared, turn):
        """Add up the sums of the two warpgroups, which have tiles in turn; both have the same references by now."""
        sums = shared.sums
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(work.row_sum[r], threads_in_group=4)
            if work.lane % 4 == 0:
                sums[work.row + 8 * r, work.role, turn] = total
        wait(LatentBarrier.SUMMED, THREADS)
        for r in cutlass.range_constexpr(2):
            work.row_sum[r] = sums[work.row + 8 * r, 0, turn] + sums[work.row + 8 * r, 1, turn]

    @cute.jit
    def fold(self, work, outputs, index, splits, there):
        """Put the ``index``-th of the block's splits together with those before it that make a subtree with it.

        What is left is kept, each thread's own numbers, unless it is the last, and so all.
        """
        level = Int32(0)
        while (there > 0) & ((index >> level) & 1 == 1):
            self.add_kept(work, self.place_of(work, outputs, level))
            level += 1
        if (there > 0) & (index + 1 < splits):
            self.keep(work, self.place_of(work, outputs, level))

    def place_of(self, work: Any, outputs: Any, level: Any) -> Any:
        """Where a thread's first four numbers of a level are."""
        state = Int64(cute.arch.block_idx()[0] * outputs.levels + level) * (STATE_FLOATS * THREADS)
        return outputs.kept.iterator + (state + cute.arch.thread_idx()[0] * 4)

    def four(self, at: Any, index: int) -> Any:
        """A thread's ``index``-th four numbers."""
        return cute.make_tensor((at + index * 4 * THREADS).align(16), cute.make_layout(4))

    @cute.jit
    def keep(self, work, at):
        four = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(HALF // 8):
            for c in cutlass.range_constexpr(4):
                four[c] = work.acc[4 * i + c]
            cute.autovec_copy(four, self.four(at, i))
        for r in cutlass.range_constexpr(2):
            four[r], four[2 + r] = work.reference[r], work.row_sum[r]
        cute.autovec_copy(four, self.four(at, HALF // 8))

    @cute.jit
    def add_kept(self, work, at):
        stats = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(self.four(at, HALF // 8), stats)
        before, own = [None, None], [None, None]
        for r in cutlass.range_constexpr(2):
            before[r], own[r], new = weights_of(stats[r], work.reference[r])
            work.row_sum[r] = weighted_sum(before[r], stats[2 + r], own[r], work.row_sum[r])
            work.reference[r] = new
        four = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(HALF // 8):
            if const_expr(i % 4 == 0):
                cute.arch.sync_warp()  # loads of more than this at once would leave no registers
            cute.autovec_copy(self.four(at, i), four)
            for c in cutlass.range_constexpr(4):
                work.acc[4 * i + c] = weighted_sum(before[c // 2], four[c], own[c // 2], work.acc[4 * i + c])

    @cute.jit
    def finish(self, work, call, outputs, place):
        """Store the result of a block that has a sequence alone, or else its part."""
        stats = outputs.stats
        for r in cutlass.range_constexpr(2):
            local = work.row + 8 * r
            row = place.row_block * ROWS + local
            if call.blocks_log == 0:
                self.store(work, call, outputs, place, r, row)
            else:
                unit = (place.batch * call.row_blocks + place.row_block << call.blocks_log) + place.block
                part = Int64(unit * ROWS + local) * HEAD_DIM_V + work.role * HALF
                for i in cutlass.range_constexpr(HALF // 8):
                    two = cute.make_rmem_tensor(2, Float32)
                    two[0], two[1] = work.acc[4 * i + 2 * r], work.acc[4 * i + 2 * r + 1]
                    into = outputs.parts.iterator + (part + 8 * i + work.lane % 4 * 2)
                    cute.autovec_copy(two, cute.make_tensor(into.align(8), cute.make_layout(2)))
                if (work.lane % 4 == 0) & (work.role == EVEN):
                    at = Int64(unit * ROWS + local) * 2
                    stats[at], stats[at + 1] = work.reference[r], work.row_sum[r]

    @cute.jit
    def store(self, work, call, outputs, place, r, row):
        """A row's half of out, 16 bytes a lane, and its lse."""
        total, lse = work.row_sum[r], outputs.lse
        inverse = inverse_of(total)
        start = outputs.out.iterator + cute.crd2idx((place.batch, row, work.role * HALF), outputs.out.layout)
        for j in cutlass.range_constexpr(HALF // 32):
            groups = [4 * j + n for n in range(4)]
            pairs = [[work.acc[4 * i + 2 * r], work.acc[4 * i + 2 * r + 1]] for i in groups]
            four = quad_words(pairs, inverse, self.dtype, work.lane)
            if row < call.rows:
                store_words(start, four, 32 * j + work.lane % 4 * 8)
        if (work.lane % 4 == 0) & (row < call.rows) & (work.role == EVEN):
            token = row // call.heads
            lse[place.batch, row - token * call.heads, token] = log_sum_exp(work.reference[r], total)


@cute.jit
def inverse_of(total):
    """What a row's O is multiplied by."""
    return 0.0 if total == 0.0 else reciprocal(total)


@cute.jit
def weights_of(first, second):
    """What two parts with these references are multiplied by when they are put together, and the larger one."""
    top = cute.arch.fmax(first, second)
    safe = finite(top)
    return exp2(first - safe), exp2(second - safe), top
