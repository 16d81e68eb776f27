"""The kernel: blocks read a sequence's keys and values once, for all query heads that share them.

One warp of a block asks for tiles of K and V by TMA, as far ahead as its ring reaches; the others multiply with mma.sync, 16
rows each, of which there are too few for wgmma. Warps with the same rows share a tile's keys, with a maximum and a sum
each. A sequence is cut into splits by its own length alone (Flash-Decoding), tile after tile in turn. Where sequences and
heads are few, a cluster's blocks have a split each, and read one another's parts through distributed shared memory; where
they are many, a block has all splits. Both put warps and splits together in the same order with the same instructions, so
it changes no bit which of them runs.

Here: the launches, shared memory and which warp does what. The warps are in ``producer`` and ``consumers``, what becomes of
parts in ``results``; ``merge`` puts together what several clusters leave of a sequence.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.decode.hopper.base import Call, Shared
from warploom.decode.hopper.consumers import Consumers
from warploom.decode.hopper.merge import Merge
from warploom.decode.hopper.producer import Producer
from warploom.kernels.cute.rings import Mbarriers
from warploom.kernels.cute.softmax import multipliers
from warploom.kernels.cute.tiles import placed, tile_layout, tma_load


class HopperDecode(Producer, Consumers, Merge):
    """softmax(scale · q kᵀ + band) v for one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, queries, heads_q, head_dim)
        k: cute.Tensor,  # (batch, capacity, heads_kv, head_dim), or pages (pages, page_size, heads_kv, head_dim)
        v: cute.Tensor,
        out: cute.Tensor,  # (batch, queries, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, queries) fp32
        parts: cute.Tensor | None,  # fp32: (rows, groups, head_dim_v), then (rows, groups), of rows of lse
        lengths: cute.Tensor,  # (batch,) int32
        table: cute.Tensor | None,  # (batch, pages of a sequence) int32
        sink: cute.Tensor | None,  # (heads_q,) fp32
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        capacity: Int32,
        page_shift: Int32,
        least: Int32,  # tiles of a split
        groups: Int32,  # of splits: clusters that share a sequence
        alone: Int32,  # whether a block has a whole group of splits
        stream: Any,
    ):
        """Launch a block or a cluster for every key head and sequence."""
        config = self.config
        k, v = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (k, v)]
        layouts = [
            tile_layout(self.dtype, (config.box, self.dim), slots * (self.tile_n // config.box), 64)
            for slots in (config.slots, config.slots_alone)
        ]
        tma_k, k = tma_load(k, layouts[0], (config.box, self.dim))
        tma_v, v = tma_load(v, layouts[0], (config.box, self.dim))
        multiplier, cap_in = multipliers(config, scale, softcap)
        batch, heads_q, queries = lse.shape
        heads_kv = k.shape[2]
        row_blocks = cute.ceil_div(queries * (heads_q // heads_kv), config.rows)
        tensors = (q, k, v, out, lse, parts, lengths, table, sink, tma_k, tma_v)
        numbers = (multiplier, cap_in, left, right, capacity, page_shift, least, groups, row_blocks)
        shape = {"block": [self.threads, 1, 1], "stream": stream, "use_pdl": True}
        shape |= {"min_blocks_per_mp": config.blocks, "preferred_smem_carveout": 100}  # per cent
        if alone > 0:
            self.kernel(*tensors, layouts[1], *numbers, 1).launch(grid=[heads_kv * row_blocks, batch, groups], **shape)
        else:
            self.kernel(*tensors, layouts[0], *numbers, config.cluster).launch(
                grid=[config.cluster * heads_kv * row_blocks, batch, groups], cluster=[config.cluster, 1, 1], **shape
            )
        if const_expr(config.groups):
            self.launch_merge(out, lse, parts, lengths, sink, (left, right, capacity, least, groups), stream)

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        parts: cute.Tensor | None,
        lengths: cute.Tensor,
        table: cute.Tensor | None,
        sink: cute.Tensor | None,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        layout: cute.ComposedLayout,
        multiplier: Float32,
        cap_in: Float32,
        left: Int32,
        right: Int32,
        capacity: Int32,
        page_shift: Int32,
        least: Int32,
        groups: Int32,
        row_blocks: Int32,
        cluster: cutlass.Constexpr,
    ):
        config = self.config
        slots = config.slots if const_expr(cluster > 1) else config.slots_alone
        exchanged = self.row_groups * config.state_floats if const_expr(self.key_groups > 1) else 0
        own = config.part_floats if const_expr(cluster > 1) else self.row_groups * config.state_floats
        # A cluster's block merges its warps before it leaves its part.
        memory = cutlass.max(exchanged, own) if const_expr(cluster > 1) else exchanged + own
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * slots]
            merged: cute.struct.Align[cute.struct.MemRange[Float32, memory], 128]
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        merged = storage.merged.data_ptr()
        shared = Shared(
            full=barriers.take(slots),
            empty=barriers.take(slots),
            ring=placed(storage.ring, layout),
            start=storage.ring.data_ptr(),
            exchange=merged,
            merged=merged if const_expr(cluster > 1) else merged + exchanged,
        )
        if warp == config.warps:
            for atom in (tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(slots):
                    cute.arch.mbarrier_init(shared.full + i, 1)
                    cute.arch.mbarrier_init(shared.empty + i, config.warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Queries, lengths and the newest keys are what the kernel before wrote; the next one may wait for its turn from now on.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        x, batch, which = cute.arch.block_idx()
        rank = Int32(0)
        if const_expr(cluster > 1):
            rank = x % cluster
            x = x // cluster
        head = x // row_blocks
        heads_q, queries = lse.shape[1], lse.shape[2]
        group = heads_q // k.shape[2]
        call = Call(
            q=q, out=out, lse=lse, parts=parts, lengths=lengths, table=table, sink=sink, multiplier=multiplier, cap_in=cap_in,
            left=left, right=right, capacity=capacity, page_shift=page_shift, pages=k.shape[3], least=least, groups=groups, queries=queries,
            heads_q=heads_q, group=group, members=queries * group, head=head, batch=batch,
            base=(x - head * row_blocks) * config.rows, which=which, rank=rank, cluster=cluster,
        )  # fmt: skip
        if warp == config.warps:
            self.produce(call, shared, k, v, tma_k, tma_v, slots)
        else:
            self.consume(call, shared, warp, slots)
        if const_expr(cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            self.merge_cluster(call, shared, warp)
            # Others may still read this block's part.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
