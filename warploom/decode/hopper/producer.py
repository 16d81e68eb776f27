"""The warp that asks for tiles of K and V. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.decode.hopper.config import DecodeConfig
from warploom.kernels.cute.rings import advance, expect
from warploom.kernels.cute.tiles import load_tile, tma_views


class Producer:
    """What one warp of a block runs."""

    config: DecodeConfig
    tile_n: int
    dim: int
    stages: int

    @cute.jit
    def produce(self, k, v, table, shared, tma_k, tma_v, head, batch, begin, end, page_shift):
        """Load keys [begin, end), tile after tile; what lies past ``end`` in the last one is loaded too, and not looked at."""
        size = self.tile_n * self.dim * 2
        boxes = self.tile_n // self.config.box
        tiles = cute.ceil_div(end - begin, self.tile_n)
        stage, phase = Int32(0), Int32(1)
        page = Int32(0)
        if const_expr(self.config.paged):
            page = self.pages(table, batch, begin, end, page_shift, k.shape[3])
        for i in cutlass.range(tiles, unroll=1):
            key = begin + i * self.tile_n
            if const_expr(self.config.paged):
                following = self.pages(table, batch, key + self.tile_n, end, page_shift, k.shape[3])
            cute.arch.mbarrier_wait(shared.empty + stage, phase)
            expect(shared.k_full, size, stage)
            if const_expr(self.config.paged):
                for j in cutlass.range_constexpr(boxes):
                    own, at = cute.arch.shuffle_sync(page, j), self.place(key + j * 16, end, page_shift)
                    self.load(tma_k, k[None, None, head, own], shared.k, at, stage * boxes + j, shared.k_full + stage)
                expect(shared.v_full, size, stage)
                for j in cutlass.range_constexpr(boxes):
                    own, at = cute.arch.shuffle_sync(page, j), self.place(key + j * 16, end, page_shift)
                    self.load(tma_v, v[None, None, head, own], shared.v, at, stage * boxes + j, shared.v_full + stage)
                page = following
            else:
                at = key // self.tile_n
                self.load(tma_k, k[None, None, head, batch], shared.k, at, stage, shared.k_full + stage)
                expect(shared.v_full, size, stage)
                self.load(tma_v, v[None, None, head, batch], shared.v, at, stage, shared.v_full + stage)
            stage, phase = advance(stage, phase, self.stages)

    def load(self, atom: Any, keys: Any, shared: Any, box: Any, at: Any, barrier: Any) -> None:
        """Load the ``box``-th box of keys (key, head_dim) into the ``at``-th of shared memory."""
        views = tma_views(atom, shared, cute.local_tile(keys, (self.config.box, self.dim), (None, 0)))
        load_tile(views, box, at, barrier)

    @cute.jit
    def pages(self, table, batch, key, end, page_shift, count):
        """Each lane's page: that of the lane's 16 keys from ``key`` on, or of the last one before ``end``."""
        at = cutlass.min(key + cute.arch.lane_idx() * 16, end - 1)
        return cutlass.min(cutlass.max(table[batch, at >> page_shift], 0), count - 1)

    @cute.jit
    def place(self, key, end, page_shift):
        """Which box of its page holds a key, or the last one before ``end``."""
        at = cutlass.min(key, end - 1)
        return (at - (at >> page_shift << page_shift)) // 16
