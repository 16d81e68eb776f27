"""The split kernel: a block reads some of a sequence's keys and values once, for all query heads that share them.

One warp asks for tiles of K and V by TMA, as far ahead as its ring of stages reaches; the others multiply with mma.sync, 16
rows each, of which there are too few for wgmma. Warps with the same rows share a tile's keys, with a maximum and a sum
each, and are put together in a fixed order when the block's keys end. What a block leaves is a normalised part and its lse.

Here: the launch, shared memory, which keys a block has and which warp does what. The warps are in ``producer`` and
``consumers``, the kernel that puts parts together in ``merge``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from warploom.decode.hopper.config import DecodeConfig
from warploom.decode.hopper.consumers import Consumers
from warploom.decode.hopper.merge import Merge
from warploom.decode.hopper.producer import Producer
from warploom.kernels.cute.basics import DTYPES, WARP
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.rings import Mbarriers
from warploom.kernels.cute.softmax import multipliers
from warploom.kernels.cute.tiles import placed, tile_layout, tma_load


class Shared(Fields):
    """A block's shared memory. Barriers are addresses of the first of a ring's."""

    k_full: Any
    v_full: Any
    empty: Any  # of a stage of both
    k: Any  # (key, head_dim, box)
    v: Any
    k_start: Any  # addresses
    v_start: Any
    stats: Any


class Rows(Fields):
    """Which queries and keys a call has."""

    queries: Any
    group: Any
    members: Any  # rows of a key head: queries · group
    left: Any
    right: Any


class HopperDecode(Producer, Consumers, Merge):
    """softmax(scale · q kᵀ + band) v for one configuration; ``__call__`` is what gets compiled."""

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.tile_n, self.dim, self.stages = config.tile_n, config.head_dim, config.stages
        self.groups = config.key_groups
        self.threads = WARP * (config.warps + 1)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, queries, heads_q, head_dim)
        k: cute.Tensor,  # (batch, capacity, heads_kv, head_dim), or pages (pages, page_size, heads_kv, head_dim)
        v: cute.Tensor,
        out: cute.Tensor,  # (batch, queries, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, queries) fp32
        parts: cute.Tensor,  # fp32: (batch, heads_q, queries, units, head_dim_v), then (batch, heads_q, queries, units)
        lengths: cute.Tensor,  # (batch,) int32
        table: cute.Tensor | None,  # (batch, pages of a sequence) int32
        sink: cute.Tensor | None,  # (heads_q,) fp32
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        capacity: Int32,
        page_shift: Int32,
        units: Int32,  # most parts of a sequence
        units_shift: Int32,  # log2 of the splits that a sequence is cut into once it is long enough
        least: Int32,  # keys of a split, a multiple of the tile's
        stream: Any,
    ):
        """Launch a block for every split, key head and sequence, then the merge."""
        config = self.config
        k, v = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (k, v)]
        layout = tile_layout(self.dtype, (config.box, self.dim), self.stages * self.tile_n // config.box, 64)
        tma_k, k = tma_load(k, layout, (config.box, self.dim))
        tma_v, v = tma_load(v, layout, (config.box, self.dim))
        multiplier, cap_in = multipliers(config, scale, softcap)
        batch, heads_q, queries = lse.shape
        heads_kv = k.shape[2]
        row_blocks = cute.ceil_div(queries * (heads_q // heads_kv), config.rows)
        cut = (left, right, capacity, units, units_shift, least)
        self.split(
            q, k, v, out, parts, lengths, table, tma_k, tma_v, layout, multiplier, cap_in, page_shift, row_blocks, *cut
        ).launch(
            grid=[heads_kv * row_blocks, batch, units],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=config.blocks,
            preferred_smem_carveout=100,  # per cent
            use_pdl=True,
        )
        self.launch_merge(out, lse, parts, lengths, sink, cut, stream)

    @cute.kernel
    def split(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        parts: cute.Tensor,
        lengths: cute.Tensor,
        table: cute.Tensor | None,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        layout: cute.ComposedLayout,
        multiplier: Float32,
        cap_in: Float32,
        page_shift: Int32,
        row_blocks: Int32,
        left: Int32,
        right: Int32,
        capacity: Int32,
        units: Int32,
        units_shift: Int32,
        least: Int32,
    ):
        config, stages, groups = self.config, self.stages, self.groups
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 3 * stages]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, 2 * config.rows * groups], 128]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        shared = Shared(
            k_full=barriers.take(stages),
            v_full=barriers.take(stages),
            empty=barriers.take(stages),
            k=placed(storage.k, layout),
            v=placed(storage.v, layout),
            k_start=storage.k.data_ptr(),
            v_start=storage.v.data_ptr(),
            stats=storage.stats.data_ptr(),
        )
        if warp == config.warps:
            for atom in (tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(shared.k_full + i, 1)
                    cute.arch.mbarrier_init(shared.v_full + i, 1)
                    cute.arch.mbarrier_init(shared.empty + i, config.warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Queries, lengths and the newest keys are what the kernel before wrote; the merge may wait for its turn from now on.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        x, batch, unit = cute.arch.block_idx()
        head = x // row_blocks
        row_block = x - head * row_blocks
        heads_kv = k.shape[2]
        group = q.shape[2] // heads_kv
        queries = q.shape[1]
        rows = Rows(queries=queries, group=group, members=queries * group, left=left, right=right)
        length, start, last, size, _ = self.cut(lengths, batch, queries, left, right, capacity, units_shift, least)
        begin = start + unit * size
        end = cutlass.min(begin + size, last)
        if begin < end:
            if warp == config.warps:
                self.produce(k, v, table, shared, tma_k, tma_v, head, batch, begin, end, page_shift)
            else:
                self.consume(
                    q, out, parts, shared, rows, warp, head, batch, row_block, unit, units, length, begin, end, multiplier, cap_in
                )

    @cute.jit
    def cut(self, lengths, batch, queries, left, right, capacity, units_shift, least):
        """Length of a sequence, the start of its first split, the end of its keys, the size of splits and how many there are.

        All by its own keys: whole tiles, at least ``least`` keys, at most 2 ** ``units_shift`` splits.
        """
        length = cutlass.min(cutlass.max(lengths[batch], 0), capacity)
        first = cutlass.max(length - queries - left, 0)
        last = cutlass.min(length, length + right)
        start = first // self.tile_n * self.tile_n
        keys = cutlass.max(last - start, 0)
        each = (keys + (Int32(1) << units_shift) - 1) >> units_shift
        size = cutlass.max((each + self.tile_n - 1) // self.tile_n * self.tile_n, least)
        return length, start, last, size, keys
