"""How far from the diagonal keys count under ALiBi, so that tiles past that are neither loaded nor multiplied.

No score is larger than |q| |k| scale, and that of the nearest key is at the most as much below 0. So a key that is farther
than that one by twice the bound and NOTHING over the slope has a weight below 2^-NOTHING of a row's largest. Such weights count
as 0. A kernel before finds the largest norms of each head. Where something is not finite, values and dO included, no key is
left out.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.kernels.cute.basics import WARP, choose
from warploom.kernels.cute.bias import slope_of, slopes_of
from warploom.kernels.reach import PARTS

NOTHING = 64.0  # powers of two
ROUNDED = 1.01  # by so much a bound of rounded norms may be too small
FARTHEST = 1 << 29
MEASURERS = 4  # warps of a block
IN_FLIGHT = 4  # rows that a group of lanes has asked for


class Near:
    """The kernel before, and what a scheduler warp makes of its norms."""

    config: Any
    dtype: Any
    tile_m: int
    tile_n: int

    @cute.jit
    def launch_measure(self, q, k, v, dout, bias, stream):
        """Measure the heads of queries and keys (batch, seqlen, heads, head_dim); dO may be None."""
        heads = q.shape[2] + k.shape[2]
        self.measure(q, k, v, dout, bias[2]).launch(
            grid=[PARTS // MEASURERS, heads, q.shape[0]], block=[WARP * MEASURERS, 1, 1], stream=stream
        )

    @cute.kernel
    def measure(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor | None, norms: cute.Tensor):
        """A warp for each of a head's PARTS of rows: the largest square of a norm, NaN where a value is not finite."""
        x, head, batch = cute.arch.block_idx()
        part = x * MEASURERS + cute.arch.warp_idx()
        heads_q = q.shape[2]
        most = Int32(0)
        if head < heads_q:
            most = self.largest_square(q, dout, batch, head, part)
        else:
            most = self.largest_square(k, v, batch, head - heads_q, part)
        for step in (16, 8, 4, 2, 1):
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=step))
        if cute.arch.lane_idx() == 0:
            words = cute.recast_tensor(norms, Int32)
            words[(Int64(batch) * (heads_q + k.shape[2]) + head) * PARTS + part] = most

    @cute.jit
    def largest_square(self, t, values, batch, head, part):
        """Of a part's rows in ``t``, as the word of an fp32 that is not negative; NaN, whose word is larger than any, stays."""
        lanes = 8 if const_expr(max(self.config.head_dim, self.config.head_dim_v) <= 64) else 16  # of a row
        lane, last = cute.arch.lane_idx(), t.shape[1] - 1
        rows = cute.ceil_div(t.shape[1], PARTS)
        row, each = part * rows + lane // lanes, WARP // lanes
        there = Float32(1.0) if lane % lanes * 8 < t.shape[3] else Float32(0.0)
        most = Int32(0)
        for _ in cutlass.range(cute.ceil_div(rows, IN_FLIGHT * each), unroll=1):
            eights = []
            for i in cutlass.range_constexpr(IN_FLIGHT):
                at = cutlass.min(row + i * each, last)
                eights.append(self.eight(t, batch, at, head, lane % lanes))
                if const_expr(values is not None):
                    eights.append(self.eight(values, batch, at, head, lane % lanes))
            step = 1 if const_expr(values is None) else 2
            for i in cutlass.range_constexpr(0, IN_FLIGHT * step, step):
                total = self.squares(eights[i], there)
                if const_expr(values is not None):
                    total = total + self.squares(eights[i + 1], Float32(0.0))
                total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
                word = cute.make_rmem_tensor(1, Float32)
                word[0] = total
                most = cutlass.max(most, cute.recast_tensor(word, Int32)[0] & 0x7FFFFFFF)
            row += IN_FLIGHT * each
        return most

    @cute.jit
    def eight(self, t, batch, row, head, place):
        """A row's ``place``-th eight elements, or its first where there are none."""
        column = choose(place * 8 < t.shape[3], place * 8, 0)
        at = Int64(batch) * t.stride[0] + Int64(row) * t.stride[1] + Int64(head) * t.stride[2] + column
        values = cute.make_rmem_tensor(8, self.dtype)
        cute.autovec_copy(cute.make_tensor((t.iterator + at).align(16), cute.make_layout(8)), values)
        return values

    @cute.jit
    def squares(self, eight, factor):
        """The sum of eight elements' squares, times ``factor``."""
        total = Float32(0.0)
        for i in cutlass.range_constexpr(8):
            x = eight[i].to(Float32)
            total = total + x * x
        return total * factor

    @cute.jit
    def reach(self, bias, batch, head, group, multiplier):
        """How many keys farther than the nearest one a query's last key that counts may be; FARTHEST where all do."""
        values, _, norms = bias
        # The turn after a scheduler's last tile has a head below 0, whose slope lies before the first.
        keys, slope = Int32(FARTHEST), slope_of(slopes_of(bias), batch, cutlass.max(head, 0))
        if (slope > 0.0) & (slope < Float32.inf) & (head >= 0):
            heads = values.shape[1]
            base = Int64(batch) * (heads + heads // group)
            square = self.largest(norms, base + head) * self.largest(norms, base + heads + head // group)
            found = (2.0 * ROUNDED * cute.math.sqrt(square) * multiplier + NOTHING) / slope
            if found < float(FARTHEST - 1):
                keys = found.to(Int32) + 1
        return keys

    @cute.jit
    def near_keys(self, tiles, positions, keys, seqlen_k):
        """Of key tiles [first, end) those that count for queries at positions from the first to the last of ``positions``."""
        first, end = tiles
        least, most = positions
        first = cutlass.max(first, cutlass.max(cutlass.min(least, seqlen_k - 1) - keys, 0) // self.tile_n)
        if const_expr(not self.config.right):
            end = cutlass.min(end, (cutlass.max(most, 0) + keys) // self.tile_n + 1)
        return first, end

    @cute.jit
    def near_queries(self, tiles, block, keys, lengths):
        """Of query tiles [first, end), [whole_first, whole_end) those that keys [key, past) of a block count for."""
        first, whole_first, whole_end, end = tiles
        (key, past), (seqlen_k, shift) = block, lengths
        if past - 1 + keys < seqlen_k - 1:
            end = cutlass.max(cutlass.min(end, cute.ceil_div(cutlass.max(past + keys - shift, 0), self.tile_m)), first)
        if const_expr(not self.config.right):  # noqa: SIM102
            if key > keys:
                first = cutlass.min(cutlass.max(first, cutlass.max(key - keys - shift, 0) // self.tile_m), end)
        whole_first = cutlass.min(cutlass.max(whole_first, first), end)
        return first, whole_first, cutlass.max(cutlass.min(whole_end, end), whole_first), end

    @cute.jit
    def largest(self, norms, head):
        """The largest of a head's parts."""
        four = cute.make_rmem_tensor(4, Int32)
        at = (norms.iterator + head * PARTS + cute.arch.lane_idx() * (PARTS // WARP)).align(16)
        cute.autovec_copy(cute.recast_tensor(cute.make_tensor(at, cute.make_layout(4)), Int32), four)
        most = cutlass.max(cutlass.max(four[0], four[1]), cutlass.max(four[2], four[3]))
        for step in (16, 8, 4, 2, 1):
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=step))
        word = cute.make_rmem_tensor(1, Int32)
        word[0] = most
        return cute.recast_tensor(word, Float32)[0]
