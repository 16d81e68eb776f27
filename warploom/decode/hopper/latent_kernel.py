"""The kernel of latent caches, whose values are the first columns of their keys: a block reads a tile once for both products.

A block has 64 rows, queries × heads, of which wgmma needs as many, or 16 where `latent_few` turns the products around. A warp
asks for tiles of 64 keys by TMA, in pieces of 64 columns; two warpgroups multiply (`latent_consumers`). There is room for Q and
two tiles, and a piece is asked for again as soon as nobody needs it. How a sequence is cut depends on its own length alone, and
how its splits are put together on nothing (`latent_results`).

Here: the launches, shared memory and which warp does what.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.decode.hopper.latent_base import LEVELS, RADIX_LOG, Call, Shared
from warploom.decode.hopper.latent_config import FEW_ROWS, HALF, HEAD_DIM, HEAD_DIM_V, PIECE, PIECES, ROWS, THREADS, TILE
from warploom.decode.hopper.latent_consumers import LatentConsumers
from warploom.decode.hopper.latent_merge import COLUMN_THREADS, LatentMerge
from warploom.decode.hopper.latent_producer import LatentProducer, Loads
from warploom.decode.hopper.latent_results import Outputs
from warploom.kernels.cute.basics import LOG2_E, WARP, WARPGROUP
from warploom.kernels.cute.rings import Mbarriers, meet
from warploom.kernels.cute.tiles import placed, tile_layout, tma_load
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_REGISTERS, IN_SHARED, product

SLOTS = 2
SLOT = HEAD_DIM * TILE  # elements
LOADER = THREADS // WARP  # the first warp behind those that compute
# Of a thread that computes, and of one of the warpgroup of the loader: what there is at the start is shared out anew.
REGISTERS, LOADER_REGISTERS = 232, 40


class HopperLatent(LatentProducer, LatentConsumers, LatentMerge):
    """softmax(scale · q kᵀ + band) v for one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, rows, 576): a row for each head of each query
        k: cute.Tensor,  # (batch, capacity, 1, 576), or pages (pages, page_size, 1, 576)
        out: cute.Tensor,  # (batch, rows, 512)
        lse: cute.Tensor,  # (batch, heads, queries) fp32
        lengths: cute.Tensor,  # (batch,) int32
        table: cute.Tensor | None,  # (batch, pages of a sequence) int32
        parts: cute.Tensor,  # fp32, of every block 64 rows of 512 where several share a sequence
        stats: cute.Tensor,  # fp32, and four numbers of each
        kept: cute.Tensor,  # fp32, what ``blocks`` keep of their splits
        scale: Float32,
        left: Int32,
        right: Int32,
        capacity: Int32,
        page_shift: Int32,
        least: Int32,
        most_log: Int32,
        blocks_log: Int32,
        parts_log: Int32,
        levels: Int32,
        blocks: Int32,
        stream: Any,
    ):
        """Launch up to ``blocks`` blocks, and where several share a sequence those that put their parts together."""
        config = self.config
        q = cute.make_tensor(q.iterator, cute.select(q.layout, mode=[1, 2, 0]))
        k = cute.make_tensor(k.iterator, cute.select(k.layout, mode=[1, 3, 2, 0]))
        layout_q = tile_layout(self.dtype, (self.rows, HEAD_DIM), 1, PIECE)
        layout_k = tile_layout(self.dtype, (TILE, HEAD_DIM), SLOTS, PIECE)
        loads = tile_layout(self.dtype, (config.box, PIECE), SLOTS * PIECES * config.boxes, PIECE)
        q_loads = tile_layout(self.dtype, (self.rows, PIECE), PIECES, PIECE)
        tma_q, q = tma_load(q, q_loads, (self.rows, PIECE))
        tma_k, k = tma_load(k, loads, (config.box, PIECE), config.pair)
        scores, own, other = self.products()
        batch, rows = out.shape[0], out.shape[1]
        row_blocks = cute.ceil_div(rows, self.rows)
        items = batch * row_blocks << blocks_log
        numbers = (left, right, capacity, page_shift, least, most_log, blocks_log, parts_log, levels)
        self.kernel(
            q, k, out, lse, lengths, table, parts, stats, kept, tma_q, tma_k, scores, own, other, layout_q, layout_k, loads,
            q_loads, scale * LOG2_E, *numbers, items,
        ).launch(
            grid=[cutlass.min(items, blocks), 1, 1], block=[THREADS + WARPGROUP, 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=1, cluster=[config.cluster, 1, 1],
        )  # fmt: skip
        if blocks_log > 0:
            tensors = (out, lse, lengths, parts, stats, kept)
            for groups in (1, self.groups()):
                if (parts_log > RADIX_LOG) == (groups > 1):
                    self.merge_kernel(*tensors, *numbers, groups).launch(
                        grid=[batch * self.shares(groups), rows, 1],
                        block=[groups * COLUMN_THREADS // self.shares(groups), 1, 1], stream=stream, use_pdl=True,
                    )  # fmt: skip

    def products(self) -> tuple[Any, Any, Any]:
        """Of scores, and of values with a P of the warpgroup's own and of the other one's."""
        scores = product(self.dtype, (ROWS, TILE, 16), IN_SHARED, BY_K, BY_K)
        own = product(self.dtype, (ROWS, HALF, 16), IN_REGISTERS, BY_K, BY_MN)
        return scores, own, product(self.dtype, (ROWS, HALF, 16), IN_SHARED, BY_K, BY_MN)

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        lengths: cute.Tensor,
        table: cute.Tensor | None,
        parts: cute.Tensor,
        stats: cute.Tensor,
        kept: cute.Tensor,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        scores: cute.TiledMma,
        own: cute.TiledMma,
        other: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        loads: cute.ComposedLayout,
        q_loads: cute.ComposedLayout,
        multiplier: Float32,
        left: Int32,
        right: Int32,
        capacity: Int32,
        page_shift: Int32,
        least: Int32,
        most_log: Int32,
        blocks_log: Int32,
        parts_log: Int32,
        levels: Int32,
        items: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 + SLOTS * (PIECES + 2)]
            references: cute.struct.Align[cute.struct.MemRange[Float32, SLOTS * ROWS], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 4 * ROWS], 16]
            totals: cute.struct.Align[cute.struct.MemRange[Float32, 4 * LEVELS * ROWS], 16]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, ROWS * HEAD_DIM], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        keys = placed(storage.k, layout_k)
        # The same memory as (column, key, slot) of the values, and the last piece of each tile as (row, key, slot) of P.
        values = cute.make_layout(((64, HEAD_DIM_V // 64), (8, 8), SLOTS), stride=((1, 64 * TILE), (64, 512), SLOT))
        weights = cute.make_layout(((8, 8), (64, 1), SLOTS), stride=((64, 512), (1, 0), SLOT))
        queries = placed(storage.q, layout_q)
        p = cute.make_tensor(keys.iterator + (PIECES - 1) * PIECE * TILE, weights)
        if const_expr(self.config.few):  # behind the rows of Q
            weights = cute.make_layout(((8, FEW_ROWS // 8), (64, 1), SLOTS), stride=((64, 512), (1, 0), FEW_ROWS * TILE))
            p = cute.make_tensor(queries.iterator + FEW_ROWS * HEAD_DIM, weights)
        spare = storage.q.data_ptr() + FEW_ROWS * HEAD_DIM
        shared = Shared(
            q_full=barriers.take(),
            q_empty=barriers.take(),
            full=barriers.take(SLOTS * PIECES),
            empty=barriers.take(SLOTS * 2),
            q=queries,
            k=keys,
            v=cute.make_tensor(keys.iterator, values),
            p=p,
            weights=spare,
            exchange=cute.recast_ptr(spare + SLOTS * FEW_ROWS * TILE, dtype=Float32),
            loads=placed(storage.k, loads),
            q_loads=placed(storage.q, q_loads),
            start=storage.k.data_ptr(),
            references=storage.references.get_tensor(cute.make_layout(SLOTS * ROWS)),
            sums=storage.sums.get_tensor(cute.make_layout((ROWS, 2, 2))),
            totals=storage.totals.get_tensor(cute.make_layout((ROWS, 2, LEVELS, 2))),
        )
        if warp == LOADER:
            for atom in (tma_q, tma_k):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(shared.q_full, 1)
                cute.arch.mbarrier_init(shared.q_empty, LOADER)
                for i in cutlass.range_constexpr(SLOTS * PIECES):
                    cute.arch.mbarrier_init(shared.full + i, 1)
                for i in cutlass.range_constexpr(SLOTS * 2):
                    cute.arch.mbarrier_init(shared.empty + i, 4 * self.config.cluster)
            cute.arch.mbarrier_init_fence()
        meet(self.config.cluster)
        # Queries, lengths and the newest keys are what the kernel before wrote; the next one may wait for its turn from now on.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        pages = k.shape[3]
        cuts = (least, most_log, blocks_log, parts_log)
        call = self.call(out, lse, lengths, table, left, right, capacity, page_shift, pages, *cuts)
        if warp >= LOADER:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            self.produce(warp - LOADER, call, shared, Loads(q=q, k=k, tma_q=tma_q, tma_k=tma_k), items)
        else:
            cute.arch.setmaxregister_increase(REGISTERS)
            outputs = Outputs(out=out, lse=lse, parts=parts, stats=stats, kept=kept, levels=levels)
            self.consume(warp // (LOADER // 2), call, outputs, shared, (scores, own, other), multiplier, items)
        if const_expr(self.config.pair):
            meet(2)  # the other block may still send and tell this one something

    @cute.kernel
    def merge_kernel(
        self,
        out: cute.Tensor,
        lse: cute.Tensor,
        lengths: cute.Tensor,
        parts: cute.Tensor,
        stats: cute.Tensor,
        kept: cute.Tensor,
        left: Int32,
        right: Int32,
        capacity: Int32,
        page_shift: Int32,
        least: Int32,
        most_log: Int32,
        blocks_log: Int32,
        parts_log: Int32,
        levels: Int32,
        groups: cutlass.Constexpr,
    ):
        call = self.call(out, lse, lengths, None, left, right, capacity, page_shift, 0, least, most_log, blocks_log, parts_log)
        self.merge(call, Outputs(out=out, lse=lse, parts=parts, stats=stats, kept=kept, levels=levels), groups)

    def call(self, out: Any, lse: Any, lengths: Any, table: Any, left: Any, right: Any, capacity: Any, *rest: Any) -> Call:
        """What all blocks work on."""
        page_shift, pages, least, most_log, blocks_log, parts_log = rest
        heads, queries, rows = lse.shape[1], lse.shape[2], out.shape[1]
        row_blocks = 1 if const_expr(self.config.few) else cute.ceil_div(rows, self.rows)
        return Call(
            lengths=lengths, table=table, left=left, right=right, capacity=capacity, page_shift=page_shift, pages=pages,
            queries=queries, heads=heads, rows=rows, row_blocks=row_blocks, least=least, most_log=most_log,
            blocks_log=blocks_log, parts_log=parts_log,
        )  # fmt: skip
