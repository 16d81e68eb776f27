"""The walk of the gated delta rule: chunk after chunk of a value head with a slice of its state in registers.

`prepare` has the equations. A warpgroup keeps 64 columns of the state, transposed, as accumulators: rounded in registers they
are the left factor of k S and q S, and so are found, Y and what is written, each in its turn. One warp loads.

Here: the launch, shared memory and which warp does what. The loader is in ``walk_producer``, the warpgroups in
``walk_consumer``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.delta.hopper.config import BOX, CHUNK, COLUMNS, NUMBERS
from warploom.delta.hopper.walk_base import WalkPart, WalkShared, ragged
from warploom.delta.hopper.walk_consumer import Consumer
from warploom.delta.hopper.walk_producer import Producer
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.rings import Mbarriers, init_rings
from warploom.kernels.cute.tiles import placed, tile_layout, tma_load, tma_store
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_REGISTERS, product

LOADER = 0


class Walk(Producer, Consumer):
    """The kernel of one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen, heads, E)
        k: cute.Tensor,
        v: cute.Tensor,  # (batch, seqlen, heads_v, M)
        out: cute.Tensor,
        prepared: cute.Tensor,  # (slots * heads_v, ITEM) fp32
        state: cute.Tensor,  # (sequences, heads_v, E, M) fp32 before the first token, or empty
        last: cute.Tensor,  # the same after the last token, or empty
        lengths: cute.Tensor,  # (batch,) int32, or empty
        cu: cute.Tensor,  # (sequences + 1,) int32, or empty
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch blocks for the value columns of each head."""
        config = self.config
        sequences = k.shape[0]
        if cu.shape[0] > 0:
            sequences = cu.shape[0]  # and those tokens that are past the last
        blocks = cute.ceil_div(v.shape[3], config.warpgroups * COLUMNS)
        grid = sequences * v.shape[2] * blocks
        heads = k.shape[2]
        q, k, v, out = [ragged(cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))) for t in (q, k, v, out)]
        tile = (CHUNK, COLUMNS)
        box = tile_layout(self.dtype, tile, 1, COLUMNS)
        tma_q, q = tma_load(q, box, tile)
        tma_k, k = tma_load(k, box, tile)
        tma_v, v = tma_load(v, box, tile)
        tma_out, out = tma_store(out, box, tile)
        self.kernel(
            q, k, v, out, prepared, state, last, lengths, cu, tma_q, tma_k, tma_v, tma_out,
            product(self.dtype, (64, CHUNK, 16), IN_REGISTERS, BY_K, BY_K),
            product(self.dtype, (64, config.width, 16), IN_REGISTERS, BY_K, BY_MN),
            tile_layout(self.dtype, (CHUNK, config.width), config.stages, COLUMNS),
            tile_layout(self.dtype, tile, config.stages * self.boxes, COLUMNS),
            tile_layout(self.dtype, tile, config.stages * config.warpgroups, COLUMNS),
            tile_layout(self.dtype, (CHUNK, CHUNK), config.stages * 2, BOX),
            tile_layout(self.dtype, tile, config.warpgroups, COLUMNS),
            heads,
        ).launch(
            grid=[grid, 1, 1],
            block=[(1 + config.warpgroups) * WARPGROUP, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        prepared: cute.Tensor,
        state: cute.Tensor,
        last: cute.Tensor,
        lengths: cute.Tensor,
        cu: cute.Tensor,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        tma_out: cute.CopyAtom,
        mma: cute.TiledMma,
        mma_update: cute.TiledMma,
        layout_qk: cute.ComposedLayout,
        layout_boxes: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_matrices: cute.ComposedLayout,
        layout_out: cute.ComposedLayout,
        heads: Int32,
    ):
        config = self.config
        stages = config.stages
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_v, tma_out):
                cpasync.prefetch_descriptor(atom)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * stages]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_qk)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_qk)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            matrices: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_matrices)], 1024]
            out: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_out)], 1024]
            numbers: cute.struct.Align[cute.struct.MemRange[Float32, NUMBERS * stages], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        shared = WalkShared(
            full=barriers.take(stages),
            empty=barriers.take(stages),
            q=placed(storage.q, layout_qk),
            k=placed(storage.k, layout_qk),
            boxes_q=placed(storage.q, layout_boxes),
            boxes_k=placed(storage.k, layout_boxes),
            v=placed(storage.v, layout_v),
            v_start=storage.v.data_ptr(),
            matrices=placed(storage.matrices, layout_matrices),
            matrices_start=storage.matrices.data_ptr(),
            numbers=storage.numbers.data_ptr(),
            out=placed(storage.out, layout_out),
            out_start=storage.out.data_ptr(),
        )
        self.clear(storage.matrices.data_ptr().toint(), 2 * cute.cosize(layout_matrices))
        if warp == LOADER:
            with cute.arch.elect_one():
                init_rings(stages, (shared.full, shared.empty, 4 * config.warpgroups))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        blocks = cute.ceil_div(v.shape[1], config.warpgroups * COLUMNS)
        index = cute.arch.block_idx()[0]
        heads_v = v.shape[2]
        pair = index // blocks
        sequence = pair // heads_v
        head = pair - sequence * heads_v
        batch, start, rows, live, slot = self.tokens(sequence, lengths, cu, v.shape[3] - 1)
        given = WalkPart(
            shared=shared,
            block=(index - pair * blocks) * config.warpgroups,
            head=head,
            head_qk=head // (heads_v // heads),
            batch=batch,
            sequence=sequence,
            start=start,
            rows=rows,
            live=live,
            chunks=cute.ceil_div(live, CHUNK),
            slot=slot,
        )
        if warp < 4:
            if const_expr(config.warpgroups == 2):
                cute.arch.setmaxregister_decrease(24)
            if warp == LOADER:
                self.load(given, q, k, v, prepared, heads_v, tma_q, tma_k, tma_v)
        else:
            if const_expr(config.warpgroups == 2):
                cute.arch.setmaxregister_increase(240)
            self.play(given, warp // 4 - 1, out, state, last, tma_out, mma, mma_update)
