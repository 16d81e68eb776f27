"""The second kernel: it puts together the parts that a sequence's blocks left. Imports the CuTe DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.decode.hopper.latent_base import RADIX_LOG
from warploom.decode.hopper.latent_config import HEAD_DIM_V, STATS
from warploom.decode.hopper.latent_results import LatentResults, inverse_of, joined, joined_sum
from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.instructions import pack16
from warploom.kernels.cute.softmax import log_sum_exp

COLUMNS = 4  # of a thread
COLUMN_THREADS = HEAD_DIM_V // COLUMNS
FEW_SHARES = 4  # blocks that put together a row where rows are few and parts many
GROUPS = 1 << RADIX_LOG  # of threads, where the parts of a row are more than one group adds up
FEW_GROUPS = GROUPS << RADIX_LOG  # of a quarter as many threads: each loads its parts at once
GROUP_LOG = 2 * RADIX_LOG  # a group has up to 2^this parts: of up to 16 parts 4, or else 16
AHEAD = 2 << RADIX_LOG  # parts that are loaded before the first is used
REFERENCE, SUMS = COLUMNS, (COLUMNS + 1, COLUMNS + 2)
PART = COLUMNS + 3  # floats: columns, the reference and each warpgroup's sum


class LatentMerge(LatentResults):
    """A block puts together a row, or some columns of it."""

    def shares(self, groups: int) -> int:
        """Blocks of a row."""
        return FEW_SHARES if self.config.few and groups > 1 else 1

    def groups(self) -> int:
        """Of threads, where the parts of a row are more than one group adds up."""
        return FEW_GROUPS if self.config.few else GROUPS

    @cute.jit
    def merge(self, call, outputs, groups):
        """``groups``: of threads, of which each has a subtree of a row's parts."""
        shares = self.shares(groups)
        threads = COLUMN_THREADS // shares
        batch, thread, row = cute.arch.block_idx()[0] // shares, cute.arch.thread_idx()[0], cute.arch.block_idx()[1]
        group = thread // threads
        column = (cute.arch.block_idx()[0] % shares * threads + thread % threads) * COLUMNS
        cut = self.cut(call, batch)
        # Lengths are older than the kernel before, which writes the parts.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        count = Int32(1) << cut.log - cut.part_log
        row_block = row // self.rows
        first = batch * call.row_blocks + row_block << call.parts_log
        each_log = Int32(RADIX_LOG)
        if const_expr(groups <= GROUPS):
            each_log = choose(count > GROUPS << RADIX_LOG, GROUP_LOG, RADIX_LOG)
        begin = group << each_log
        place = Int64(first + begin) * self.rows + (row - row_block * self.rows)
        own = self.subtree(outputs, place, cutlass.min(count - begin, Int32(1) << each_log), column, groups)
        if const_expr(groups == 1):
            self.store_columns(call, outputs, own, batch, row, column)
        else:
            columns, stats = self.leave(own, group, column, groups, thread % threads == 0)
            if group == 0:
                parts = self.left(columns, stats, column, groups)
                for first in cutlass.range_constexpr(0, groups, GROUPS):
                    for g in cutlass.range_constexpr(first + 1, first + GROUPS):
                        if Int32(g) << each_log < count:
                            add(parts[first], parts[g])
                    if const_expr(first > 0):  # noqa: SIM102 (const_expr)
                        if Int32(first) << each_log < count:
                            add(parts[0], parts[first])
                self.store_columns(call, outputs, parts[0], batch, row, column)

    @cute.jit
    def leave(self, own, group, column, groups, first):
        """A group's part of some columns into shared memory; ``first``: a thread of each group."""

        @cute.struct
        class Storage:
            columns: cute.struct.Align[cute.struct.MemRange[Float32, groups * HEAD_DIM_V], 16]
            stats: cute.struct.MemRange[Float32, groups * 3]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        columns, stats = storage.columns.data_ptr(), storage.stats.get_tensor(cute.make_layout((3, groups)))
        self.copy_columns(own, columns + (group * HEAD_DIM_V + column))
        if first:
            for i in cutlass.range_constexpr(3):
                stats[i, group] = own[COLUMNS + i]
        cute.arch.sync_threads()
        return columns, stats

    @cute.jit
    def left(self, columns, stats, column, groups):
        """Of some columns the parts of all groups."""
        parts = [cute.make_rmem_tensor(PART, Float32) for _ in range(groups)]
        for g in cutlass.range_constexpr(groups):
            four = cute.make_rmem_tensor(COLUMNS, Float32)
            source = columns + (g * HEAD_DIM_V + column)
            cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(COLUMNS)), four)
            for c in cutlass.range_constexpr(COLUMNS):
                parts[g][c] = four[c]
            for i in cutlass.range_constexpr(3):
                parts[g][COLUMNS + i] = stats[i, g]
        return parts

    @cute.jit
    def subtree(self, outputs, place, count, column, groups):
        """The first ``count`` parts added up; where there are none, anything."""
        result = cute.make_rmem_tensor(PART, Float32)
        result.fill(0.0)
        four = 1 << RADIX_LOG
        most, ahead = (four, four) if const_expr(groups > GROUPS) else (1 << GROUP_LOG, AHEAD)
        for chunk in cutlass.range_constexpr(0, most, ahead):
            if chunk < count:
                parts = [cute.make_rmem_tensor(PART, Float32) for _ in range(ahead)]
                for i in cutlass.range_constexpr(ahead):
                    parts[i].fill(0.0)
                    if chunk + i < count:
                        self.load_part(outputs, parts[i], place + Int64(chunk + i) * self.rows, column)
                for i in cutlass.range_constexpr(0, ahead, four):
                    for j in cutlass.range_constexpr(1, four):
                        if chunk + i + j < count:
                            add(parts[i], parts[i + j])
                    if const_expr(chunk + i == 0):
                        for c in cutlass.range_constexpr(PART):
                            result[c] = parts[0][c]
                    elif chunk + i < count:
                        add(result, parts[i])
        return result

    @cute.jit
    def load_part(self, outputs, part, at, column):
        """Some columns of a part's row."""
        four = cute.make_rmem_tensor(COLUMNS, Float32)
        source = outputs.parts.iterator + (at * HEAD_DIM_V + column)
        cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(COLUMNS)), four)
        for c in cutlass.range_constexpr(COLUMNS):
            part[c] = four[c]
        stats = outputs.stats
        for i in cutlass.range_constexpr(3):
            part[COLUMNS + i] = stats[at * STATS + i]

    def copy_columns(self, part: Any, target: Any) -> None:
        """Into shared memory."""
        four = cute.make_rmem_tensor(COLUMNS, Float32)
        for c in range(COLUMNS):
            four[c] = part[c]
        cute.autovec_copy(four, cute.make_tensor(target.align(16), cute.make_layout(COLUMNS)))

    @cute.jit
    def store_columns(self, call, outputs, part, batch, row, column):
        """Some columns of a row of out, and from one thread its lse."""
        total, lse = part[SUMS[0]] + part[SUMS[1]], outputs.lse
        inverse = inverse_of(total)
        packed = cute.make_rmem_tensor(COLUMNS // 2, Int32)
        for i in cutlass.range_constexpr(COLUMNS // 2):
            packed[i] = pack16(part[2 * i] * inverse, part[2 * i + 1] * inverse, self.dtype)
        target = outputs.out.iterator + cute.crd2idx((batch, row, column), outputs.out.layout)
        into = cute.make_tensor(target.align(2 * COLUMNS), cute.make_layout(COLUMNS))
        cute.autovec_copy(packed, cute.recast_tensor(into, Int32))
        if column == 0:
            token = row // call.heads
            lse[batch, row - token * call.heads, token] = log_sum_exp(part[REFERENCE], total)


@cute.jit
def add(total, part):
    """Add a part to the total of those before it, as a block adds its splits."""
    new, before, own = joined(total[REFERENCE], part[REFERENCE])
    for i in cutlass.range_constexpr(PART):
        if const_expr(i != REFERENCE):
            total[i] = joined_sum(before, total[i], own, part[i])
    total[REFERENCE] = new
