"""Which key tiles of a query tile its rows see under a column mask: lists, from the bounds of blocks of columns.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper.forward_base import ForwardBase
from warploom.kernels.cute.band import key_tiles, whole_tiles
from warploom.kernels.cute.columns import (
    BLOCK,
    COARSE_BLOCK,
    block_extrema,
    hides_all,
    hides_some,
    mask_row,
    may_hold_dead,
)
from warploom.kernels.cute.instructions import highest_bit
from warploom.kernels.cute.rings import advance, publish


class Lists(ForwardBase):
    """What the scheduler warp does with a query tile."""

    @cute.jit
    def hand_out_lists(self, place, heads, blocks, shared, bounds, stage, phase, left, right):
        """The lists of a query tile, whose ``place`` is: query tile, head, batch, and starts and lengths of queries and keys.

        A list waits until the next one is found, or none: so every list but a tile's only one is not empty.
        """
        m_block, head, batch, q_start, seqlen_q, k_start, seqlen_k = place
        queries = self.config.queries
        lane, shift = cute.arch.lane_idx(), seqlen_k - seqlen_q
        of_sequence = (q_start, seqlen_q, k_start, seqlen_k) if const_expr(self.config.varlen) else ()
        base, visible, whole, edge = Int32(0), Int32(0), Int32(0), Int32(0)
        if head >= 0:
            top = m_block * queries
            past = cutlass.min(top + queries, seqlen_q)
            mask = mask_row(batch, head, heads, bounds)
            first, end = key_tiles(self.config, top, past, seqlen_q, seqlen_k, shift, left, right)
            whole_first, whole_end = whole_tiles(self.config, top, past, first, seqlen_q, seqlen_k, shift, left, right)
            lists = (end + 31) // 32
            left_over = cutlass.max(lists - first // 32, 0)
            while left_over > 0:
                # The lists whose columns do not all hide all rows: of 32 at one look.
                some = first // 32 + cutlass.max(left_over - 32, 0)
                own = cutlass.min(some + lane, lists - 1)
                seeing = (lane < left_over) & ~self.list_hidden(bounds, mask, own, blocks, top, past)
                seeing = cute.arch.vote_ballot_sync(seeing)
                left_over -= 32
                while seeing != 0:
                    bit = highest_bit(seeing)
                    seeing = seeing ^ (Int32(1) << bit)
                    start = (some + bit) * 32
                    n = start + lane
                    hidden, touched, dead = self.classes(bounds, mask, n, blocks, top, past, seqlen_q)
                    inside = (n >= first) & (n < end)
                    seen = cute.arch.vote_ballot_sync(inside & ~hidden)
                    plain = (n >= whole_first) & (n < whole_end) & ~touched & ~dead
                    plain = cute.arch.vote_ballot_sync(plain)
                    dead = cute.arch.vote_ballot_sync(dead)
                    if seen != 0:
                        if visible != 0:
                            cute.arch.mbarrier_wait(shared.tile_empty + stage, phase)
                            words = (m_block, head, batch, base, visible, whole, edge, Int32(1), *of_sequence)
                            publish(shared.tiles, (0, stage), words, shared.tile_full, stage)
                            stage, phase = advance(stage, phase, self.tile_stages)
                        base, visible, whole, edge = start, seen, plain, dead
        cute.arch.mbarrier_wait(shared.tile_empty + stage, phase)
        words = (m_block, head, batch, base, visible, whole, edge, Int32(0), *of_sequence)
        publish(shared.tiles, (0, stage), words, shared.tile_full, stage)
        return advance(stage, phase, self.tile_stages)

    @cute.jit
    def list_hidden(self, bounds, mask, number, blocks, top, past):
        """Whether the columns of 32 key tiles hide all rows, by their coarse blocks."""
        each = 32 * self.tile_n // COARSE_BLOCK
        hidden = True
        for i in cutlass.range_constexpr(each):
            block = cutlass.min(blocks.first_coarse + number * each + i, blocks.last_coarse)
            hidden = hides_all(block_extrema(bounds, mask, block), top, past) & hidden
        return hidden

    @cute.jit
    def classes(self, bounds, mask, n, blocks, top, past, seqlen_q):
        """Of key tile ``n``: whether its columns hide all rows, hide some, may hold one that no row sees."""
        each = self.tile_n // BLOCK
        hidden, touched, dead = True, False, False
        for i in cutlass.range_constexpr(each):
            extrema = block_extrema(bounds, mask, cutlass.min(blocks.first + n * each + i, blocks.last))
            hidden = hides_all(extrema, top, past) & hidden
            touched = hides_some(extrema, top, past) | touched
            dead = may_hold_dead(extrema, seqlen_q) | dead
        return hidden, touched, dead
