"""The backward kernels: a block owns 128 keys of one key head and walks the queries of that head's whole group.

Scores are kept transposed, keys down and queries across, so that P and dS leave the accumulators of their GEMMs as the left
operands of dV += Pᵀ dO and dK += dSᵀ Q without passing through shared memory. Only dQ needs dS of both warpgroups, and sums
over key blocks: its tiles are added to an fp32 accumulator in global memory by TMA. A kernel before prepares the row
statistics and zeroes that accumulator, a kernel after rounds it (Shah et al., FlashAttention-3, arXiv 2407.08608).

Blocks may be persistent, one a processor: then a warp of the producer's asks for the next key block when all queries of this
one are on their way, and what that one reads first arrives while this one ends.

Here: the launch, shared memory and which warp does what. The kernels before and after are in ``backward_rows``, the warps in
``backward_producer`` and ``backward_consumers``, what all of them share in ``backward_base``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from warploom.attention.hopper.backward_base import LOADER, PACKED_WORDS, PRODUCER_REGISTERS, SCHEDULER, WARPGROUPS, WRITERS
from warploom.attention.hopper.backward_consumers import Consumers
from warploom.attention.hopper.backward_producer import Producer
from warploom.attention.hopper.backward_rows import ROW_THREADS, RowKernels
from warploom.attention.hopper.config import box_columns
from warploom.kernels.cute.basics import RAGGED, WARPGROUP, Names


class HopperBackward(RowKernels, Producer, Consumers):
    """dq, dk and dv of softmax(scale · q kᵀ + band) v for one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim_v)
        out: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        dout: cute.Tensor,  # as out
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32, or packed (heads_q, total_q)
        dlse: cute.Tensor | None,  # as lse
        dq: cute.Tensor,  # gradients: as their tensors
        dk: cute.Tensor,
        dv: cute.Tensor,
        sums: cute.Tensor,  # fp32, flat: what ``workspace`` says
        cu_q: cute.Tensor | None,  # (sequences + 1,) int32, of packed calls
        cu_k: cute.Tensor | None,
        used: cute.Tensor | None,  # (sequences,) int32: keys of a sequence that count
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        section: Int32,  # key heads whose blocks are in flight together; or how many sections there are
        blocks: Int32,  # persistent ones
        split: Int32,  # key blocks at the end of the call whose steps are dealt out,
        each: Int32,  # so many a share; or waves of a section
        stream: Any,
    ):
        """Count tiles and blocks, find room for the workspaces and launch the three kernels."""
        varlen = const_expr(self.config.varlen)
        batch, seqlen_q = Int32(1), Int32(0)
        if const_expr(varlen):
            # Tiles of a sequence are numbered from start // tile + its number, which leaves none of two sequences.
            heads_q, total_q = lse.shape
            sequences = cu_q.shape[0] - 1  # type: ignore[union-attr]
            m_blocks = total_q // self.tile_m + sequences
            n_blocks = k.shape[0] // self.span + sequences
        else:
            batch, heads_q, seqlen_q = lse.shape
            m_blocks = cute.ceil_div(seqlen_q, self.tile_m)
            n_blocks = cute.ceil_div(k.shape[1], self.span)
        rows = m_blocks * heads_q * batch
        stats, turns, partial = self.workspace(sums, dq, rows, split)
        cleared = (dk, dv, cu_k) if const_expr(varlen) else (None, None, None)
        self.before(out, dout, lse, dlse, sums, stats, turns, cu_q, *cleared, m_blocks).launch(
            grid=[rows, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream
        )  # fmt: skip
        # (seqlen, head_dim, heads, batch): a tile is the first two modes.
        modes = [0, 2, 1] if const_expr(varlen) else [1, 3, 2, 0]
        views = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes)) for t in (q, k, v, dout)]
        if const_expr(varlen):
            views = [self.ragged(t) for t in views]
        self.launch(
            views, (dk, dv, sums, partial, stats, turns), (cu_q, cu_k, used, seqlen_q, m_blocks, n_blocks, batch),
            (scale, softcap, left, right, section), heads_q, (blocks, split, each), stream,
        )  # fmt: skip
        # Query tiles before the first that a key sees: where the first block at a tile stores, none came to these.
        unseen = None
        if const_expr(self.config.claims):
            unseen = (cu_k, k.shape[0], right) if varlen else cutlass.max(seqlen_q - k.shape[1] - right, 0) // self.tile_m
        self.after(dq, sums, unseen, cu_q, m_blocks, scale).launch(
            grid=[rows, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream
        )  # fmt: skip

    def launch(
        self,
        views: list[Any],
        targets: tuple[Any, ...],
        sizes: tuple[Any, ...],
        band: tuple[Any, ...],
        heads_q: Any,
        order: tuple[Any, Any, Any],
        stream: Any,
    ) -> None:
        """Describe the TMA copies and launch the kernel of key blocks; the tuples are parameters of it that stand together."""
        config = self.config
        tq, tk, tv, tdo = views
        *_, m_blocks, n_blocks, batch = sizes
        blocks, split, each = order
        heads_kv = tk.shape[2]
        box_q, box_k, box_v, box_do = config.boxes
        layout_q = self.tile_layout((self.tile_m, config.head_dim), self.stages, box_q)
        layout_do = self.tile_layout((self.tile_m, config.head_dim_v), self.dout_stages, box_do)
        layout_k = self.tile_layout((self.tile_n, config.head_dim), 1, box_k)
        layout_v = self.tile_layout((self.tile_n, config.head_dim_v), 1, box_v)
        layout_ds = self.tile_layout((self.tile_m, self.tile_n), self.slots, box_columns(self.tile_n))
        tma_q, tq = self.tma(tq, layout_q, (self.tile_m, config.head_dim))
        tma_do, tdo = self.tma(tdo, layout_do, (self.tile_m, config.head_dim_v))
        tma_k, tk = self.tma(tk, layout_k, (self.tile_n, config.head_dim))
        tma_v, tv = self.tma(tv, layout_v, (self.tile_n, config.head_dim_v))
        products = self.products()
        total = n_blocks * heads_kv * batch
        items, deal = total, (total, Int32(0), Int32(1), Int32(1))
        if const_expr(config.parted):
            steps = heads_q // heads_kv * m_blocks
            items, deal = total - split + cute.ceil_div(split * steps, each), (total - split, split, each, steps)
        if const_expr(config.waves):
            deal = (total, Int32(0), each, Int32(1))
        self.kernel(
            tq, tk, tv, tdo, *targets, tma_q, tma_k, tma_v, tma_do, *products,
            layout_q, layout_do, layout_k, layout_v, layout_ds, *sizes, *band, items, *deal,
        ).launch(
            grid=[cutlass.min(blocks, items) if const_expr(config.persistent) else items, 1, 1],
            block=[WARPGROUP * (WARPGROUPS + 1), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.jit
    def workspace(self, sums, dq, rows, split):
        """What stands behind dQ / scale, (tiles, tile_m · head_dim) in accumulator order, or if nothing does in dq.

        fp32 (tiles, 2, tile_m) flat: lse in log2 units, rowsum(dO∘O) − dlse. And int32 (tiles, 2) flat: key blocks that have
        added to a part of dQ, or whether it is there (0: no, 1: on its way, 2: yes); where blocks are persistent one more, or
        only one: key blocks handed out; before it (split, 8), of the last key blocks, whose steps are shared out: steps in the
        sums of their warps. Those follow in dq: fp32 (split, (head_dim_v + head_dim) · 128), dV and dK / scale of pieces.
        """
        config, tiles = self.config, Int64(rows)
        address = dq.iterator.toint()
        behind = address + (4 * config.others(tiles, split) + 127) // 128 * 128
        if sums.shape[0] > config.sums(tiles):
            address = (sums.iterator + config.sums(tiles)).toint()
        count = config.stats(tiles)
        stats = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
        turns = cute.make_ptr(Int32, address + 4 * count, cute.AddressSpace.gmem, assumed_align=4)
        partial = cute.make_ptr(Float32, behind, cute.AddressSpace.gmem, assumed_align=16)
        counted = const_expr(config.states > 0 or config.persistent)
        return (
            cute.make_tensor(stats, cute.make_layout((count,))),
            cute.make_tensor(turns, cute.make_layout((config.turns(tiles, split),))) if counted else None,
            cute.make_tensor(partial, cute.make_layout((split * config.partial_floats,))),
        )

    def products(self) -> tuple[Any, ...]:
        """A warpgroup's share of S and dP, of dV, of dK and of dQ."""
        config = self.config
        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        by_k, by_mn = OperandMajorMode.K, OperandMajorMode.MN
        scores = self.mma((64, self.tile_m, 16), smem, by_k, by_k)
        values = self.mma((64, config.head_dim_v, 16), rmem, by_k, by_mn)
        keys = self.mma((64, config.head_dim, 16), rmem, by_k, by_mn)
        if const_expr(self.swapped):
            return scores, values, keys, self.mma((64, self.tile_m, 16), smem, by_mn, by_k)
        return scores, values, keys, self.mma((64, self.columns, 16), smem, by_k, by_mn)

    def mma(self, shape: tuple[int, int, int], source: Any, major_a: Any, major_b: Any) -> Any:
        return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, major_a, major_b))

    def tile_layout(self, tile: tuple[int, int], stages: int, box: int) -> Any:
        """Row-major tiles, one after the other, with a swizzle of ``box`` columns."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {64: kinds.K_SW128, 32: kinds.K_SW64, 16: kinds.K_SW32}[box]
        return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, self.dtype), (*tile, stages), order=(0, 1, 2))

    def ragged(self, t: Any) -> Any:
        """A packed tensor (tokens, head_dim, heads) as (RAGGED, head_dim, heads, end): tile row RAGGED - n + i of end e
        is token e - n + i, and rows of a sequence of n tokens that ends at e stop where it does.
        """
        layout = cute.make_layout((RAGGED, t.shape[1], t.shape[2], t.shape[0] + 1), stride=(*t.stride, t.stride[0]))
        return cute.make_tensor(cute.domain_offset((-RAGGED, 0, 0), t).iterator, layout)

    def tma(self, tensor: Any, layout: Any, tile: tuple[int, int]) -> Any:
        """The TMA load of one tile, and the tensor of its coordinates."""
        one_stage = cute.select(layout, mode=[0, 1])
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, one_stage, tile)

    # The kernel

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        sums: cute.Tensor,
        partial: cute.Tensor,
        stats: cute.Tensor,
        turns: cute.Tensor | None,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        tma_do: cute.CopyAtom,
        mma_scores: cute.TiledMma,
        mma_values: cute.TiledMma,
        mma_keys: cute.TiledMma,
        mma_queries: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        layout_do: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_ds: cute.ComposedLayout,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        used: cute.Tensor | None,
        seqlen_q: Int32,
        m_blocks: Int32,
        n_blocks: Int32,
        batches: Int32,
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        section: Int32,
        items: Int32,
        whole: Int32,
        split: Int32,
        each: Int32,
        steps: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_v, tma_do):
                cpasync.prefetch_descriptor(atom)
        stages, dout_stages, tile_m = self.stages, self.dout_stages, self.tile_m

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * (stages + dout_stages) + 6]
            words: cute.struct.Align[cute.struct.MemRange[Int32, 2 * PACKED_WORDS], 16]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, stages * 2 * tile_m], 128]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_do)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_ds)], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, WARPGROUPS * self.part], 128]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = storage.barriers.data_ptr()
        shared = Names(
            q_full=barriers,
            q_empty=barriers + stages,
            do_full=barriers + 2 * stages,
            do_empty=barriers + 2 * stages + dout_stages,
            k_full=barriers + 2 * (stages + dout_stages),
            v_full=barriers + 2 * (stages + dout_stages) + 1,
            k_empty=barriers + 2 * (stages + dout_stages) + 2,
            v_empty=barriers + 2 * (stages + dout_stages) + 3,
            block_full=barriers + 2 * (stages + dout_stages) + 4,
            block_empty=barriers + 2 * (stages + dout_stages) + 5,
            words=storage.words.get_tensor(cute.make_layout(2 * PACKED_WORDS)),
            stats=storage.stats.data_ptr(),
            ds_start=storage.ds.data_ptr(),
            k_start=storage.k.data_ptr(),
            v_start=storage.v.data_ptr(),
            dq=storage.dq.data_ptr(),
            q=storage.q.get_tensor(layout_q.outer, swizzle=layout_q.inner),
            dout=storage.dout.get_tensor(layout_do.outer, swizzle=layout_do.inner),
            k=storage.k.get_tensor(layout_k.outer, swizzle=layout_k.inner),
            v=storage.v.get_tensor(layout_v.outer, swizzle=layout_v.inner),
            ds=storage.ds.get_tensor(layout_ds.outer, swizzle=layout_ds.inner),
        )
        if warp == LOADER:
            with cute.arch.elect_one():
                self.init_rings(shared, 4 * WARPGROUPS)
                for barrier in (shared.k_full, shared.v_full, shared.block_full):
                    cute.arch.mbarrier_init(barrier, 1)
                if const_expr(self.config.persistent):
                    for barrier in (shared.k_empty, shared.v_empty):
                        cute.arch.mbarrier_init(barrier, 4 * WARPGROUPS)
                    cute.arch.mbarrier_init(shared.block_empty, 32 * (4 * WARPGROUPS + 1 + len(WRITERS)))  # lanes
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        given = Names(
            shared=shared,
            q_shape=q.shape,
            k_shape=k.shape,
            cu_q=cu_q,
            cu_k=cu_k,
            used=used,
            seqlen_q=seqlen_q,
            m_blocks=m_blocks,
            n_blocks=n_blocks,
            slices=k.shape[2] * batches,
            section=section,
            items=items,
            deal=(whole, split, each, steps),
            partial=partial,
            turns=turns,
            left=left,
            right=right,
        )
        products = (mma_scores, mma_values, mma_keys, mma_queries)
        if const_expr(self.config.persistent):
            if warp < 4:
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
                if warp == LOADER:
                    self.load_blocks(given, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do)
                for i in cutlass.range_constexpr(WARPGROUPS):
                    if warp == WRITERS[i]:
                        self.write_blocks(given, sums, turns, i)
                if warp == SCHEDULER:
                    if const_expr(self.config.parted):
                        self.deal_out(given, turns)
                    else:
                        self.hand_out(given, turns, dk, dv)
            else:
                self.compute_blocks(given, dk, dv, products, scale, softcap)
        else:
            work = self.describe(given, cute.arch.block_idx()[0])
            if warp < 4:
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
                if warp == LOADER:
                    self.load(work, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do)
                for i in cutlass.range_constexpr(WARPGROUPS):
                    if warp == WRITERS[i]:
                        self.write(work, sums, turns, i, left, right)
                if const_expr(self.config.varlen):  # noqa: SIM102
                    if warp == SCHEDULER:
                        self.clear_hidden(work, dk, dv)
            else:
                self.compute(work, dk, dv, products, scale, softcap, left, right)
