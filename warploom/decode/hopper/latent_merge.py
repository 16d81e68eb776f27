"""The second kernel: it puts together the parts that a sequence's blocks left. Imports the CuTe DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.decode.hopper.latent_config import HEAD_DIM_V, ROWS
from warploom.decode.hopper.latent_results import LatentResults, inverse_of, weights_of
from warploom.kernels.cute.instructions import pack16, weighted_sum
from warploom.kernels.cute.softmax import log_sum_exp

COLUMNS = 4  # of a thread
COLUMN_THREADS = HEAD_DIM_V // COLUMNS
GROUPS = 4  # of threads, where the parts of a row are more than one has registers for
AHEAD_LOG = 3  # 2^this parts are loaded before the first is used
LEVELS = 2  # of as many of those as a group may have: 2^2
PART = COLUMNS + 2  # floats: columns, the reference and the sum


class LatentMerge(LatentResults):
    """A block puts together a row."""

    @cute.jit
    def merge(self, call, outputs, groups):
        """``groups``: of threads, each with as many of a row's parts."""
        index, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        group, column = thread // COLUMN_THREADS, thread % COLUMN_THREADS * COLUMNS
        batch = index // call.rows
        row = index - batch * call.rows
        cut = self.cut(call, batch)
        # Lengths are older than the kernel before, which writes the parts.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        count = Int32(1) << cutlass.min(cut.log, call.blocks_log)
        each = cutlass.max(count // groups, 1)
        row_block = row // ROWS
        first = batch * call.row_blocks + row_block << call.blocks_log
        place = Int64(first) * ROWS + (row - row_block * ROWS)
        own = self.subtree(outputs, place, group * each, cutlass.min(group * each + each, count), column)
        if const_expr(groups == 1):
            self.store_columns(call, outputs, own, batch, row, column)
        else:
            parts = self.exchange(own, group, column, groups)
            if group == 0:
                self.store_columns(call, outputs, add_all(parts), batch, row, column)

    @cute.jit
    def exchange(self, own, group, column, groups):
        """Of some columns the parts of all groups."""

        @cute.struct
        class Storage:
            columns: cute.struct.Align[cute.struct.MemRange[Float32, groups * HEAD_DIM_V], 16]
            stats: cute.struct.MemRange[Float32, groups * 2]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        stats = storage.stats.get_tensor(cute.make_layout((2, groups)))
        self.copy_columns(own, storage.columns.data_ptr() + (group * HEAD_DIM_V + column))
        if column == 0:
            stats[0, group], stats[1, group] = own[COLUMNS], own[COLUMNS + 1]
        cute.arch.sync_threads()
        parts = [cute.make_rmem_tensor(PART, Float32) for _ in range(groups)]
        for g in cutlass.range_constexpr(groups):
            four = cute.make_rmem_tensor(COLUMNS, Float32)
            source = storage.columns.data_ptr() + (g * HEAD_DIM_V + column)
            cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(COLUMNS)), four)
            for c in cutlass.range_constexpr(COLUMNS):
                parts[g][c] = four[c]
            parts[g][COLUMNS], parts[g][COLUMNS + 1] = stats[0, g], stats[1, g]
        return parts

    @cute.jit
    def subtree(self, outputs, place, begin, end, column):
        """Parts from ``begin`` to ``end`` of a row put together; where there are none, nothing."""
        result = cute.make_rmem_tensor(PART, Float32)
        stack = cute.make_rmem_tensor((PART, LEVELS), Float32)
        stack.fill(0.0)
        clear(result)
        ahead = 1 << AHEAD_LOG
        for chunk in cutlass.range((end - begin + ahead - 1) // ahead, unroll=1):
            parts = [cute.make_rmem_tensor(PART, Float32) for _ in range(ahead)]
            for i in cutlass.range_constexpr(ahead):
                clear(parts[i])
                if begin + chunk * ahead + i < end:
                    self.load_part(outputs, parts[i], place + Int64(begin + chunk * ahead + i) * ROWS, column)
            together = add_all(parts)
            for i in cutlass.range_constexpr(PART):
                result[i] = together[i]
            going = Int32(1)
            for level in cutlass.range_constexpr(LEVELS):
                if going > 0:
                    if (chunk >> level) & 1 == 1:
                        before = cute.make_rmem_tensor(PART, Float32)
                        for i in cutlass.range_constexpr(PART):
                            before[i] = stack[i, level]
                        add(before, result)
                        for i in cutlass.range_constexpr(PART):
                            result[i] = before[i]
                    else:
                        for i in cutlass.range_constexpr(PART):
                            stack[i, level] = result[i]
                        going = Int32(0)
        return result

    @cute.jit
    def load_part(self, outputs, part, at, column):
        """Some columns of a part's row."""
        four = cute.make_rmem_tensor(COLUMNS, Float32)
        source = outputs.parts.iterator + (at * HEAD_DIM_V + column)
        cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(COLUMNS)), four)
        for c in cutlass.range_constexpr(COLUMNS):
            part[c] = four[c]
        part[COLUMNS], part[COLUMNS + 1] = outputs.stats[at * 2], outputs.stats[at * 2 + 1]

    def copy_columns(self, part: Any, target: Any) -> None:
        """Into shared memory."""
        four = cute.make_rmem_tensor(COLUMNS, Float32)
        for c in range(COLUMNS):
            four[c] = part[c]
        cute.autovec_copy(four, cute.make_tensor(target.align(16), cute.make_layout(COLUMNS)))

    @cute.jit
    def store_columns(self, call, outputs, part, batch, row, column):
        """Some columns of a row of out, and from one thread its lse."""
        inverse, lse = inverse_of(part[COLUMNS + 1]), outputs.lse
        packed = cute.make_rmem_tensor(COLUMNS // 2, Int32)
        for i in cutlass.range_constexpr(COLUMNS // 2):
            packed[i] = pack16(part[2 * i] * inverse, part[2 * i + 1] * inverse, self.dtype)
        target = outputs.out.iterator + cute.crd2idx((batch, row, column), outputs.out.layout)
        into = cute.make_tensor(target.align(2 * COLUMNS), cute.make_layout(COLUMNS))
        cute.autovec_copy(packed, cute.recast_tensor(into, Int32))
        if column == 0:
            token = row // call.heads
            lse[batch, row - token * call.heads, token] = log_sum_exp(part[COLUMNS], part[COLUMNS + 1])


def clear(part: Any) -> None:
    """Nothing: what is put together with it stays as it is."""
    part.fill(0.0)
    part[COLUMNS] = -Float32.inf


@cute.jit
def add(part, after):
    """Put a part together with the one after it."""
    first, second, top = weights_of(part[COLUMNS], after[COLUMNS])
    for i in cutlass.range_constexpr(COLUMNS):
        part[i] = weighted_sum(first, part[i], second, after[i])
    part[COLUMNS + 1] = weighted_sum(first, part[COLUMNS + 1], second, after[COLUMNS + 1])
    part[COLUMNS] = top


def add_all(parts: list[Any]) -> Any:
    """Put all together into the first, as a tree."""
    step = 1
    while step < len(parts):
        for i in range(0, len(parts), 2 * step):
            add(parts[i], parts[i + step])
        step *= 2
    return parts[0]
