"""What becomes of a warpgroup's part: added to those of other splits, and stored.

Four splits are added up, one after the other, and four such totals again: 64 splits are a tree of three levels. A total is
relative to its first split's reference, so that others are added to it in global memory, which the block does not wait for;
the last of four takes it over. A block leaves parts that are whole subtrees, and `merge` goes on by the same arithmetic: it
changes no bit how many blocks there are.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.decode.hopper.latent_base import EVEN, ODD, RADIX_LOG, LatentBase
from warploom.decode.hopper.latent_config import HALF, HEAD_DIM_V, ROWS, STATS, THREADS, TOTAL_FLOATS
from warploom.decode.hopper.latent_memory import add_four, flushed_product, flushed_sum, load_four, store_four
from warploom.kernels.cute.barriers import LatentBarrier, wait
from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.epilogue import quad_words, store_words
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import exp2, hidden, reciprocal
from warploom.kernels.cute.softmax import finite, log_sum_exp

NOTHING, TO_KEEP, TO_SEND = 0, 1, 2  # what waits of a split: O is to begin a total, or to be added to it
# A part's O is multiplied by up to 2^this, on three levels by 2^60: that leaves room to fp32's end, and what is lost because
# its factor is no normal number is less than 2^-60 of the whole.
MOST_LOG2 = 20.0
FOUR_BYTES = THREADS * 16  # from four numbers of a total to the next ones of the same thread
AT_ONCE = 16  # fours of a total that a thread loads before it adds the first


class Outputs(Fields):
    """Where results go."""

    out: Any  # (batch, row, column)
    lse: Any  # (batch, head, query)
    parts: Any  # fp32: O of each block's rows
    stats: Any  # and their references and each warpgroup's sums
    kept: Any  # fp32: totals of a block's splits
    levels: Any  # of those


class LatentResults(LatentBase):
    """The end of a split, and of a sequence."""

    def clear(self, work: Any) -> None:
        """No O."""
        work.acc.fill(0.0)

    @cute.jit
    def add_quads(self, work):
        """Add up the sums of the four threads that share rows."""
        for r in cutlass.range_constexpr(2):
            work.row_sum[r] = cute.arch.warp_reduction_sum(work.row_sum[r], threads_in_group=4)

    @cute.jit
    def add_sums(self, work, shared, turn):
        """Add up the sums of the two warpgroups, which have tiles in turn; both have the same references by now."""
        sums = shared.sums
        for r in cutlass.range_constexpr(2):
            if work.lane % 4 == 0:
                sums[work.row + 8 * r, work.role, turn] = work.row_sum[r]
        wait(LatentBarrier.SUMMED, THREADS)
        for r in cutlass.range_constexpr(2):
            work.row_sum[r] = sums[work.row + 8 * r, EVEN, turn] + sums[work.row + 8 * r, ODD, turn]

    @cute.jit
    def end_split(self, work, outputs, shared, index, count):
        """Add the ``index``-th of ``count`` splits to the total of those before it; the last one leaves all in registers.

        Returns what waits until the next split's first scores are under way, as nobody needs it before: TO_KEEP or TO_SEND.
        """
        digit = index & (1 << RADIX_LOG) - 1
        waits = Int32(NOTHING)
        if (digit < (1 << RADIX_LOG) - 1) & (index + 1 < count):
            waits = self.put_off(work, shared, digit)
        if waits == NOTHING:
            self.fold(work, outputs, shared, index, count)
        return waits

    @cute.jit
    def put_off(self, work, shared, digit):
        """A split's sums into a total of the lowest level, for O to follow; not where the total's reference is to change."""
        waits = Int32(TO_KEEP)
        if digit > 0:
            grown, waits = Int32(0), Int32(NOTHING)
            for r in cutlass.range_constexpr(2):
                reference = shared.totals[work.row + 8 * r, work.role, 0, 0]
                new, _, _ = joined(reference, work.reference[r])
                grown |= choose(new != reference, 1, 0)
            if not cute.arch.vote_any_sync(grown > 0):
                self.join_rows(work, shared, Int32(0), work.correction)
                waits = Int32(TO_SEND)
        if waits > 0:
            self.keep_rows(work, shared, Int32(0))
        return waits

    @cute.jit
    def begin_split(self, work, outputs, waits):
        """Put away what waits, and begin anew; O is overwritten by the split's first product."""
        at = self.place_of(work, outputs, Int32(0))
        if waits == TO_KEEP:
            self.keep(work, at)
        if waits == TO_SEND:
            self.send(work, at, work.correction)
        work.reference.fill(-Float32.inf)
        work.row_sum.fill(0.0)

    @cute.jit
    def fold(self, work, outputs, shared, index, count):
        """Add the ``index``-th of ``count`` splits to the total of those before it; the last one leaves all in registers."""
        level, going = Int32(0), choose(count > 1, 1, 0)
        while going > 0:
            digit = (index >> RADIX_LOG * level) & (1 << RADIX_LOG) - 1
            last = choose((digit == (1 << RADIX_LOG) - 1) | (index + 1 == count), 1, 0)
            self.join(work, outputs, shared, level, digit, last)
            level += 1
            going = choose((last > 0) & ((Int32(1) << RADIX_LOG * level) < count), 1, 0)

    @cute.jit
    def join(self, work, outputs, shared, level, digit, last):
        """Add what is in registers to a level's total: the first one becomes it, the last one takes it over."""
        at = self.place_of(work, outputs, level)
        stays = Int32(1)
        if digit > 0:
            stays = self.add_to(work, shared, at, level, last)
        if stays > 0:
            self.keep(work, at)
        if last == 0:
            self.keep_rows(work, shared, level)

    @cute.jit
    def add_to(self, work, shared, at, level, last):
        """Add what is in registers to a total; whether the sum is in registers and is to become the total."""
        own = cute.make_rmem_tensor(2, Float32)
        before, grown = self.join_rows(work, shared, level, own)
        self.scale(work, own)
        stays = Int32(0)
        if (last > 0) | cute.arch.vote_any_sync(grown > 0):
            self.take_over(work, at, before)
            stays = 1 - last
        else:
            self.send(work, at, None)
        return stays

    @cute.jit
    def join_rows(self, work, shared, level, own):
        """Add a total's sums to those in registers; what its O is multiplied by, and whether its reference changes.

        ``own`` becomes what O in registers is multiplied by.
        """
        totals, role = shared.totals, work.role
        before = cute.make_rmem_tensor(2, Float32)
        grown = Int32(0)
        for r in cutlass.range_constexpr(2):
            row = work.row + 8 * r
            reference, row_sum = totals[row, role, level, 0], totals[row, role, level, 1]
            new, before[r], own[r] = joined(reference, work.reference[r])
            grown |= choose(new != reference, 1, 0)
            work.reference[r] = new
            work.row_sum[r] = joined_sum(before[r], row_sum, own[r], work.row_sum[r])
        return before, grown

    def scale(self, work: Any, own: Any) -> None:
        """Multiply O by its rows' factors."""
        for i in range(HALF // 2):
            work.acc[i] = flushed_product(own[i // 2 % 2], work.acc[i])

    @cute.jit
    def keep_rows(self, work, shared, level):
        """A total's references and sums."""
        totals, role = shared.totals, work.role
        cute.arch.sync_warp()  # all four threads of a row have read what was there
        if work.lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                row = work.row + 8 * r
                totals[row, role, level, 0], totals[row, role, level, 1] = work.reference[r], work.row_sum[r]
        cute.arch.sync_warp()

    def place_of(self, work: Any, outputs: Any, level: Any) -> Any:
        """Where a thread's first four numbers of a level's total are."""
        total = Int64(cute.arch.block_idx()[0] * outputs.levels + level) * (TOTAL_FLOATS * THREADS)
        return outputs.kept.iterator + (total + cute.arch.thread_idx()[0] * 4)

    @cute.jit
    def keep(self, work, at):
        """Begin a total."""
        for i in cutlass.range_constexpr(HALF // 8):
            store_four(at, i * FOUR_BYTES, [work.acc[4 * i + c] for c in range(4)])

    @cute.jit
    def send(self, work, at, factors):
        """Add to a total where it is. A thread's own additions take effect in their order, as nobody else's go there."""
        for i in cutlass.range_constexpr(HALF // 8):
            four = [work.acc[4 * i + c] for c in range(4)]
            if const_expr(factors is not None):
                four = [flushed_product(factors[c // 2], four[c]) for c in range(4)]
            add_four(at, i * FOUR_BYTES, four)

    @cute.jit
    def take_over(self, work, at, factors):
        """Add a total, times its rows' factors, to what is in registers."""
        for start in cutlass.range_constexpr(0, HALF // 8, AT_ONCE):
            fours = [load_four(at, (start + i) * FOUR_BYTES) for i in range(AT_ONCE)]
            for i in cutlass.range_constexpr(AT_ONCE):
                for c in cutlass.range_constexpr(4):
                    n = 4 * (start + i) + c
                    work.acc[n] = flushed_sum(flushed_product(factors[c // 2], fours[i][c]), work.acc[n])

    @cute.jit
    def finish(self, work, call, outputs, place, index):
        """Store the result of a block that has a sequence alone, or else its ``index``-th part."""
        stats = outputs.stats
        for r in cutlass.range_constexpr(2):
            local = work.row + 8 * r
            row = place.row_block * ROWS + local
            if call.blocks_log == 0:
                self.store(work, call, outputs, place, r, row)
            else:
                unit = (place.batch * call.row_blocks + place.row_block << call.parts_log) + index
                part = Int64(unit * ROWS + local) * HEAD_DIM_V + work.role * HALF
                for i in cutlass.range_constexpr(HALF // 8):
                    two = cute.make_rmem_tensor(2, Float32)
                    two[0], two[1] = work.acc[4 * i + 2 * r], work.acc[4 * i + 2 * r + 1]
                    into = outputs.parts.iterator + (part + 8 * i + work.lane % 4 * 2)
                    cute.autovec_copy(two, cute.make_tensor(into.align(8), cute.make_layout(2)))
                if work.lane % 4 == 0:
                    at = Int64(unit * ROWS + local) * STATS
                    stats[at + 1 + work.role] = work.row_sum[r]
                    if work.role == EVEN:
                        stats[at] = work.reference[r]

    @cute.jit
    def store(self, work, call, outputs, place, r, row):
        """A row's half of out, 16 bytes a lane, and its lse."""
        total, lse = work.row_sum[r], outputs.lse
        inverse = inverse_of(total)
        # Computed here, or addresses would take registers all along.
        start = outputs.out.iterator + cute.crd2idx((hidden(place.batch), row, work.role * HALF), outputs.out.layout)
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
def joined(before, after):
    """The reference of a total that a part is added to, and what both are multiplied by.

    It stays the total's, for which additions need nothing but the part, unless the part's is larger by MOST_LOG2.
    """
    new = after if after > before + MOST_LOG2 else before
    safe = finite(new)
    return new, exp2(before - safe), exp2(after - safe)


def joined_sum(first: Any, before: Any, second: Any, after: Any) -> Any:
    """A number of a total and one of a part together: bit for bit what memory makes of it where ``first`` is 1."""
    return flushed_sum(flushed_product(first, before), flushed_product(second, after))
