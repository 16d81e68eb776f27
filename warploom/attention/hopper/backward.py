"""The backward kernels: a block owns 128 keys of one key head and walks the queries of that head's whole group.

Scores are kept transposed, keys down and queries across, so that P and dS leave the accumulators of their GEMMs as the left
operands of dV += Pᵀ dO and dK += dSᵀ Q without passing through shared memory. Only dQ needs dS of both warpgroups, and sums
over key blocks: its tiles are added to an fp32 accumulator in global memory by TMA. A kernel before prepares the row
statistics and zeroes that accumulator, a kernel after rounds it (Shah et al., FlashAttention-3, arXiv 2407.08608).

Blocks may be persistent, one a processor: then a warp of the producer's asks for the next key block when all queries of this
one are on their way, and what that one reads first arrives while this one ends.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from warploom.attention.hopper import schedule
from warploom.attention.hopper.config import BackwardConfig, box_columns
from warploom.attention.hopper.primitives import (
    bulk_add,
    bulk_load,
    bulk_store,
    claim,
    hold,
    load_acquire,
    negative,
    pass_on,
    store_matrices,
    wait_for,
)
from warploom.runtime.instructions import exp2, pack16, reciprocal, transpose_quad

WARPGROUP = 128
WARPGROUPS = 2  # consumers
LOG2_E = math.log2(math.e)
DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
# Together 504 a thread of each, which is what 168 at the start leave: with more, warps would wait for registers for ever.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
# Warps of the producer warpgroup; writer i drains dQ of consumer warpgroup i.
LOADER, WRITERS, SCHEDULER = 0, (1, 2), 3
# Named barriers; 0 is the block's.
DS_READY = 1  # both warpgroups have written their dS
DQ_EMPTY, DQ_FULL = 2, 4  # and + 1: a warpgroup's dQ buffer may be written, may be read
SCORES_TURN = 6  # and + 1: a warpgroup's turn to issue S and dP
DQ_ODD = 8  # added to DQ_FULL in odd steps where the writers alternate
ROW_THREADS = 256  # of the kernels before and after
# A key block as the scheduler hands it out: its number (below 0: no more), head, batch, the four bounds of its query tiles and
# whether they rise; for packed sequences also where queries and keys start, how many there are, the shift and the first tile.
DENSE_WORDS, PACKED_WORDS = 8, 14
# A packed sequence is read by TMA as the end of a dimension of so many rows, past which TMA fills in zeros.
RAGGED = 1 << 24


class Names:
    """What a role of the kernel works on. A plain class: the DSL would carry the fields of a namespace through every loop."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def but(self, **values: Any) -> Names:
        """The same with other values."""
        return Names(**{**self.__dict__, **values})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class HopperBackward:
    """dq, dk and dv of softmax(scale · q kᵀ + band) v for one configuration; ``__call__`` is what gets compiled."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.stages, self.dout_stages = config.stages, config.dout_stages
        self.part = config.tile_m * config.head_dim // WARPGROUPS  # elements of dQ of a tile and warpgroup
        # A warpgroup's share of dQ: 64 rows of it, or 64 rows by half of the columns.
        self.by_rows = config.tile_m == 64 * WARPGROUPS
        self.columns = self.part // 64
        # Or, transposed, half of the head dims by all queries.
        self.swapped = config.tile_m % 64 != 0
        self.alternate = config.alternate
        self.mixed = config.deterministic and config.right  # sections but the last begin with the last key block
        self.piece = self.part // config.pieces  # elements that leave at a time
        self.slots = 2  # tiles of dS
        # Warpgroups issue S and dP one after the other; exponentials are computed before the wait for dP, and dP begins at
        # minus its rows' means. Measured: +2 to 5 % at 96 and 128, to -6 % at 64. A softcap leaves no registers for the latter.
        self.in_turns = config.head_dim > 64
        self.fold = self.in_turns and not config.softcap
        self.dims = config.head_dim_v, config.head_dim  # columns of dV and dK

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
        sums: cute.Tensor,  # fp32 (batch · heads_q · query tiles · tile_m · head_dim,): dQ / scale in accumulator order
        stats: cute.Tensor,  # fp32 (batch · heads_q · query tiles · 2 · tile_m,): lse in log2 units, rowsum(dO∘O) − dlse
        # int32 (batch · heads_q · query tiles · 2,): key blocks that have added to a part of dQ, or whether it is there (0: no,
        # 1: on its way, 2: yes); where blocks are persistent, one more (or only one): key blocks handed out
        turns: cute.Tensor | None,
        cu_q: cute.Tensor | None,  # (sequences + 1,) int32, of packed calls
        cu_k: cute.Tensor | None,
        used: cute.Tensor | None,  # (sequences,) int32: keys of a sequence that count
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        section: Int32,  # key heads whose blocks are in flight together
        blocks: Int32,  # persistent ones
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch the three kernels."""
        config = self.config
        batch, seqlen_q = Int32(1), Int32(0)
        if const_expr(config.varlen):
            # Tiles of a sequence are numbered from start // tile + its number, which leaves none of two sequences.
            heads_q, total_q = lse.shape
            sequences = cu_q.shape[0] - 1  # type: ignore[union-attr]
            m_blocks = total_q // self.tile_m + sequences
            n_blocks = k.shape[0] // self.tile_n + sequences
        else:
            batch, heads_q, seqlen_q = lse.shape
            m_blocks = cute.ceil_div(seqlen_q, self.tile_m)
            n_blocks = cute.ceil_div(k.shape[1], self.tile_n)
        rows = m_blocks * heads_q * batch
        cleared = (dq, dk, dv, cu_k) if const_expr(config.varlen) else (None, None, None, None)
        self.before(out, dout, lse, dlse, sums, stats, turns, cu_q, *cleared, m_blocks).launch(
            grid=[rows, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream
        )  # fmt: skip

        # (seqlen, head_dim, heads, batch): a tile is the first two modes.
        modes = [0, 2, 1] if const_expr(config.varlen) else [1, 3, 2, 0]
        tq, tk, tv, tdo = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes)) for t in (q, k, v, dout)]
        if const_expr(config.varlen):
            tq, tk, tv, tdo = [self.ragged(t) for t in (tq, tk, tv, tdo)]
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
        scores, values, keys, queries = self.products()
        total = n_blocks * heads_kv * batch
        self.kernel(
            tq, tk, tv, tdo, dk, dv, sums, stats, turns, tma_q, tma_k, tma_v, tma_do, scores, values, keys, queries,
            layout_q, layout_do, layout_k, layout_v, layout_ds,
            cu_q, cu_k, used, seqlen_q, m_blocks, n_blocks, batch, scale, softcap, left, right, section,
        ).launch(
            grid=[cutlass.min(blocks, total) if const_expr(config.persistent) else total, 1, 1],
            block=[WARPGROUP * (WARPGROUPS + 1), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip
        there = turns if const_expr(config.claims) else None
        self.after(dq, sums, there, cu_q, m_blocks, scale).launch(
            grid=[rows, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream
        )  # fmt: skip

    def products(self) -> tuple[Any, Any, Any, Any]:
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

    # Before

    @cute.kernel
    def before(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        sums: cute.Tensor,
        stats: cute.Tensor,
        turns: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        dq: cute.Tensor | None,
        dk: cute.Tensor | None,
        dv: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        m_blocks: Int32,
    ):
        """Row statistics of a query tile, and zeros where its dQ will be summed up or where it is said to be there.

        A row that sees nothing, or is past the last one, gets an lse of +inf, which makes its P and dS 0.
        """
        tile_m, lanes = self.tile_m, 16 if self.config.head_dim_v <= 128 else 32
        thread, index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        if const_expr(self.config.varlen):
            self.clear(dq, cu_q)
            self.clear(dk, cu_k)
            self.clear(dv, cu_k)
        batch, head, start, seqlen_q, m_block = self.query_tile(index, m_blocks, out, cu_q)
        size = tile_m * self.config.head_dim
        if const_expr(not self.config.claims):
            zeros = cute.make_rmem_tensor(4, Float32)
            zeros.fill(0.0)
            into = sums.iterator + Int64(index) * size
            for i in cutlass.range_constexpr(size // (4 * ROW_THREADS)):
                target = cute.make_tensor((into + (i * ROW_THREADS + thread) * 4).align(16), cute.make_layout(4))
                cute.autovec_copy(zeros, target)
        if const_expr(self.config.persistent):  # noqa: SIM102
            if index == 0 and thread == 0:
                turns[turns.shape[0] - 1] = Int32(0)  # type: ignore[index,union-attr]
        if const_expr(self.config.deterministic or self.config.claims):  # noqa: SIM102
            if thread < WARPGROUPS:
                turns[Int64(index) * WARPGROUPS + thread] = Int32(0)  # type: ignore[index]
        column = thread % lanes * 8
        for i in cutlass.range_constexpr(tile_m * lanes // ROW_THREADS):
            in_tile = thread // lanes + i * (ROW_THREADS // lanes)
            row = m_block * tile_m + in_tile
            total = Float32(0.0)
            if row < seqlen_q and column < out.shape[-1]:
                a, b = self.eight(out, batch, start + row, head, column), self.eight(dout, batch, start + row, head, column)
                for j in cutlass.range_constexpr(8):
                    total += a[j].to(Float32) * b[j].to(Float32)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
            if column == 0:
                level = Float32.inf
                if row < seqlen_q:
                    at = (head, start + row) if const_expr(self.config.varlen) else (batch, head, row)
                    found = lse[at]
                    if const_expr(dlse is not None):
                        total -= dlse[at]  # type: ignore[index]
                    level = Float32.inf if found == -Float32.inf else found * LOG2_E
                    total = Float32(0.0) if found == -Float32.inf else total
                base = Int64(index) * (2 * tile_m) + in_tile
                stats[base] = level
                stats[base + tile_m] = total

    @cute.jit
    def clear(self, t, cu):
        """Zeros in the rows of a packed tensor that belong to no sequence."""
        rows, heads, columns = t.shape
        first = cutlass.min(cutlass.max(cu[0], 0), rows)
        past = cutlass.min(cutlass.max(cu[cu.shape[0] - 1], 0), rows)
        index, blocks, thread = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], cute.arch.thread_idx()[0]
        for i in cutlass.range(index, first + rows - past, blocks, unroll=1):
            row = self.choose(i < first, i, past + i - first)
            for at in cutlass.range(thread, heads * (columns // 8), ROW_THREADS, unroll=1):
                chunk = columns // 8
                self.store_words(self.element(t, 0, row, at // chunk, at % chunk * 8), [Int32(0)] * 4)

    def element(self, t: Any, batch: Any, row: Any, head: Any, column: Any) -> Any:
        """Address of eight elements of a row, which packed tensors count through all sequences."""
        *outer, along_rows, along_heads, _ = t.stride
        offset = Int64(row) * along_rows + Int64(head) * along_heads + column
        if const_expr(len(outer) > 0):
            offset += Int64(batch) * outer[0]
        return (t.iterator + offset).align(16)

    @cute.jit
    def query_tile(self, index, m_blocks, rows, cu_q):
        """Batch, head, first row and rows of the sequence, and query tile in it, of a block of the kernels before and after."""
        slice_, m_block = index // m_blocks, index % m_blocks
        if const_expr(self.config.varlen):
            _, start, length, m_block = self.locate(cu_q, m_block, self.tile_m, rows.shape[0])
            return Int32(0), slice_, start, length, m_block
        heads = rows.shape[2]
        return slice_ // heads, slice_ % heads, Int32(0), rows.shape[1], m_block

    @cute.jit
    def locate(self, cu, tile, size, total):
        """Number, start and length of the packed sequence that a tile belongs to, and the tile's number in it."""
        lower, upper = Int32(0), Int32(cu.shape[0] - 2)
        while lower < upper:
            middle = (lower + upper + 1) // 2
            if self.first_tile(cu, middle, size, total) <= tile:
                lower = middle
            else:
                upper = middle - 1
        start, length = self.bounds(cu, lower, total)
        block = tile - self.first_tile(cu, lower, size, total)
        return lower, start, length, self.choose(block < 0, length // size + 1, block)

    @cute.jit
    def first_tile(self, cu, sequence, size, total):
        return cutlass.min(cutlass.max(cu[sequence], 0), total) // size + sequence

    @cute.jit
    def bounds(self, cu, sequence, total):
        """Start and length of a sequence, inside of the packed tokens whatever the contents say."""
        start = cutlass.min(cutlass.max(cu[sequence], 0), total)
        return start, cutlass.max(cutlass.min(cu[sequence + 1], total) - start, 0)

    def eight(self, t: Any, batch: Any, row: Any, head: Any, column: Any) -> Any:
        """Eight elements of a row in registers, by one load."""
        source = cute.make_tensor(self.element(t, batch, row, head, column), cute.make_layout(8))
        values = cute.make_rmem_tensor(8, self.dtype)
        cute.autovec_copy(source, values)
        return values

    # After

    @cute.kernel
    def after(
        self,
        dq: cute.Tensor,
        sums: cute.Tensor,
        there: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        m_blocks: Int32,
        scale: Float32,
    ):
        """Scale, round and store dQ of a query tile: threads read what they, as consumers, had in registers."""
        config, tile_m = self.config, self.tile_m
        thread, index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        batch, head, start, seqlen_q, m_block = self.query_tile(index, m_blocks, dq, cu_q)
        group, own, lane = thread // WARPGROUP, thread % WARPGROUP, thread % 32
        source = sums.iterator + Int64(index) * (tile_m * config.head_dim) + group * self.part + own * 4
        count = self.part // (4 * WARPGROUP)
        values = cute.make_rmem_tensor((4, count), Float32)
        for i in cutlass.range_constexpr(count):
            four = cute.make_tensor((source + i * 4 * WARPGROUP).align(16), cute.make_layout(4))
            cute.autovec_copy(four, values[None, i])
        if const_expr(there is not None):  # noqa: SIM102
            if there[Int64(index) * WARPGROUPS + group] == 0:  # type: ignore[index]
                values.fill(0.0)
        if const_expr(self.swapped):
            # Columns of dQᵀ, which are queries: rows again by way of shared memory.
            pitch = config.head_dim + 8

            @cute.struct
            class Storage:
                rows: cute.struct.Align[cute.struct.MemRange[self.dtype, tile_m * pitch], 128]

            rows = cutlass.utils.SmemAllocator().allocate(Storage).rows.data_ptr()
            first_column = group * (config.head_dim // 2) + own // 32 * 16 + lane // 8 % 2 * 8
            matrices = rows + (lane // 16 * 8 + lane % 8) * pitch + first_column
            for i in cutlass.range_constexpr(tile_m // 16):
                words = [
                    pack16(values[j, c] * scale, values[j + 1, c] * scale, self.dtype)
                    for c in (2 * i, 2 * i + 1)
                    for j in (0, 2)
                ]
                store_matrices(matrices + i * (16 * pitch), words, transposed=True)
            cute.arch.sync_threads()
            chunks = config.head_dim // 8
            for i in cutlass.range_constexpr(tile_m * chunks // ROW_THREADS):
                at = i * ROW_THREADS + thread
                row, column = at // chunks, at % chunks * 8
                if m_block * tile_m + row < seqlen_q and column < dq.shape[-1]:
                    chunk = cute.make_rmem_tensor(8, self.dtype)
                    staged = cute.make_tensor((rows + (row * pitch + column)).align(16), cute.make_layout(8))
                    target = self.element(dq, batch, start + m_block * tile_m + row, head, column)
                    cute.autovec_copy(staged, chunk)
                    cute.autovec_copy(chunk, cute.make_tensor(target, cute.make_layout(8)))
        else:
            word = lane % 4
            first_row, first_column = (group * 64, 0) if const_expr(self.by_rows) else (0, group * self.columns)
            for r in cutlass.range_constexpr(2):
                row = m_block * tile_m + first_row + own // 32 * 16 + lane // 4 + 8 * r
                for chunk in cutlass.range_constexpr(-(-count // 4)):
                    words = [
                        pack16(values[2 * r, i] * scale, values[2 * r + 1, i] * scale, self.dtype) if i < count else Int32(0)
                        for i in range(4 * chunk, 4 * chunk + 4)
                    ]
                    words = transpose_quad(words, lane)
                    column = first_column + chunk * 32 + word * 8
                    if row < seqlen_q and column < dq.shape[-1] and chunk * 32 + word * 8 < 8 * count:
                        self.store_words(self.element(dq, batch, start + row, head, column), words)

    def store_words(self, target: Any, words: list[Any]) -> None:
        """Eight 16-bit elements by one store."""
        four = cute.make_rmem_tensor(4, Int32)
        for i in range(4):
            four[i] = words[i]
        cute.autovec_copy(four, cute.recast_tensor(cute.make_tensor(target, cute.make_layout(8)), Int32))

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
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_v, tma_do):
                cpasync.prefetch_descriptor(atom)
        stages, dout_stages, tile_m = self.stages, self.dout_stages, self.tile_m

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * (stages + dout_stages) + 6]
            words: cute.struct.Align[cute.struct.MemRange[Int32, PACKED_WORDS], 16]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, stages * 2 * tile_m], 128]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_do)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_ds)], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, WARPGROUPS * self.piece], 128]

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
            words=storage.words.get_tensor(cute.make_layout(PACKED_WORDS)),
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
                for full, empty, count in (
                    (shared.q_full, shared.q_empty, stages),
                    (shared.do_full, shared.do_empty, dout_stages),
                ):
                    for i in cutlass.range_constexpr(count):
                        cute.arch.mbarrier_init(full + i, 1)
                        cute.arch.mbarrier_init(empty + i, 4 * WARPGROUPS)
                for barrier in (shared.k_full, shared.v_full, shared.block_full):
                    cute.arch.mbarrier_init(barrier, 1)
                if const_expr(self.config.persistent):
                    for barrier in (shared.k_empty, shared.v_empty):
                        cute.arch.mbarrier_init(barrier, 4 * WARPGROUPS)
                    cute.arch.mbarrier_init(shared.block_empty, 4 * WARPGROUPS + 1 + len(WRITERS))
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
                self.compute(work, dk, dv, sums, products, scale, softcap, left, right)

    def describe(self, given: Any, index: Any) -> Names:
        """What a block works on, by its number in the order of blocks."""
        q_shape, k_shape, cu_q, cu_k, left, right = (
            given.q_shape, given.k_shape, given.cu_q, given.cu_k, given.left, given.right,
        )  # fmt: skip
        heads_kv, n_blocks, seqlen_q = k_shape[2], given.n_blocks, given.seqlen_q
        n_block, slice_ = schedule.sections(index, n_blocks, given.slices, given.section, self.choose)
        rising = Int32(0)
        if self.mixed:
            rising = self.choose((index // (given.section * n_blocks) + 1) * given.section < given.slices, 1, 0)
            n_block = self.choose(rising == 1, n_blocks - 1 - n_block, n_block)
        batch, head = slice_ // heads_kv, slice_ % heads_kv
        q_start, k_start, seqlen_k, first_tile = Int32(0), Int32(0), k_shape[0], Int32(0)
        if self.config.varlen:
            total_q, total_k = q_shape[3] - 1, k_shape[3] - 1
            sequence, k_start, seqlen_k, n_block = self.locate(cu_k, n_block, self.tile_n, total_k)
            if given.used is not None:
                seqlen_k = cutlass.max(cutlass.min(seqlen_k, given.used[sequence]), 0)
            q_start, seqlen_q = self.bounds(cu_q, sequence, total_q)
            first_tile = self.first_tile(cu_q, sequence, self.tile_m, total_q)
        shift = seqlen_k - seqlen_q
        whole, hidden = seqlen_k, Int32(0)
        if self.config.varlen:
            if given.used is not None:
                _, whole = self.bounds(cu_k, sequence, total_k)
            # Keys that no query of the sequence sees stay outside of what TMA reads.
            if self.config.right:
                seqlen_k = cutlass.max(cutlass.min(seqlen_k, seqlen_k + right), 0)
            if self.config.left:
                hidden = cutlass.min(cutlass.max(shift - left, 0), seqlen_k)
                k_start += hidden
                seqlen_k -= hidden
                shift -= hidden
        return Names(
            shared=given.shared,
            group_size=q_shape[2] // heads_kv,
            batch=batch,
            head=head,
            n_block=n_block,
            q_start=q_start,
            k_start=k_start,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            shift=shift,
            heads_q=q_shape[2],
            m_blocks=given.m_blocks,
            first_tile=first_tile,
            rising=rising,
            bounds=self.query_tiles(n_block, seqlen_q, seqlen_k, shift, left, right),
            whole=whole,
            hidden=hidden,
            turn=Int32(0),
            base=Int32(0),
        )

    # Persistent blocks

    @cute.jit
    def hand_out(self, given, turns, dk, dv):
        """The scheduler warp: key blocks in their order to whoever asks first.

        It asks once the loader is done with the block before, which leaves that one's last two steps; of packed sequences,
        which take longer to find, one block ahead. Blocks of theirs that do not exist, counted generously, are left out.
        """
        shared, varlen = given.shared, const_expr(self.config.varlen)
        counter = turns.iterator + (turns.shape[0] - 1)
        total = given.n_blocks * given.slices
        turn, index = Int32(0), Int32(0)
        while index < total:
            if const_expr(not varlen):
                cute.arch.mbarrier_wait(shared.block_empty, turn & 1 ^ 1)
            if cute.arch.lane_idx() == 0:
                index = cute.arch.atomic_add(counter, Int32(1))
            index = cute.arch.shuffle_sync(index, 0)
            work = self.describe(given, cutlass.min(index, total - 1))
            n_block = self.choose(index < total, work.n_block, -1)
            words = [n_block, work.head, work.batch, *work.bounds, work.rising]
            if const_expr(varlen):
                words += [work.q_start, work.k_start, work.seqlen_q, work.seqlen_k, work.shift, work.first_tile]
                if index < total:
                    self.clear_hidden(work, dk, dv)
            if n_block * self.tile_n < work.seqlen_k:
                if const_expr(varlen):
                    cute.arch.mbarrier_wait(shared.block_empty, turn & 1 ^ 1)
                self.publish(shared.words, words, shared.block_full)
                turn += 1

    @cute.jit
    def publish(self, target, words, barrier):
        """Words into shared memory, for those who wait at the barrier."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(words)):
                target[i] = words[i]
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def next_block(self, given, turn):
        """Number of the block that is handed out next, below 0: none."""
        cute.arch.mbarrier_wait(given.shared.block_full, turn & 1)
        return cute.arch.make_warp_uniform(given.shared.words[0])

    def read_block(self, given: Any, n_block: Any, turn: Any, base: Any) -> Names:
        """As ``describe``, from what the scheduler wrote; ``base``: steps of the blocks before."""
        count = PACKED_WORDS if self.config.varlen else DENSE_WORDS
        words = [cute.arch.make_warp_uniform(given.shared.words[i]) for i in range(1, count)]
        head, batch, *bounds, rising = words[: DENSE_WORDS - 1]
        seqlen_q, seqlen_k = given.seqlen_q, given.k_shape[0]
        lengths = [Int32(0), Int32(0), seqlen_q, seqlen_k, seqlen_k - seqlen_q, Int32(0)]
        if self.config.varlen:
            lengths = words[DENSE_WORDS - 1 :]
        q_start, k_start, seqlen_q, seqlen_k, shift, first_tile = lengths
        return Names(
            shared=given.shared,
            group_size=given.q_shape[2] // given.k_shape[2],
            batch=batch,
            head=head,
            n_block=n_block,
            q_start=q_start,
            k_start=k_start,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            shift=shift,
            heads_q=given.q_shape[2],
            m_blocks=given.m_blocks,
            first_tile=first_tile,
            rising=rising,
            bounds=tuple(bounds),
            turn=turn,
            base=base,
        )

    @cute.jit
    def steps_of(self, work):
        """How many steps a block has."""
        first, _, _, end = work.bounds
        return work.group_size * (end - first)

    @cute.jit
    def load_blocks(self, given, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do):
        """The loader warp's part of every block."""
        turn, base = Int32(0), Int32(0)
        n_block = self.next_block(given, turn)
        while n_block >= 0:
            work = self.read_block(given, n_block, turn, base)
            self.load(work, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do)
            self.release(given.shared.block_empty)
            base += self.steps_of(work)
            turn += 1
            n_block = self.next_block(given, turn)

    @cute.jit
    def write_blocks(self, given, sums, turns, warp):
        """A writer warp's part of every block."""
        turn, base = Int32(0), Int32(0)
        n_block = self.next_block(given, turn)
        while n_block >= 0:
            work = self.read_block(given, n_block, turn, base)
            cute.arch.sync_warp()
            self.release(given.shared.block_empty)
            self.write(work, sums, turns, warp, given.left, given.right)
            base += self.steps_of(work)
            turn += 1
            n_block = self.next_block(given, turn)

    @cute.jit
    def compute_blocks(self, given, dk, dv, products, scale, softcap):
        """A consumer warpgroup's part of every block."""
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        r = self.registers(given, products, scale, softcap)
        self.begin_turns(r.group)
        turn, base = Int32(0), Int32(0)
        n_block = self.next_block(given, turn)
        while n_block >= 0:
            work = self.read_block(given, n_block, turn, base)
            cute.arch.sync_warp()
            self.release(given.shared.block_empty)
            self.compute_block(r, work, dk, dv, scale, given.left, given.right)
            base += self.steps_of(work)
            turn += 1
            n_block = self.next_block(given, turn)

    @cute.jit
    def clear_hidden(self, work, dk, dv):
        """Zeros in a packed sequence's rows of the block that are not keys its queries see."""
        first, past, start = work.hidden, work.hidden + work.seqlen_k, work.k_start - work.hidden
        end = cutlass.min((work.n_block + 1) * self.tile_n, work.whole)
        for row in cutlass.range(work.n_block * self.tile_n, end, unroll=1):
            if row < first or row >= past:
                for t in (dk, dv):
                    for i in cutlass.range(cute.arch.lane_idx(), t.shape[2] // 8, 32, unroll=1):
                        self.store_words(self.element(t, 0, start + row, work.head, i * 8), [Int32(0)] * 4)

    @cute.jit
    def choose(self, condition, a, b):
        """a if condition else b, of run-time values."""
        return Int32(a) if condition else Int32(b)

    @cute.jit
    def query_tiles(self, n_block, seqlen_q, seqlen_k, shift, left, right):
        """Query tiles [first, end) that some key of the block sees, and [whole_first, whole_end) that all of them see."""
        key, past = n_block * self.tile_n, (n_block + 1) * self.tile_n
        first, end = Int32(0), cute.ceil_div(seqlen_q, self.tile_m)
        if const_expr(self.config.left):
            last_row = cutlass.min(past, seqlen_k) - 1 + left - shift
            end = cutlass.min(end, cutlass.max(last_row + self.tile_m, 0) // self.tile_m)
        if const_expr(self.config.right):
            first = cutlass.min(cutlass.max(key - shift - right, 0) // self.tile_m, end)
        whole_first, whole_end = first, end
        if const_expr(self.config.right):
            whole_first = cute.ceil_div(cutlass.max(past - 1 - shift - right, 0), self.tile_m)
            whole_first = cutlass.min(cutlass.max(whole_first, first), end)
        if const_expr(self.config.left):
            whole_end = cutlass.max(key + left - shift + 1, 0) // self.tile_m
            whole_end = cutlass.max(cutlass.min(whole_end, end), whole_first)
        if key >= seqlen_k:  # no such block: tiles of packed sequences are counted generously
            first = end
        if past > seqlen_k:  # keys past the last one are masked in every tile
            whole_first, whole_end = end, end
        return first, whole_first, whole_end, end

    # The loader warp

    @cute.jit
    def load(self, work, q, k, v, dout, stats, tma_q, tma_k, tma_v, tma_do):
        """K and V once; Q with the row statistics, and dO, for every query tile.

        Where blocks are persistent, K and V come after the first Q and dO: the block before is done with those earlier.
        """
        shared, config = work.shared, self.config
        tk, tv = (self.sequence(t, work.head, work.batch, work.k_start, work.seqlen_k) for t in (k, v))
        gk = cute.local_tile(tk, (self.tile_n, config.head_dim), (work.n_block, 0))
        gv = cute.local_tile(tv, (self.tile_n, config.head_dim_v), (work.n_block, 0))
        tks, tkg = self.tma_views(tma_k, shared.k, gk)
        tvs, tvg = self.tma_views(tma_v, shared.v, gv)
        keys, values = Names(atom=tma_k, into=tks, out_of=tkg), Names(atom=tma_v, into=tvs, out_of=tvg)
        steps = self.steps_of(work)
        if const_expr(config.persistent):
            if steps == 0:  # others count on a load in every block
                self.load_keys(work, keys, values)
        else:
            if steps > 0:  # else nobody waits for what would still be on its way when the block ends
                self.expect(shared.k_full, 2 * self.tile_n * config.head_dim)
                cute.copy(tma_k, tkg, tks[None, 0], tma_bar_ptr=shared.k_full)
        stats_bytes = 8 * self.tile_m
        for j in cutlass.range(steps, unroll=1):
            head, m, tile = self.place(work, j)
            tq, tdo = (self.sequence(t, head, work.batch, work.q_start, work.seqlen_q) for t in (q, dout))
            gq = cute.local_tile(tq, (self.tile_m, config.head_dim), (m, 0))
            gdo = cute.local_tile(tdo, (self.tile_m, config.head_dim_v), (m, 0))
            tqs, tqg = self.tma_views(tma_q, shared.q, gq)
            tds, tdg = self.tma_views(tma_do, shared.dout, gdo)
            stage, phase = schedule.ring(work.base + j, self.stages)
            cute.arch.mbarrier_wait(shared.q_empty + stage, phase ^ 1)
            self.expect(shared.q_full + stage, 2 * self.tile_m * config.head_dim + stats_bytes)
            cute.copy(tma_q, tqg, tqs[None, stage], tma_bar_ptr=shared.q_full + stage)
            with cute.arch.elect_one():
                source = stats.iterator + Int64(tile) * (2 * self.tile_m)
                bulk_load(shared.stats + stage * (2 * self.tile_m), source, stats_bytes, shared.q_full + stage)
            if const_expr(not config.persistent):  # noqa: SIM102
                if j == 0:
                    self.expect(shared.v_full, 2 * self.tile_n * config.head_dim_v)
                    cute.copy(tma_v, tvg, tvs[None, 0], tma_bar_ptr=shared.v_full)
            stage, phase = schedule.ring(work.base + j, self.dout_stages)
            cute.arch.mbarrier_wait(shared.do_empty + stage, phase ^ 1)
            self.expect(shared.do_full + stage, 2 * self.tile_m * config.head_dim_v)
            cute.copy(tma_do, tdg, tds[None, stage], tma_bar_ptr=shared.do_full + stage)
            if const_expr(config.persistent):  # noqa: SIM102
                if j == 0:
                    self.load_keys(work, keys, values)

    @cute.jit
    def load_keys(self, work, keys, values):
        """V, then K, each once the block before has read its own for the last time."""
        shared, config = work.shared, self.config
        phase = work.turn & 1 ^ 1
        cute.arch.mbarrier_wait(shared.v_empty, phase)
        self.expect(shared.v_full, 2 * self.tile_n * config.head_dim_v)
        cute.copy(values.atom, values.out_of, values.into[None, 0], tma_bar_ptr=shared.v_full)
        cute.arch.mbarrier_wait(shared.k_empty, phase)
        self.expect(shared.k_full, 2 * self.tile_n * config.head_dim)
        cute.copy(keys.atom, keys.out_of, keys.into[None, 0], tma_bar_ptr=shared.k_full)

    def sequence(self, t: Any, head: Any, batch: Any, start: Any, length: Any) -> Any:
        """(rows, head_dim) of a head, of a batch or of the packed sequence there."""
        if const_expr(self.config.varlen):
            return cute.domain_offset((RAGGED - length, 0), t[None, None, head, start + length])
        return t[None, None, head, batch]

    @cute.jit
    def place(self, work, j):
        """Query head, query tile in it and number of that tile in the workspaces, of a block's j-th step.

        Tiles in order, a head after the other. Where key blocks queue for dQ all heads of the group pass a tile before the
        next one, since the elders, which see more tiles, would else reach the second head long after this block. And either
        the last tile comes first, which all blocks reach at the same time and leave one after the other. Or, under a causal
        mask, tiles rise from the diagonal and the last key block is the eldest: then a block's elders are ahead of it from
        the start, by more than a turn takes. But its longest block starts last, so the call's last section does not.
        """
        first, _, _, end = work.bounds
        if const_expr(self.config.deterministic):
            i = j // work.group_size
            member = j - i * work.group_size
            m = self.choose(work.rising == 1, first + i, end - 1 - i)
        else:
            member = j // (end - first)
            m = first + j - member * (end - first)
        head = work.head * work.group_size + member
        return head, m, (work.batch * work.heads_q + head) * work.m_blocks + work.first_tile + m

    @cute.jit
    def expect(self, barrier, size):
        """The barrier's phase ends once so many bytes have landed."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)

    def tma_views(self, atom: Any, shared: Any, tiles: Any) -> tuple[Any, Any]:
        """Shared and global tiles as the TMA copy takes them: (copy, stage) and (copy, tile)."""
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    # The writer warps

    @cute.jit
    def write(self, work, sums, turns, warp, left, right):
        """A writer warp's part of a block."""
        if const_expr(self.alternate):
            self.write_in_turn(work, sums, turns, warp, left, right)
        else:
            self.write_part(work, sums, turns, warp, left, right)

    @cute.jit
    def write_part(self, work, sums, turns, group, left, right):
        """Add dQ of one consumer warpgroup to the accumulator, tile after tile.

        Where blocks claim tiles, the first at one stores; others wait until that is there, for as long as a store takes.

        When deterministic, key blocks add to a tile in their order: the next one finds their number in ``turns``. They
        start in that order, so a block never waits for one that waits for a processor. Then the consumer gets its buffer back
        when the add is on its way, or, where blocks reach a tile at the same time, when it has arrived, which keeps them in
        step: measured both.
        """
        shared = work.shared
        source = shared.dq + group * self.piece
        steps = self.steps_of(work)
        if steps > 0:
            cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=WARPGROUP + 32)
        for j in cutlass.range(steps, unroll=1):
            _, m, tile = self.place(work, j)
            part = Int64(tile) * WARPGROUPS + group
            found, first = Int32(0), Int32(0)
            if const_expr(self.config.claims):  # noqa: SIM102
                if cute.arch.lane_idx() == 0:
                    found = load_acquire(turns.iterator + part)  # its latency hides under the wait for dQ
            for piece in cutlass.range_constexpr(self.config.pieces):
                cute.arch.barrier(barrier_id=DQ_FULL + group, number_of_threads=WARPGROUP + 32)
                if cute.arch.lane_idx() == 0:
                    if const_expr(self.config.deterministic and piece == 0):
                        wait_for(turns.iterator + part, self.rank(work, m, left, right))
                    if const_expr(self.config.claims):
                        first = claim(turns.iterator + part, found)
                        self.leave(first, sums.iterator + part * self.part, source)
                    else:
                        bulk_add(sums.iterator + (part * self.part + piece * self.piece), source, 4 * self.piece)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                if const_expr(piece + 1 < self.config.pieces):
                    cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=WARPGROUP + 32)
            at_once = not self.config.deterministic or self.mixed or work.group_size > 1
            if at_once:
                self.pass_back(group, j + 1 < steps)
            if const_expr(self.config.claims):
                if cute.arch.lane_idx() == 0 and first == 1:
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    pass_on(turns.iterator + part)
                cute.arch.sync_warp()
            if const_expr(self.config.deterministic):
                if cute.arch.lane_idx() == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    pass_on(turns.iterator + part)
                cute.arch.sync_warp()
                if not at_once:
                    self.pass_back(group, j + 1 < steps)
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def pass_back(self, group, more):
        """A consumer may write to its buffer of dQ again: the next dQ or, behind the last, dK and dV."""
        if more:
            cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=WARPGROUP + 32)

    @cute.jit
    def leave(self, first, target, source):
        """A part of dQ: stored where nothing is yet, else added to what is there."""
        if first == 1:
            bulk_store(target, source, 4 * self.part)
        else:
            bulk_add(target, source, 4 * self.part)

    @cute.jit
    def write_in_turn(self, work, sums, turns, parity, left, right):
        """As ``write_part`` when key blocks add in an order: one warp has the even steps, one the odd ones, of both warpgroups.

        From the wait for a turn to passing it on takes longer than a step, most of it until the adds have arrived.
        """
        shared = work.shared
        steps, ahead = self.steps_of(work), (work.base + parity) & 1
        if ahead == 1 and steps > 0:  # who had the step before, of another block
            for group in cutlass.range_constexpr(WARPGROUPS):
                cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=WARPGROUP + 32)
        for j in cutlass.range(ahead, steps, 2, unroll=1):
            _, m, tile = self.place(work, j)
            turn = turns.iterator + Int64(tile) * WARPGROUPS
            for piece in cutlass.range_constexpr(self.config.pieces):
                for group in cutlass.range_constexpr(WARPGROUPS):
                    cute.arch.barrier(barrier_id=DQ_FULL + DQ_ODD * parity + group, number_of_threads=WARPGROUP + 32)
                    if cute.arch.lane_idx() == 0:
                        if const_expr(group == 0 and piece == 0):
                            wait_for(turn, self.rank(work, m, left, right))
                        target = sums.iterator + ((Int64(tile) * WARPGROUPS + group) * self.part + piece * self.piece)
                        bulk_add(target, shared.dq + group * self.piece, 4 * self.piece)
                        cute.arch.cp_async_bulk_commit_group()
                for group in cutlass.range_constexpr(WARPGROUPS):
                    if cute.arch.lane_idx() == 0:
                        cute.arch.cp_async_bulk_wait_group(WARPGROUPS - 1 - group, read=True)
                    cute.arch.sync_warp()
                    if piece + 1 < self.config.pieces or j + 1 < steps:
                        cute.arch.barrier_arrive(barrier_id=DQ_EMPTY + group, number_of_threads=WARPGROUP + 32)
            if cute.arch.lane_idx() == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                pass_on(turn)
            cute.arch.sync_warp()

    @cute.jit
    def rank(self, work, m, left, right):
        """How many key blocks add to a query tile before this one: those before it, or where tiles rise those after it."""
        rank = work.n_block
        if const_expr(self.config.left):
            rank -= cutlass.max(m * self.tile_m + work.shift - left, 0) // self.tile_n
        if const_expr(self.mixed):
            last = cutlass.max((m + 1) * self.tile_m - 1 + work.shift + right, 0) // self.tile_n
            last = cutlass.min(last, (work.seqlen_k - 1) // self.tile_n)
            rank = self.choose(work.rising == 1, last - work.n_block, rank)
        return rank

    # The consumer warpgroups

    @cute.jit
    def compute(self, work, dk, dv, sums, products, scale, softcap, left, right):
        """dK and dV of a warpgroup's share of the block's keys, and a half of every dQ."""
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        r = self.registers(work, products, scale, softcap)
        self.begin_turns(r.group)
        self.compute_block(r, work, dk, dv, scale, left, right)

    @cute.jit
    def compute_block(self, r, work, dk, dv, scale, left, right):
        """All steps of a block, and its dK and dV."""
        shared = work.shared
        r = r.but(past=work.base + self.steps_of(work))
        self.set_limits(r, work, left, right)
        r.acc_dk.fill(0.0)
        r.acc_dv.fill(0.0)
        if const_expr(self.config.persistent):
            cute.arch.mbarrier_wait(shared.k_full, work.turn & 1)
            cute.arch.mbarrier_wait(shared.v_full, work.turn & 1)
            if self.steps_of(work) == 0:
                self.release(shared.v_empty)
                self.release(shared.k_empty)
        self.steps(r, work)
        self.finish(r, work, dk, dv, scale)

    @cute.jit
    def steps(self, r, work):
        """All query tiles, masked ones in loops of their own."""
        config, shared = self.config, work.shared
        first, whole_first, whole_end, end = work.bounds
        j = work.base
        if const_expr(not config.persistent):  # noqa: SIM102
            if first < end:
                cute.arch.mbarrier_wait(shared.k_full, 0)
                cute.arch.mbarrier_wait(shared.v_full, 0)
        parts = [(first, whole_first, True), (whole_first, whole_end, False)]
        if const_expr(config.left):
            parts.append((whole_end, end, True))
        if const_expr(self.config.deterministic):
            lengths = [(upper - lower, masked) for lower, upper, masked in reversed(parts)]
            if const_expr(self.mixed):
                begins, ends = whole_first - first, end - whole_end
                rising = work.rising == 1
                lengths = [
                    (self.choose(rising, begins, ends), True),
                    (whole_end - whole_first, False),
                    (self.choose(rising, ends, begins), True),
                ]
            m, onward, member = end - 1, Int32(-1), Int32(0)
            if const_expr(self.mixed):
                m, onward = self.choose(rising, first, m), self.choose(rising, 1, -1)
            for length, masked in lengths:
                for _ in cutlass.range(length * work.group_size, unroll=1):
                    self.step(r, m, j, masked)
                    j += 1
                    member += 1
                    if member == work.group_size:
                        member = Int32(0)
                        m += onward
        else:
            for _ in cutlass.range(work.group_size, unroll=1):
                for lower, upper, masked in parts:
                    for m in cutlass.range(lower, upper, unroll=1):
                        self.step(r, m, j, masked)
                        j += 1

    @cute.jit
    def set_limits(self, r, work, left, right):
        """This thread's first visible query row, and the one past the last, of each of its keys."""
        for i in cutlass.range_constexpr(2):
            key = work.n_block * self.tile_n + r.row + 8 * i
            visible = Int32(0)
            if const_expr(self.config.right):
                visible = key - work.shift - right - r.column
            r.limits[i, 0] = self.choose(key < work.seqlen_k, visible, 1 << 30)
            if const_expr(self.config.left):
                r.limits[i, 1] = key + left - work.shift + 1 - r.column

    @cute.jit
    def finish(self, r, work, dk, dv, scale):
        """Store dK and dV."""
        warpgroup.wait_group(0)
        row = work.n_block * self.tile_n + r.row
        self.epilogue(r.acc_dv, dv, work, row, 0, Float32(1.0))
        self.epilogue(r.acc_dk, dk, work, row, 0, scale)

    def registers(self, work: Any, products: Any, scale: Any, softcap: Any) -> Names:
        """Descriptors, accumulators and constants of one warpgroup."""
        mma_scores, mma_values, mma_keys, mma_queries = products
        shared = work.shared
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        own = cute.arch.thread_idx()[0] % WARPGROUP
        config, tile_m = self.config, self.tile_m
        multiplier, cap_in = self.multipliers(scale, softcap)
        scores, values, keys, queries = (m.get_slice(0) for m in (mma_scores, mma_values, mma_keys, mma_queries))
        turned = [1, 0, 2]
        q_turned, do_turned, k_turned = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=turned)) for t in (shared.q, shared.dout, shared.k)
        )
        acc_s = mma_scores.make_fragment_C(scores.partition_shape_C((64, tile_m)))
        acc_dp = mma_scores.make_fragment_C(scores.partition_shape_C((64, tile_m)))
        acc_dq = mma_queries.make_fragment_C(queries.partition_shape_C((64, tile_m if self.swapped else self.columns)))
        if const_expr(self.swapped):
            k_part = self.part_of(mma_queries.make_fragment_A(queries.partition_A(k_turned)), group)
            dq_a = k_part[None, None, None, 0]
            dq_b = mma_queries.make_fragment_B(queries.partition_B(shared.ds))
        else:
            dq_a = mma_queries.make_fragment_A(queries.partition_A(shared.ds))
            dq_b = mma_queries.make_fragment_B(queries.partition_B(k_turned))
            dq_a = self.part_of(dq_a, group if const_expr(self.by_rows) else 0)
            dq_b = self.part_of(dq_b, 0 if const_expr(self.by_rows) else group)[None, None, None, 0]
        # A warp's 16 keys × 16 queries of dS go out as four transposed 8 × 8 tiles; lane l addresses row l % 8 of tile l // 8,
        # a query, in the half of the tile whose rows hold this warpgroup's 64 keys as eight swizzled chunks of 16 bytes.
        lane = own % 32
        chunk = own // 32 * 2 + lane // 8 % 2
        ds_target = shared.ds_start + group * (tile_m * 64) + (lane // 16 * 8 + lane % 8) * 64 + (chunk ^ lane % 8) * 8
        return Names(
            shared=shared,
            group=group,
            multiplier=multiplier,
            cap_in=cap_in,
            mma_scores=mma_scores,
            mma_values=mma_values,
            mma_keys=mma_keys,
            mma_queries=mma_queries,
            k=self.part_of(mma_scores.make_fragment_A(scores.partition_A(shared.k)), group)[None, None, None, 0],
            v=self.part_of(mma_scores.make_fragment_A(scores.partition_A(shared.v)), group)[None, None, None, 0],
            q=mma_scores.make_fragment_B(scores.partition_B(shared.q)),
            dout=mma_scores.make_fragment_B(scores.partition_B(shared.dout)),
            q_turned=mma_keys.make_fragment_B(keys.partition_B(q_turned)),
            do_turned=mma_values.make_fragment_B(values.partition_B(do_turned)),
            p=mma_values.make_fragment_A(values.partition_shape_A((64, tile_m))),
            ds=mma_keys.make_fragment_A(keys.partition_shape_A((64, tile_m))),
            dq_a=dq_a,
            dq_b=dq_b,
            acc_s=acc_s,
            acc_dp=acc_dp,
            acc_dq=acc_dq,
            acc_dk=mma_keys.make_fragment_C(keys.partition_shape_C((64, config.head_dim))),
            acc_dv=mma_values.make_fragment_C(values.partition_shape_C((64, config.head_dim_v))),
            rows_s=cute.make_tensor(acc_s.iterator, self.row_view(tile_m)),
            rows_dp=cute.make_tensor(acc_dp.iterator, self.row_view(tile_m)),
            limits=cute.make_rmem_tensor((2, 2), Int32),
            ds_target=ds_target,
            dq_target=(shared.dq + group * self.piece + own * 4).align(16),
            stats=(shared.stats + own % 4 * 2).align(8),
            row=group * 64 + own // 32 * 16 + own % 32 // 4,  # key of the block, and that + 8
            column=own % 4 * 2,
        )

    def multipliers(self, scale: Any, softcap: Any) -> tuple[Any, Any]:
        """What turns raw scores into log2 units: scale, or softcap and what goes into its tanh."""
        if const_expr(self.config.softcap):
            return softcap * LOG2_E, 2 * LOG2_E * scale / softcap
        return scale * LOG2_E, Float32(0.0)

    def part_of(self, operand: Any, index: Any) -> Any:
        """One of an operand's tiles of rows (A) or columns (B): (element, 1, step, stage)."""
        own = operand[None, index, None, None]
        shape, stride = own.shape, own.stride
        layout = cute.make_layout((shape[0], 1, *shape[1:]), stride=(stride[0], 0, *stride[1:]))
        return cute.make_tensor(own.iterator, layout)

    def row_view(self, columns: int) -> Any:
        """An accumulator as (row, (column pair, group of 8 columns)): rows 0 and 1 are 8 apart."""
        return cute.make_layout((2, (2, columns // 8)), stride=(2, (1, 4)))

    @cute.jit
    def step(self, r, m, j, masked):
        """One query tile: five GEMMs; while the tensor cores run those of one warpgroup, the other computes P and dS.

        Row statistics are asked for before the wait for S, under which their latency hides.
        """
        shared, config = r.shared, self.config
        stage, phase = schedule.ring(j, self.stages)
        cute.arch.mbarrier_wait(shared.q_full + stage, phase)
        if const_expr(self.fold):
            self.begin_at_mean(r, self.statistics(r, stage, 1))
        if const_expr(self.in_turns):
            self.take_turn(r.group)
        self.gemm(r.mma_scores, r.acc_s, r.k, r.q[None, None, None, stage], False)
        if const_expr(not config.softcap):
            level = self.statistics(r, stage, 0)
        cute.arch.mbarrier_wait(shared.do_full + stage, phase)
        self.gemm(r.mma_scores, r.acc_dp, r.v, r.dout[None, None, None, stage], self.fold)
        if const_expr(self.in_turns):
            self.pass_turn(r.group)
        warpgroup.wait_group(1)
        if const_expr(config.softcap):  # whose slopes leave no registers for more
            level = self.statistics(r, stage, 0)
        self.probabilities(r, m, level, masked)
        mean = None
        if const_expr(not config.softcap and not self.fold):
            mean = self.statistics(r, stage, 1)
        if const_expr(self.fold):
            for i in cutlass.range_constexpr(cute.size(r.acc_s) // 4):
                hold([r.acc_s[4 * i + n] for n in range(4)], r.ds_target)
        warpgroup.wait_group(0)
        if const_expr(config.persistent):
            self.release_last(r, j, shared.v_empty)
        if const_expr(config.softcap):
            mean = self.statistics(r, stage, 1)
        self.differentiate(r, mean)
        self.pack(r.acc_dp, r.ds)
        self.share(r, stage)
        # Not before dS is there: under the wait for the other warpgroup's, where nothing else could run.
        self.gemm(r.mma_values, r.acc_dv, r.p, r.do_turned[None, None, None, stage], True)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_READY, number_of_threads=WARPGROUPS * WARPGROUP)
        if const_expr(self.swapped):
            self.gemm(r.mma_queries, r.acc_dq, r.dq_a, r.dq_b[None, None, None, stage], False)
        else:
            self.gemm(r.mma_queries, r.acc_dq, r.dq_a[None, None, None, stage], r.dq_b, False)
        self.gemm(r.mma_keys, r.acc_dk, r.ds, r.q_turned[None, None, None, stage], True)
        warpgroup.wait_group(1)
        self.release(shared.do_empty + stage)
        if const_expr(config.persistent):
            self.release_last(r, j, shared.k_empty)
        self.hand_over(r, j)
        warpgroup.wait_group(0)
        self.release(shared.q_empty + stage)

    def take_turn(self, group: Any) -> None:
        """Wait until the other warpgroup has issued its products."""
        cute.arch.barrier(barrier_id=SCORES_TURN + group, number_of_threads=WARPGROUPS * WARPGROUP)

    def pass_turn(self, group: Any) -> None:
        """Let the other warpgroup issue its products."""
        cute.arch.barrier_arrive(barrier_id=SCORES_TURN + (group ^ 1), number_of_threads=WARPGROUPS * WARPGROUP)

    @cute.jit
    def begin_turns(self, group):
        """The first warpgroup begins."""
        if const_expr(self.in_turns):  # noqa: SIM102
            if group == 1:
                self.pass_turn(group)

    @cute.jit
    def gemm(self, mma, acc, a, b, accumulate):
        """Issue acc = a b, or acc += a b, as one group."""
        atom = cute.make_mma_atom(mma.op)
        warpgroup.fence()
        for i in cutlass.range_constexpr(cute.size(b, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, accumulate or i > 0)
            cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
        warpgroup.commit_group()

    @cute.jit
    def statistics(self, r, stage, which):
        """A row statistic of this thread's queries, in the order of an accumulator's columns."""
        groups = self.tile_m // 8
        source = r.stats + cute.assume(stage * (2 * self.tile_m), divby=2) + which * self.tile_m
        values = cute.make_rmem_tensor((2, groups), Float32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout((2, groups), stride=(1, 8))), values)
        return cute.make_tensor(values.iterator, cute.make_layout(2 * groups))

    @cute.jit
    def probabilities(self, r, m, level, masked):
        """P from the raw scores and lse, as an operand and, times the softcap's derivative, in the scores' place."""
        for i in cutlass.range_constexpr(2):
            if const_expr(masked):
                first = r.limits[i, 0] - m * self.tile_m
                for c in cutlass.range_constexpr(self.tile_m // 4):
                    r.rows_s[i, c] = r.rows_s[i, c] if c // 2 * 8 + c % 2 >= first else -Float32.inf
                if const_expr(self.config.left):
                    past = r.limits[i, 1] - m * self.tile_m
                    for c in cutlass.range_constexpr(self.tile_m // 4):
                        r.rows_s[i, c] = r.rows_s[i, c] if c // 2 * 8 + c % 2 < past else -Float32.inf
        words = self.words(r.p)
        for c in cutlass.range_constexpr(0, self.tile_m // 4, 2):
            for i in cutlass.range_constexpr(2):
                p = []
                for j in (0, 1):
                    weight, slope = self.weigh(r, r.rows_s[i, c + j], level[c + j], masked)
                    r.rows_s[i, c + j] = weight * slope if const_expr(self.config.softcap) else weight
                    p.append(weight)
                words[i + c] = pack16(p[0], p[1], self.dtype)

    @cute.jit
    def weigh(self, r, raw, level, masked):
        """P of a raw score whose row has this lse, and the softcap's derivative there."""
        score, slope = raw * r.multiplier, Float32(1.0)
        if const_expr(self.config.softcap):
            # softcap · tanh(x / softcap) in log2 units, 2 / (1 + exp2(·)) being 1 - tanh.
            rest = 2 * reciprocal(exp2(raw * r.cap_in) + 1)
            score, slope = r.multiplier - r.multiplier * rest, rest * (2 - rest)
            if const_expr(masked):
                score = -Float32.inf if raw == -Float32.inf else score
        return exp2(score - level), slope

    @cute.jit
    def begin_at_mean(self, r, mean):
        """What dP is to be less, where its product adds to it: under S, and not behind dP."""
        for c in cutlass.range_constexpr(self.tile_m // 4):
            for i in cutlass.range_constexpr(2):
                r.rows_dp[i, c] = negative(mean[c])

    @cute.jit
    def differentiate(self, r, mean):
        """dS / scale from P and dP, in dP's place."""
        for c in cutlass.range_constexpr(self.tile_m // 4):
            for i in cutlass.range_constexpr(2):
                if const_expr(mean is None):
                    r.rows_dp[i, c] = r.rows_s[i, c] * r.rows_dp[i, c]
                else:
                    r.rows_dp[i, c] = r.rows_s[i, c] * (r.rows_dp[i, c] - mean[c])

    @cute.jit
    def pack(self, acc, operand):
        """An accumulator in the input dtype: as an A operand it has the same elements in the same order."""
        words = self.words(operand)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = pack16(acc[2 * i], acc[2 * i + 1], self.dtype)

    def words(self, operand: Any) -> Any:
        """The 32-bit registers of an operand."""
        return cute.recast_tensor(cute.make_tensor(operand.iterator, cute.make_layout(cute.size(operand))), Int32)

    @cute.jit
    def share(self, r, slot):
        """dS, rows now queries, where both warpgroups read it."""
        target = r.ds_target + slot * (self.tile_m * self.tile_n)
        for i in cutlass.range_constexpr(self.tile_m // 16):
            words = [self.words(r.ds)[4 * i + j] for j in range(4)]
            store_matrices(target + i * (16 * 64), words, transposed=True)

    @cute.jit
    def hand_over(self, r, j=0):
        """dQ to the writer warp, in accumulator order."""
        full = DQ_FULL + r.group
        if const_expr(self.alternate):
            full += (j & 1) * DQ_ODD
        count = self.piece // (4 * WARPGROUP)
        for piece in cutlass.range_constexpr(cute.size(r.acc_dq) // (4 * count)):
            cute.arch.barrier(barrier_id=DQ_EMPTY + r.group, number_of_threads=WARPGROUP + 32)
            for i in cutlass.range_constexpr(count):
                four = cute.make_tensor(r.acc_dq.iterator + 4 * (piece * count + i), cute.make_layout(4))
                target = cute.make_tensor(r.dq_target + i * 4 * WARPGROUP, cute.make_layout(4))
                cute.autovec_copy(four, target)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier_arrive(barrier_id=full, number_of_threads=WARPGROUP + 32)

    @cute.jit
    def release(self, barrier):
        """This warp has read what the barrier guards."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def release_last(self, r, j, barrier):
        """As ``release``, in a block's last step."""
        if cute.arch.lane_idx() == 0 and j + 1 == r.past:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def epilogue(self, acc, target, work, row, first_column, factor):
        """Store rows of dK or dV: quads transpose their columns, so that each lane writes 16 bytes of a row."""
        lane = cute.arch.lane_idx()
        columns = 2 * cute.size(acc)
        rows = cute.make_tensor(acc.iterator, self.row_view(columns))
        for i in cutlass.range_constexpr(2):
            for chunk in cutlass.range_constexpr(columns // 32):
                pairs = [(rows[i, chunk * 8 + j], rows[i, chunk * 8 + j + 1]) for j in range(0, 8, 2)]
                words = [pack16(low * factor, high * factor, self.dtype) for low, high in pairs]
                words = transpose_quad(words, lane)
                here, column = row + 8 * i, first_column + chunk * 32 + lane % 4 * 8
                if here < work.seqlen_k and column < target.shape[-1]:
                    self.store_words(self.element(target, work.batch, work.k_start + here, work.head, column), words)
