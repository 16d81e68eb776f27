"""The kernels before and after the backward's: row statistics and what starts at zero; dQ scaled, rounded and stored.

A thread block of either works on one query tile of one head.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.attention.hopper.backward_base import FAR_LEVEL, ROW_THREADS, Call
from warploom.attention.hopper.backward_bias import BiasSteps
from warploom.attention.hopper.backward_deal import Dealer
from warploom.attention.hopper.backward_distances import DistanceSteps
from warploom.kernels.cute.basics import LOG2_E, WARPGROUP, choose
from warploom.kernels.cute.bias import slopes_of
from warploom.kernels.cute.columns import Columns
from warploom.kernels.cute.distances import distances_of
from warploom.kernels.cute.epilogue import quad_words, store_words
from warploom.kernels.cute.instructions import pack16, store_matrices
from warploom.kernels.cute.packed import bounds, locate

AT_ONCE = 5  # rows of a thread whose loads are under way together


class RowKernels(Dealer, BiasSteps, DistanceSteps):
    """What runs over rows of Q rather than blocks of keys."""

    @cute.kernel
    def before(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        sums: cute.Tensor,
        stats: cute.Tensor,
        counters: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        dk: cute.Tensor | None,
        dv: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        q: cute.Tensor | None,
        masked: tuple[Any, ...] | None,
        bias: tuple[Any, ...] | None,
        m_blocks: Int32,
        cleared: Int32 | None,
        multiplier: Float32 | None,
    ):
        """Row statistics of a query tile, and zeros where its dQ will be summed up or where it is said to be there.

        Zeros for dQ of the first ``cleared`` tiles alone; None: of all.

        A row that sees nothing, or is past the last one, gets an lse of +inf, which makes its P and dS 0. Under a column mask
        or with a table of distances a finite one that does the same, unless it holds NaN or infinity in ``q`` or dO, which the
        consumers then clear. Under a mask the first thread block deals out the last key blocks, for which ``masked`` is what
        ``key_blocks`` and ``deal`` take.

        ``multiplier``: what makes log2 units of raw scores, where a row's lse stands once more, as keys far right take it.
        """
        tile_m, lanes = self.tile_m, self.lanes
        thread, index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        if const_expr(self.config.varlen):
            self.clear(dk, cu_k)
            self.clear(dv, cu_k)
        batch, head, start, seqlen_q, m_block, sequence = self.query_tile(index, m_blocks, out, cu_q)
        slopes = slopes_of(bias) if const_expr(self.biased) else None
        distances = distances_of(bias) if const_expr(self.reads_distances) else None
        lower, right = Float32(0.0), Float32(0.0)
        if const_expr(distances is not None):
            lower, right = self.levels(distances, head, multiplier)
        if const_expr(not self.config.claims):
            size = tile_m * self.config.head_dim
            into = sums.iterator + Int64(index) * size
            if const_expr(cleared is None):
                self.zero(into, size, thread, ROW_THREADS)
            else:
                if index < cleared:
                    self.zero(into, size, thread, ROW_THREADS)
        if const_expr(self.config.persistent):  # noqa: SIM102
            if index == 0:
                past = counters.shape[0]  # type: ignore[union-attr]
                shares = const_expr(self.config.stream_k or self.config.dealt)
                first = thread if const_expr(shares) else past - 1 + thread
                for i in cutlass.range(first, past, ROW_THREADS, unroll=1):
                    counters[i] = Int32(0)  # type: ignore[index]
        if const_expr(masked is not None):  # noqa: SIM102
            if index == 0:
                *sizes, processors, slots = masked  # type: ignore[misc]
                if const_expr(self.config.dealt):
                    self.deal(self.key_blocks(out, m_blocks, sizes), counters, processors, slots)
                else:
                    self.order_last(self.key_blocks(out, m_blocks, sizes), counters, processors)
        if const_expr(self.config.states > 0):  # noqa: SIM102
            if thread < self.config.states:
                counters[Int64(index) * self.config.states + thread] = Int32(0)  # type: ignore[index]
        column, count = thread % lanes * 8, tile_m * lanes // ROW_THREADS
        for first in cutlass.range_constexpr(0, count, AT_ONCE):
            # All loads of some rows, of the sequence's last one in place of those past it, before anything waits for one.
            taken = []
            for i in cutlass.range_constexpr(first, min(first + AT_ONCE, count)):
                in_tile = thread // lanes + i * (ROW_THREADS // lanes)
                row = m_block * tile_m + in_tile
                inside = row < seqlen_q
                place = start + cutlass.max(cutlass.min(row, seqlen_q - 1), 0)
                place = cutlass.min(place, out.shape[0 if const_expr(self.config.varlen) else 1] - 1)
                at = choose(column < out.shape[-1], column, 0)
                found = self.of_row(lse, batch, head, place)
                taken.append(
                    (in_tile, inside, place, found, *(self.eight(t, batch, place, head, at) for t in (out, dout)))
                )
            for in_tile, inside, place, found, a, b in taken:
                total = Float32(0.0)
                for j in cutlass.range_constexpr(8):
                    total += a[j].to(Float32) * b[j].to(Float32)
                total = total if inside and column < out.shape[-1] else Float32(0.0)
                total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
                unseeing = Float32.inf
                if const_expr(q is not None):
                    blind = inside and found == -Float32.inf
                    unseeing = self.unseeing_level(q, dout, batch, head, place, column, blind, lanes)
                if column == 0:
                    level = unseeing
                    if inside:
                        if const_expr(dlse is not None):
                            total -= self.of_row(dlse, batch, head, place)
                        level = unseeing if found == -Float32.inf else found * LOG2_E - self.lift
                        if const_expr(slopes is not None):
                            level += self.row_bias(slopes, sequence, head, in_tile)
                        if const_expr(distances is not None):
                            level -= lower
                        total = Float32(0.0) if found == -Float32.inf else total
                    base = Int64(index) * self.stage_statistics + in_tile
                    stats[base] = level
                    stats[base + tile_m] = total
                    if const_expr(multiplier is not None):
                        stats[base + 2 * tile_m] = level - right

    def key_blocks(self, out: Any, m_blocks: Any, masked: Any) -> Call:
        """What is to be known of a masked call's key blocks, whose sizes and limits ``masked`` has."""
        bounds, offsets, k, n_blocks, section, left, right = masked
        batch, seqlen_q, heads, _ = out.shape
        seqlen_k, heads_kv = k.shape[1:3]
        return Call(
            shared=None,
            q_shape=(seqlen_q, None, heads, batch),
            k_shape=(seqlen_k, None, heads_kv, batch),
            cu_q=None,
            cu_k=None,
            used=None,
            seqlen_q=seqlen_q,
            m_blocks=m_blocks,
            n_blocks=n_blocks,
            slices=batch * heads_kv,
            section=section,
            left=left,
            right=right,
            columns=Columns(vectors=None, present=None, bounds=bounds, offsets=offsets),
            dropout=None,
            slopes=None,
            distances=None,
            near=None,
        )

    @cute.jit
    def unseeing_level(self, q, dout, batch, head, row, column, blind, lanes):
        """What stands for the lse of a row of the tensors if it is ``blind``: +inf where it holds anything but numbers."""
        odd = Float32(0.0)
        if blind:
            for t in (q, dout):
                for part in cutlass.range_constexpr(-(-self.config.head_dim // (8 * lanes))):
                    at = column + part * (8 * lanes)
                    if at < t.shape[-1]:
                        values = self.eight(t, batch, row, head, at)
                        for j in cutlass.range_constexpr(8):
                            value = values[j].to(Float32)
                            odd += value - value
        odd = cute.arch.warp_reduction_sum(odd, threads_in_group=lanes)
        return FAR_LEVEL if odd == 0.0 else Float32.inf

    def of_row(self, t: Any, batch: Any, head: Any, row: Any) -> Any:
        """A query's number."""
        return t[head, row] if self.config.varlen else t[batch, head, row]

    @cute.jit
    def clear(self, t, cu):
        """Zeros in the rows of a packed tensor that belong to no sequence."""
        rows, heads, columns = t.shape
        first = cutlass.min(cutlass.max(cu[0], 0), rows)
        past = cutlass.min(cutlass.max(cu[cu.shape[0] - 1], 0), rows)
        index, blocks, thread = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], cute.arch.thread_idx()[0]
        for i in cutlass.range(index, first + rows - past, blocks, unroll=1):
            row = choose(i < first, i, past + i - first)
            for at in cutlass.range(thread, heads * (columns // 8), ROW_THREADS, unroll=1):
                chunk = columns // 8
                store_words(self.element(t, 0, row, at // chunk, at % chunk * 8), [Int32(0)] * 4)

    @cute.jit
    def query_tile(self, index, m_blocks, rows, cu_q):
        """Of a block of the kernels before and after: batch, head, first row and rows of the sequence, and query tile in it.

        Last the number of the batch entry or sequence.
        """
        slice_, m_block = index // m_blocks, index % m_blocks
        if const_expr(self.config.varlen):
            sequence, start, length, m_block = locate(cu_q, m_block, self.tile_m, rows.shape[0])
            return Int32(0), slice_, start, length, m_block, sequence
        heads = rows.shape[2]
        batch = slice_ // heads
        return batch, slice_ % heads, Int32(0), rows.shape[1], m_block, batch

    @cute.jit
    def unseen_tiles(self, tile, seqlen_q, cu_q, total_q, keys):
        """Query tiles before the first that a key sees, or all, of the packed sequence that a tile belongs to."""
        cu_k, total_k, right = keys
        sequence, _, _, _ = locate(cu_q, tile, self.tile_m, total_q)
        _, seqlen_k = bounds(cu_k, sequence, total_k)
        first = cutlass.max(seqlen_q - seqlen_k - right, 0) // self.tile_m
        return choose(cutlass.min(seqlen_k, seqlen_k + right) > 0, first, seqlen_q // self.tile_m + 1)

    def eight(self, t: Any, batch: Any, row: Any, head: Any, column: Any) -> Any:
        """Eight elements of a row in registers, by one load."""
        source = cute.make_tensor(self.element(t, batch, row, head, column), cute.make_layout(8))
        values = cute.make_rmem_tensor(8, self.dtype)
        cute.autovec_copy(source, values)
        return values

    @cute.kernel
    def after(
        self,
        dq: cute.Tensor,
        sums: cute.Tensor,
        unseen: Int32 | tuple[cute.Tensor, Int32, Int32] | None,
        cu_q: cute.Tensor | None,
        m_blocks: Int32,
        scale: Float32,
    ):
        """Scale, round and store dQ of a query tile: threads read what they, as consumers, had in registers.

        Query tiles before the ``unseen``-th have none; of packed sequences that follows from cu_k, the number of all keys and
        the right limit. Nothing else is read, since the row statistics may have stood in ``dq``.
        """
        config, tile_m = self.config, self.tile_m
        if const_expr(config.varlen):
            self.clear(dq, cu_q)
        thread, index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        batch, head, start, seqlen_q, m_block, _ = self.query_tile(index, m_blocks, dq, cu_q)
        group, own, lane = thread // WARPGROUP, thread % WARPGROUP, thread % 32
        source = sums.iterator + Int64(index) * (tile_m * config.head_dim) + group * self.part + own * 4
        count = self.part // (4 * WARPGROUP)
        values = cute.make_rmem_tensor((4, count), Float32)
        for i in cutlass.range_constexpr(count):
            four = cute.make_tensor((source + i * 4 * WARPGROUP).align(16), cute.make_layout(4))
            cute.autovec_copy(four, values[None, i])
        if const_expr(isinstance(unseen, tuple)):
            unseen = self.unseen_tiles(index % m_blocks, seqlen_q, cu_q, dq.shape[0], unseen)
        if const_expr(unseen is not None):  # noqa: SIM102
            if m_block < unseen:
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
                    chosen = range(4 * chunk, 4 * chunk + 4)
                    pairs = [(values[2 * r, i], values[2 * r + 1, i]) if i < count else None for i in chosen]
                    words = quad_words(pairs, scale, self.dtype, lane)
                    column = first_column + chunk * 32 + word * 8
                    if row < seqlen_q and column < dq.shape[-1] and chunk * 32 + word * 8 < 8 * count:
                        store_words(self.element(dq, batch, start + row, head, column), words)
