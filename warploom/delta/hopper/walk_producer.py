"""The loader warp of a walk. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from warploom.delta.hopper.config import BOX, BOX_ROWS, CHUNK, COLUMNS, ITEM, NUMBERS
from warploom.delta.hopper.walk_base import WalkBase, rows_of
from warploom.kernels.cute.memory import bulk_load
from warploom.kernels.cute.rings import advance, expect
from warploom.kernels.cute.tiles import load_tile, tma_views


class Producer(WalkBase):
    """The loader warp."""

    @cute.jit
    def load(self, given, q, k, v, prepared, heads, tma_q, tma_k, tma_v):
        """q, k, v and what was prepared of each chunk, zeros for tokens that do not count."""
        shared, config = given.shared, self.config
        tile = (CHUNK, COLUMNS)
        of = given.batch, given.start, given.live
        gq, gk = (cute.local_tile(rows_of(t, given.head_qk, *of), tile, (None, None)) for t in (q, k))
        gv = cute.local_tile(rows_of(v, given.head, *of), tile, (None, None))
        load_q, load_k = tma_views(tma_q, shared.boxes_q, gq), tma_views(tma_k, shared.boxes_k, gk)
        load_v = tma_views(tma_v, shared.v, gv)
        stage, phase = Int32(0), Int32(1)
        source = prepared.iterator + (Int64(given.slot) * heads + given.head) * ITEM
        for n in cutlass.range(given.chunks, unroll=1):
            cute.arch.mbarrier_wait(shared.empty + stage, phase)
            expect(shared.full + stage, config.stage_bytes)
            for box in cutlass.range_constexpr(self.boxes):
                load_tile(load_k, (n, box), stage * self.boxes + box, shared.full, stage)
            for w in cutlass.range_constexpr(config.warpgroups):
                load_tile(load_v, (n, given.block + w), stage * config.warpgroups + w, shared.full, stage)
            for box in cutlass.range_constexpr(self.boxes):
                load_tile(load_q, (n, box), stage * self.boxes + box, shared.full, stage)
            with cute.arch.elect_one():
                item = source + Int64(n) * heads * ITEM
                for which in cutlass.range_constexpr(2):
                    to = shared.matrices_start + (2 * stage + which) * (CHUNK * CHUNK)
                    for box in cutlass.range_constexpr(len(BOX_ROWS)):
                        # From the first row on that is not 0: those before it stay 0.
                        part = to + (box * CHUNK + CHUNK - BOX_ROWS[box]) * BOX
                        words = BOX_ROWS[box] * BOX // 2
                        bulk_load(part, item, 4 * words, shared.full + stage)
                        item = item + words
                bulk_load(shared.numbers + stage * NUMBERS, item, 4 * NUMBERS, shared.full + stage)
            stage, phase = advance(stage, phase, config.stages)
