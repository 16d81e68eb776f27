"""The forward under a column mask: lists of visible key tiles, and the bits of those that are partly visible.

The scheduler warp classifies 32 key tiles at a time by the bounds of their columns and hands the visible ones out as the bits
of a word (``forward_lists``): no list in memory, however long the keys are. Two more warps of the producer's make the bits of
partial tiles from the vectors, a word for each row and lane of a quad, while the tensor cores work on tiles before; consumers
only apply them.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.attention.hopper import schedule
from warploom.attention.hopper.forward_base import (
    BASE,
    BATCH,
    EDGE,
    HEAD,
    K_START,
    MASK_STAGES,
    OFFSET,
    QUERIES,
    SEQLEN_K,
    SEQLEN_Q,
    WHOLE,
)
from warploom.attention.hopper.forward_consumers import Consumers
from warploom.attention.hopper.forward_producer import Producer
from warploom.kernels.cute.basics import WARPGROUP, choose
from warploom.kernels.cute.columns import (
    band_rows,
    dense_blocks,
    intervals,
    limits_in_tile,
    mask_row,
    query_offset,
    sees_none,
    shown_rows,
    turned,
)
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import hidden as unknown
from warploom.kernels.cute.instructions import highest_bit, shifted
from warploom.kernels.cute.packed import sequence_rows
from warploom.kernels.cute.rings import advance, expect, next_in_ring, place_in_ring, release
from warploom.kernels.cute.tiles import load_tile
from warploom.kernels.cute.wgmma import gemm

RING_BITS = 4  # of a warpgroup's ring of masks, as ``next_in_ring`` counts, in a word of all


class MaskedRows(Fields):
    """What the masks of a query tile are made from."""

    columns: Any
    start: Any  # of the vectors of the tile's head
    top: Any  # its first row
    seqlen_q: Any
    seqlen_k: Any
    left: Any
    right: Any
    offset: Any  # of the batch entry, by which vectors and positions are past rows; None without query offsets


def masked_tile(index: Any, m_blocks: Any, heads: Any, section: Any, last: Any, choose: Any) -> tuple[Any, Any]:
    """(m_block, head) of the ``index``-th query tile of a call under a column mask; heads of all batch entries.

    ``section`` heads at a time, as ``schedule.sections`` has it, the last rows first. But the ``last`` first tiles of each head
    end the call, all heads abreast: under most masks they see the fewest keys.
    """
    upper = m_blocks - last
    rest = index - upper * heads
    ends = rest >= 0
    width = choose(ends, heads, section)
    row, head = schedule.sections(choose(ends, rest, index), choose(ends, last, upper), heads, width, choose)
    return choose(ends, last, m_blocks) - 1 - row, head


def of_head(t: Any, head: Any, batch: Any) -> Any:
    """A tile's modes of a tensor whose last two are heads and batch."""
    return t[(*(None,) * (len(t.shape) - 2), head, batch)]


class ColumnProducer(Producer):
    """The producer's warps: ``schedule_lists``, ``load_lists`` and, of two warps, ``make_masks``."""

    neighbours = 2  # columns of a thread that lie together

    # The scheduler warp

    @cute.jit
    def schedule_lists(self, seqlen_k, lse_shape, shared, columns, counter, left, right, section, last):
        """Hand out query tiles in the order in which blocks ask for them, as ``masked_tile`` has it."""
        queries = self.config.queries
        batch_size, heads, seqlen_q = lse_shape
        m_blocks = cute.ceil_div(seqlen_q, queries)
        stage, phase, wanted, head = Int32(0), Int32(1), Int32(1), Int32(0)
        while head >= 0:
            index = self.claim(shared, counter, wanted)
            wanted ^= 1
            tiles = m_blocks * heads * batch_size
            at = cutlass.min(index, tiles - 1)
            m_block, head = masked_tile(at, m_blocks, heads * batch_size, section, last, choose)
            batch = head // heads
            head = head - batch * heads if index < tiles else Int32(-1)
            place = (m_block, head, batch, Int32(0), seqlen_q, Int32(0), seqlen_k)
            blocks = dense_blocks(columns.bounds, seqlen_k)
            offset = query_offset(columns, batch) if const_expr(self.config.q_offset) else None
            stage, phase = self.hand_out_lists(
                place, heads, blocks, shared, columns.bounds, stage, phase, left, right, offset
            )

    # The loader warp

    @cute.jit
    def load_lists(self, q, k, v, lse, shared, tma_q, tma_k, tma_v):
        """Q of each warpgroup once a tile that sees a key, then K one visible tile ahead of V.

        Before the last K of a tile it asks for the next one, whose lists take less time to find than the K before to be read.
        """
        packed = self.config.varlen
        group = (lse.shape[0] if const_expr(packed) else lse.shape[1]) // k.shape[-2]
        q_phase = Int32(1)
        k_stage, k_phase = Int32(0), Int32(1)
        v_stage, v_phase = Int32(0), Int32(1)
        stage, phase = Int32(0), Int32(0)
        m_block, head, batch, base, visible, _, edge, more, q_start, _, k_start, seqlen_k = self.next_list(
            shared, stage, phase, Int32(0)
        )
        while head >= 0:
            head_kv = head // group
            if const_expr(packed):
                k_end = k_start + seqlen_k
                tq = cute.domain_offset((q_start, 0), q[None, None, head])
                tk, tv = sequence_rows(k, head_kv, k_end, seqlen_k), sequence_rows(v, head_kv, k_end, seqlen_k)
            else:
                tq, tk, tv = (of_head(t, n, batch) for t, n in ((q, head), (k, head_kv), (v, head_kv)))
            keys, values = self.key_rings(tk, tv, shared, tma_k, tma_v)
            waiting, going, cleared = Int32(-1), Int32(1), Int32(0)  # the key tile whose V is still to come
            while going != 0:
                while visible != 0:
                    bit = highest_bit(visible)
                    visible = visible ^ (Int32(1) << bit)
                    if (visible | more) == 0:
                        release(shared.tile_wanted)
                    k_stage, k_phase = self.push_keys(keys, base + bit, k_stage, k_phase)
                    if waiting >= 0:
                        v_stage, v_phase = self.push_values(values, waiting, cleared, v_stage, v_phase)
                    else:
                        self.load_rows_of_tile(tma_q, tq, shared, m_block, q_phase)
                        q_phase ^= 1
                    waiting, cleared = base + bit, (edge >> bit) & 1
                going = more
                if more != 0:
                    stage, phase = advance(stage, phase, self.tile_stages)
                    m_block, head, batch, base, visible, _, edge, more, q_start, _, k_start, seqlen_k = self.next_list(
                        shared, stage, phase, Int32(0)
                    )
            if waiting >= 0:
                v_stage, v_phase = self.push_values(values, waiting, cleared, v_stage, v_phase)
            else:
                release(shared.tile_wanted)
            stage, phase = advance(stage, phase, self.tile_stages)
            m_block, head, batch, base, visible, _, edge, more, q_start, _, k_start, seqlen_k = self.next_list(
                shared, stage, phase, Int32(0)
            )

    @cute.jit
    def push_values(self, ring, n, cleared, stage, phase):
        """As ``push``; a tile of which values are to be ``cleared`` is full only when they are."""
        barrier = choose(cleared != 0, self.stages + stage, stage)  # of v_full, or of v_landed behind it
        cute.arch.mbarrier_wait(ring.empty + stage, phase)
        expect(ring.full, ring.bytes, barrier)
        load_tile(ring.tma, n, stage, ring.full, barrier)
        return advance(stage, phase, self.stages)

    @cute.jit
    def load_rows_of_tile(self, tma_q, queries, shared, m_block, phase):
        """Q of every warpgroup, once it has read the last one."""
        for i in cutlass.range_constexpr(self.warpgroups):
            cute.arch.mbarrier_wait(shared.q_empty + i, phase)
            self.expect_queries(shared, i)
            self.load_queries(tma_q, queries, shared, m_block * self.warpgroups + i, i, shared.q_full + i)

    # The warps that make masks

    @cute.jit
    def make_masks(self, part, k_shape, lse_shape, shared, columns, left, right):
        """The bits of every partial tile, half of its columns by each ``part``.

        The first part also clears values that no row sees: P is zero there, but zero times a NaN is not. Words of a list stay
        where they are, since registers are few.
        """
        heads = lse_shape[0] if const_expr(self.config.varlen) else lse_shape[1]
        vectors = columns.vectors[0] if const_expr(self.config.q_offset) else columns.bounds  # where bounds are of each batch
        lists, masks = Int32(0), Int32(0)
        values, edges = Int32(0), Int32(0)  # stage of V, and a bit for the phase of each stage's ``v_landed``
        _, head, _, _, visible, _, _, _ = self.see_list(shared, 0, 0)
        while head >= 0:
            words = shared.tiles[None, place_in_ring(lists, self.tile_stages)[0]]
            while visible != 0:
                bit = highest_bit(visible)
                visible = visible ^ (Int32(1) << bit)
                if ((words[WHOLE] >> bit) & 1) == 0:
                    row = cutlass.min(words[BATCH], vectors.shape[0] - 1)
                    if vectors.shape[1] > 1:  # a division takes 200 clocks
                        row = mask_row(words[BATCH], words[HEAD], heads, vectors)
                    start = Int64(row)
                    if const_expr(self.config.varlen):
                        start = start * (k_shape[3] - 1) + words[K_START]
                        seqlen_q, seqlen_k = words[SEQLEN_Q], words[SEQLEN_K]
                    else:
                        start = start * k_shape[0]
                        seqlen_q, seqlen_k = lse_shape[2], k_shape[0]
                    rows = MaskedRows(
                        columns=columns,
                        start=start,
                        top=words[QUERIES] * self.tile_m,
                        seqlen_q=seqlen_q,
                        seqlen_k=seqlen_k,
                        left=left,
                        right=right,
                        offset=words[OFFSET] if const_expr(self.config.q_offset) else None,
                    )
                    tile = (words[BASE] + bit) * self.tile_n
                    column = self.masked_column(part, tile)
                    inside, apart = seqlen_k - column, self.neighbours
                    top = rows.top + rows.offset if const_expr(self.config.q_offset) else rows.top
                    limits = limits_in_tile(columns, start + column, inside, top, self.tile_m, apart)
                    if const_expr(self.owners > 1):
                        masks = self.put_own_masks(part, rows, words, bit, column, limits, shared, masks)
                    else:
                        masks = self.put_mask(part, rows, column, limits, shared, masks, 0)
                    if part == 0 and ((words[EDGE] >> bit) & 1) != 0:
                        cute.arch.mbarrier_wait(shared.v_landed + values, (edges >> values) & 1)
                        edges = edges ^ (Int32(1) << values)
                        self.clear_values(rows, tile, shared.v[None, None, values])
                        cute.arch.sync_warp()
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(shared.v_full + values)
                values = choose(values + 1 == self.stages, 0, values + 1)
            self.leave_list(shared, place_in_ring(lists, self.tile_stages)[0])
            lists = next_in_ring(lists, self.tile_stages)
            stage, phase = place_in_ring(lists, self.tile_stages)
            _, head, _, _, visible, _, _, _ = self.see_list(shared, stage, phase)

    @cute.jit
    def put_mask(self, part, rows, column, limits, shared, number, owner):
        """Make the mask of an owner's rows in its ring; the number of the next one."""
        stage, phase = place_in_ring(number, MASK_STAGES)
        place = owner * MASK_STAGES + stage
        cute.arch.mbarrier_wait(shared.mask_empty + place, phase ^ 1)
        first = owner * self.mask_rows
        self.make_mask(part, rows, column, limits, first, shared.masks + place * (4 * self.mask_rows))
        cute.arch.mbarrier_arrive(shared.mask_full + place)
        return next_in_ring(number, MASK_STAGES)

    @cute.jit
    def put_own_masks(self, part, rows, words, bit, column, limits, shared, masks):
        """As ``put_mask``, of each warpgroup that a tile is partial for; a word has the numbers of all."""
        for g in cutlass.range(self.owners, unroll=1):
            partial = words[self.own_at + g] & ~words[self.own_at + self.owners + g]
            if ((partial >> bit) & 1) != 0:
                number = (masks >> (RING_BITS * g)) & ((1 << RING_BITS) - 1)
                after = self.put_mask(part, rows, column, limits, shared, number, g)
                masks += (after - number) << (RING_BITS * g)
        return masks

    def shift(self, rows: Any) -> Any:
        """By how much a query's position is past its row."""
        return rows.offset if self.config.q_offset else rows.seqlen_k - rows.seqlen_q

    @cute.jit
    def hidden(self, rows, column):
        """Rows that a column hides, and [first, past) that see it by the band."""
        here = cutlass.min(column, rows.seqlen_k - 1)
        first, past = band_rows(self.config, here, self.shift(rows), rows.left, rows.right)
        found = intervals(rows.columns, rows.start + here)
        if const_expr(self.config.q_offset):
            found = tuple([cutlass.max(row, 0) - rows.offset for row in found])
        return found, first, past

    def masked_column(self, part: Any, tile: Any) -> Any:
        """The first of a lane's columns whose bits ``part`` makes; the other one is ``neighbours`` further on."""
        lane = unknown(cute.arch.lane_idx())  # what is computed of it out of the loop would be spilled
        own = self.neighbours
        return tile + lane // own * (4 * own) + lane % own + 2 * own * part

    @cute.jit
    def make_mask(self, part, rows, column, limits, first, target):
        """Bit c of word (row, i): whether the row sees the c-th column of lane i of a quad (``neighbours`` together).

        Of the tile's rows from ``first`` on, 32 at a time, of which all see the same columns or each its own: where all do, the
        bits of a column are a ballot's word.
        """
        lane = unknown(cute.arch.lane_idx())
        diagonal = column - self.shift(rows) - rows.top
        blocks = self.mask_rows // 32 if const_expr(self.owners > 1) else 1  # of 32 rows, at once
        for j in cutlass.range(self.mask_rows // 32 // blocks, unroll=1):
            shown = self.shown(rows, limits, diagonal, first + 32 * blocks * j, blocks)
            mixed = cutlass.Boolean(False)
            for b in cutlass.range_constexpr(blocks):
                for i in cutlass.range_constexpr(2):
                    mixed = mixed | ((shown[b, i] != 0) & (shown[b, i] != -1))
            mixed = mixed & (lane < self.tile_n // 4)
            words = cute.make_rmem_tensor((2, blocks), Int32)
            if cute.arch.vote_any_sync(mixed):
                for b in cutlass.range_constexpr(blocks):
                    for i in cutlass.range_constexpr(2):
                        words[i, b] = turned(shown[b, i])
            else:
                for b in cutlass.range_constexpr(blocks):
                    for i in cutlass.range_constexpr(2):
                        words[i, b] = cute.arch.vote_ballot_sync(shown[b, i] != 0)
            for b in cutlass.range_constexpr(blocks):
                into = (target + (32 * (blocks * j + b) + lane) * 4 + 2 * part).align(8)
                cute.autovec_copy(words[None, b], cute.make_tensor(into, cute.make_layout(2)))

    @cute.jit
    def shown(self, rows, limits, diagonal, start, blocks):
        """Bits of 32 rows a word: of those from the tile's row ``start`` on who sees a lane's columns, (blocks, 2)."""
        own, left, right = self.neighbours, rows.left, rows.right
        shown = cute.make_rmem_tensor((blocks, 2), Int32)
        if rows.columns.present == 1:  # the first hidden row alone, as of most masks
            for b in cutlass.range_constexpr(blocks):
                for i in cutlass.range_constexpr(2):
                    top, here = start + 32 * b, diagonal + own * i
                    word = ~shifted(Int32(-1), cutlass.max((limits[i] & 0xFF) - top, 0))
                    if const_expr(self.config.right):
                        word = word & shifted(Int32(-1), cutlass.max(here - top - right, 0))
                    if const_expr(self.config.left):
                        word = word & ~shifted(Int32(-1), cutlass.max(here - top + left + 1, 0))
                    shown[b, i] = word
        else:
            for b in cutlass.range_constexpr(blocks):
                for i in cutlass.range_constexpr(2):
                    top, here = start + 32 * b, diagonal + own * i
                    shown[b, i] = shown_rows(self.config, limits[i], here, top, left, right)
        return shown

    @cute.jit
    def clear_values(self, rows, tile, values):
        """Zero the values of columns that no row sees."""
        lane = cute.arch.lane_idx()
        for i in cutlass.range(self.tile_n // 32, unroll=1):
            column = tile + i * 32 + lane
            hidden, first, past = self.hidden(rows, column)
            dead = sees_none(first, cutlass.min(past, rows.seqlen_q), *hidden)
            bits = cute.arch.vote_ballot_sync(dead & (column < rows.seqlen_k))
            while bits != 0:
                bit = highest_bit(bits)
                bits = bits ^ (Int32(1) << bit)
                for d in cutlass.range_constexpr(self.config.head_dim_v // 32):
                    self.clear_value(values, i * 32 + bit, d * 32 + lane)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def clear_value(self, values, key, column):
        """Zero in the place of a value in shared memory."""
        values[key, column] = self.dtype(0.0)


class ColumnConsumers(Consumers):
    """The consumer warpgroups: ``compute_lists``."""

    @cute.jit
    def compute_lists(
        self, out, lse, sink, sequences, dropout, shared, mma_qk, mma_pv, multiplier, cap_in, scales=None
    ):  # fmt: skip
        """64 rows of every query tile of this block; ``scales`` as `compute` has them."""
        dense_seqlen_q = Int32(0) if const_expr(self.config.varlen) else lse.shape[2]
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row_in_group = thread // 32 * 16 + thread % 32 // 4  # and that + 8
        work = self.rows(shared, mma_qk, mma_pv, group, multiplier, cap_in, dropout, scales=scales)
        work.mask_ring.fill(0)
        if group == self.warpgroups - 1:
            self.pass_ping_pong(group)  # the first one begins
        q_phase = Int32(0)
        k_stage, k_phase = Int32(0), Int32(0)
        lists = Int32(0)
        m_block, head, batch, base, visible, whole, _, more, q_start, seqlen_q, _, _ = self.next_list(
            shared, 0, 0, dense_seqlen_q
        )
        while head >= 0:
            local = group * 64 + row_in_group
            places = [(m_block * self.tile_m + local + 8 * r, head) for r in range(2)]
            self.start(work, head, batch, places)
            self.find_scales(work, head, batch, m_block * self.tile_m + group * 64, q_start, Int32(0))
            begun, going = Int32(0), Int32(1)
            while going != 0:
                if begun == 0 and visible != 0:
                    bit = highest_bit(visible)
                    visible = visible ^ (Int32(1) << bit)
                    self.note_tile(work, base + bit)
                    cute.arch.mbarrier_wait(shared.q_full + group, q_phase)
                    q_phase ^= 1
                    self.first_of_list(work, k_stage, k_phase, (whole >> bit) & 1, visible | more)
                    begun = Int32(1)
                while visible != 0:
                    # Whole tiles down to the next partial one.
                    bit = highest_bit(visible & ~whole)  # -1: there is none
                    above = visible & choose(bit < 0, -1, shifted(-2, bit))
                    visible = visible ^ above
                    run = cute.arch.popc(above)
                    last = choose((visible | more) == 0, run - 1, -1)
                    for i in cutlass.range(run, unroll=1):
                        if const_expr(self.notes_tiles):
                            self.note_tile(work, base + highest_bit(above))
                            above = above ^ (Int32(1) << highest_bit(above))
                        k_stage, k_phase = self.step(work, i, last, k_stage, k_phase, False)
                    if visible != 0:
                        visible = visible ^ (Int32(1) << bit)
                        self.note_tile(work, base + bit)
                        k_stage, k_phase = self.step(work, visible | more, 0, k_stage, k_phase, True)
                going = more
                if more != 0:
                    lists = next_in_ring(lists, self.tile_stages)
                    stage, phase = place_in_ring(lists, self.tile_stages)
                    _, _, _, base, visible, whole, _, more, _, _, _, _ = self.next_list(shared, stage, phase, dense_seqlen_q)
            if begun != 0:
                k_stage, k_phase = self.finish(work, k_stage, k_phase)
            self.epilogue(work, out, lse, sink, batch, places, q_start, seqlen_q, sequences)
            lists = next_in_ring(lists, self.tile_stages)
            stage, phase = place_in_ring(lists, self.tile_stages)
            m_block, head, batch, base, visible, whole, _, more, q_start, seqlen_q, _, _ = self.next_list(
                shared, stage, phase, dense_seqlen_q
            )

    @cute.jit
    def first_of_list(self, work, stage, phase, full, others):
        """The first visible key tile, with no PV before it."""
        self.score_first(work, stage, phase, full, others)
        self.keep_scale(work)
        self.pack(work, 0)

    @cute.jit
    def score_first(self, work, stage, phase, full, others):
        """Scores and exponentials of a key tile that no PV is under way beside."""
        shared = work.shared
        cute.arch.mbarrier_wait(shared.k_full + stage, phase)
        self.wait_ping_pong(work.group)
        gemm(work.mma_qk, work.acc_s, work.q, work.k, False, stage)
        self.pass_ping_pong(work.group)
        self.while_scoring(work, 0)
        work.mask_words.fill(-1)
        if full == 0:
            self.take_mask(work)
        warpgroup.wait_group(0)
        release(shared.k_empty + stage)
        if others == 0:
            release(shared.q_empty + work.group)
        self.softmax(work, 0, True)
