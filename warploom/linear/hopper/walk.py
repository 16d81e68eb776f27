"""A walk of causal linear attention past head_dim 128: out_i = scale * sum over j <= i of (a_i . b_j) c_j, in reverse j >= i.

The output and each gradient are such a sum. A block has 64 columns of c and out of one head and walks its tokens in chunks of
64. One warpgroup keeps the state, transposed, 64 columns of c by all of b, as accumulators: rounded in registers they are the
left factor of what a chunk takes from the chunks before. Another computes the chunk's own products, one chunk ahead. Blocks of
a head that form a cluster load a and b for each other.

Here: the launch, shared memory and which warp does what. The loader is in ``walk_producer``, the warpgroups in
``walk_consumers``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from warploom.kernels.cute.basics import WARPGROUP, Names
from warploom.linear.hopper.config import C_STAGES, COLUMNS
from warploom.linear.hopper.walk_consumers import Consumers
from warploom.linear.hopper.walk_producer import Producer

STATE_REGISTERS, SCORE_REGISTERS, PRODUCER_REGISTERS = 256, 152, 96
LOADER = 0


class Walk(Producer, Consumers):
    """The kernel of one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (batch, seqlen, heads, head_dim)
        b: cute.Tensor,
        c: cute.Tensor,  # (batch, seqlen, heads, head_dim_v)
        out: cute.Tensor,
        weights: cute.Tensor | None,  # (batch, heads, seqlen) fp32: of rows of c in reverse, else of rows of out
        bias: cute.Tensor | None,  # (batch, heads, seqlen) fp32: taken from all products with row j of b
        scale: Float32,
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch a block for 64 columns of each head."""
        config = self.config
        a, b, c, out = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (a, b, c, out)]
        tile = (config.chunk, COLUMNS)
        box = self.tile_layout(tile, 1)
        layout_ab = self.tile_layout((config.chunk, config.head_dim), config.stages)
        shared_op = cpasync.CopyBulkTensorTileG2SOp()
        if const_expr(config.cluster > 1):
            shared_op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        one = cute.select(box, mode=[0, 1])
        tma_a, a = cpasync.make_tiled_tma_atom(shared_op, a, one, tile)
        tma_b, b = cpasync.make_tiled_tma_atom(shared_op, b, one, tile)
        tma_c, c = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), c, one, tile)
        tma_out = None
        if const_expr(not config.wide):
            tma_out, out = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, one, tile)
        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        by_k, by_mn = OperandMajorMode.K, OperandMajorMode.MN
        scores = self.mma((64, config.chunk, 16), smem, by_k, by_k)
        inter = self.mma((64, config.chunk, 16), rmem, by_k, by_k)
        intra = self.mma((64, config.chunk, 16), smem, by_mn, by_k)
        source, major = (rmem, by_k) if const_expr(config.weighs_rows) else (smem, by_mn)
        update = self.mma((64, config.head_dim, 16), source, major, by_mn)
        blocks = config.head_dim_v // COLUMNS
        self.kernel(
            a, b, c, out, weights, bias, tma_a, tma_b, tma_c, tma_out, scores, inter, intra, update,
            layout_ab, self.tile_layout(tile, config.stages * self.boxes), self.tile_layout(tile, C_STAGES), box, scale,
        ).launch(
            grid=[blocks * out.shape[2] * out.shape[3], 1, 1],
            block=[3 * WARPGROUP, 1, 1],
            cluster=[config.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def mma(self, shape: tuple[int, int, int], source: Any, major_a: Any, major_b: Any) -> Any:
        return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, major_a, major_b))

    def tile_layout(self, tile: tuple[int, int], stages: int) -> Any:
        """Row-major tiles, one after the other, swizzled."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        out: cute.Tensor,
        weights: cute.Tensor | None,
        bias: cute.Tensor | None,
        tma_a: cute.CopyAtom,
        tma_b: cute.CopyAtom,
        tma_c: cute.CopyAtom,
        tma_out: cute.CopyAtom | None,
        mma_scores: cute.TiledMma,
        mma_inter: cute.TiledMma,
        mma_intra: cute.TiledMma,
        mma_update: cute.TiledMma,
        layout_ab: cute.ComposedLayout,
        layout_boxes: cute.ComposedLayout,
        layout_c: cute.ComposedLayout,
        layout_p: cute.ComposedLayout,
        scale: Float32,
    ):
        config = self.config
        stages = config.stages
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_a, tma_b, tma_c, *(() if const_expr(config.wide) else (tma_out,))):
                cpasync.prefetch_descriptor(atom)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 4 * stages + 2 * C_STAGES]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_ab)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_ab)], 1024]
            c: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_c)], 1024]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_p)], 1024]
            out: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_p)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = storage.barriers.data_ptr()
        shared = Names(
            a_full=barriers,
            a_empty=barriers + stages,
            b_full=barriers + 2 * stages,
            b_empty=barriers + 3 * stages,
            c_full=barriers + 4 * stages,
            c_empty=barriers + 4 * stages + C_STAGES,
            a=storage.a.get_tensor(layout_ab.outer, swizzle=layout_ab.inner),
            b=storage.b.get_tensor(layout_ab.outer, swizzle=layout_ab.inner),
            boxes_a=storage.a.get_tensor(layout_boxes.outer, swizzle=layout_boxes.inner),
            boxes_b=storage.b.get_tensor(layout_boxes.outer, swizzle=layout_boxes.inner),
            c_start=storage.c.data_ptr(),
            c=storage.c.get_tensor(layout_c.outer, swizzle=layout_c.inner),
            p=storage.p.get_tensor(layout_p.outer, swizzle=layout_p.inner),
            p_start=storage.p.data_ptr(),
            out=storage.out.get_tensor(layout_p.outer, swizzle=layout_p.inner),
            out_start=storage.out.data_ptr(),
        )
        if warp == LOADER:
            with cute.arch.elect_one():
                readers = 8 * config.cluster  # warps
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(shared.a_full + i, 1)
                    cute.arch.mbarrier_init(shared.a_empty + i, readers)
                    cute.arch.mbarrier_init(shared.b_full + i, 1)
                    cute.arch.mbarrier_init(shared.b_empty + i, readers)
                for i in cutlass.range_constexpr(C_STAGES):
                    cute.arch.mbarrier_init(shared.c_full + i, 1)
                    cute.arch.mbarrier_init(shared.c_empty + i, 4)
            cute.arch.mbarrier_init_fence()
        self.meet()

        blocks = config.head_dim_v // COLUMNS
        index = cute.arch.block_idx()[0]
        slice_ = index // blocks
        heads = out.shape[2]
        rank = Int32(0)
        if const_expr(config.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        given = Names(
            shared=shared,
            block=index % blocks,
            head=slice_ % heads,
            batch=slice_ // heads,
            rank=rank,
            chunks=cute.ceil_div(out.shape[0], config.chunk),
        )
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == LOADER:
                self.load(given, a, b, c, tma_a, tma_b, tma_c)
        elif warp < 8:
            cute.arch.setmaxregister_increase(STATE_REGISTERS)
            self.play_state(given, out, tma_out, (mma_inter, mma_intra, mma_update), weights, bias, scale)
        else:
            cute.arch.setmaxregister_decrease(SCORE_REGISTERS)
            self.play_scores(given, mma_scores, weights, bias)
        self.meet()  # other blocks may still come to this one's barriers

    @cute.jit
    def meet(self):
        """All blocks of the cluster are here."""
        if const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
