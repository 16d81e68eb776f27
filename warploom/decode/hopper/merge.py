"""The kernel that puts the parts of a row together. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.decode.hopper.base import Base
from warploom.kernels.cute.basics import LOG2_E
from warploom.kernels.cute.instructions import exp2, pack16, reciprocal
from warploom.kernels.cute.softmax import finite, log_sum_exp, with_sink

ROWS = 4  # of a block, one a warp
AHEAD = 8  # parts that are asked for before the first is used
MOST = 1  # times 32: parts of a row


class Merge(Base):
    """What runs over rows of queries."""

    @cute.jit
    def launch_merge(self, out, lse, parts, lengths, sink, cut, stream):
        """A warp for every row of every sequence."""
        rows = lse.shape[0] * lse.shape[1] * lse.shape[2]
        self.merge(out, lse, parts, lengths, sink, *cut).launch(
            grid=[cute.ceil_div(rows, ROWS), 1, 1], block=[32 * ROWS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def merge(
        self,
        out: cute.Tensor,
        lse: cute.Tensor,
        parts: cute.Tensor,
        lengths: cute.Tensor,
        sink: cute.Tensor | None,
        left: Int32,
        right: Int32,
        capacity: Int32,
        least: Int32,
        groups: Int32,
    ):
        """Parts are added in order, each weighted by what its lse is from the largest; the sink joins here, once."""
        batches, heads_q, queries = lse.shape
        lane = cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * ROWS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rows = batches * heads_q * queries
        if row < rows:
            head = row // queries
            token = row - head * queries
            batch = head // heads_q
            head = head - batch * heads_q
            # Settled before the kernel before this one let it start.
            most = self.config.splits * groups
            _, _, _, _, splits = self.cut_up(lengths, batch, queries, left, right, capacity, least, most)
            used = cute.ceil_div(splits, self.config.splits)
            logit = -Float32.inf
            if const_expr(self.config.sink):
                logit = sink[head] * LOG2_E  # type: ignore[index]
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

            columns = self.dim // 32
            column = lane * columns
            inside = column < out.shape[3]
            lses = parts.iterator + (Int64(rows) * groups * out.shape[3] + Int64(row) * groups)
            values = parts.iterator + Int64(row) * groups * out.shape[3] + (column if inside else 0)
            own = cute.make_rmem_tensor(MOST, Float32)
            top = -Float32.inf
            for i in cutlass.range_constexpr(MOST):
                own[i] = -Float32.inf
                if lane + 32 * i < used:
                    own[i] = cute.make_tensor(lses + (lane + 32 * i), cute.make_layout(1))[0]
                top = cute.arch.fmax(top, own[i])
            top = cute.arch.warp_reduction_max(top)
            safe = finite(top)
            total = Float32(0.0)
            for i in cutlass.range_constexpr(MOST):
                own[i] = exp2(own[i] - safe)
                total = total + own[i]
            total = cute.arch.warp_reduction_sum(total)
            acc = cute.make_rmem_tensor(columns, Float32)
            acc.fill(0.0)
            for i in cutlass.range_constexpr(MOST):
                for u in cutlass.range(32 * i, cutlass.min(used, 32 * i + 32), AHEAD, unroll=1):
                    read = [cute.make_rmem_tensor(columns, Float32) for _ in range(AHEAD)]
                    for a in cutlass.range_constexpr(AHEAD):
                        at = values + Int64(cutlass.min(u + a, used - 1)) * out.shape[3]
                        cute.autovec_copy(cute.make_tensor(at.align(4 * min(columns, 4)), cute.make_layout(columns)), read[a])
                    for a in cutlass.range_constexpr(AHEAD):
                        weight = cute.arch.shuffle_sync(own[i], u + a - 32 * i)
                        for c in cutlass.range_constexpr(columns):
                            acc[c] = acc[c] + read[a][c] * weight
            shrink = Float32(1.0)
            if const_expr(self.config.sink):
                top, total, shrink = with_sink(top, total, logit)
            inverse = 0.0 if total == 0.0 else shrink * reciprocal(total)
            if lane == 0:
                lse[batch, head, token] = log_sum_exp(top, total)
            if inside:
                words = cute.make_rmem_tensor(columns // 2, Int32)
                for c in cutlass.range_constexpr(columns // 2):
                    words[c] = pack16(acc[2 * c] * inverse, acc[2 * c + 1] * inverse, self.dtype)
                target = out.iterator + cute.crd2idx((batch, token, head, column), out.layout)
                into = cute.make_tensor(target.align(2 * columns), cute.make_layout(columns))
                cute.autovec_copy(words, cute.recast_tensor(into, Int32))
