"""The forward kernel: one producer warpgroup feeds K and V through TMA rings, consumer warpgroups own 64 query rows each.

A consumer issues the QKᵀ of the next key tile before the PV of the last one, so that its softmax runs under its own PV and
under the products of the others (Shah et al., FlashAttention-3, arXiv 2407.08608). Blocks are persistent: K, V and Q of the
next tile arrive while this one ends. A warp of the producer's decides which tile is next. O is rescaled only where a row's
maximum has grown by much: on this chip long calls are bound by power, and an instruction less is a faster clock.

Here: the launch, shared memory and which warp does what. The warps are in ``forward_producer`` and ``forward_consumers``, the
kernels that merge split tiles in ``forward_merge`` and ``forward_shares``, what all of them share in ``forward_base``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.attention.hopper.forward_apart import OwnConsumers
from warploom.attention.hopper.forward_base import MASK_STAGES, ForwardShared
from warploom.attention.hopper.forward_columns import ColumnProducer
from warploom.attention.hopper.forward_pages import PagedProducer
from warploom.attention.hopper.forward_shares import PagedScheduler
from warploom.kernels.cute.basics import WARP
from warploom.kernels.cute.columns import columns_of
from warploom.kernels.cute.distances import SPREAD_THREADS
from warploom.kernels.cute.packed import page_rows, ragged
from warploom.kernels.cute.rings import Mbarriers, init_rings
from warploom.kernels.cute.softmax import multipliers
from warploom.kernels.cute.tiles import placed, tile_layout, tma_load
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_REGISTERS, IN_SHARED, product

# Registers a thread (consumer, producer): a warpgroup's share of 64 Ki, in steps of 8, by number of consumers.
REGISTERS = {1: (256, 56), 2: (240, 24), 3: (160, 32), 4: (112, 32)}
# Over pages, where the scheduler finds how to share out key tiles.
PAGED_REGISTERS = {2: (232, 40), 3: (160, 32)}
# Under a column mask, whose bits two warps of the producer make.
COLUMN_REGISTERS = {2: (224, 56), 3: (160, 32)}
# Warps of the producer warpgroup; under a column mask those from MASKS on make masks.
LOADER, SCHEDULER, MASKS = 0, 1, 2


class HopperForward(PagedProducer, PagedScheduler, ColumnProducer, OwnConsumers):
    """softmax(scale · q kᵀ + band) v for one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim), or pages (pages, page_size, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim_v)
        out: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32, or packed (heads_q, total_q)
        sink: cute.Tensor | None,  # (heads_q,) fp32
        cu_q: cute.Tensor | None,  # (sequences + 1,) int32, of packed calls
        cu_k: cute.Tensor | None,
        used_k: cute.Tensor | None,  # (sequences,) int32
        counter: cute.Tensor | None,  # (1,) int32, 0: tiles handed out in a packed call, or under a column mask
        parts: cute.Tensor | None,  # fp32 workspace of 2 · blocks pieces, over pages one more, where ``split`` > 0, else any
        mask: tuple[Any, ...] | None,  # lts, lte, uts, ute, bounds and which of them there are, as ``columns_of`` has it
        dropout: tuple[Any, ...] | None,  # as ``dropout_of`` has it
        bias: tuple[Any, ...] | None,  # as ``slopes_of`` or ``distances_of`` has it
        largest: cute.Tensor | None,  # (batch or sequences, heads_q) fp32, contiguous: raised to the largest logits
        table: cute.Tensor | None,  # (sequences, pages of one) int32, of a call over pages
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        pair_heads: Int32,  # under a column mask the heads of a section
        split: Int32,  # tiles; under a column mask the ``last`` of ``masked_tile``
        blocks: Int32,
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch ``blocks`` persistent blocks."""
        config = self.config
        if const_expr(config.reaches):
            self.launch_measure(q, k, v, None, bias, stream)
        # (seqlen, head_dim, heads, batch): a tile is the first two modes.
        dense, packed = [1, 3, 2, 0], [0, 2, 1]
        modes = packed if const_expr(config.varlen) else dense
        q = cute.make_tensor(q.iterator, cute.select(q.layout, mode=modes))
        modes = dense if const_expr(config.paged) else modes
        k, v = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes)) for t in (k, v)]
        if const_expr(config.paged):
            k, v = page_rows(k), page_rows(v)
        elif const_expr(config.varlen):
            k, v = ragged(k), ragged(v)
        box, box_v = config.boxes
        # Where heads are grouped, load after load.
        order = (1, 0, 2) if const_expr(config.pack_gqa) else (0, 1, 2)
        layout_q = tile_layout(self.dtype, (64, config.head_dim), self.q_slots, box, order)
        loads_q = tile_layout(self.dtype, (self.load_rows, config.head_dim), self.q_slots * 64 // self.load_rows, box)
        layout_k = tile_layout(self.dtype, (self.tile_n, config.head_dim), self.stages, box)
        layout_v = tile_layout(self.dtype, (self.tile_n, config.head_dim_v), self.stages, box_v)
        tma_q, q = tma_load(q, loads_q, (self.load_rows, config.head_dim))
        if const_expr(config.paged):
            tma_k, k = self.page_load(k, box)
            tma_v, v = self.page_load(v, box_v)
        else:
            tma_k, k = tma_load(k, layout_k, (self.tile_n, config.head_dim))
            tma_v, v = tma_load(v, layout_v, (self.tile_n, config.head_dim_v))
        qk = product(self.dtype, (64, self.tile_n, 16), IN_SHARED, BY_K, BY_K)
        pv = product(self.dtype, (64, config.head_dim_v, 16), IN_REGISTERS, BY_K, BY_MN)
        multiplier, cap_in = multipliers(config, scale, softcap)
        if const_expr(self.reads_distances):
            table_heads = bias[0].shape[0]  # type: ignore[index]
            self.spread(bias, scale).launch(grid=[table_heads, 1, 1], block=[SPREAD_THREADS, 1, 1], stream=stream)
        heads = Int32(0)
        if const_expr(config.paged or not config.varlen):
            heads = self.tile_heads(lse.shape[0] if const_expr(config.paged) else lse.shape[1], k.shape[2])
        self.kernel(
            q, k, v, out, lse, sink, cu_q, cu_k, used_k, counter, parts, mask, dropout, bias, largest, table,
            tma_q, tma_k, tma_v, qk, pv,
            layout_q, loads_q, layout_k, layout_v, multiplier, cap_in, left, right, heads, pair_heads, split,
        ).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip
        if const_expr(config.split and config.paged):
            self.launch_merge_shares(parts, out, lse, sink, k.shape[2], split, blocks, stream)
        elif const_expr(config.split):
            self.launch_merge(parts, out, lse, sink, k.shape[0], k.shape[2], heads, split, blocks, stream)

    def page_load(self, pages: Any, columns: int) -> Any:
        """The TMA load of a box of so many columns from pages."""
        size = self.config.page_box, columns
        return tma_load(pages, tile_layout(self.dtype, size, 1, columns), size)

    # The kernel

    @cute.jit
    def init_barriers(self, warp, shared):
        """The barriers in shared memory, which all threads see afterwards."""
        consumers = 4 * self.warpgroups  # warps
        if warp == LOADER:
            with cute.arch.elect_one():
                init_rings(self.q_slots, (shared.q_full, shared.q_empty, 4))
                makers = 2 if const_expr(self.config.columns) else 0
                loaders = self.config.loaders
                init_rings(self.stages, (shared.k_full, shared.k_empty, consumers), loads=loaders)
                init_rings(self.stages, (shared.v_full, shared.v_empty, consumers), loads=loaders)
                readers = WARP * (consumers + loaders + makers)  # lanes
                init_rings(self.tile_stages, (shared.tile_full, shared.tile_empty, readers))
                if const_expr(self.claims_late):
                    cute.arch.mbarrier_init(shared.tile_wanted, 1)
                if const_expr(self.config.columns):
                    for i in cutlass.range_constexpr(self.stages):
                        cute.arch.mbarrier_init(shared.v_landed + i, 1)
                    for i in cutlass.range_constexpr(self.owners * MASK_STAGES):
                        cute.arch.mbarrier_init(shared.mask_full + i, WARP * makers)
                        cute.arch.mbarrier_init(shared.mask_empty + i, WARP * consumers // self.owners)
                if const_expr(self.config.paged and self.config.left):
                    cute.arch.mbarrier_init(shared.v_landed, loaders)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        used_k: cute.Tensor | None,
        counter: cute.Tensor | None,
        parts: cute.Tensor | None,
        mask: tuple[Any, ...] | None,
        dropout: tuple[Any, ...] | None,
        bias: tuple[Any, ...] | None,
        largest: cute.Tensor | None,
        table: cute.Tensor | None,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        loads_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        multiplier: Float32,
        cap_in: Float32,
        left: Int32,
        right: Int32,
        heads: Int32,
        pair_heads: Int32,
        split: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)

        stages, q_slots, tile_stages = self.stages, self.q_slots, self.tile_stages
        mask_stages = self.owners * MASK_STAGES if const_expr(self.config.columns) else 0
        mask_words = mask_stages * self.mask_rows * 4
        cleared = stages if const_expr(self.config.columns) else int(self.config.paged and self.config.left)
        wanted = int(self.claims_late)
        drops_words = 8 * self.tile_m * self.rounds if const_expr(self.config.dropout) else 0
        alibi_elements = self.tile_n * 16 if const_expr(self.multiplies) else 0

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[
                cutlass.Int64, 2 * q_slots + 4 * stages + cleared + 2 * tile_stages + wanted + 2 * mask_stages
            ]
            tiles: cute.struct.Align[cute.struct.MemRange[Int32, tile_stages * self.tile_words], 16]
            masks: cute.struct.Align[cute.struct.MemRange[Int32, mask_words], 16]
            scratch: cute.struct.MemRange[Int32, 1]
            drops: cute.struct.Align[cute.struct.MemRange[Int32, drops_words], 16]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            alibi: cute.struct.Align[cute.struct.MemRange[cutlass.BFloat16, alibi_elements], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        shared = ForwardShared(
            q_full=barriers.take(q_slots),
            q_empty=barriers.take(q_slots),
            k_full=barriers.take(stages),
            k_empty=barriers.take(stages),
            v_full=barriers.take(stages),
            v_landed=barriers.take(cleared),
            v_empty=barriers.take(stages),
            tile_full=barriers.take(tile_stages),
            tile_empty=barriers.take(tile_stages),
            tile_wanted=barriers.take(wanted),
            tiles=storage.tiles.get_tensor(cute.make_layout((self.tile_words, tile_stages))),
            mask_full=barriers.take(mask_stages),
            mask_empty=barriers.take(mask_stages),
            masks=storage.masks.data_ptr(),
            scratch=storage.scratch.data_ptr(),
            drops=storage.drops.data_ptr(),
            q=placed(storage.q, layout_q),
            loads_q=placed(storage.q, loads_q),
            k=placed(storage.k, layout_k),
            v=placed(storage.v, layout_v),
            alibi=self.alibi_columns(storage.alibi) if const_expr(self.multiplies) else None,
        )
        self.init_barriers(warp, shared)

        if const_expr(self.config.columns):
            self.play_lists(
                warp, q, k, v, out, lse, sink, cu_q, cu_k, used_k, counter, mask, dropout, shared, tma_q, tma_k, tma_v,
                mma_qk, mma_pv, multiplier, cap_in, left, right, pair_heads, split,
            )  # fmt: skip
        else:
            self.play_tiles(
                warp, q, k, v, out, lse, sink, cu_q, cu_k, used_k, counter, parts, dropout, bias, largest, table, shared,
                tma_q, tma_k, tma_v, mma_qk, mma_pv, multiplier, cap_in, left, right, heads, pair_heads, split,
            )  # fmt: skip

    @cute.jit
    def play_tiles(
        self, warp, q, k, v, out, lse, sink, cu_q, cu_k, used_k, counter, parts, dropout, bias, largest, table, shared,
        tma_q, tma_k, tma_v, mma_qk, mma_pv, multiplier, cap_in, left, right, heads, pair_heads, split,
    ):  # fmt: skip
        """What each warp does without a column mask."""
        consumer_registers, producer_registers = (PAGED_REGISTERS if self.config.paged else REGISTERS)[self.warpgroups]
        if warp < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if const_expr(self.config.paged):
                part = cute.arch.make_warp_uniform(cutlass.max(warp - 1, 0))  # the scheduler's is none
                if (warp != SCHEDULER) & (part < self.config.loaders):
                    self.load_pages(part, q, k, v, lse, shared, table, tma_q, tma_k, tma_v, left)
            elif warp == LOADER:
                self.load(q, k, v, lse, shared, tma_q, tma_k, tma_v)
            if warp == SCHEDULER:
                if const_expr(self.config.paged):
                    capacity = (k.shape[3] - 1) * table.shape[1]
                    self.schedule_pages(capacity, lse.shape[1], heads, shared, cu_q, used_k, counter, parts, left, right, split)
                elif const_expr(self.config.varlen):
                    total_k = k.shape[3] - 1
                    self.schedule_packed(total_k, lse.shape, shared, None, cu_q, cu_k, used_k, counter, left, right)
                else:
                    group = lse.shape[1] // k.shape[2]
                    self.schedule(
                        k.shape[0], lse.shape, heads, shared, left, right, pair_heads, split, bias, group, multiplier
                    )
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            sequences = 0 if const_expr(cu_q is None) else cu_q.shape[0] - 1
            self.compute(
                out, lse, sink, parts, k.shape, sequences, dropout, bias, shared, mma_qk, mma_pv, multiplier, cap_in,
                left, right, largest=largest,
            )  # fmt: skip

    @cute.jit
    def play_lists(
        self, warp, q, k, v, out, lse, sink, cu_q, cu_k, used_k, counter, mask, dropout, shared, tma_q, tma_k, tma_v,
        mma_qk, mma_pv, multiplier, cap_in, left, right, section, last,
    ):  # fmt: skip
        """What each warp does under a column mask."""
        columns = columns_of(mask)
        consumer_registers, producer_registers = COLUMN_REGISTERS[self.warpgroups]
        if warp < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == LOADER:
                self.load_lists(q, k, v, lse, shared, tma_q, tma_k, tma_v)
            if warp == SCHEDULER:
                if const_expr(self.config.varlen):
                    total_k = k.shape[3] - 1
                    self.schedule_packed(total_k, lse.shape, shared, columns, cu_q, cu_k, used_k, counter, left, right)
                else:
                    self.schedule_lists(k.shape[0], lse.shape, shared, columns, counter, left, right, section, last)
            if warp >= MASKS:
                self.make_masks(warp - MASKS, k.shape, lse.shape, shared, columns, left, right)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            sequences = 0 if const_expr(cu_q is None) else cu_q.shape[0] - 1
            if const_expr(self.owners > 1):
                self.compute_own_lists(out, lse, sink, sequences, dropout, shared, mma_qk, mma_pv, multiplier, cap_in)
            else:
                self.compute_lists(out, lse, sink, sequences, dropout, shared, mma_qk, mma_pv, multiplier, cap_in)
