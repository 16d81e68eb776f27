"""The backward of head_dim 256: two blocks of a cluster, of 64 keys each, exchange dS; each adds half of dQ's columns.

L2 takes only so many fp32 adds a second. A block that has dS of 128 keys, its own 64 and the other block's, adds half of
what two blocks of 64 would; for that it keeps half of the columns of the other's K beside its own. Q and dO, which both
blocks read, arrive by multicast, half of the columns from each.

One warpgroup computes S, P and dV, the other dP, dS and dK; each a quarter of dQ. Scores are kept transposed, keys down and
queries across, so that P and dS go from registers into dV and dK. P passes to the other warpgroup by way of shared memory,
as fp16, whose eleven bits are more than dS keeps.

Here: the launch, shared memory and which warp does what.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.attention.hopper.backward import HopperBackward
from warploom.attention.hopper.backward_base import LOADER, SCHEDULER, WARPGROUPS, WRITERS
from warploom.attention.hopper.backward_pair_base import KEYS, PAIR, PARTS, VALUES, PairCall, PairShared
from warploom.attention.hopper.backward_pair_consumers import PairConsumers
from warploom.attention.hopper.backward_pair_producer import PairProducer
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.columns import columns_of
from warploom.kernels.cute.dropout import dropout_of
from warploom.kernels.cute.rings import Mbarriers, meet
from warploom.kernels.cute.tiles import placed, tile_layout, tma_load
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_REGISTERS, IN_SHARED, product


class PairBackward(PairProducer, PairConsumers, HopperBackward):
    """As ``HopperBackward``, for 64 queries by 64 keys of each of two blocks."""

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
        """As ``HopperBackward``; persistent clusters, unless lengths differ or, without a mask, blocks wait for others."""
        config = self.config
        tq, tk, tv, tdo = views
        dk, dv, sums, _, stats, counters = buffers
        heads_kv = tk.shape[2]
        layouts = self.layouts()
        half = tile_layout(self.dtype, (self.tile_m, self.half), 1, 64)  # of a tile of Q, dO or K: 64 rows all
        tile = (self.tile_m, self.half)
        tma_q, tq = tma_load(tq, half, tile, multicast=True)
        tma_do, tdo = tma_load(tdo, half, tile, multicast=True)
        tma_k, tk = tma_load(tk, half, tile)
        tma_v, tv = tma_load(tv, layouts[3], (self.tile_n, config.head_dim_v))
        *_, pairs, batch = sizes
        clusters = pairs * heads_kv * batch
        if const_expr(config.persistent):
            clusters = cutlass.min(cutlass.max(order[0] // PAIR, 1), clusters)
        self.kernel(
            tq, tk, tv, tdo, dk, dv, sums, stats, counters, tma_q, tma_k, tma_v, tma_do, *self.products(),
            *layouts, *sizes, *columns, added[0], *band,
        ).launch(
            grid=[PAIR * clusters, 1, 1],
            block=[WARPGROUP * (WARPGROUPS + 1), 1, 1],
            cluster=[PAIR, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def products(self) -> tuple[Any, ...]:
        """Sᵀ and dPᵀ, dV or dK, a quarter of dQ."""
        scores = product(self.dtype, (64, self.tile_m, 16), IN_SHARED, BY_K, BY_K)
        gradient = product(self.dtype, (64, self.config.head_dim, 16), IN_REGISTERS, BY_K, BY_MN)
        return scores, gradient, product(self.dtype, (64, self.half // WARPGROUPS, 16), IN_SHARED, BY_K, BY_MN)

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
        stats: cute.Tensor,
        counters: cute.Tensor | None,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        tma_do: cute.CopyAtom,
        mma_scores: cute.TiledMma,
        mma_gradient: cute.TiledMma,
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
        pairs: Int32,
        batches: Int32,
        lts: cute.Tensor | None,
        lte: cute.Tensor | None,
        uts: cute.Tensor | None,
        ute: cute.Tensor | None,
        bounds: cute.Tensor | None,
        present: Int32 | None,
        offsets: cute.Tensor | None,
        dropout: tuple[Any, ...] | None,
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        section: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        drops = dropout_of(dropout)
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_v, tma_do):
                cpasync.prefetch_descriptor(atom)
        stages, dout_stages, tile_m, words_count = self.stages, self.dout_stages, self.tile_m, self.words_count
        half = tile_layout(self.dtype, (tile_m, self.half), 1, 64)
        halves = tile_layout(self.dtype, (tile_m, self.half), 2, 64)
        halves_q = tile_layout(self.dtype, (tile_m, self.half), 2 * stages, 64)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * (stages + dout_stages) + 8]
            index: cute.struct.Align[cute.struct.MemRange[Int32, words_count], 16]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, stages * 2 * tile_m], 128]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_do)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            other: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(half)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_ds)], 1024]
            p: cute.struct.Align[cute.struct.MemRange[Int32, tile_m * self.tile_n // 2], 128]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, self.quarter // PARTS[0] + self.quarter // PARTS[1]], 128]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        start = storage.barriers.data_ptr()
        barriers = Mbarriers(start + 2 * (stages + dout_stages))
        shared = PairShared(
            **self.shared_rings(storage, Mbarriers(start), (layout_q, layout_do, layout_k, layout_v, layout_ds)),
            k_full=barriers.take(),
            v_full=barriers.take(),
            came=barriers.take(),
            taken=barriers.take(),
            k_empty=barriers.take(),
            v_empty=barriers.take(),
            block_full=barriers.take(),
            block_empty=barriers.take(),
            index=storage.index.data_ptr(),
            p=storage.p.data_ptr(),
            seed=storage.index.data_ptr() + 2,
            other=placed(storage.other, half),
            halves_q=placed(storage.q, halves_q),
            halves_do=placed(storage.dout, halves),
            halves_k=placed(storage.k, halves),
            words=storage.index.get_tensor(cute.make_layout(words_count)),
            k_start=storage.k.data_ptr(),
            v_start=storage.v.data_ptr(),
            q_start=storage.q.data_ptr(),
            do_start=storage.dout.data_ptr(),
            other_start=storage.other.data_ptr(),
        )
        self.store_seed(warp, shared, drops)
        self.init_barriers(warp, shared)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        given = PairCall(
            shared=shared,
            q_shape=q.shape,
            k_shape=k.shape,
            cu_q=cu_q,
            cu_k=cu_k,
            used=used,
            seqlen_q=seqlen_q,
            m_blocks=m_blocks,
            n_blocks=pairs,
            slices=k.shape[2] * batches,
            section=section,
            left=left,
            right=right,
            columns=columns_of((lts, lte, uts, ute, bounds, present, offsets)),
            dropout=drops,
            slopes=None,
            distances=None,
            near=None,
            rank=rank,
        )
        loads = (q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do)
        self.play_blocks(warp, given, loads, dk, dv, sums, counters, (mma_scores, mma_gradient, mma_queries), scale, softcap)
        meet(PAIR)  # the other block may still come to this one's barriers

    @cute.jit
    def init_barriers(self, warp, shared):
        """The barriers in shared memory, which all threads of both blocks see afterwards."""
        if warp == LOADER:
            with cute.arch.elect_one():
                self.init_both(shared, PAIR * 4 * WARPGROUPS)
                for barrier in (shared.k_full, shared.v_full, shared.came):
                    cute.arch.mbarrier_init(barrier, 1)
                cute.arch.mbarrier_init(shared.k_empty, 4 * WARPGROUPS)
                cute.arch.mbarrier_init(shared.v_empty, 4)
                cute.arch.mbarrier_init(shared.block_full, 1)
                cute.arch.mbarrier_init(shared.block_empty, PAIR * 32 * (1 + len(WRITERS) + 4 * WARPGROUPS))  # lanes
                cute.arch.mbarrier_init(shared.taken, 4 * (WARPGROUPS + 1))
            cute.arch.mbarrier_init_fence()
        meet(PAIR)

    @cute.jit
    def play_blocks(self, warp, given, loads, dk, dv, sums, counters, products, scale, softcap):
        """A warp's role in all pairs of its cluster."""
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == LOADER:
                self.load_blocks(given, *loads)
            for i in cutlass.range_constexpr(WARPGROUPS):
                if warp == WRITERS[i]:
                    self.write_blocks(given, sums, counters, i)
            if const_expr(self.config.persistent):  # noqa: SIM102
                if warp == SCHEDULER and given.rank == 0:
                    self.hand_out(given, counters)
            if const_expr(self.config.varlen):  # noqa: SIM102
                if warp == SCHEDULER:
                    work = self.share_of(given, self.next_pair(given, Int32(0)), Int32(0), Int32(0))
                    self.clear_hidden(work, dk, dv)
        else:
            values, keys = self.registers_each
            if const_expr(values == keys):
                cute.arch.setmaxregister_increase(values)
            if warp < 8:
                if const_expr(values != keys):
                    cute.arch.setmaxregister_increase(values)
                self.play(VALUES, given, dv, products, scale, softcap)
            else:
                if const_expr(values != keys):
                    cute.arch.setmaxregister_increase(keys)
                self.play(KEYS, given, dk, products, scale, softcap)
