"""The forward under a column mask where each warpgroup walks the key tiles that its own rows see.

Key tiles go through the rings if some warpgroup sees them; who does not lets them go by. Each warpgroup has a ring of masks
of its own, which holds those of tiles that are partial for its rows alone.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper.forward_columns import ColumnConsumers
from warploom.kernels.cute.basics import WARPGROUP, choose
from warploom.kernels.cute.instructions import highest_bit, shifted
from warploom.kernels.cute.rings import next_in_ring, place_in_ring, release

# Whether P of a key tile waits for its PV: none was seen yet, one waits, or the last one's is done as tiles went by.
NONE, WAITS, DONE = 0, 1, 2


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
        self.score_first(work, stage, phase, full, others)
        if pending == NONE:
            self.keep_scale(work)
        self.pack(work, 0)
