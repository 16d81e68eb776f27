"""The kernel after the forward's: puts together what blocks have left of the tiles whose keys were dealt out.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.forward_base import ForwardBase
from warploom.kernels.cute.basics import LOG2_E, choose
from warploom.kernels.cute.instructions import exp2, pack16
from warploom.kernels.cute.softmax import finite, log_sum_exp

# Rows of split tiles that a block of the merging kernel puts together, one a warp.
MERGED_ROWS = 8


class Merge(ForwardBase):
    """What runs over rows of split tiles rather than over tiles."""

    @cute.jit
    def launch_merge(self, parts, out, lse, sink, seqlen_k, heads_kv, heads, split, blocks, stream):
        """Put the pieces of split tiles together, if there are any."""
        if split > 0:
            n_blocks = cute.ceil_div(seqlen_k, self.tile_n)
            self.merge(parts, out, lse, sink, lse.shape[1] // heads_kv, heads, n_blocks, split, blocks).launch(
                grid=[split * (self.tile_m // MERGED_ROWS), 1, 1], block=[32 * MERGED_ROWS, 1, 1], stream=stream
            )

    @cute.kernel
    def merge(
        self,
        parts: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        members: Int32,
        heads: Int32,
        n_blocks: Int32,
        split: Int32,
        blocks: Int32,
    ):
        """Rows of the split tiles, one a warp: the pieces' O, weighted by what their maxima are from the largest."""
        batch_size, _, seqlen_q = lse.shape
        m_blocks = cute.ceil_div(seqlen_q, self.config.queries)
        row = cute.arch.block_idx()[0] * MERGED_ROWS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = row // self.tile_m
        row = row - tile * self.tile_m
        rounds = (m_blocks * heads * batch_size - split) // blocks
        m_block, head = schedule.in_order(rounds, tile, blocks, m_blocks, choose)
        batch = head // heads
        here, head = self.place(m_block, head - batch * heads, row, members, seqlen_q)
        if here < seqlen_q:
            block, last, part = schedule.pieces(tile, blocks, split, n_blocks)
            logit = -Float32.inf
            if const_expr(self.config.sink):
                logit = sink[head] * LOG2_E  # type: ignore[index]
            base = out.iterator + cute.crd2idx((batch, here, head, 0), out.layout)
            found = self.merge_row(parts, block, last, part, row, logit, base, out.shape[3])
            if cute.arch.lane_idx() == 0:
                lse[batch, head, here] = found

    @cute.jit
    def merge_row(self, parts, block, last, part, row, logit, target, columns):
        """Put a row's pieces together, which blocks from ``block``, its ``part``-th, to ``last`` have left; its lse.

        ``logit``: the sink's in log2 units, if there is one; ``target``: where its ``columns`` go.
        """
        dim = self.config.head_dim_v
        lane = cute.arch.lane_idx()
        # The largest maximum, each lane's of other pieces, then pieces that do not wait for one another.
        top = -Float32.inf
        for b in cutlass.range(block + lane, last + 1, 32, unroll=1):
            top = cute.arch.fmax(top, self.piece_stats(parts, b, part if b == block else Int32(0), row)[0])
        top = cute.arch.warp_reduction_max(top)
        total = Float32(0.0)
        if const_expr(self.config.sink):
            top = cute.arch.fmax(top, logit)
        safe = finite(top)
        if const_expr(self.config.sink):
            total = exp2(logit - safe)
        spans = -(-dim // 64)  # a lane has two columns of each 64
        acc = cute.make_rmem_tensor((2, spans), Float32)
        acc.fill(0.0)
        for b in cutlass.range(block, last + 1, unroll=4):
            slot_part = part if b == block else Int32(0)
            stats = self.piece_stats(parts, b, slot_part, row)
            weight = exp2(stats[0] - safe)
            total = total + stats[1] * weight
            base = parts.iterator + cutlass.Int64(2 * b + slot_part) * self.config.piece_floats
            for i in cutlass.range_constexpr(spans):
                column = 64 * i + 2 * lane
                if column < dim:
                    source = cute.make_tensor((base + (row * dim + column)).align(8), cute.make_layout(2))
                    acc[0, i] = acc[0, i] + source[0] * weight
                    acc[1, i] = acc[1, i] + source[1] * weight
        inverse = 0.0 if total == 0.0 else 1.0 / total
        for i in cutlass.range_constexpr(spans):
            column = 64 * i + 2 * lane
            if column < columns:
                word = cute.make_rmem_tensor(1, Int32)
                word[0] = pack16(acc[0, i] * inverse, acc[1, i] * inverse, self.dtype)
                pair = cute.make_tensor((target + column).align(4), cute.make_layout(2))
                cute.autovec_copy(word, cute.recast_tensor(pair, Int32))
        return log_sum_exp(top, total)

    @cute.jit
    def piece_stats(self, parts, block, part, row):
        """The maximum of a piece's row in log2 units, and its sum."""
        base = parts.iterator + cutlass.Int64(2 * block + part) * self.config.piece_floats
        at = base + (self.tile_m * self.config.head_dim_v + 2 * row)
        return cute.make_tensor(at.align(8), cute.make_layout(2))
