"""The walk of a backward pass: as `walk`, without out, and leaving what gradients need.

That is Y of each chunk, and the state before each of the last range (`back_base` has their tiles); and where there are more
ranges, the states at their starts. From these and Y a walk `again` has another range's states, by one product a chunk. What the
last state and its gradient make together, both in fp32, it leaves in ``prepared``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.delta.hopper.back_base import item_of
from warploom.delta.hopper.config import BACK_ITEM, BOX, CHUNK, COLUMNS, MATRIX, NUMBERS, KeepConfig
from warploom.delta.hopper.keep_consumer import KeepConsumer
from warploom.delta.hopper.walk_base import place_of_y, ragged, rows_of
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.memory import bulk_load
from warploom.kernels.cute.rings import Mbarriers, advance, expect, init_rings
from warploom.kernels.cute.tiles import load_tile, placed, tile_layout, tma_load, tma_store, tma_views
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_REGISTERS, product

LOADER = 0


class KeepShared(Fields):
    """A block's shared memory. Barriers are addresses of the first of the ring's."""

    full: Any
    empty: Any
    k: Any  # (chunk, width, stage)
    boxes_k: Any  # the same as TMA fills it, (chunk, COLUMNS, box)
    v: Any  # (chunk, COLUMNS, stage and warpgroup)
    v_start: Any  # pointers
    matrices: Any  # (chunk, chunk, stage): (I + A)⁻¹ - I
    matrices_start: Any
    numbers: Any  # of each stage
    kept: Any  # of each warpgroup a state on its way out
    y: Any  # (chunk, COLUMNS, warpgroup)
    y_start: Any


class Keep(KeepConsumer):
    """The kernel of one configuration; ``__call__`` is what gets compiled."""

    config: KeepConfig

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,  # (batch, seqlen, heads, E)
        v: cute.Tensor,  # (batch, seqlen, heads_v, M)
        prepared: cute.Tensor,  # (slots * heads_v, BACK_ITEM) fp32
        state: cute.Tensor,  # (sequences, heads_v, E, M) fp32 before the first token, or empty
        last: cute.Tensor,  # the same, the gradient of the last state, or empty
        resume: cute.Tensor,  # ((ranges - 1) * carriers * heads_v * tiles, width * COLUMNS) fp32, at the starts of ranges
        states: cute.Tensor,  # (entries * heads_v * tiles, width * COLUMNS)
        missing: cute.Tensor,  # (batch, seqlen, ·, M or more): Y, written, or read by a walk `again`, of all value heads
        missing_odd: cute.Tensor,  # or of even ones, and here of odd ones
        lengths: cute.Tensor,  # (batch,) int32, or empty
        cu: cute.Tensor,  # (sequences + 1,) int32, or empty
        size: Int32,  # chunks of a range
        begin: Int32,  # the first range to walk
        end: Int32,  # the last, whose chunks are kept
        per_sequence: Int32,
        carriers: Int32,  # sequences that a boundary may cut
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch blocks for the value columns of each head."""
        config = self.config
        sequences = k.shape[0]
        if cu.shape[0] > 0:
            sequences = cu.shape[0] - 1
        blocks = cute.ceil_div(v.shape[3], config.warpgroups * COLUMNS)
        grid = sequences * v.shape[2] * blocks
        heads = k.shape[2]
        k, v, missing, missing_odd = [
            ragged(cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))) for t in (k, v, missing, missing_odd)
        ]
        tile = (CHUNK, COLUMNS)
        box = tile_layout(self.dtype, tile, 1, COLUMNS)
        tma_k, k = tma_load(k, box, tile)
        tma_v, v = tma_load(v, box, tile)
        tma_y = tma_load if const_expr(config.again) else tma_store
        tma_missing, missing = tma_y(missing, box, tile)
        tma_odd, missing_odd = tma_y(missing_odd, box, tile)
        self.kernel(
            k, v, prepared, state, last, resume, states, missing, missing_odd, lengths, cu, tma_k, tma_v, tma_missing, tma_odd,
            product(self.dtype, (64, CHUNK, 16), IN_REGISTERS, BY_K, BY_K),
            product(self.dtype, (64, config.width, 16), IN_REGISTERS, BY_K, BY_MN),
            tile_layout(self.dtype, (CHUNK, config.width), config.stages, COLUMNS),
            tile_layout(self.dtype, tile, config.stages * self.boxes, COLUMNS),
            tile_layout(self.dtype, tile, config.stages * config.warpgroups, COLUMNS),
            tile_layout(self.dtype, (CHUNK, CHUNK), 1 if config.again else config.stages, BOX),
            tile_layout(self.dtype, tile, config.warpgroups, COLUMNS),
            heads, size, begin, end, per_sequence, carriers,
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
        k: cute.Tensor,
        v: cute.Tensor,
        prepared: cute.Tensor,
        state: cute.Tensor,
        last: cute.Tensor,
        resume: cute.Tensor,
        states: cute.Tensor,
        missing: cute.Tensor,
        missing_odd: cute.Tensor,
        lengths: cute.Tensor,
        cu: cute.Tensor,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        tma_missing: cute.CopyAtom,
        tma_odd: cute.CopyAtom,
        mma: cute.TiledMma,
        mma_update: cute.TiledMma,
        layout_k: cute.ComposedLayout,
        layout_boxes: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_matrices: cute.ComposedLayout,
        layout_y: cute.ComposedLayout,
        heads: Int32,
        size: Int32,
        begin: Int32,
        end: Int32,
        per_sequence: Int32,
        carriers: Int32,
    ):
        config = self.config
        stages = config.stages
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_k, tma_v, tma_missing, tma_odd):
                cpasync.prefetch_descriptor(atom)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * stages]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            matrices: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_matrices)], 1024]
            kept: cute.struct.Align[cute.struct.MemRange[self.dtype, config.warpgroups * config.width * COLUMNS], 1024]
            y: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_y)], 1024]
            numbers: cute.struct.Align[cute.struct.MemRange[Float32, NUMBERS * stages], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        shared = KeepShared(
            full=barriers.take(stages),
            empty=barriers.take(stages),
            k=placed(storage.k, layout_k),
            boxes_k=placed(storage.k, layout_boxes),
            v=placed(storage.v, layout_v),
            v_start=storage.v.data_ptr(),
            matrices=placed(storage.matrices, layout_matrices),
            matrices_start=storage.matrices.data_ptr(),
            numbers=storage.numbers.data_ptr(),
            kept=storage.kept.data_ptr(),
            y=placed(storage.y, layout_y),
            y_start=storage.y.data_ptr(),
        )
        if const_expr(not config.again):
            self.clear(storage.matrices.data_ptr().toint(), 2 * cute.cosize(layout_matrices))
        if warp == LOADER:
            with cute.arch.elect_one():
                init_rings(stages, (shared.full, shared.empty, 4 * config.warpgroups))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Only then may the walk back start, which waits for no kernel before it begins: it writes what that one read.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        given = self.part(
            cute.arch.block_idx()[0], v.shape[2], heads, v.shape[1], v.shape[3] - 1, prepared.shape[0] // v.shape[2],
            lengths, cu, size, begin, end, per_sequence,
        )  # fmt: skip
        if warp < 4:
            if const_expr(config.warpgroups == 2):
                cute.arch.setmaxregister_decrease(24)
            if warp == LOADER:
                self.load(given, shared, k, v, prepared, missing, missing_odd, tma_k, tma_v, tma_missing, tma_odd)
        else:
            if const_expr(config.warpgroups == 2):
                cute.arch.setmaxregister_increase(240)
            if const_expr(config.again):
                self.play_again(given, shared, warp // 4 - 1, state, resume, states, begin, carriers, mma, mma_update)
            else:
                self.play(
                    given, shared, warp // 4 - 1, prepared, state, last, resume, states, missing, missing_odd, size, begin, end,
                    carriers, tma_missing, tma_odd, mma, mma_update,
                )  # fmt: skip

    @cute.jit
    def load(self, given, shared, k, v, prepared, missing, missing_odd, tma_k, tma_v, tma_missing, tma_odd):
        """k, v and what was prepared of each chunk, zeros for tokens that do not count."""
        config = self.config
        tile = (CHUNK, COLUMNS)
        of = given.batch, given.start, given.live
        gk = cute.local_tile(rows_of(k, given.head_qk, *of), tile, (None, None))
        gv = cute.local_tile(rows_of(v, given.head, *of), tile, (None, None))
        load_k, load_v = tma_views(tma_k, shared.boxes_k, gk), tma_views(tma_v, shared.v, gv)
        which, head = place_of_y(given.head, given.heads, missing)
        if const_expr(config.again):
            gy, gy_odd = (cute.local_tile(rows_of(t, head, *of), tile, (None, None)) for t in (missing, missing_odd))
            load_y, load_odd = tma_views(tma_missing, shared.v, gy), tma_views(tma_odd, shared.v, gy_odd)
        stage, phase = Int32(0), Int32(1)
        for n in cutlass.range(given.low, given.high, unroll=1):
            cute.arch.mbarrier_wait(shared.empty + stage, phase)
            expect(shared.full + stage, config.stage_bytes)
            for box in cutlass.range_constexpr(self.boxes):
                load_tile(load_k, (n, box), stage * self.boxes + box, shared.full, stage)
            for w in cutlass.range_constexpr(config.warpgroups):
                at, to = (n, given.block + w), stage * config.warpgroups + w
                if const_expr(not config.again):
                    load_tile(load_v, at, to, shared.full, stage)
                elif which == 0:
                    load_tile(load_y, at, to, shared.full, stage)
                else:
                    load_tile(load_odd, at, to, shared.full, stage)
            with cute.arch.elect_one():
                item = prepared.iterator + item_of(given, n) * BACK_ITEM
                if const_expr(not config.again):
                    self.load_matrix(shared.matrices_start + stage * (CHUNK * CHUNK), item, shared.full + stage)
                bulk_load(shared.numbers + stage * NUMBERS, item + 2 * MATRIX, 4 * NUMBERS, shared.full + stage)
            stage, phase = advance(stage, phase, config.stages)
