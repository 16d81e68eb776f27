"""Which key tiles of a query tile its rows see under a column mask: lists, from the bounds of blocks of columns.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper.forward_base import ForwardBase
from warploom.kernels.cute.band import key_tiles, whole_tiles
from warploom.kernels.cute.basics import choose
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

TOUCHED, DEAD = 8, 16  # bits of what is known of a key tile: hides some of a warpgroup's rows; may hold a dead column


class Lists(ForwardBase):
    """What the scheduler warp does with a query tile."""

    @cute.jit
    def claim(self, shared, counter, phase):
        """The number of the next query tile; where ``claims_late``, as late as its lists are found in time.

        A block that claims tiles ahead keeps them from others, which have nothing left to do before it ends.
        """
        if const_expr(self.claims_late):
            cute.arch.mbarrier_wait(shared.tile_wanted, phase)
        index = Int32(0)
        if cute.arch.lane_idx() == 0:
            index = cute.arch.atomic_add(counter.iterator, Int32(1))
        return cute.arch.shuffle_sync(index, 0)

    @cute.jit
    def hand_out_lists(self, place, heads, blocks, shared, bounds, stage, phase, left, right, offset=None):
        """The lists of a query tile, whose ``place`` is: query tile, head, batch, and starts and lengths of queries and keys.

        ``offset``: of a call with query offsets the batch entry's, by which a query's position is past its row.

        A list waits until the next one is found, or none: so every list but a tile's only one is not empty.
        """
        m_block, head, batch, q_start, seqlen_q, k_start, seqlen_k = place
        queries = self.config.queries
        lane, shift = cute.arch.lane_idx(), seqlen_k - seqlen_q
        of_sequence = (q_start, seqlen_q, k_start, seqlen_k) if const_expr(self.config.varlen) else ()
        of_entry = (offset,) if const_expr(self.config.q_offset) else ()
        if const_expr(self.config.q_offset):
            shift = offset
        base, visible, whole, edge, own = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
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
                number = cutlass.min(some + lane, lists - 1)
                seeing = (lane < left_over) & ~self.list_hidden(bounds, mask, number, blocks, top, past)
                seeing = cute.arch.vote_ballot_sync(seeing)
                left_over -= 32
                while seeing != 0:
                    bit = highest_bit(seeing)
                    seeing = seeing ^ (Int32(1) << bit)
                    start = (some + bit) * 32
                    n = start + lane
                    found = Int32(0)
                    if const_expr(self.owners > 1):
                        lengths = (seqlen_q, seqlen_k, shift)
                        seen, plain, dead, found = self.own_classes(bounds, mask, n, blocks, top, lengths, left, right)
                    else:
                        hidden, touched, dead = self.classes(bounds, mask, n, blocks, top, past, seqlen_q)
                        inside = (n >= first) & (n < end)
                        seen = cute.arch.vote_ballot_sync(inside & ~hidden)
                        plain = (n >= whole_first) & (n < whole_end) & ~touched & ~dead
                        plain = cute.arch.vote_ballot_sync(plain)
                        dead = cute.arch.vote_ballot_sync(dead)
                    if seen != 0:
                        if visible != 0:
                            cute.arch.mbarrier_wait(shared.tile_empty + stage, phase)
                            words = (m_block, head, batch, base, visible, whole, edge, Int32(1), *of_sequence, *of_entry)
                            self.publish_list(shared, words, own, stage)
                            stage, phase = advance(stage, phase, self.tile_stages)
                        base, visible, whole, edge, own = start, seen, plain, dead, found
        cute.arch.mbarrier_wait(shared.tile_empty + stage, phase)
        words = (m_block, head, batch, base, visible, whole, edge, Int32(0), *of_sequence, *of_entry)
        self.publish_list(shared, words, own, stage)
        return advance(stage, phase, self.tile_stages)

    @cute.jit
    def publish_list(self, shared, words, own, stage):
        """Put a list into the ring's stage; of warpgroups' own words each lane has one in ``own``."""
        if const_expr(self.owners > 1):
            lane, tiles = cute.arch.lane_idx(), shared.tiles
            if lane < 2 * self.owners:
                tiles[self.own_at + lane, stage] = own
            cute.arch.sync_warp()
        publish(shared.tiles, (0, stage), words, shared.tile_full, stage)

    @cute.jit
    def own_classes(self, bounds, mask, n, blocks, top, lengths, left, right):
        """Of key tile ``n`` of each lane words of all lanes: visible to a warpgroup, partial for none, maybe of a dead column.

        And lane g's word of what warpgroup g sees, and behind those, lane after lane, of what is whole for it.
        """
        seqlen_q, seqlen_k, shift = lengths
        lane = cute.arch.lane_idx()
        # Of each lane's tile: a bit for each warpgroup that sees it, from TOUCHED on those that it is touched for, and DEAD.
        facts, each = Int32(0), self.tile_n // BLOCK
        for i in cutlass.range(each, unroll=1):  # one after another: registers hold the extrema of one
            extrema = block_extrema(bounds, mask, cutlass.min(blocks.first + n * each + i, blocks.last))
            for g in cutlass.range(self.owners, unroll=1):
                row = top + g * self.mask_rows
                past = cutlass.min(row + self.mask_rows, seqlen_q)
                found = choose(hides_all(extrema, row, past), 0, 1) | choose(hides_some(extrema, row, past), 1 << TOUCHED, 0)
                facts = facts | (found << g)
            facts = facts | choose(may_hold_dead(extrema, seqlen_q), 1 << DEAD, 0)
        edge = cute.arch.vote_ballot_sync(((facts >> DEAD) & 1) != 0)
        seen, partial, own = Int32(0), Int32(0), Int32(0)
        for g in cutlass.range(self.owners, unroll=1):
            row = top + g * self.mask_rows
            past = cutlass.min(row + self.mask_rows, seqlen_q)
            first, end = key_tiles(self.config, row, past, seqlen_q, seqlen_k, shift, left, right)
            whole_first, whole_end = whole_tiles(self.config, row, past, first, seqlen_q, seqlen_k, shift, left, right)
            inside = (n >= first) & (n < end) & (row < seqlen_q)
            visible = cute.arch.vote_ballot_sync(inside & (((facts >> g) & 1) != 0))
            plain = (n >= whole_first) & (n < whole_end) & (((facts >> (TOUCHED + g)) & 1) == 0)
            plain = cute.arch.vote_ballot_sync(plain) & visible & ~edge
            own = choose(lane == g, visible, choose(lane == self.owners + g, plain, own))
            seen, partial = seen | visible, partial | (visible & ~plain)
        return seen, ~partial, edge, own

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
