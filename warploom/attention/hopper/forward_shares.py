"""The scheduler of calls over pages: whole tiles, or all key tiles dealt out over the blocks, and what merges these.

How long sequences are is known on the device alone, so each block finds the same plan for itself. Where the longest query tile
has many more key tiles than a block's share of all, tiles go one after the other in units of their key tiles, and block b
takes units [b · share, (b + 1) · share): of at most two tiles only a piece. The kernel behind puts pieces together.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.config import CUT_WORDS
from warploom.attention.hopper.forward_merge import MERGED_ROWS, Merge
from warploom.kernels.cute.band import key_tiles
from warploom.kernels.cute.basics import LOG2_E, choose
from warploom.kernels.cute.packed import bounds, seen_end
from warploom.kernels.cute.rings import advance, publish


class PagedScheduler(Merge):
    """``schedule_pages``, in the place of ``schedule_packed``, and the kernel that merges what it cut."""

    @cute.jit
    def schedule_pages(self, capacity, total_q, heads, shared, cu_q, used_k, counter, parts, left, right, split):
        """Hand out tiles in the order in which blocks ask for them, or this block's share of all key tiles.

        Tiles count sequence after sequence, their last rows first. The tokens past the last sequence are one more sequence,
        without keys. ``capacity``: keys that a sequence's pages hold; ``heads``: tiles for the same queries; ``split``: by
        how many key tiles the longest tile is to be past a share, or 0 where none is to be cut.
        """
        queries, sequences = self.config.queries, cu_q.shape[0] - 1
        lane, block = cute.arch.lane_idx(), cute.arch.block_idx()[0]
        lengths = capacity, total_q, cu_q, used_k, right
        stage, phase = Int32(0), Int32(1)
        share = Int32(0)
        if const_expr(self.config.split):  # noqa: SIM102
            if split > 0:
                share = self.find_share(lengths, heads, split)
                if lane == 0:
                    self.note_cut(parts, block, (Int32(-1),))
        at = block * share
        base, before, head = Int32(0), Int32(0), Int32(0)  # sequences of the lanes start at base, their units at before
        while head >= 0:
            if share == 0:
                if lane == 0:
                    at = cute.arch.atomic_add(counter.iterator, Int32(1))
                at = cute.arch.shuffle_sync(at, 0)
            own, through = self.lane_units(base + lane, lengths, heads, share)
            while before + cute.arch.shuffle_sync(through, 31) <= at and base <= sequences:
                before += cute.arch.shuffle_sync(through, 31)
                base += 32
                own, through = self.lane_units(base + lane, lengths, heads, share)
            head = Int32(-1)
            m_block, sequence, first, end, slot = Int32(0), Int32(0), Int32(0), Int32(0), Int32(-1)
            start, seqlen_q, seqlen_k, shift = Int32(0), Int32(0), Int32(0), Int32(0)
            if base <= sequences and (share == 0 or at < block * share + share):
                # The first lane whose units reach past ``at``.
                owner = cute.arch.popc(~cute.arch.vote_ballot_sync(before + through > at))
                within = at - before - cute.arch.shuffle_sync(through - own, owner)
                sequence = base + owner
                start, seqlen_q, seqlen_k, each = self.lengths(sequence, lengths, share)
                tile = within // each
                row = tile // heads
                head = tile - row * heads
                m_block = cute.ceil_div(seqlen_q, queries) - 1 - row
                shift = seqlen_k - seqlen_q
                seqlen_k = seen_end(self.config, seqlen_k, right)  # tiles are of pages, and begin as they do
                row = m_block * queries
                first, end = key_tiles(self.config, row, row + queries, seqlen_q, seqlen_k, shift, left, right)
                if const_expr(self.config.split):  # noqa: SIM102
                    if share > 0:
                        begins = within - tile * each
                        ends, slot = schedule.share_piece(begins, each, block * share + share - at, block, choose)
                        if lane == 0 and schedule.cut_first(begins, share):
                            last = schedule.cut_last(begins, each, share, block)
                            self.note_cut(parts, block, (head, m_block, start, seqlen_q, last))
                        first, end = cutlass.max(first, begins), cutlass.min(end, ends)
                        at += ends - begins
            cute.arch.mbarrier_wait(shared.tile_empty + stage, phase)
            words = (m_block, head, sequence, first, end, slot, start, seqlen_q, Int32(0), seqlen_k, shift)
            publish(shared.tiles, (0, stage), words, shared.tile_full, stage)
            stage, phase = advance(stage, phase, self.tile_stages)

    @cute.jit
    def lengths(self, sequence, lengths, share):
        """Start, queries and keys of a sequence, and units of each of its tiles.

        Those are its key tiles, one at the least, where blocks have a ``share``; else a tile is one.
        """
        capacity, total_q, cu_q, used_k, right = lengths
        sequences = cu_q.shape[0] - 1
        start, length, keys, each = Int32(0), Int32(0), Int32(0), Int32(1)
        if sequence < sequences:
            start, length = bounds(cu_q, sequence, total_q)
            keys = capacity
            if const_expr(self.config.used):
                keys = cutlass.max(cutlass.min(keys, used_k[sequence]), 0)
            if const_expr(self.config.split):  # noqa: SIM102
                if share > 0:
                    each = cutlass.max(cute.ceil_div(seen_end(self.config, keys, right), self.tile_n), 1)
        if sequence == sequences:
            start = cutlass.min(cutlass.max(cu_q[sequence], 0), total_q)
            length = total_q - start
        return start, length, keys, each

    @cute.jit
    def lane_units(self, sequence, lengths, heads, share):
        """Units of a lane's sequence, and those of the lanes up to it."""
        _, length, _, each = self.lengths(sequence, lengths, share)
        own = cute.ceil_div(length, self.config.queries) * heads * each
        through = own
        for distance in (1, 2, 4, 8, 16):
            lower = cute.arch.shuffle_sync_up(through, distance)
            through = through + lower if cute.arch.lane_idx() >= distance else through
        return own, through

    @cute.jit
    def find_share(self, lengths, heads, split):
        """Units that each block takes, or 0 where tiles go whole."""
        total, longest = Int32(0), Int32(0)
        for base in cutlass.range(0, lengths[2].shape[0], 32, unroll=1):
            sequence = base + cute.arch.lane_idx()
            total += cute.arch.shuffle_sync(self.lane_units(sequence, lengths, heads, Int32(1))[1], 31)
            _, length, _, each = self.lengths(sequence, lengths, Int32(1))
            longest = cutlass.max(longest, each if length > 0 else Int32(0))
        longest = cute.arch.warp_reduction_max(longest)
        return schedule.share(total, longest, cute.arch.grid_dim()[0], split, choose)

    @cute.jit
    def cut_words(self, parts, block):
        """What a block says of the tile whose second piece it takes; the first word is below 0 where there is none."""
        pieces = Int64(parts.shape[0] - 1) * self.config.piece_floats
        words = cute.recast_ptr(parts.iterator, dtype=Int32) + (pieces + CUT_WORDS * block)
        return cute.make_tensor(words, cute.make_layout(CUT_WORDS))

    @cute.jit
    def note_cut(self, parts, block, words):
        """Leave a tile's words to the kernel that merges it."""
        target = self.cut_words(parts, block)
        for i in cutlass.range_constexpr(len(words)):
            target[i] = words[i]

    # The kernel behind

    @cute.jit
    def launch_merge_shares(self, parts, out, lse, sink, heads_kv, split, blocks, stream):
        """Put the pieces of cut tiles together, if there may be any."""
        if split > 0:
            self.merge_shares(parts, out, lse, sink, lse.shape[0] // heads_kv).launch(
                grid=[blocks * (self.tile_m // MERGED_ROWS), 1, 1], block=[32 * MERGED_ROWS, 1, 1], stream=stream
            )

    @cute.kernel
    def merge_shares(self, parts: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, sink: cute.Tensor | None, members: Int32):
        """Rows of the cut tiles, one a warp."""
        row = cute.arch.block_idx()[0] * MERGED_ROWS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block = row // self.tile_m
        row = row - block * self.tile_m
        words = self.cut_words(parts, block)
        head = words[0]
        if head >= 0:
            start, seqlen_q, last = words[2], words[3], words[4]
            here, head = self.place(words[1], head, row, members, seqlen_q)
            if here < seqlen_q:
                logit = -cutlass.Float32.inf
                if const_expr(self.config.sink):
                    logit = sink[head] * LOG2_E  # type: ignore[index]
                base = out.iterator + cute.crd2idx((start + here, head, 0), out.layout)
                found = self.merge_row(parts, block - 1, last, Int32(1), row, logit, base, out.shape[2])
                if cute.arch.lane_idx() == 0:
                    lse[head, start + here] = found
