"""The FP8 forward kernel: as `HopperForward`, with e4m3 operands of both products.

Here: the launch, shared memory and which warp does what. The loader is in ``fp8_producer``, softmax and sums in two levels are
in ``fp8_consumers``, the order of keys is in ``fp8_base``; scheduler, tiles and merging are those of 16-bit calls.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.attention.hopper.forward import COLUMN_REGISTERS, LOADER, MASKS, REGISTERS, SCHEDULER
from warploom.attention.hopper.forward_base import MASK_STAGES, TILE_WORDS, ForwardShared
from warploom.attention.hopper.forward_merge import Merge
from warploom.attention.hopper.fp8_base import E4M3, QUAD, Scales, halved, quads, ragged_quads
from warploom.attention.hopper.fp8_consumers import Fp8Consumers
from warploom.attention.hopper.fp8_producer import Fp8Producer
from warploom.kernels.cute.basics import WARP
from warploom.kernels.cute.columns import columns_of
from warploom.kernels.cute.rings import Mbarriers, init_rings
from warploom.kernels.cute.softmax import multipliers
from warploom.kernels.cute.tiles import placed, tile_layout, tma_load
from warploom.kernels.cute.wgmma import IN_REGISTERS, IN_SHARED, product_e4m3


class Fp8Forward(Fp8Producer, Fp8Consumers, Merge):
    """softmax(scale · q kᵀ + band) v of e4m3 numbers for one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bytes, as k and v: (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim_v), keys contiguous; of packed calls blocks of 128 of a sequence
        out: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32, or packed (heads_q, total_q)
        scale_q: cute.Tensor,  # fp32 (batch, blocks, heads_q), or packed (blocks, heads_q)
        scale_k: cute.Tensor,
        scale_v: cute.Tensor,
        sink: cute.Tensor | None,  # (heads_q,) fp32
        cu_q: cute.Tensor | None,  # (sequences + 1,) int32, of packed calls
        cu_k: cute.Tensor | None,
        used_k: cute.Tensor | None,  # (sequences,) int32
        counter: cute.Tensor | None,  # (1,) int32, 0: tiles handed out in a packed call, or under a column mask
        parts: cute.Tensor | None,  # fp32 workspace of 2 · blocks pieces where ``split`` > 0, else any
        mask: tuple[Any, ...] | None,  # lts, lte, uts, ute, bounds and which of them there are, as ``columns_of`` has it
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        pair_heads: Int32,
        split: Int32,
        blocks: Int32,
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch ``blocks`` persistent blocks."""
        config = self.config
        q, k, v = [cute.make_tensor(cute.recast_ptr(t.iterator, dtype=E4M3), t.layout) for t in (q, k, v)]
        # (seqlen, head_dim, heads, batch), of V (head_dim, seqlen, heads, batch): a tile is the first two modes.
        modes = [0, 2, 1] if const_expr(config.varlen) else [1, 3, 2, 0]
        modes_v = [2, 0, 1] if const_expr(config.varlen) else [3, 1, 2, 0]
        q, k = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes)) for t in (q, k)]
        v = cute.make_tensor(v.iterator, cute.select(v.layout, mode=modes_v))
        total_k, heads_kv = k.shape[0], k.shape[2]
        k = ragged_quads(k) if const_expr(config.varlen) else quads(k)
        box, box_v = config.boxes
        layout_q = tile_layout(E4M3, (64, config.head_dim), self.warpgroups, box)
        layout_k = tile_layout(E4M3, (self.tile_n, config.head_dim), self.stages, box)
        layout_v = tile_layout(E4M3, (config.head_dim_v, self.tile_n), self.stages, box_v)
        loads_k = halved(config, layout_k, self.stages)
        tma_q, q = tma_load(q, layout_q, (64, config.head_dim))
        tma_v, v = tma_load(v, layout_v, (config.head_dim_v, self.tile_n))
        tma_k, k = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), k, cute.select(loads_k, mode=[0, 1, 2]), (2, self.tile_n // QUAD, box)
        )
        qk = product_e4m3((64, self.tile_n, 32), IN_SHARED)
        pv = product_e4m3((64, self.pv_columns, 32), IN_REGISTERS)
        multiplier, cap_in = multipliers(config, scale, softcap)
        members = (out.shape[1] if const_expr(config.varlen) else out.shape[2]) // heads_kv
        self.kernel(
            q, k, v, out, lse, scale_q, scale_k, scale_v, sink, cu_q, cu_k, used_k, counter, parts, mask, tma_q, tma_k, tma_v,
            qk, pv, layout_q, layout_k, loads_k, layout_v, multiplier, cap_in, left, right, total_k, heads_kv, members,
            pair_heads, split,
        ).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip
        if const_expr(config.split):
            self.launch_merge(parts, out, lse, sink, total_k, heads_kv, lse.shape[1], split, blocks, stream)

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        scale_q: cute.Tensor,
        scale_k: cute.Tensor,
        scale_v: cute.Tensor,
        sink: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        used_k: cute.Tensor | None,
        counter: cute.Tensor | None,
        parts: cute.Tensor | None,
        mask: tuple[Any, ...] | None,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        loads_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        multiplier: Float32,
        cap_in: Float32,
        left: Int32,
        right: Int32,
        total_k: Int32,
        heads_kv: Int32,
        members: Int32,
        pair_heads: Int32,
        split: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)
        stages, warpgroups, tile_stages = self.stages, self.warpgroups, self.tile_stages
        mask_stages = MASK_STAGES if const_expr(self.config.columns) else 0
        mask_words = mask_stages * self.tile_m * 4
        cleared = stages if const_expr(self.config.columns) else 0
        wanted = int(self.claims_late)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[
                cutlass.Int64, 2 * warpgroups + 4 * stages + cleared + 2 * tile_stages + wanted + 2 * mask_stages
            ]
            tiles: cute.struct.Align[cute.struct.MemRange[Int32, tile_stages * TILE_WORDS], 16]
            masks: cute.struct.Align[cute.struct.MemRange[Int32, mask_words], 16]
            scratch: cute.struct.MemRange[Int32, 1]
            q: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(layout_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(layout_v)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        queries = placed(storage.q, layout_q)
        shared = ForwardShared(
            q_full=barriers.take(warpgroups),
            q_empty=barriers.take(warpgroups),
            k_full=barriers.take(stages),
            k_empty=barriers.take(stages),
            v_full=barriers.take(stages),
            v_landed=barriers.take(cleared),
            v_empty=barriers.take(stages),
            tile_full=barriers.take(tile_stages),
            tile_empty=barriers.take(tile_stages),
            tile_wanted=barriers.take(wanted),
            tiles=storage.tiles.get_tensor(cute.make_layout((TILE_WORDS, tile_stages))),
            mask_full=barriers.take(mask_stages),
            mask_empty=barriers.take(mask_stages),
            masks=storage.masks.data_ptr(),
            scratch=storage.scratch.data_ptr(),
            q=queries,
            loads_q=queries,
            k=placed(storage.k, layout_k),
            v=placed(storage.v, layout_v),
            alibi=None,
            drops=None,
        )
        consumers = 4 * warpgroups  # warps
        if warp == LOADER:
            with cute.arch.elect_one():
                init_rings(warpgroups, (shared.q_full, shared.q_empty, 4))
                init_rings(stages, (shared.k_full, shared.k_empty, consumers), (shared.v_full, shared.v_empty, consumers))
                makers = 2 if const_expr(self.config.columns) else 0
                init_rings(tile_stages, (shared.tile_full, shared.tile_empty, WARP * (consumers + 1 + makers)))
                for i in cutlass.range_constexpr(wanted):
                    cute.arch.mbarrier_init(shared.tile_wanted + i, 1)
                for i in cutlass.range_constexpr(cleared):
                    cute.arch.mbarrier_init(shared.v_landed + i, 1)
                for i in cutlass.range_constexpr(mask_stages):
                    cute.arch.mbarrier_init(shared.mask_full + i, WARP * makers)
                    cute.arch.mbarrier_init(shared.mask_empty + i, WARP * consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        tma_k = (tma_k, placed(storage.k, loads_k))
        scales = Scales(q=scale_q, k=scale_k, v=scale_v, members=members)
        k_shape = (total_k, self.config.head_dim, heads_kv)
        if const_expr(self.config.columns):
            columns = columns_of(mask)
            consumer_registers, producer_registers = COLUMN_REGISTERS[warpgroups]
            if warp < 4:
                cute.arch.setmaxregister_decrease(producer_registers)
                if warp == LOADER:
                    self.load_lists(q, k, v, lse, shared, tma_q, tma_k, tma_v)
                if warp == SCHEDULER:
                    self.schedule_lists(total_k, lse.shape, shared, columns, counter, left, right, pair_heads, split)
                if warp >= MASKS:
                    self.make_masks(warp - MASKS, k_shape, lse.shape, shared, columns, left, right)
            else:
                cute.arch.setmaxregister_increase(consumer_registers)
                self.compute_lists(out, lse, sink, 0, None, shared, mma_qk, mma_pv, multiplier, cap_in, scales)
        else:
            consumer_registers, producer_registers = REGISTERS[warpgroups]
            if warp < 4:
                cute.arch.setmaxregister_decrease(producer_registers)
                if warp == LOADER:
                    self.load_fp8(q, k, v, members, shared, tma_q, tma_k, tma_v)
                if warp == SCHEDULER:
                    if const_expr(self.config.varlen):
                        self.schedule_packed(total_k, lse.shape, shared, None, cu_q, cu_k, used_k, counter, left, right)
                    else:
                        self.schedule(total_k, lse.shape, lse.shape[1], shared, left, right, pair_heads, split)
            else:
                cute.arch.setmaxregister_increase(consumer_registers)
                sequences = 0 if const_expr(cu_q is None) else cu_q.shape[0] - 1  # type: ignore[union-attr]
                self.compute(
                    out, lse, sink, parts, k_shape, sequences, None, None, shared, mma_qk, mma_pv, multiplier, cap_in, left,
                    right, scales,
                )  # fmt: skip
