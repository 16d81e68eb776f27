"""The backward kernels: a block owns 128 keys of one key head and walks the queries of that head's whole group.

Scores are kept transposed, keys down and queries across, so that P and dS leave the accumulators of their GEMMs as the left
operands of dV += Pᵀ dO and dK += dSᵀ Q without passing through shared memory. Only dQ needs dS of both warpgroups, and sums
over key blocks: its tiles are added to an fp32 accumulator in global memory by TMA. A kernel before prepares the row
statistics and zeroes that accumulator, a kernel after rounds it (Shah et al., FlashAttention-3, arXiv 2407.08608). Under a
column mask blocks zero what blocks of later heads add to.

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
from cutlass.cute.nvgpu import cpasync

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward_base import (
    LOADER,
    ROW_THREADS,
    SCHEDULER,
    SEED_WORDS,
    WARPGROUPS,
    WRITERS,
    BackwardShared,
    Call,
)
from warploom.attention.hopper.backward_consumers import Consumers
from warploom.attention.hopper.backward_producer import Producer
from warploom.attention.hopper.backward_rows import RowKernels
from warploom.attention.hopper.config import box_columns
from warploom.kernels.cute.basics import LOG2_E, WARPGROUP
from warploom.kernels.cute.bias import slopes_of
from warploom.kernels.cute.columns import columns_of
from warploom.kernels.cute.distances import SPREAD_THREADS, distances_of
from warploom.kernels.cute.dropout import dropout_of
from warploom.kernels.cute.packed import ragged
from warploom.kernels.cute.rings import Mbarriers
from warploom.kernels.cute.tiles import tile_layout, tma_load
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_REGISTERS, IN_SHARED, product


class StepShared(BackwardShared):
    """Of blocks that work alone."""

    words: Any  # of the block that is handed out
    drop_full: Any  # a step's words of dropout are there, where they are drawn ahead
    k_start: Any  # addresses
    v_start: Any
    q_start: Any
    do_start: Any


class StepCall(Call):
    """Of blocks that work alone."""

    items: Any  # blocks and shares that are handed out
    # Whole blocks, split ones, steps of a share, steps of a block; the third may be waves, or key heads of a stretch.
    deal: Any
    partial: Any  # sums of blocks whose steps are shared out
    counters: Any


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
        lts: cute.Tensor | None,  # of a column mask, as ``Columns`` has it
        lte: cute.Tensor | None,
        uts: cute.Tensor | None,
        ute: cute.Tensor | None,
        bounds: cute.Tensor | None,
        present: Int32 | None,
        offsets: cute.Tensor | None,
        dropout: tuple[Any, ...] | None,  # as ``dropout_of`` has it
        bias: tuple[Any, ...] | None,  # as ``slopes_of`` or ``distances_of`` has it
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        section: Int32,  # key heads whose blocks are in flight together; or how many sections there are
        blocks: Int32,  # persistent ones
        split: Int32,  # key blocks at the end of the call whose steps are dealt out, or that may be cut;
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
        stats, counters, partial = self.workspace(sums, dq, rows, split)
        zeroed = (dk, dv, cu_k) if const_expr(varlen) else (None, None, None)
        looked_at = q if const_expr(self.config.columns or self.reads_distances) else None
        masked, cleared = None, None
        if const_expr(self.config.dealt):
            each = schedule.stretch(section, n_blocks, blocks)
            cleared = cutlass.min(each * (heads_q // k.shape[2]), heads_q * batch) * m_blocks
        if const_expr(self.config.dealt or self.config.ordered > 0):
            masked = (bounds, offsets, k, n_blocks, section, left, right, blocks, split)
        if const_expr(self.config.reaches):
            self.launch_measure(q, k, v, dout, bias, stream)
        if const_expr(self.reads_distances):
            table_heads = bias[0].shape[0]  # type: ignore[index]
            self.spread(bias, scale).launch(grid=[table_heads, 1, 1], block=[SPREAD_THREADS, 1, 1], stream=stream)
        self.before(
            out, dout, lse, dlse, sums, stats, counters, cu_q, *zeroed, looked_at, masked, bias, m_blocks, cleared,
            scale * LOG2_E if const_expr(self.row_statistics > 2) else None,
        ).launch(grid=[rows, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream)
        # (seqlen, head_dim, heads, batch): a tile is the first two modes.
        modes = [0, 2, 1] if const_expr(varlen) else [1, 3, 2, 0]
        views = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes)) for t in (q, k, v, dout)]
        if const_expr(varlen):
            views = [ragged(t) for t in views]
        self.launch(
            views, (dk, dv, sums, partial, stats, counters), (cu_q, cu_k, used, seqlen_q, m_blocks, n_blocks, batch),
            (lts, lte, uts, ute, bounds, present, offsets), (dropout, bias), (scale, softcap, left, right, section), heads_q,
            (blocks, split, each), stream,
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
        buffers: tuple[Any, ...],
        sizes: tuple[Any, ...],
        columns: tuple[Any, ...],
        added: tuple[Any, Any],
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
        layouts = self.layouts()
        layout_q, layout_do, layout_k, layout_v, _ = layouts
        tma_q, tq = tma_load(tq, layout_q, (self.tile_m, config.head_dim))
        tma_do, tdo = tma_load(tdo, layout_do, (self.tile_m, config.head_dim_v))
        tma_k, tk = tma_load(tk, layout_k, (self.tile_n, config.head_dim))
        tma_v, tv = tma_load(tv, layout_v, (self.tile_n, config.head_dim_v))
        products = self.products()
        total = n_blocks * heads_kv * batch
        items, deal = total, (total, Int32(0), Int32(1), Int32(1))
        if const_expr(config.stream_k):
            steps = heads_q // heads_kv * m_blocks
            items, deal = total - split + cute.ceil_div(split * steps, each), (total - split, split, each, steps)
        if const_expr(config.waves or config.dealt):
            deal = (total, Int32(0), each, Int32(1))
        grid = cutlass.min(blocks, items) if const_expr(config.persistent) else items
        if const_expr(config.dealt):
            grid = blocks  # there may be more pieces than blocks
        self.kernel(
            tq, tk, tv, tdo, *buffers, tma_q, tma_k, tma_v, tma_do, *products,
            *layouts, *sizes, *columns, *added, *band, items, *deal,
        ).launch(
            grid=[grid, 1, 1],
            block=[WARPGROUP * (WARPGROUPS + 1 + self.drawers), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.jit
    def workspace(self, sums, dq, rows, split):
        """What stands behind dQ / scale, (tiles, tile_m · head_dim) in accumulator order, or if nothing does in dq.

        fp32 (tiles, 2, tile_m) flat: lse in log2 units, rowsum(dO∘O) − dlse; or (tiles, 3, tile_m), last an lse of far keys.
        And int32 (tiles, 2) flat: key blocks that have added to a part of dQ, or whether it is there (0: no, 1: on its way, 2:
        yes); where blocks are persistent one more, or only one: key blocks handed out; before it (split, 8), of the last key
        blocks, whose steps are shared out: steps in the sums of their warps, and under a column mask the table of ``Dealer``.
        Sums follow in dq: fp32 (split, (head_dim_v + head_dim) · 128), dV and dK / scale of pieces.
        """
        config, tiles = self.config, Int64(rows)
        address = dq.iterator.toint()
        behind = address + (4 * config.others(tiles, split) + 127) // 128 * 128
        if sums.shape[0] > config.sums(tiles):
            address = (sums.iterator + config.sums(tiles)).toint()
        count = config.stats(tiles)
        stats = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
        counters = cute.make_ptr(Int32, address + 4 * count, cute.AddressSpace.gmem, assumed_align=4)
        partial = cute.make_ptr(Float32, behind, cute.AddressSpace.gmem, assumed_align=16)
        counted = const_expr(config.states > 0 or config.persistent or config.ordered > 0)
        return (
            cute.make_tensor(stats, cute.make_layout((count,))),
            cute.make_tensor(counters, cute.make_layout((config.counters(tiles, split),))) if counted else None,
            cute.make_tensor(partial, cute.make_layout((split * config.partial_floats,))),
        )

    def layouts(self) -> tuple[Any, Any, Any, Any, Any]:
        """Shared tiles of Q, dO, K, V and dS."""
        config, dtype = self.config, self.dtype
        box_q, box_k, box_v, box_do = config.boxes
        return (
            tile_layout(dtype, (self.tile_m, config.head_dim), self.stages, box_q),
            tile_layout(dtype, (self.tile_m, config.head_dim_v), self.dout_stages, box_do),
            tile_layout(dtype, (self.tile_n, config.head_dim), 1, box_k),
            tile_layout(dtype, (self.tile_n, config.head_dim_v), 1, box_v),
            tile_layout(dtype, (self.tile_m, self.tile_n), self.slots, box_columns(self.tile_n)),
        )

    def products(self) -> tuple[Any, ...]:
        """A warpgroup's share of S and dP, of dV, of dK and of dQ."""
        config = self.config
        scores = product(self.dtype, (64, self.tile_m, 16), IN_SHARED, BY_K, BY_K)
        values = product(self.dtype, (64, config.head_dim_v, 16), IN_REGISTERS, BY_K, BY_MN)
        keys = product(self.dtype, (64, config.head_dim, 16), IN_REGISTERS, BY_K, BY_MN)
        if const_expr(self.swapped):
            return scores, values, keys, product(self.dtype, (64, self.tile_m, 16), IN_SHARED, BY_MN, BY_K)
        return scores, values, keys, product(self.dtype, (64, self.columns, 16), IN_SHARED, BY_K, BY_MN)

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
        counters: cute.Tensor | None,
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
        lts: cute.Tensor | None,
        lte: cute.Tensor | None,
        uts: cute.Tensor | None,
        ute: cute.Tensor | None,
        bounds: cute.Tensor | None,
        present: Int32 | None,
        offsets: cute.Tensor | None,
        dropout: tuple[Any, ...] | None,
        bias: tuple[Any, ...] | None,
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
        drops = dropout_of(dropout)
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_v, tma_do):
                cpasync.prefetch_descriptor(atom)
        stages, dout_stages, tile_stats, words_count = self.stages, self.dout_stages, self.stage_statistics, self.words_count

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * (stages + dout_stages) + self.drop_stages + 6]
            words: cute.struct.Align[cute.struct.MemRange[Int32, words_count], 16]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, stages * tile_stats], 128]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_do)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_ds)], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, WARPGROUPS * self.part], 128]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        shared = StepShared(
            **self.shared_rings(storage, barriers, (layout_q, layout_do, layout_k, layout_v, layout_ds)),
            k_full=barriers.take(),
            v_full=barriers.take(),
            k_empty=barriers.take(),
            v_empty=barriers.take(),
            block_full=barriers.take(),
            block_empty=barriers.take(),
            words=storage.words.get_tensor(cute.make_layout(words_count)),
            k_start=storage.k.data_ptr(),
            v_start=storage.v.data_ptr(),
            q_start=storage.q.data_ptr(),
            do_start=storage.dout.data_ptr(),
            seed=storage.words.data_ptr() + (words_count - SEED_WORDS),
            drop_full=barriers.take(self.drop_stages),
        )
        self.store_seed(warp, shared, drops)
        self.init_barriers(warp, shared)

        given = StepCall(
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
            counters=counters,
            left=left,
            right=right,
            columns=columns_of((lts, lte, uts, ute, bounds, present, offsets)),
            dropout=drops,
            slopes=slopes_of(bias) if const_expr(self.biased) else None,
            distances=distances_of(bias) if const_expr(self.reads_distances) else None,
            near=(bias, scale * LOG2_E) if const_expr(self.config.reaches) else None,
        )
        loads = (q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do)
        products = (mma_scores, mma_values, mma_keys, mma_queries)
        if const_expr(self.config.persistent):
            self.play_blocks(warp, given, loads, dk, dv, sums, counters, products, scale, softcap)
        else:
            self.play_block(warp, given, loads, dk, dv, sums, counters, products, scale, softcap)

    @cute.jit
    def init_barriers(self, warp, shared):
        """The barriers in shared memory, which all threads see afterwards."""
        if warp == LOADER:
            with cute.arch.elect_one():
                self.init_both(shared, 4 * WARPGROUPS)
                for barrier in (shared.k_full, shared.v_full, shared.block_full):
                    cute.arch.mbarrier_init(barrier, 1)
                for i in cutlass.range_constexpr(self.drop_stages):
                    cute.arch.mbarrier_init(shared.drop_full + i, WARPGROUP)
                if const_expr(self.config.persistent):
                    for barrier in (shared.k_empty, shared.v_empty):
                        cute.arch.mbarrier_init(barrier, 4 * WARPGROUPS)
                    readers = 4 * (WARPGROUPS + self.drawers) + 1 + len(WRITERS)  # warps
                    cute.arch.mbarrier_init(shared.block_empty, 32 * readers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def play_blocks(self, warp, given, loads, dk, dv, sums, counters, products, scale, softcap):
        """A warp's role in a persistent block."""
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == LOADER:
                self.load_blocks(given, *loads)
            for i in cutlass.range_constexpr(WARPGROUPS):
                if warp == WRITERS[i]:
                    self.write_blocks(given, sums, counters, i)
            if warp == SCHEDULER:
                if const_expr(self.config.stream_k):
                    self.hand_out_stream_k(given, counters)
                else:
                    self.hand_out(given, counters, dk, dv)
        elif const_expr(self.drawers > 0):
            if warp >= 4 * (1 + WARPGROUPS):
                cute.arch.setmaxregister_decrease(self.drawer_registers)
                self.draw_blocks(given, warp % 4)
            else:
                self.compute_blocks(given, dk, dv, products, scale, softcap)
        else:
            self.compute_blocks(given, dk, dv, products, scale, softcap)

    @cute.jit
    def play_block(self, warp, given, loads, dk, dv, sums, counters, products, scale, softcap):
        """A warp's role in a block that works on one key block."""
        if const_expr(self.config.columns):
            if warp == SCHEDULER:
                self.hand_out_own(given, counters)
            work = self.read_block(given, self.next_block(given, Int32(0)), Int32(0), Int32(0))
        else:
            work = self.describe(given, cute.arch.block_idx()[0])
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == LOADER:
                self.load(work, *loads)
            for i in cutlass.range_constexpr(WARPGROUPS):
                if warp == WRITERS[i]:
                    self.write(work, sums, counters, i, given.left, given.right)
            if const_expr(self.config.varlen):  # noqa: SIM102
                if warp == SCHEDULER:
                    self.clear_hidden(work, dk, dv)
        else:
            self.compute(work, dk, dv, products, scale, softcap, given.left, given.right)
