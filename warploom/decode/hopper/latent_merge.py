"""The second kernel: it puts together the parts that a sequence's blocks left. Imports the CuTe DSL."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from warploom.decode.hopper.latent_config import HEAD_DIM_V, ROWS
from warploom.decode.hopper.latent_results import LatentResults, inverse_of, weights_of
from warploom.kernels.cute.instructions import pack16, weighted_sum
from warploom.kernels.cute.softmax import log_sum_exp

AHEAD_LOG = 3  # 2^this parts are loaded before the first is used
LEVELS = 4  # of as many of those as there can be
PART_FLOATS = 6  # four columns, the reference and the sum


class LatentMerge(LatentResults):
    """A block puts together a row, four columns a thread."""

    @cute.jit
    def merge(self, call, outputs):
        index, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        batch = index // call.rows
        row = index - batch * call.rows
        cut = self.cut(call, batch)
        count = Int32(1) << cutlass.min(cut.log, call.blocks_log)
        row_block = row // ROWS
        first = batch * call.row_blocks + row_block << call.blocks_log
        place = Int64(first) * ROWS + (row - row_block * ROWS)
        stack = cute.make_rmem_tensor((PART_FLOATS, LEVELS), Float32)
        stack.fill(0.0)
        result = cute.make_rmem_tensor(PART_FLOATS, Float32)
        result.fill(0.0)
        ahead = 1 << AHEAD_LOG
        for chunk in cutlass.range((count + ahead - 1) // ahead, unroll=1):
            parts = [cute.make_rmem_tensor(PART_FLOATS, Float32) for _ in range(ahead)]
            for i in cutlass.range_constexpr(ahead):
                part = parts[i]
                part.fill(0.0)
                part[4] = -Float32.inf
                if chunk * ahead + i < count:
                    at = place + Int64(chunk * ahead + i) * ROWS
                    four = cute.make_rmem_tensor(4, Float32)
                    source = outputs.parts.iterator + (at * HEAD_DIM_V + thread * 4)
                    cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(4)), four)
                    for c in cutlass.range_constexpr(4):
                        part[c] = four[c]
                    part[4], part[5] = outputs.stats[at * 2], outputs.stats[at * 2 + 1]
            for level in cutlass.range_constexpr(AHEAD_LOG):
                step = 1 << level
                for i in cutlass.range_constexpr(0, ahead, 2 * step):
                    add(parts[i], parts[i + step])
            for i in cutlass.range_constexpr(PART_FLOATS):
                result[i] = parts[0][i]
            going = Int32(1)
            for level in cutlass.range_constexpr(LEVELS):
                if going > 0:
                    if (chunk >> level) & 1 == 1:
                        before = cute.make_rmem_tensor(PART_FLOATS, Float32)
                        for i in cutlass.range_constexpr(PART_FLOATS):
                            before[i] = stack[i, level]
                        add(before, result)
                        for i in cutlass.range_constexpr(PART_FLOATS):
                            result[i] = before[i]
                    else:
                        for i in cutlass.range_constexpr(PART_FLOATS):
                            stack[i, level] = result[i]
                        going = Int32(0)
        inverse = inverse_of(result[5])
        four = cute.make_rmem_tensor(2, Int32)
        for i in cutlass.range_constexpr(2):
            four[i] = pack16(result[2 * i] * inverse, result[2 * i + 1] * inverse, self.dtype)
        target = outputs.out.iterator + cute.crd2idx((batch, row, thread * 4), outputs.out.layout)
        cute.autovec_copy(four, cute.recast_tensor(cute.make_tensor(target.align(8), cute.make_layout(4)), Int32))
        lse = outputs.lse
        if thread == 0:
            token = row // call.heads
            lse[batch, row - token * call.heads, token] = log_sum_exp(result[4], result[5])


@cute.jit
def add(part, after):
    """Put a part together with the one after it; one that is not there changes nothing."""
    first, second, top = weights_of(part[4], after[4])
    for i in cutlass.range_constexpr(4):
        part[i] = weighted_sum(first, part[i], second, after[i])
    part[5] = weighted_sum(first, part[5], second, after[5])
    part[4] = top
