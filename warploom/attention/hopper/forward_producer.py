"""The producer warpgroup of the forward: a warp that decides which tile is next, and one that loads Q, K and V.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.forward_lists import Lists
from warploom.attention.hopper.near import Near
from warploom.kernels.cute.band import key_tiles
from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.columns import sequence_blocks
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.packed import bounds, seen_keys, sequence_rows
from warploom.kernels.cute.rings import advance, expect, publish, release
from warploom.kernels.cute.tiles import Tma, load_tile, tma_views


class KeyRing(Fields):
    """The ring of K or V."""

    tma: Tma
    full: Any  # barriers
    empty: Any
    bytes: int  # of a tile


class Producer(Lists, Near):
    """The roles of the producer's warps: ``schedule``, or ``schedule_packed`` for packed sequences, and ``load``."""

    # The scheduler warp

    @cute.jit
    def schedule(
        self, seqlen_k, lse_shape, heads_q, shared, left, right, pair_heads, split, bias=None, group=None, multiplier=None
    ):
        """Hand out this block's tiles, one ahead of who works on them; a head below 0 ends the work.

        The last three are what a reach takes.
        """
        queries = self.config.queries
        batch_size, _, seqlen_q = lse_shape
        heads = heads_q * batch_size
        m_blocks = cute.ceil_div(seqlen_q, queries)
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        stage, phase = Int32(0), Int32(1)
        turn, head = Int32(0), Int32(0)
        while head >= 0:
            if const_expr(self.config.right and not self.config.left):
                m_block, head = schedule.paired(turn, block, blocks, m_blocks, heads, pair_heads, choose)
            else:
                m_block, head = schedule.in_order(turn, block, blocks, m_blocks, choose)
            slot, piece_first, piece_end = Int32(-1), Int32(0), Int32(0)
            if const_expr(self.config.split):
                rounds = choose(split > 0, (m_blocks * heads - split) // blocks, 1 << 30)
                if turn >= rounds:
                    part = turn - rounds
                    n_blocks = cute.ceil_div(seqlen_k, self.tile_n)
                    tile, piece_first, piece_end = schedule.piece(part, block, blocks, split, n_blocks, choose)
                    m_block, head = schedule.in_order(rounds, tile, blocks, m_blocks, choose)
                    slot = 2 * block + part
                    if piece_first == piece_end:
                        m_block, head = Int32(schedule.NOTHING), Int32(0)
                    if part == 2:
                        m_block, head = Int32(0), heads
            turn += 1
            if m_block != schedule.NOTHING:
                row, shift = m_block * queries, seqlen_k - seqlen_q
                first, end = key_tiles(self.config, row, row + queries, seqlen_q, seqlen_k, shift, left, right)
                batch = head // heads_q
                head = head - batch * heads_q if batch < batch_size else Int32(-1)
                if const_expr(self.config.reaches):
                    positions = row + shift, cutlass.min(row + queries, seqlen_q) - 1 + shift
                    keys = self.reach(bias, batch, head, group, multiplier)
                    first, end = self.near_keys((first, end), positions, keys, seqlen_k)
                if slot >= 0:
                    first, end = cutlass.max(first, piece_first), cutlass.min(end, piece_end)
                cute.arch.mbarrier_wait(shared.tile_empty + stage, phase)
                words = (m_block, head, batch, first, end, slot)
                publish(shared.tiles, (0, stage), words, shared.tile_full, stage)
                stage, phase = advance(stage, phase, self.tile_stages)

    @cute.jit
    def schedule_packed(self, total_k, lse_shape, shared, columns, cu_q, cu_k, used_k, counter, left, right):
        """Hand out tiles of packed sequences in the order in which blocks ask for them: lengths differ too much to plan.

        Tiles count sequence after sequence, their last rows first. The tokens past the last sequence are one more
        sequence, without keys. Under a column mask, ``columns``, each tile goes as lists.
        """
        heads_q, total_q = lse_shape
        sequences = cu_q.shape[0] - 1
        lane = cute.arch.lane_idx()
        stage, phase, wanted = Int32(0), Int32(1), Int32(1)
        base, before, head = Int32(0), Int32(0), Int32(0)  # sequences of the lanes start at base, their tiles at before
        while head >= 0:
            index = self.claim(shared, counter, wanted)
            wanted ^= 1
            start, length, tiles, through = self.lane_tiles(base + lane, cu_q, sequences, total_q, heads_q)
            while before + cute.arch.shuffle_sync(through, 31) <= index and base <= sequences:
                before += cute.arch.shuffle_sync(through, 31)
                base += 32
                start, length, tiles, through = self.lane_tiles(base + lane, cu_q, sequences, total_q, heads_q)
            head = Int32(-1)
            m_block, sequence, first, end = Int32(0), Int32(0), Int32(0), Int32(0)
            seqlen_q, k_start, seqlen_k, shift = Int32(0), Int32(0), Int32(0), Int32(0)
            if base <= sequences:
                # The first lane whose tiles reach past index.
                owner = cute.arch.popc(~cute.arch.vote_ballot_sync(before + through > index))
                within = index - before - cute.arch.shuffle_sync(through - tiles, owner)
                start = cute.arch.shuffle_sync(start, owner)
                seqlen_q = cute.arch.shuffle_sync(length, owner)
                sequence = base + owner
                row = within // heads_q
                head = within - row * heads_q
                m_block = cute.ceil_div(seqlen_q, self.tile_m) - 1 - row
                if sequence < sequences:
                    k_start, seqlen_k = bounds(cu_k, sequence, total_k)
                    if const_expr(self.config.used):
                        seqlen_k = cutlass.max(cutlass.min(seqlen_k, used_k[sequence]), 0)
                    if const_expr(not self.config.columns):
                        shift = seqlen_k - seqlen_q
                        k_start, seqlen_k, shift = self.seen_keys(k_start, seqlen_k, shift, left, right)
                        row_q = m_block * self.tile_m
                        past_q = row_q + self.tile_m
                        first, end = key_tiles(self.config, row_q, past_q, seqlen_q, seqlen_k, shift, left, right)
            if const_expr(self.config.columns):
                place = (m_block, head, sequence, start, seqlen_q, k_start, seqlen_k)
                blocks = sequence_blocks(sequence, sequences, k_start, seqlen_k, total_k)
                stage, phase = self.hand_out_lists(place, heads_q, blocks, shared, columns.bounds, stage, phase, left, right)
            else:
                cute.arch.mbarrier_wait(shared.tile_empty + stage, phase)
                words = (m_block, head, sequence, first, end, Int32(-1), start, seqlen_q, k_start, seqlen_k, shift)
                publish(shared.tiles, (0, stage), words, shared.tile_full, stage)
                stage, phase = advance(stage, phase, self.tile_stages)

    @cute.jit
    def seen_keys(self, k_start, seqlen_k, shift, left, right):
        """Start, length and shift of a packed sequence's keys without those that no query of it sees."""
        return seen_keys(self.config, k_start, seqlen_k, shift, left, right)[:3]

    @cute.jit
    def lane_tiles(self, sequence, cu_q, sequences, total_q, heads_q):
        """Start, queries and tiles of a lane's sequence, and the tiles of the lanes up to it."""
        start, length = Int32(0), Int32(0)
        if sequence < sequences:
            start, length = bounds(cu_q, sequence, total_q)
        if sequence == sequences:
            start = cutlass.min(cutlass.max(cu_q[sequence], 0), total_q)
            length = total_q - start
        tiles = cute.ceil_div(length, self.tile_m) * heads_q
        through = tiles
        for distance in (1, 2, 4, 8, 16):
            lower = cute.arch.shuffle_sync_up(through, distance)
            through = through + lower if cute.arch.lane_idx() >= distance else through
        return start, length, tiles, through

    # The loader warp

    @cute.jit
    def load(self, q, k, v, lse, shared, tma_q, tma_k, tma_v):
        """Q of each warpgroup once a tile, then K one tile ahead of V."""
        config, packed = self.config, self.config.varlen
        group = (lse.shape[0] if const_expr(packed) else lse.shape[1]) // k.shape[2]
        q_turn = Int32(self.q_stages)
        k_stage, k_phase = Int32(0), Int32(1)
        v_stage, v_phase = Int32(0), Int32(1)
        tile_stage, tile_phase = Int32(0), Int32(0)
        m_block, head, batch, first, end, _, q_start, _, k_start, seqlen_k, _ = self.next_tile(
            shared, tile_stage, tile_phase, Int32(0), Int32(0)
        )
        while head >= 0:
            head_kv = head // group
            if const_expr(config.pack_gqa):
                head_kv = head // schedule.tile_heads(group, config.heads_per_tile)
            if const_expr(packed):
                k_end = k_start + seqlen_k
                tq = cute.domain_offset((q_start, 0), q[None, None, head])
                tk, tv = sequence_rows(k, head_kv, k_end, seqlen_k), sequence_rows(v, head_kv, k_end, seqlen_k)
            else:
                tq, tk, tv = q[None, None, head, batch], k[None, None, head_kv, batch], v[None, None, head_kv, batch]
            keys, values = self.key_rings(tk, tv, shared, tma_k, tma_v)
            if const_expr(self.claims_late):  # before the last K, as ``load_lists``  # noqa: SIM102
                if end - first < 2:
                    release(shared.tile_wanted)
            if first < end:
                k_stage, k_phase = self.push(keys, end - 1, k_stage, k_phase)
                for i in cutlass.range_constexpr(self.warpgroups):
                    slot, q_phase = self.q_place(i, q_turn)
                    cute.arch.mbarrier_wait(shared.q_empty + slot, q_phase)
                    self.expect_queries(shared, slot)
                    if const_expr(config.pack_gqa):
                        self.load_group(tma_q, q[None, None, None, batch], shared, m_block, head, group, i)
                    else:
                        self.load_queries(tma_q, tq, shared, m_block * self.warpgroups + i, slot, shared.q_full + slot)
                q_turn = self.next_q(q_turn)
                for j in cutlass.range(end - first - 1, unroll=1):
                    if const_expr(self.claims_late):  # noqa: SIM102
                        if j == end - first - 2:
                            release(shared.tile_wanted)
                    k_stage, k_phase = self.push(keys, end - 2 - j, k_stage, k_phase)
                    v_stage, v_phase = self.push(values, end - 1 - j, v_stage, v_phase)
                v_stage, v_phase = self.push(values, first, v_stage, v_phase)
            tile_stage, tile_phase = advance(tile_stage, tile_phase, self.tile_stages)
            m_block, head, batch, first, end, _, q_start, _, k_start, seqlen_k, _ = self.next_tile(
                shared, tile_stage, tile_phase, Int32(0), Int32(0)
            )

    def key_rings(self, k: Any, v: Any, shared: Any, tma_k: Any, tma_v: Any) -> tuple[KeyRing, KeyRing]:
        """The rings of K and of V, of the keys (seqlen, head_dim) of one head."""
        config = self.config
        gk = cute.local_tile(k, (self.tile_n, config.head_dim), (None, 0))
        gv = cute.local_tile(v, (self.tile_n, config.head_dim_v), (None, 0))
        return (
            self.ring(tma_views(tma_k, shared.k, gk), shared.k_full, shared.k_empty, config.head_dim),
            self.ring(tma_views(tma_v, shared.v, gv), shared.v_full, shared.v_empty, config.head_dim_v),
        )

    def expect_queries(self, shared: Any, i: Any) -> None:
        """The barrier of warpgroup ``i``'s Q waits for its bytes."""
        expect(shared.q_full, 64 * self.config.head_dim * 2, i)

    @cute.jit
    def load_queries(self, atom, queries, shared, n, j, barrier):
        """Load the ``n``-th ``load_rows`` queries of a head as the ``j``-th of the tile."""
        rows = cute.local_tile(queries, (self.load_rows, self.config.head_dim), (None, 0))
        load_tile(tma_views(atom, shared.loads_q, rows), n, j, barrier)

    @cute.jit
    def load_group(self, atom, queries, shared, m_block, head, group, i):
        """Load warpgroup ``i``'s rows of a tile of several heads from ``queries`` (row, column, head)."""
        loads = 64 // self.load_rows
        for j in cutlass.range(i * loads, (i + 1) * loads, unroll=1):
            at, member = self.place(0, head, j * self.load_rows, group, 0)
            n = (m_block * self.config.pack_gqa + at) // self.load_rows
            self.load_queries(atom, queries[None, None, member], shared, n, j, shared.q_full + i)

    def ring(self, tma: Tma, full: Any, empty: Any, head_dim: int) -> KeyRing:
        """The ring of tiles of so many columns."""
        return KeyRing(tma=tma, full=full, empty=empty, bytes=self.tile_n * head_dim * 2)

    @cute.jit
    def push_keys(self, ring, n, stage, phase):
        """As ``push``, of K."""
        return self.push(ring, n, stage, phase)

    @cute.jit
    def push(self, ring, n, stage, phase):
        """Load key tile ``n`` into the ring once its stage is free; the stage and phase that follow."""
        cute.arch.mbarrier_wait(ring.empty + stage, phase)
        expect(ring.full, ring.bytes, stage)
        load_tile(ring.tma, n, stage, ring.full, stage)
        return advance(stage, phase, self.stages)
