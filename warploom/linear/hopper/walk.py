"""A walk of causal linear attention: out_i = scale * sum over j <= i of (a_i . b_j) c_j, in reverse j >= i.

The output and each gradient are such a sum. A block walks one head's tokens in chunks of 64. One warpgroup, or each of two,
keeps the state, transposed, 64 columns of c by all of b, as accumulators: rounded in registers they are the left factor of what
a chunk takes from the chunks before. Another computes the chunk's own products, one chunk ahead. Blocks of a head that form a
cluster load a and b for each other.

Here: the launch, shared memory and which warp does what. The loader is in ``walk_producer``, the warpgroups in
``walk_consumers``, what the loader's neighbours sum, weigh and find in ``walk_sums`` and ``walk_logs``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.kernels.cute.basics import WARP, WARPGROUP
from warploom.kernels.cute.rings import Mbarriers, init_rings, meet
from warploom.kernels.cute.tiles import placed, tile_layout, tma_load, tma_store
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_REGISTERS, IN_SHARED, product
from warploom.linear.hopper.config import COLUMNS
from warploom.linear.hopper.walk_base import WalkPart, WalkShared
from warploom.linear.hopper.walk_consumers import Consumers
from warploom.linear.hopper.walk_logs import FINDER, Logs
from warploom.linear.hopper.walk_producer import Producer
from warploom.linear.hopper.walk_sums import Sums

# Registers of those that keep the state, of scores and of the loader, by the number of the former.
REGISTERS = {1: (256, 152, 96), 2: (184, 104, 40)}
# Of two where they leave terms: nobody beside the loader finds gradients there.
TWO_WITH_TERMS = 192, 104, 24
LOADER = 0


class Walk(Producer, Consumers, Sums, Logs):
    """The kernel of one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (batch, seqlen, heads, head_dim)
        b: cute.Tensor,
        c: cute.Tensor,  # (batch, seqlen, heads, head_dim_v)
        out: cute.Tensor,
        # (batch, heads, seqlen) fp32: of rows of c in reverse, else of rows of out; sums of segments' logs; of a_head (heads,).
        weights: cute.Tensor | None,
        bias: cute.Tensor | None,  # (batch, heads, seqlen) fp32: taken from all products with row j of b
        states: cute.Tensor | None,  # (batch, heads, segments, head_dim_v, head_dim) fp32, of the tile: segments' own
        fades: cute.Tensor | None,  # (batch, heads, segments) fp32: sums of a segment's logs, in log2
        logs: cute.Tensor | None,  # (batch, seqlen, heads) fp32, to sum, or whose gradient is to be found
        x: cute.Tensor | None,  # as out, which is its gradient: see ``walk_terms``, as of the two behind it
        dots: cute.Tensor | None,  # (parts, and of pairs where not in reverse one a block, batch, heads, seqlen) fp32
        totals: cute.Tensor | None,  # (parts, batch, heads, chunks) fp32
        dots_k: cute.Tensor | None,  # to find the logs' gradient: the same of the walk of keys, those above being of queries
        totals_k: cute.Tensor | None,
        found: cute.Tensor | None,  # (batch, seqlen, heads) fp32: the gradient
        scale: Float32,
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch the blocks of each head."""
        config = self.config
        a, b, c, out = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (a, b, c, out)]
        tile = (config.chunk, COLUMNS)
        box = tile_layout(self.dtype, tile, 1, COLUMNS)
        layout_ab = tile_layout(self.dtype, (config.chunk, config.head_dim), config.stages, COLUMNS)
        tma_a, a = tma_load(a, box, tile, multicast=config.cluster > 1)
        tma_b, b = tma_load(b, box, tile, multicast=config.cluster > 1)
        tma_c, c = tma_load(c, box, tile)
        tma_x = None
        if const_expr(config.terms):
            assert x is not None
            x = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))
            tma_x, x = tma_load(x, box, tile)
        tma_out = None
        if const_expr(not config.wide):
            tma_out, out = tma_store(out, box, tile)
        scores = product(self.dtype, (64, config.chunk, 16), IN_SHARED, BY_K, BY_K)
        inter = product(self.dtype, (64, config.chunk, 16), IN_REGISTERS, BY_K, BY_K)
        intra = product(self.dtype, (64, config.chunk, 16), IN_SHARED, BY_MN, BY_K)
        source, major = (IN_REGISTERS, BY_K) if const_expr(config.weighs_rows) else (IN_SHARED, BY_MN)
        update = product(self.dtype, (64, config.head_dim, 16), source, major, BY_MN)
        self.kernel(
            a, b, c, out, weights, bias, states, fades, logs, x, dots, totals, dots_k, totals_k, found, tma_a,
            tma_b, tma_c, tma_x, tma_out, scores, inter, intra, update,
            layout_ab, tile_layout(self.dtype, tile, config.stages * self.boxes, COLUMNS),
            tile_layout(self.dtype, tile, config.c_stages * config.groups, COLUMNS), box,
            tile_layout(self.dtype, tile, config.groups, COLUMNS), scale,
        ).launch(
            grid=[config.blocks * out.shape[2] * out.shape[3] * self.segments(states), 1, 1],
            block=[(2 + config.groups) * WARPGROUP, 1, 1],
            cluster=[config.cluster, 1, 1],
            stream=stream,
            use_pdl=config.early,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.jit
    def init_barriers(self, warp, shared):
        """The barriers in shared memory, which all threads of the cluster see afterwards."""
        if warp == LOADER:
            with cute.arch.elect_one():
                groups = self.config.groups
                readers = 4 * (1 + groups)  # warps
                own = WARP if const_expr(self.config.fading) else 1  # of a warp; of other blocks' one
                ring_a = shared.a_full, shared.a_empty, readers * (own + self.config.in_step - 1)
                ring_b = shared.b_full, shared.b_empty, readers * self.config.cluster
                if const_expr(self.config.fading):  # each lane of the warp that sums fills stages of a too
                    init_rings(self.config.stages, ring_a, loads=1 + WARP)
                    init_rings(self.config.stages, ring_b)
                else:
                    init_rings(self.config.stages, ring_a, ring_b)
                init_rings(self.config.c_stages, (shared.c_full, shared.c_empty, 4 * (groups + self.config.meets)))
                if const_expr(self.config.terms):
                    for i in range(self.config.stages):
                        cute.arch.mbarrier_init(shared.x_full + i, 1)
            cute.arch.mbarrier_init_fence()
        meet(self.config.in_step)

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        out: cute.Tensor,
        weights: cute.Tensor | None,
        bias: cute.Tensor | None,
        states: cute.Tensor | None,
        fades: cute.Tensor | None,
        logs: cute.Tensor | None,
        x: cute.Tensor | None,
        dots: cute.Tensor | None,
        totals: cute.Tensor | None,
        dots_k: cute.Tensor | None,
        totals_k: cute.Tensor | None,
        found: cute.Tensor | None,
        tma_a: cute.CopyAtom,
        tma_b: cute.CopyAtom,
        tma_c: cute.CopyAtom,
        tma_x: cute.CopyAtom | None,
        tma_out: cute.CopyAtom | None,
        mma_scores: cute.TiledMma,
        mma_inter: cute.TiledMma,
        mma_intra: cute.TiledMma,
        mma_update: cute.TiledMma,
        layout_ab: cute.ComposedLayout,
        layout_boxes: cute.ComposedLayout,
        layout_c: cute.ComposedLayout,
        layout_p: cute.ComposedLayout,
        layout_out: cute.ComposedLayout,
        scale: Float32,
    ):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_a, tma_b, tma_c, *(() if const_expr(config.wide) else (tma_out,))):
                cpasync.prefetch_descriptor(atom)
            if const_expr(config.terms):
                cpasync.prefetch_descriptor(tma_x)

        shared = self.share(layout_ab, layout_boxes, layout_c, layout_p, layout_out)
        self.init_barriers(warp, shared)
        self.begin_early()
        self.play(
            warp, cute.arch.block_idx()[0], shared, (a, b, c, out, x), (tma_a, tma_b, tma_c, tma_x, tma_out),
            (mma_scores, mma_inter, mma_intra, mma_update), weights, bias, states, fades, (dots, totals),
            (logs, (dots, totals), (dots_k, totals_k), found), scale,
        )  # fmt: skip
        meet(config.in_step)  # other blocks may still come to this one's barriers
        if const_expr(config.early and not config.first):
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def begin_early(self):
        """Let the next kernel begin, once what this one needs is there."""
        if const_expr(self.config.early and self.config.first):
            cute.arch.griddepcontrol_wait()
        if const_expr(self.config.early):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def share(self, layout_ab, layout_boxes, layout_c, layout_p, layout_out):
        """Lay out shared memory."""
        config = self.config
        stages = config.stages

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, (5 if config.terms else 4) * stages + 2 * config.c_stages]
            logs: cute.struct.Align[cute.struct.MemRange[Float32, max(config.logs, 1)], 16]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_ab)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_ab)], 1024]
            c: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_c)], 1024]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_p)], 1024]
            out: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_out)], 1024]

        allocator = cutlass.utils.SmemAllocator()
        storage = allocator.allocate(Storage)
        boxes_x, x_start, x_whole, c_whole, sums = None, None, None, None, None
        if const_expr(config.terms):
            columns = tile_layout(self.dtype, (config.chunk, config.groups * COLUMNS), stages, COLUMNS)  # a block's own

            @cute.struct
            class More:
                x: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(columns)], 1024]
                sums: cute.struct.Align[cute.struct.MemRange[Float32, config.sums], 16]

            more = allocator.allocate(More)
            boxes_x, x_whole, c_whole = placed(more.x, layout_c), placed(more.x, columns), placed(storage.c, columns)
            x_start, sums = more.x.data_ptr(), more.sums.data_ptr().toint()
        barriers = Mbarriers(storage.barriers.data_ptr())
        return WalkShared(
            a_full=barriers.take(stages),
            a_empty=barriers.take(stages),
            b_full=barriers.take(stages),
            b_empty=barriers.take(stages),
            c_full=barriers.take(config.c_stages),
            c_empty=barriers.take(config.c_stages),
            a=placed(storage.a, layout_ab),
            b=placed(storage.b, layout_ab),
            boxes_a=placed(storage.a, layout_boxes),
            boxes_b=placed(storage.b, layout_boxes),
            c_start=storage.c.data_ptr(),
            c=placed(storage.c, layout_c),
            p=placed(storage.p, layout_p),
            p_start=storage.p.data_ptr(),
            out=placed(storage.out, layout_out),
            out_start=storage.out.data_ptr(),
            x_full=barriers.take(stages) if config.terms else None,
            boxes_x=boxes_x,
            x_start=x_start,
            x=x_whole,
            c_whole=c_whole,
            sums=sums,
            logs=storage.logs.data_ptr().toint(),
        )

    @cute.jit
    def play(self, warp, index, shared, tensors, atoms, products, weights, bias, states, fades, terms, logs, scale):
        """The part of block ``index``, by each warp its own."""
        config = self.config
        a, b, c, out, x = tensors
        tma_a, tma_b, tma_c, tma_x, tma_out = atoms
        slice_ = index // config.blocks
        heads, chunks = out.shape[2], cute.ceil_div(out.shape[0], config.chunk)
        first, segment = Int32(0), Int32(0)
        if const_expr(config.cut):
            segments = self.segments(states)
            segment = slice_ % segments
            slice_ = slice_ // segments
            each = cute.ceil_div(chunks, segments)
            first = segment * each
            chunks = cutlass.max(cutlass.min(each, chunks - first), 0)
        rank = Int32(0)
        if const_expr(config.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        given = WalkPart(
            shared=shared,
            block=index % config.blocks * config.groups,
            head=slice_ % heads,
            batch=slice_ // heads,
            rank=rank,
            chunks=chunks,
            first=first,
            segment=segment,
        )
        registers = TWO_WITH_TERMS if const_expr(config.terms and config.groups == 2) else REGISTERS[config.groups]
        state_registers, score_registers, loader_registers = registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(loader_registers)
            if warp == LOADER:
                self.load(given, a, b, c, x, tma_a, tma_b, tma_c, tma_x)
            elif warp < FINDER:
                if const_expr(config.fading):
                    self.sum_logs(given, logs[0], weights)
            elif const_expr(config.finds):
                self.find_logs(given, warp - FINDER, *logs, scale)
        elif warp < 4 + 4 * config.groups:
            cute.arch.setmaxregister_increase(state_registers)
            self.play_state(given, warp // 4 - 1, out, tma_out, products[1:], weights, bias, states, fades, terms, scale)
        else:
            cute.arch.setmaxregister_decrease(score_registers)
            self.play_scores(given, products[0], weights, bias, terms[0])
