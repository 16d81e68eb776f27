"""The walk back: the state's gradient from the last chunk of a range to the first, and dV on the way.

In the terms of `prepare`, with dS the gradient after a chunk:

    d(beta Y) = (scale P)ᵀ dout + e^(G_last - G) beta k dS,    dV = (I + A)⁻ᵀ beta d(beta Y),
    dS before the chunk = e^G_last dS + qᵀ (scale e^G dout) - kᵀ (e^G dV).

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.delta.hopper.back_base import item_of
from warploom.delta.hopper.back_consumer import BackConsumer
from warploom.delta.hopper.config import BACK_ITEM, BOX, CHUNK, COLUMNS, MATRIX, NUMBERS
from warploom.delta.hopper.walk_base import ragged, rows_of
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.memory import bulk_load
from warploom.kernels.cute.rings import Mbarriers, advance, expect, init_rings
from warploom.kernels.cute.tiles import load_tile, placed, tile_layout, tma_load, tma_store, tma_views
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_REGISTERS, product

LOADER = 0


class BackShared(Fields):
    """A block's shared memory. Barriers are addresses of the first of the ring's."""

    full: Any
    empty: Any
    q: Any  # (chunk, width, stage)
    k: Any
    boxes_q: Any  # the same as TMA fills it, (chunk, COLUMNS, box)
    boxes_k: Any
    dout: Any  # (chunk, COLUMNS, stage and warpgroup)
    dout_start: Any  # pointers
    matrices: Any  # (chunk, chunk, stage and which): (I + A)⁻¹ - I, then P
    matrices_start: Any
    numbers: Any  # of each stage
    kept: Any  # of each warpgroup a state's gradient on its way out
    dv: Any  # (chunk, COLUMNS, warpgroup)
    dv_start: Any


class Back(BackConsumer):
    """The kernel of one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen, heads, E)
        k: cute.Tensor,
        dout: cute.Tensor,  # (batch, seqlen, heads_v, M)
        dv: cute.Tensor,  # where tokens count
        prepared: cute.Tensor,  # (slots * heads_v, BACK_ITEM) fp32
        last: cute.Tensor,  # (sequences, heads_v, E, M) fp32, the gradient of the last state, or empty
        first: cute.Tensor,  # the same of the initial state, or empty
        carry: cute.Tensor,  # between ranges, of carriers, or two that they use by turns: as `resume` of `keep`
        dstates: cute.Tensor,  # (entries * heads_v * tiles, width * COLUMNS)
        lengths: cute.Tensor,  # (batch,) int32, or empty
        cu: cute.Tensor,  # (sequences + 1,) int32, or empty
        size: Int32,  # chunks of a range
        current: Int32,  # the range
        per_sequence: Int32,
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch blocks for the value columns of each head."""
        config = self.config
        sequences = k.shape[0]
        if cu.shape[0] > 0:
            sequences = cu.shape[0] - 1
        blocks = cute.ceil_div(dv.shape[3], config.warpgroups * COLUMNS)
        grid = sequences * dv.shape[2] * blocks
        heads = k.shape[2]
        q, k, dout, dv = [
            ragged(cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))) for t in (q, k, dout, dv)
        ]
        tile = (CHUNK, COLUMNS)
        box = tile_layout(self.dtype, tile, 1, COLUMNS)
        tma_q, q = tma_load(q, box, tile)
        tma_k, k = tma_load(k, box, tile)
        tma_dout, dout = tma_load(dout, box, tile)
        tma_dv, dv = tma_store(dv, box, tile)
        self.kernel(
            q, k, dout, dv, prepared, last, first, carry, dstates, lengths, cu, tma_q, tma_k, tma_dout, tma_dv,
            product(self.dtype, (64, CHUNK, 16), IN_REGISTERS, BY_K, BY_K),
            product(self.dtype, (64, CHUNK, 16), IN_REGISTERS, BY_K, BY_MN),
            product(self.dtype, (64, config.width, 16), IN_REGISTERS, BY_K, BY_MN),
            tile_layout(self.dtype, (CHUNK, config.width), config.stages, COLUMNS),
            tile_layout(self.dtype, tile, config.stages * self.boxes, COLUMNS),
            tile_layout(self.dtype, tile, config.stages * config.warpgroups, COLUMNS),
            tile_layout(self.dtype, (CHUNK, CHUNK), config.stages * 2, BOX),
            tile_layout(self.dtype, tile, config.warpgroups, COLUMNS),
            heads, size, current, per_sequence,
        ).launch(
            grid=[grid, 1, 1],
            block=[(1 + config.warpgroups) * WARPGROUP, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        dout: cute.Tensor,
        dv: cute.Tensor,
        prepared: cute.Tensor,
        last: cute.Tensor,
        first: cute.Tensor,
        carry: cute.Tensor,
        dstates: cute.Tensor,
        lengths: cute.Tensor,
        cu: cute.Tensor,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_dout: cute.CopyAtom,
        tma_dv: cute.CopyAtom,
        mma: cute.TiledMma,
        mma_turned: cute.TiledMma,
        mma_update: cute.TiledMma,
        layout_qk: cute.ComposedLayout,
        layout_boxes: cute.ComposedLayout,
        layout_dout: cute.ComposedLayout,
        layout_matrices: cute.ComposedLayout,
        layout_dv: cute.ComposedLayout,
        heads: Int32,
        size: Int32,
        current: Int32,
        per_sequence: Int32,
    ):
        config = self.config
        stages = config.stages
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_dout, tma_dv):
                cpasync.prefetch_descriptor(atom)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * stages]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_qk)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_qk)], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_dout)], 1024]
            matrices: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_matrices)], 1024]
            kept: cute.struct.Align[cute.struct.MemRange[self.dtype, config.warpgroups * config.width * COLUMNS], 1024]
            dv: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_dv)], 1024]
            numbers: cute.struct.Align[cute.struct.MemRange[Float32, NUMBERS * stages], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        shared = BackShared(
            full=barriers.take(stages),
            empty=barriers.take(stages),
            q=placed(storage.q, layout_qk),
            k=placed(storage.k, layout_qk),
            boxes_q=placed(storage.q, layout_boxes),
            boxes_k=placed(storage.k, layout_boxes),
            dout=placed(storage.dout, layout_dout),
            dout_start=storage.dout.data_ptr(),
            matrices=placed(storage.matrices, layout_matrices),
            matrices_start=storage.matrices.data_ptr(),
            numbers=storage.numbers.data_ptr(),
            kept=storage.kept.data_ptr(),
            dv=placed(storage.dv, layout_dv),
            dv_start=storage.dv.data_ptr(),
        )
        cute.arch.griddepcontrol_launch_dependents()
        self.clear(storage.matrices.data_ptr().toint(), 2 * cute.cosize(layout_matrices))
        if warp == LOADER:
            with cute.arch.elect_one():
                init_rings(stages, (shared.full, shared.empty, 4 * config.warpgroups))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        given = self.part(
            cute.arch.block_idx()[0], dv.shape[2], heads, dv.shape[1], dv.shape[3] - 1, prepared.shape[0] // dv.shape[2],
            lengths, cu, size, current, current, per_sequence,
        )  # fmt: skip
        if warp < 4:
            if const_expr(config.warpgroups == 2):
                cute.arch.setmaxregister_decrease(24)
            if warp == LOADER:
                self.load(given, shared, q, k, dout, prepared, tma_q, tma_k, tma_dout)
        else:
            if const_expr(config.warpgroups == 2):
                cute.arch.setmaxregister_increase(240)
            self.play(
                given, shared, warp // 4 - 1, dv, last, first, carry, dstates, current, per_sequence, tma_dv, mma, mma_turned,
                mma_update,
            )  # fmt: skip
        # What comes after this kernel reads what the walk beside it leaves.
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def load(self, given, shared, q, k, dout, prepared, tma_q, tma_k, tma_dout):
        """q, k, dout and what was prepared of each chunk, zeros for tokens that do not count; the last chunk first."""
        config = self.config
        tile = (CHUNK, COLUMNS)
        of = given.batch, given.start, given.live
        gq, gk = (cute.local_tile(rows_of(t, given.head_qk, *of), tile, (None, None)) for t in (q, k))
        gout = cute.local_tile(rows_of(dout, given.head, *of), tile, (None, None))
        load_q, load_k = tma_views(tma_q, shared.boxes_q, gq), tma_views(tma_k, shared.boxes_k, gk)
        load_dout = tma_views(tma_dout, shared.dout, gout)
        stage, phase = Int32(0), Int32(1)
        for i in cutlass.range(given.high - given.low, unroll=1):
            n = given.high - 1 - i
            cute.arch.mbarrier_wait(shared.empty + stage, phase)
            expect(shared.full + stage, config.stage_bytes)
            for box in cutlass.range_constexpr(self.boxes):
                load_tile(load_k, (n, box), stage * self.boxes + box, shared.full, stage)
            for w in cutlass.range_constexpr(config.warpgroups):
                load_tile(load_dout, (n, given.block + w), stage * config.warpgroups + w, shared.full, stage)
            for box in cutlass.range_constexpr(self.boxes):
                load_tile(load_q, (n, box), stage * self.boxes + box, shared.full, stage)
            with cute.arch.elect_one():
                item = prepared.iterator + item_of(given, n) * BACK_ITEM
                to = shared.matrices_start + stage * (2 * CHUNK * CHUNK)
                self.load_matrix(to, item, shared.full + stage)
                self.load_matrix(to + CHUNK * CHUNK, item + MATRIX, shared.full + stage)
                bulk_load(shared.numbers + stage * NUMBERS, item + 2 * MATRIX, 4 * NUMBERS, shared.full + stage)
            stage, phase = advance(stage, phase, config.stages)
