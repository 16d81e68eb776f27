"""The loader warp of a walk. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, const_expr

from warploom.linear.hopper.config import C_STAGES, COLUMNS
from warploom.linear.hopper.walk_base import WalkBase


class Producer(WalkBase):
    """The loader warp."""

    @cute.jit
    def load(self, given, a, b, c, tma_a, tma_b, tma_c):
        """This block's boxes of each chunk of a and b, for all blocks of the cluster, and its columns of c."""
        shared, config = given.shared, self.config
        tile = (config.chunk, COLUMNS)
        ga, gb, gc = (cute.local_tile(t[None, None, given.head, given.batch], tile, (None, None)) for t in (a, b, c))
        ring_a, ring_b = self.ring(tma_a, shared.boxes_a, ga), self.ring(tma_b, shared.boxes_b, gb)
        ring_c = self.ring(tma_c, shared.c, gc)
        stage, phase = Int32(0), Int32(1)
        c_stage, c_phase = Int32(0), Int32(1)
        size = 2 * config.chunk * config.head_dim
        for t in cutlass.range(given.chunks, unroll=1):
            n = self.chunk_at(t, given.chunks)
            for ring, full, empty in ((ring_a, shared.a_full, shared.a_empty), (ring_b, shared.b_full, shared.b_empty)):
                cute.arch.mbarrier_wait(empty + stage, phase)
                self.expect(full + stage, size)
                for i in cutlass.range_constexpr(self.boxes // config.cluster):
                    box = given.rank + i * config.cluster
                    source, target = ring.out_of[None, n, box], ring.into[None, stage * self.boxes + box]
                    if const_expr(config.cluster > 1):
                        mask = Int16((1 << config.cluster) - 1)
                        cute.copy(ring.atom, source, target, tma_bar_ptr=full + stage, mcast_mask=mask)
                    else:
                        cute.copy(ring.atom, source, target, tma_bar_ptr=full + stage)
            cute.arch.mbarrier_wait(shared.c_empty + c_stage, c_phase)
            self.expect(shared.c_full + c_stage, 2 * config.chunk * COLUMNS)
            cute.copy(
                ring_c.atom,
                ring_c.out_of[None, n, given.block],
                ring_c.into[None, c_stage],
                tma_bar_ptr=shared.c_full + c_stage,
            )
            stage, phase = self.advance(stage, phase, config.stages)
            c_stage, c_phase = self.advance(c_stage, c_phase, C_STAGES)

    @cute.jit
    def expect(self, barrier, size):
        """The barrier's phase ends once so many bytes have landed."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
