"""The kernel of column sums: a block owns a tile of keys of one head, and tiles of queries stream past it.

Each of two consumer warpgroups takes every other tile of 64 queries. Its scores lie in chunks of keys: while it takes one's
exponentials, the product of the other runs, and that of the next queries follows as soon as there is room, across tiles of keys
too. So neither the tensor cores nor the special function units wait for each other. A part of the exponentials are polynomials:
16 a clock is all that the special function units of a multiprocessor do.

Here: the launch, shared memory, and the warp that loads. The consumers are in ``sums_consumers``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from warploom.attention.hopper.sums_base import Call, SumsShared
from warploom.attention.hopper.sums_config import CHUNKS, ROWS, WARPGROUPS
from warploom.attention.hopper.sums_consumers import Consumers
from warploom.kernels.cute.rings import Mbarriers, advance, expect, init_rings
from warploom.kernels.cute.softmax import multipliers
from warploom.kernels.cute.tiles import load_tile, placed, tile_layout, tma_load, tma_views
from warploom.kernels.cute.wgmma import BY_K, IN_SHARED, product

REGISTERS = 240, 24  # a thread of consumers and of the producer
LOADER = 0  # warp


class ColumnSums(Consumers):
    """Sums over queries of exp(score - lse) for one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim)
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32
        sums: cute.Tensor,  # (batch, heads_q, seqlen_k) fp32
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        blocks: Int32,
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch ``blocks`` persistent blocks."""
        config = self.config
        # (seqlen, head_dim, heads, batch): a tile is the first two modes.
        q, k = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (q, k)]
        layout_q = tile_layout(self.dtype, (ROWS, config.head_dim), self.q_slots, config.box)
        layout_k = tile_layout(self.dtype, (config.chunk, config.head_dim), config.k_slots, config.box)
        tma_q, q = tma_load(q, layout_q, (ROWS, config.head_dim))
        tma_k, k = tma_load(k, layout_k, (config.chunk, config.head_dim))
        mma = product(self.dtype, (ROWS, config.chunk, 16), IN_SHARED, BY_K, BY_K)
        multiplier, cap_in = multipliers(config, scale, softcap)
        self.kernel(q, k, lse, sums, tma_q, tma_k, mma, layout_q, layout_k, multiplier, cap_in, left, right).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        lse: cute.Tensor,
        sums: cute.Tensor,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        mma: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        multiplier: Float32,
        cap_in: Float32,
        left: Int32,
        right: Int32,
    ):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_q, tma_k):
                cpasync.prefetch_descriptor(atom)

        q_slots, k_slots = self.q_slots, config.k_slots
        partial_floats = 2 * WARPGROUPS * 4 * config.tile_n

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * q_slots + 2 * k_slots]
            partial: cute.struct.Align[cute.struct.MemRange[Float32, partial_floats], 16]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        shared = SumsShared(
            q_full=barriers.take(q_slots),
            q_empty=barriers.take(q_slots),
            k_full=barriers.take(k_slots),
            k_empty=barriers.take(k_slots),
            q=placed(storage.q, layout_q),
            k=placed(storage.k, layout_k),
            partial=storage.partial.data_ptr(),
        )
        if warp == LOADER:
            with cute.arch.elect_one():
                init_rings(q_slots, (shared.q_full, shared.q_empty, 4))
                init_rings(k_slots, (shared.k_full, shared.k_empty, 4 * WARPGROUPS))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        call = Call(
            seqlen_q=lse.shape[2],
            seqlen_k=sums.shape[2],
            heads=sums.shape[1],
            group=sums.shape[1] // k.shape[2],
            batch=sums.shape[0],
            left=left,
            right=right,
        )
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            if warp == LOADER:
                self.load(call, q, k, shared, tma_q, tma_k)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self.compute(call, lse, sums, shared, mma, multiplier, cap_in)

    @cute.jit
    def load(self, call, q, k, shared, tma_q, tma_k):
        """Keys of this block's tiles, and for each tile the queries of every warpgroup."""
        config = self.config
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        stage, phase = Int32(0), Int32(1)
        turn, number = Int32(0), Int32(0)
        total = self.tiles(call)
        position = self.position(turn, block, blocks)
        while position < total:
            item = self.item(call, position)
            head_kv = item.head // call.group
            keys = cute.local_tile(k[None, None, head_kv, item.batch], (config.chunk, config.head_dim), (None, 0))
            queries = cute.local_tile(q[None, None, item.head, item.batch], (ROWS, config.head_dim), (None, 0))
            load_k, load_q = tma_views(tma_k, shared.k, keys), tma_views(tma_q, shared.q, queries)
            self.load_keys(load_k, shared, item, number, 0)
            for i in cutlass.range(item.rounds, unroll=1):
                for group in cutlass.range_constexpr(WARPGROUPS):
                    slot = stage * WARPGROUPS + group
                    cute.arch.mbarrier_wait(shared.q_empty + slot, phase)
                    expect(shared.q_full, 2 * ROWS * config.head_dim, slot)
                    load_tile(load_q, (item.first + i) * WARPGROUPS + group, slot, shared.q_full, slot)
                stage, phase = advance(stage, phase, config.stages)
                # The last to be free, and the last that is needed.
                if i == 0:
                    self.load_keys(load_k, shared, item, number, 1)
            turn += 1
            number = self.k_ahead(number, CHUNKS)
            position = self.position(turn, block, blocks)

    @cute.jit
    def load_keys(self, load_k, shared, item, number, chunk):
        """One of the chunks of a tile's keys."""
        slot, lap = self.k_place(number, chunk)
        cute.arch.mbarrier_wait(shared.k_empty + slot, lap ^ 1)
        expect(shared.k_full, 2 * self.config.chunk * self.config.head_dim, slot)
        load_tile(load_k, item.key // self.config.chunk + chunk, slot, shared.k_full, slot)
