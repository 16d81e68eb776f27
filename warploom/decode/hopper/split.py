"""The kernel: blocks read a sequence's keys and values once, for all query heads that share them.

One warp of a block asks for tiles of K and V by TMA, as far ahead as its ring reaches; the others multiply with mma.sync, 16
rows each, of which there are too few for wgmma. Warps with the same rows share a tile's keys, with a maximum and a sum
each. A sequence is cut into splits by its own length alone (Flash-Decoding), tile after tile in turn. Where sequences and
heads are few, a cluster's blocks have a split each, and read one another's parts through distributed shared memory; where
they are many, a block has all splits. Both put warps and splits together in the same order with the same instructions, so
it changes no bit which of them runs.

Here: the launches, shared memory and which warp does what. The warps are in ``producer`` and ``consumers``, what becomes of
parts in ``results``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.decode.hopper.base import Call, Place, Shared
from warploom.decode.hopper.consumers import Consumers
from warploom.decode.hopper.producer import Loads, Producer
from warploom.kernels.cute.rings import Mbarriers
from warploom.kernels.cute.softmax import multipliers
from warploom.kernels.cute.tiles import placed, tile_layout, tma_load


class HopperDecode(Producer, Consumers):
    """softmax(scale · q kᵀ + band) v for one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, queries, heads_q, head_dim)
        k: cute.Tensor,  # (batch, capacity, heads_kv, head_dim), or pages (pages, page_size, heads_kv, head_dim)
        v: cute.Tensor,
        out: cute.Tensor,  # (batch, queries, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, queries) fp32
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
        cluster: Int32,  # blocks that share a sequence
        blocks: Int32,  # at once, where each has sequences alone
        stream: Any,
    ):
        """Launch a block or a cluster for every key head and sequence."""
        config = self.config
        k, v = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (k, v)]
        layout = tile_layout(self.dtype, (config.box, self.dim), self.tile_n // config.box, 64)
        tma_k, k = tma_load(k, layout, (config.box, self.dim))
        tma_v, v = tma_load(v, layout, (config.box, self.dim))
        multiplier, cap_in = multipliers(config, scale, softcap)
        batch, heads_q, queries = lse.shape
        heads_kv = k.shape[2]
        row_blocks = cute.ceil_div(queries * (heads_q // heads_kv), config.rows)
        tensors = (q, k, v, out, lse, lengths, table, sink, tma_k, tma_v)
        numbers = (multiplier, cap_in, left, right, capacity, page_shift, least, row_blocks)
        shape = {"block": [self.threads, 1, 1], "stream": stream, "use_pdl": True, "min_blocks_per_mp": 1}
        for size in config.clusters:
            ring = tile_layout(self.dtype, (config.box, self.dim), config.slots(size) * (self.tile_n // config.box), 64)
            if size == cluster:
                if const_expr(size == 1):
                    grid = [cutlass.min(blocks, heads_kv * row_blocks * batch), 1, 1]
                    self.kernel(*tensors, ring, *numbers, size).launch(grid=grid, **shape)
                else:
                    self.kernel(*tensors, ring, *numbers, size).launch(
                        grid=[size * heads_kv * row_blocks, batch, 1], cluster=[size, 1, 1], **shape
                    )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
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
        row_blocks: Int32,
        cluster: cutlass.Constexpr,
    ):
        config, slots = self.config, self.config.slots(cluster)
        exchanged, kept = config.exchanged_floats, config.merged_floats(cluster)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * slots]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, exchanged], 128]
            merged: cute.struct.Align[cute.struct.MemRange[Float32, kept], 128]
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        shared = Shared(
            full=barriers.take(slots),
            empty=barriers.take(slots),
            ring=placed(storage.ring, layout),
            start=storage.ring.data_ptr(),
            exchange=storage.exchange.data_ptr(),
            merged=storage.merged.data_ptr(),
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

        heads_q, queries = lse.shape[1], lse.shape[2]
        group = heads_q // k.shape[2]
        call = Call(
            q=q, out=out, lse=lse, lengths=lengths, table=table, sink=sink, multiplier=multiplier, cap_in=cap_in,
            left=left, right=right, capacity=capacity, page_shift=page_shift, pages=k.shape[3], least=least,
            queries=queries, heads_q=heads_q, group=group, members=queries * group, cluster=cluster, slots=slots,
        )  # fmt: skip
        loads = Loads(k=k, v=v, tma_k=tma_k, tma_v=tma_v)
        x, batch, _ = cute.arch.block_idx()
        across = k.shape[2] * row_blocks
        if const_expr(cluster > 1):
            place = self.place(x // cluster, batch, row_blocks, x % cluster)
            if warp == config.warps:
                self.produce(call, place, shared, loads, Int32(0), Int32(1))
            else:
                self.consume(call, place, shared, warp, Int32(0), Int32(0))
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            self.merge_cluster(call, place, shared, warp)
            # Others may still read this block's parts.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            total = across * lse.shape[0]
            slot, phase = Int32(0), Int32(0)
            for index in cutlass.range(x, total, cute.arch.grid_dim()[0], unroll=1):
                batch = index // across
                place = self.place(index - batch * across, batch, row_blocks, Int32(0))
                if warp == config.warps:
                    slot, phase = self.produce(call, place, shared, loads, slot, phase ^ 1)
                    phase ^= 1
                else:
                    slot, phase = self.consume(call, place, shared, warp, slot, phase)

    def place(self, x: Any, batch: Any, row_blocks: Any, rank: Any) -> Place:
        """What a block works on: ``x`` counts blocks of rows, and key heads."""
        head = x // row_blocks
        return Place(head=head, batch=batch, base=(x - head * row_blocks) * self.config.rows, rank=rank)
