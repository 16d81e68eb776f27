"""The loader warp of a walk. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, const_expr

from warploom.kernels.cute.rings import advance, expect
from warploom.kernels.cute.tiles import load_tile, tma_views
from warploom.linear.hopper.config import COLUMNS
from warploom.linear.hopper.walk_base import WalkBase


class Producer(WalkBase):
    """The loader warp."""

    @cute.jit
    def load(self, given, a, b, c, x, tma_a, tma_b, tma_c, tma_x):
        """This block's boxes of each chunk of a and b, for all blocks of the cluster, and its columns of c and x."""
        shared, config = given.shared, self.config
        tile = (config.chunk, COLUMNS)
        ga, gb, gc = (cute.local_tile(t[None, None, given.head, given.batch], tile, (None, None)) for t in (a, b, c))
        load_a, load_b = tma_views(tma_a, shared.boxes_a, ga), tma_views(tma_b, shared.boxes_b, gb)
        load_c = tma_views(tma_c, shared.c, gc)
        if const_expr(config.terms):
            gx = cute.local_tile(x[None, None, given.head, given.batch], tile, (None, None))
            load_x = tma_views(tma_x, shared.boxes_x, gx)
        stage, phase = Int32(0), Int32(1)
        c_stage, c_phase = Int32(0), Int32(1)
        size = 2 * config.chunk * config.head_dim
        for t in cutlass.range(given.chunks, unroll=1):
            n = self.chunk_at(t, given)
            for load, full, empty in ((load_a, shared.a_full, shared.a_empty), (load_b, shared.b_full, shared.b_empty)):
                cute.arch.mbarrier_wait(empty + stage, phase)
                expect(full + stage, size)
                for i in cutlass.range_constexpr(self.boxes // config.cluster):
                    box = given.rank + i * config.cluster
                    mask = Int16((1 << config.cluster) - 1) if const_expr(config.cluster > 1) else None
                    load_tile(load, (n, box), stage * self.boxes + box, full, stage, mask)
            cute.arch.mbarrier_wait(shared.c_empty + c_stage, c_phase)
            expect(shared.c_full + c_stage, 2 * config.groups * config.chunk * COLUMNS)
            for i in cutlass.range_constexpr(config.groups):
                load_tile(load_c, (n, given.block + i), c_stage * config.groups + i, shared.c_full, c_stage)
            if const_expr(config.terms):
                expect(shared.x_full + stage, 2 * config.groups * config.chunk * COLUMNS)
                for i in cutlass.range_constexpr(config.groups):
                    load_tile(load_x, (n, given.block + i), stage * config.groups + i, shared.x_full, stage)
            stage, phase = advance(stage, phase, config.stages)
            c_stage, c_phase = advance(c_stage, c_phase, config.c_stages)
