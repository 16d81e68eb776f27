"""The forward under a column mask where each warpgroup walks the key tiles that its own rows see.

Key tiles go through the rings if some warpgroup sees them; who does not lets them go by. Each warpgroup has a ring of masks
of its own, which holds those of tiles that are partial for its rows alone.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.attention.hopper.forward_base import (
    BASE,
    BATCH,
    EDGE,
    HEAD,
    K_START,
    MASK_STAGES,
    QUERIES,
    SEQLEN_K,
    SEQLEN_Q,
    WHOLE,
)
from warploom.attention.hopper.forward_columns import ColumnConsumers, ColumnProducer, MaskedRows
from warploom.kernels.cute.basics import WARPGROUP, choose
from warploom.kernels.cute.columns import mask_row
from warploom.kernels.cute.instructions import highest_bit, shifted
from warploom.kernels.cute.rings import next_in_ring, place_in_ring, release
from warploom.kernels.cute.wgmma import gemm

# Whether P of a key tile waits for its PV: none was seen yet, one waits, or the last one's is done as tiles went by.
NONE, WAITS, DONE = 0, 1, 2
RING_BITS = 4  # of a warpgroup's ring of masks, as ``next_in_ring`` counts, in a word of all


class OwnMasks(ColumnProducer):
    """Of the producer's warps those that make masks: ``make_own_masks``."""

    @cute.jit
    def make_own_masks(self, part, k_shape, lse_shape, shared, columns, left, right):
        """As ``make_masks``, of each warpgroup's partial tiles."""
        heads = lse_shape[0] if const_expr(self.config.varlen) else lse_shape[1]
        lists, masks = Int32(0), Int32(0)
        values, edges = Int32(0), Int32(0)  # stage of V, and a bit for the phase of each stage's ``v_landed``
        _, head, _, _, visible, _, _, _ = self.see_list(shared, 0, 0)
        while head >= 0:
            words = shared.tiles[None, place_in_ring(lists, self.tile_stages)[0]]
            while visible != 0:
                bit = highest_bit(visible)
                visible = visible ^ (Int32(1) << bit)
                if ((words[WHOLE] >> bit) & 1) == 0:
                    start = Int64(mask_row(words[BATCH], words[HEAD], heads, columns.bounds))
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
                    )
                    tile = (words[BASE] + bit) * self.tile_n
                    for g in cutlass.range(self.owners, unroll=1):
                        partial = words[self.own_at + g] & ~words[self.own_at + self.owners + g]
                        if ((partial >> bit) & 1) != 0:
                            number = (masks >> (RING_BITS * g)) & ((1 << RING_BITS) - 1)
                            stage, phase = place_in_ring(number, MASK_STAGES)
                            place = g * MASK_STAGES + stage
                            cute.arch.mbarrier_wait(shared.mask_empty + place, phase ^ 1)
                            self.make_own_mask(part, rows, g, tile, shared.masks + place * (4 * self.mask_rows))
                            cute.arch.mbarrier_arrive(shared.mask_full + place)
                            masks += (next_in_ring(number, MASK_STAGES) - number) << (RING_BITS * g)
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
    def make_own_mask(self, part, rows, group, tile, target):
        """As ``make_mask``, of a warpgroup's rows."""
        self.make_mask(part, rows.but(top=rows.top + group * self.mask_rows), tile, target)


class OwnConsumers(ColumnConsumers):
    """The consumer warpgroups: ``compute_own_lists``."""

    @cute.jit
    def compute_own_lists(self, out, lse, sink, sequences, dropout, shared, mma_qk, mma_pv, multiplier, cap_in):
        """As ``compute_lists``, of the key tiles that the warpgroup's rows see."""
        dense_seqlen_q = Int32(0) if const_expr(self.config.varlen) else lse.shape[2]
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row_in_group = thread // 32 * 16 + thread % 32 // 4  # and that + 8
        work = self.rows(shared, mma_qk, mma_pv, group, multiplier, cap_in, dropout)
        work.mask_ring.fill(0)
        if group == self.warpgroups - 1:
            self.pass_ping_pong(group)  # the first one begins
        q_phase = Int32(0)
        k_stage, k_phase = Int32(0), Int32(0)
        lists = Int32(0)
        m_block, head, batch, _, visible, own, whole, more, q_start, seqlen_q = self.next_own_list(
            shared, 0, 0, group, dense_seqlen_q
        )
        while head >= 0:
            local = group * 64 + row_in_group
            places = [(m_block * self.tile_m + local + 8 * r, head) for r in range(2)]
            self.start(work, head, batch, places)
            seen, pending, going = visible, Int32(NONE), Int32(1)
            while going != 0:
                while visible != 0:
                    top = highest_bit(visible)
                    if pending != WAITS and ((own >> top) & 1) != 0:
                        visible = visible ^ (Int32(1) << top)
                        cute.arch.mbarrier_wait(shared.q_full + group, q_phase)
                        self.first_of_run(work, k_stage, k_phase, (whole >> top) & 1, (visible & own) | more, pending)
                        pending = Int32(WAITS)
                    # Whole tiles down to the next one that is partial or goes by.
                    bit = highest_bit(visible & ~whole)  # -1: there is none
                    above = visible & choose(bit < 0, -1, shifted(-2, bit))
                    visible = visible ^ above
                    run = cute.arch.popc(above)
                    last = choose(((visible & own) | more) == 0, run - 1, -1)
                    for i in cutlass.range(run, unroll=1):
                        k_stage, k_phase = self.step(work, i, last, k_stage, k_phase, False)
                    if visible != 0:
                        visible = visible ^ (Int32(1) << bit)
                        if ((own >> bit) & 1) != 0:
                            k_stage, k_phase = self.step(work, (visible & own) | more, 0, k_stage, k_phase, True)
                        else:
                            if pending == WAITS:
                                k_stage, k_phase = self.finish(work, k_stage, k_phase)
                                pending = Int32(DONE)
                            k_stage, k_phase = self.skip(shared, group, k_stage, k_phase)
                going = more
                if more != 0:
                    lists = next_in_ring(lists, self.tile_stages)
                    stage, phase = place_in_ring(lists, self.tile_stages)
                    _, _, _, _, visible, own, whole, more, _, _ = self.next_own_list(
                        shared, stage, phase, group, dense_seqlen_q
                    )
            if pending == WAITS:
                k_stage, k_phase = self.finish(work, k_stage, k_phase)
            if seen != 0:
                if own == 0:  # in the last list, and Q was kept for it
                    cute.arch.mbarrier_wait(shared.q_full + group, q_phase)
                    release(shared.q_empty + group)
                q_phase ^= 1
            self.epilogue(work, out, lse, sink, batch, places, q_start, seqlen_q, sequences)
            lists = next_in_ring(lists, self.tile_stages)
            stage, phase = place_in_ring(lists, self.tile_stages)
            m_block, head, batch, _, visible, own, whole, more, q_start, seqlen_q = self.next_own_list(
                shared, stage, phase, group, dense_seqlen_q
            )

    @cute.jit
    def first_of_run(self, work, stage, phase, full, others, pending):
        """The first key tile, or the first one behind others that went by: no PV is to be done before it."""
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
        if pending == NONE:
            self.keep_scale(work)
        self.pack(work, 0)
