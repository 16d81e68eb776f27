"""Sums of a decay's logs, by a kernel that the walk's module launches first. Imports the CuTe DSL."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, const_expr

from warploom.kernels.cute.basics import WARP
from warploom.kernels.cute.instructions import store_pair
from warploom.linear.hopper.walk_base import WalkBase
from warploom.linear.hopper.walk_consumers import held


class Sums(WalkBase):
    """A lane has a chunk of a head."""

    @cute.jit
    def sum_logs(self, logs: cute.Tensor, sums: cute.Tensor, stream: Any):
        """Sums of logs (batch, seqlen, heads) up to each token within its chunk, in log2, into (batch, heads, whole chunks)."""
        chunks = cute.ceil_div(logs.shape[1], self.config.chunk)
        blocks = cute.ceil_div(logs.shape[2], WARP)
        self.sums_kernel(logs, sums).launch(grid=[logs.shape[0] * chunks * blocks, 1, 1], block=[WARP, 1, 1], stream=stream)

    @cute.kernel
    def sums_kernel(self, logs: cute.Tensor, sums: cute.Tensor):
        if const_expr(self.config.early):
            cute.arch.griddepcontrol_launch_dependents()
        seqlen, heads = logs.shape[1], logs.shape[2]
        chunks, blocks = cute.ceil_div(seqlen, self.config.chunk), cute.ceil_div(heads, WARP)
        index = cute.arch.block_idx()[0]
        row = index // blocks
        head = (index - row * blocks) * WARP + cute.arch.lane_idx()
        batch = row // chunks
        first = (row - batch * chunks) * self.config.chunk
        if head < heads:
            # All loads under way at once, so none asks whether there is such a token.
            loaded = cute.make_rmem_tensor(self.config.chunk, Float32)
            for i in cutlass.range_constexpr(self.config.chunk):
                loaded[i] = logs[batch, cutlass.min(first + i, seqlen - 1), head]
            target = (sums.iterator + sums.layout((batch, head, first))).toint()
            total = Float64(0.0)
            for i in cutlass.range_constexpr(0, self.config.chunk, 2):
                pair = []
                for e in cutlass.range_constexpr(2):
                    total = total + held(where(first + i + e < seqlen, loaded[i + e])).to(Float64)
                    pair.append((total * math.log2(math.e)).to(Float32))
                store_pair(target + 4 * i, pair[0], pair[1])


@cute.jit
def where(condition, x):
    return x if condition else Float32(0.0)
