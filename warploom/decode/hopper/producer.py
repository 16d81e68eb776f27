"""The warp that asks for tiles of K and V. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.decode.hopper.base import FAR, Base
from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.rings import advance, expect
from warploom.kernels.cute.tiles import load_tile, tma_views


class Loads(Fields):
    """Where tiles come from."""

    k: Any
    v: Any
    tma_k: Any
    tma_v: Any


class Producer(Base):
    """What one warp of a block runs."""

    @cute.jit
    def produce(self, call, place, shared, loads, slot, phase):
        """Load the tiles of the block's splits; what lies past the last key is loaded too, and not looked at.

        Split s begins with tile s however many splits there are: a cluster's are on their way before the length is known.
        """
        split, _ = self.own_splits(call, place, Int32(0))
        ahead = Int32(0)
        if const_expr(call.cluster > 1):
            ahead = choose((call.left == FAR) & (split * self.tile_n < call.capacity), 1, 0)
            if ahead > 0:
                page = self.pages(call, place, split, call.capacity)
                slot, phase = self.push(call, place, shared, loads, split, page, call.capacity, slot, phase)
        _, start, last, tiles, splits = self.cut(call, place.batch)
        split, end = self.own_splits(call, place, splits)
        if split < end:
            tile = split + ahead * splits
            if tile >= tiles:
                split += 1
                tile = split
            page = self.pages(call, place, start + tile, last)
            while split < end:
                following, at = tile + splits, split
                if following >= tiles:
                    at = split + 1
                    following = at
                following_page = self.pages(call, place, start + following, last)
                slot, phase = self.push(call, place, shared, loads, start + tile, page, last, slot, phase)
                tile, split, page = following, at, following_page
        elif ahead > 0:
            # Nobody else waits for what is still to land in this block's memory.
            cute.arch.mbarrier_wait(shared.full, 0)
            cute.arch.mbarrier_wait(shared.full + 1, 0)
        return slot, phase

    @cute.jit
    def push(self, call, place, shared, loads, tile, page, last, slot, phase):
        """Load a tile of K and one of V, each once its slot is free; the slot and phase that follow."""
        for t, atom in ((loads.k, loads.tma_k), (loads.v, loads.tma_v)):
            slot, phase = self.push_one(call, place, shared, t, atom, tile, page, last, slot, phase)
        return slot, phase

    @cute.jit
    def push_one(self, call, place, shared, t, atom, tile, page, last, slot, phase):
        """As ``push``, of K or V."""
        config = self.config
        cute.arch.mbarrier_wait(shared.empty + slot, phase)
        expect(shared.full, config.slot_bytes, slot)
        if const_expr(config.paged):
            boxes = self.tile_n // config.box
            for j in cutlass.range_constexpr(boxes):
                key = cutlass.min(tile * self.tile_n + j * config.box, last - 1)
                at = (key - (key >> call.page_shift << call.page_shift)) // config.box
                own = cute.arch.shuffle_sync(page, j)
                self.load(atom, t[None, None, place.head, own], shared, at, slot * boxes + j, slot)
        else:
            self.load(atom, t[None, None, place.head, place.batch], shared, tile, slot, slot)
        return advance(slot, phase, call.slots)

    def load(self, atom: Any, keys: Any, shared: Any, box: Any, at: Any, slot: Any) -> None:
        """Load the ``box``-th box of keys (key, head_dim) into the ``at``-th of shared memory."""
        views = tma_views(atom, shared.ring, cute.local_tile(keys, (self.config.box, self.dim), (None, 0)))
        load_tile(views, box, at, shared.full, slot)

    @cute.jit
    def pages(self, call, place, tile, last):
        """Each lane's page: that of the lane's box of a tile, or of the last key."""
        page = Int32(0)
        if const_expr(self.config.paged):
            key = cutlass.min(tile * self.tile_n + cute.arch.lane_idx() * self.config.box, last - 1)
            page = call.table[place.batch, cutlass.max(key, 0) >> call.page_shift]
            page = cutlass.min(cutlass.max(page, 0), call.pages - 1)
        return page
