"""The four warps that ask for queries and tiles of keys, each for every fourth piece.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr

from warploom.decode.hopper.latent_base import OTHER, OWN, LatentBase
from warploom.decode.hopper.latent_config import HEAD_DIM, PIECE, PIECE_BYTES, PIECES, TILE
from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.rings import expect
from warploom.kernels.cute.tiles import load_tile, tma_views

# What L2 is to do with keys, as CUTLASS encodes it: evict them first. What blocks keep of their splits is to stay there.
ONCE = 0x12F0000000000000
LOADERS = 4  # warps


class Loads(Fields):
    """Where tiles come from."""

    q: Any  # (row, column, batch)
    k: Any  # (key, column, head, batch or page)
    tma_q: Any
    tma_k: Any


class LatentProducer(LatentBase):
    """What the warps of a warpgroup run: one alone asks for the last piece of two tiles 600 clocks later."""

    @cute.jit
    def produce(self, part, call, shared, loads, items):
        """Load a part of all that the block works on; what lies past the last key is loaded too, and not looked at."""
        q_phase, even, odd = Int32(1), Int32(1), Int32(1)
        for item in cutlass.range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0], unroll=1):
            place = self.place(call, item)
            cut = self.cut(call, place.batch)
            if (self.has_part(cut, place) > 0) & (cut.tiles > 0):
                cute.arch.mbarrier_wait(shared.q_empty, q_phase)
                q_phase ^= 1
                if part == 0:
                    expect(shared.q_full, self.rows * HEAD_DIM * 2)
                rows = cute.local_tile(loads.q[None, None, place.batch], (self.rows, PIECE), (None, None))
                queries = tma_views(loads.tma_q, shared.q_loads, rows)
                for piece in cutlass.range(part, PIECES, LOADERS, unroll=1):
                    load_tile(queries, (place.row_block, piece), piece, shared.q_full)
                first = self.first_split(cut, place)
                begin, _ = self.split(cut, first)
                page = self.pages(call, place, begin, cut.last)
                for i in cutlass.range(Int32(1) << cut.each_log, unroll=1):
                    begin, end = self.split(cut, first + i)
                    slot = Int32(0)
                    for tile in cutlass.range(begin, end, unroll=1):
                        following = self.pages(call, place, tile + 1, cut.last)
                        self.push(part, call, place, shared, loads, tile, page, cut.last, slot, choose(slot == 0, even, odd))
                        even ^= 1 - slot
                        odd ^= slot
                        slot ^= 1
                        page = following

    @cute.jit
    def push(self, part, call, place, shared, loads, tile, page, last, slot, phase):
        """Load pieces of a tile, those first whose room is free first: the half of the warpgroup that scores the tile."""
        cute.arch.mbarrier_wait(shared.empty + (2 * slot + OWN), phase)
        self.load(call, place, shared, loads, tile, page, last, slot, 4 * slot + part)
        cute.arch.mbarrier_wait(shared.empty + (2 * slot + OTHER), phase)
        self.load(call, place, shared, loads, tile, page, last, slot, 4 - 4 * slot + part)
        if part == 0:
            self.load(call, place, shared, loads, tile, page, last, slot, Int32(PIECES - 1))

    @cute.jit
    def load(self, call, place, shared, loads, tile, page, last, slot, piece):
        """One piece."""
        config = self.config
        at = slot * PIECES + piece
        expect(shared.full, PIECE_BYTES, at)
        each = config.boxes // config.cluster
        for i in cutlass.range_constexpr(each):
            j = i + each * (cute.arch.block_idx()[0] % 2) if const_expr(config.pair) else i
            if const_expr(config.paged):
                key = cutlass.min(tile * TILE + j * config.box, last - 1)
                box = (key - (key >> call.page_shift << call.page_shift)) // config.box
                keys = loads.k[None, None, 0, cute.arch.shuffle_sync(page, j)]
            else:
                box, keys = tile * config.boxes + j, loads.k[None, None, 0, place.batch]
            self.copy(loads.tma_k, keys, shared, (box, piece), at * config.boxes + j, at)

    def copy(self, atom: Any, keys: Any, shared: Any, box: Any, to: Any, at: Any) -> None:
        """A box of keys (key, column) into the ``to``-th of shared memory."""
        tma = tma_views(atom, shared.loads, cute.local_tile(keys, (self.config.box, PIECE), (None, None)))
        more = {"mcast_mask": Int16(3)} if self.config.pair else {}
        cute.copy(
            tma.atom, tma.tiles[(None, *box)], tma.shared[None, to], tma_bar_ptr=shared.full + at,
            cache_policy=Int64(ONCE), **more,
        )  # fmt: skip

    @cute.jit
    def pages(self, call, place, tile, last):
        """Each lane's page: that of the lane's box of a tile, or of the last key."""
        page = Int32(0)
        if const_expr(self.config.paged):
            key = cutlass.min(tile * TILE + cute.arch.lane_idx() * self.config.box, last - 1)
            page = call.table[place.batch, cutlass.max(key, 0) >> call.page_shift]
            page = cutlass.min(cutlass.max(page, 0), call.pages - 1)
        return page
