"""The consumer warpgroups of a walk, each with COLUMNS columns of the state. Imports the CuTe DSL.

All products have their left factor in registers: the state, transposed, and what is made of it. So a result becomes the next
product's factor where it is; an element 4 n + 2 r + e of an accumulator is value column 16 warp + lane // 4 + 8 r and token,
or key dim, 8 n + 2 (lane % 4) + e.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from warploom.delta.hopper.config import BETA, CHUNK, COLUMNS, NUMBERS, QUERIES, READS, WHOLE, WRITES
from warploom.delta.hopper.walk_base import WalkBase, rows_of
from warploom.kernels.cute.barriers import DeltaBarrier, wait
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.instructions import from_bfloat16, from_half, ldmatrix_x4, load_shared, pack16, store_matrices
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.tiles import tma_views, transposed
from warploom.kernels.cute.wgmma import gemm, pack, words


class Consumer(WalkBase):
    """What each of the warpgroups runs."""

    @cute.jit
    def play(self, given, group, out, state, last, tma_out, mma, mma_update):
        """out of each chunk, and the state after the last."""
        shared, config = given.shared, self.config
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = own % 32, own // 32
        part, update = mma.get_slice(0), mma_update.get_slice(0)
        queries, keys, matrices = (mma.make_fragment_B(part.partition_B(t)) for t in (shared.q, shared.k, shared.matrices))
        keys_turned = mma_update.make_fragment_B(update.partition_B(transposed(shared.k)))
        s = mma_update.make_fragment_C(update.partition_shape_C((COLUMNS, config.width)))
        s_operand = mma.make_fragment_A(part.partition_shape_A((COLUMNS, config.width)))
        y, o = (mma.make_fragment_C(part.partition_shape_C((COLUMNS, CHUNK))) for _ in range(2))
        operand, written = (mma.make_fragment_A(part.partition_shape_A((COLUMNS, CHUNK))) for _ in range(2))
        column = (given.block + group) * COLUMNS + warp * 16 + lane // 4
        matrix = lane // 8
        # Where this lane's row of the first four 8 x 8 tiles of this warp lies, in v and in out: tokens down, columns across.
        tiles = (matrix // 2 * 8 + lane % 8) * 64 + ((warp * 2 + matrix % 2) ^ lane % 8) * 8
        target = shared.out_start + (group * (CHUNK * COLUMNS) + tiles)
        values = (shared.v_start + (group * (CHUNK * COLUMNS) + tiles)).toint()
        rows = rows_of(out, given.head, given.batch, given.start, given.rows)
        tiles_out = cute.local_tile(rows, (CHUNK, COLUMNS), (None, None))
        store_out = tma_views(tma_out, shared.out, tiles_out)
        self.first_state(given, s, state, column, lane)
        stage, phase = Int32(0), Int32(0)
        for n in cutlass.range(given.chunks, unroll=1):
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            numbers = (shared.numbers + stage * NUMBERS).toint() + lane % 4 * 8
            pack(s, s_operand, self.dtype)
            gemm(mma, y, s_operand, keys[None, None, None, stage], False)
            gemm(mma, o, s_operand, queries[None, None, None, stage], False)
            warpgroup.wait_group(1)
            whole = load_shared(numbers, WHOLE * CHUNK * 4, 1)[0]
            for i in cutlass.range_constexpr(cute.size(s)):
                s[i] = s[i] * whole
            self.take_values(y, values + stage * (2 * config.warpgroups * CHUNK * COLUMNS), numbers)
            pack(y, operand, self.dtype)
            self.unpack(operand, y)
            gemm(mma, y, operand, matrices[None, None, None, 2 * stage], True)
            warpgroup.wait_group(1)
            self.scale(o, o, numbers, QUERIES)
            warpgroup.wait_group(0)
            self.scale(y, y, numbers, BETA)
            pack(y, operand, self.dtype)
            gemm(mma, o, operand, matrices[None, None, None, 2 * stage + 1], True)
            self.scale(y, y, numbers, WRITES)
            pack(y, written, self.dtype)
            gemm(mma_update, s, written, keys_turned[None, None, None, stage], True)
            warpgroup.wait_group(1)
            self.store(o, target, store_out, warp, group, (n, given.block + group))
            warpgroup.wait_group(0)
            release(shared.empty + stage)
            stage, phase = advance(stage, phase, config.stages)
        self.last_state(given, s, last, column, lane)
        if given.chunks * CHUNK < given.rows:
            o.fill(0.0)
            for n in cutlass.range(given.chunks, cute.ceil_div(given.rows, CHUNK), unroll=1):
                self.store(o, target, store_out, warp, group, (n, given.block + group))
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def take_values(self, y, address, numbers):
        """y becomes v less what the state answers, y, times the decay since the chunk's start."""
        for i in cutlass.range_constexpr(CHUNK // 16):
            four = ldmatrix_x4(address, i * (2 * 16 * COLUMNS), True)
            for half in cutlass.range_constexpr(2):
                reads = load_shared(numbers, (READS * CHUNK + 16 * i + 8 * half) * 4, 2)
                for r in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        at = 8 * i + 4 * half + 2 * r + e
                        y[at] = self.half(four[2 * half + r], e) - y[at] * reads[e]

    @cute.jit
    def unpack(self, operand, y):
        """y as its rounded values: Y takes them by both ways, as they are and by the inverse.

        Of equal keys each token replaces what the one before wrote. An error of all that is written goes with it; one of what
        the inverse takes alone would stay, and add up.
        """
        rounded = words(operand)
        for i in cutlass.range_constexpr(cute.size(y)):
            y[i] = self.half(rounded[i // 2], i % 2)

    def half(self, word: Any, part: int) -> Any:
        """One of a word's two numbers."""
        return from_bfloat16(word, part) if self.dtype is cutlass.BFloat16 else from_half(word, part)

    @cute.jit
    def scale(self, source, target, numbers, row):
        """An accumulator's tokens times a row of numbers."""
        for i in cutlass.range_constexpr(CHUNK // 8):
            pair = load_shared(numbers, (row * CHUNK + 8 * i) * 4, 2)
            for j in cutlass.range_constexpr(4):
                target[4 * i + j] = source[4 * i + j] * pair[j % 2]

    @cute.jit
    def store(self, o, target, tma, warp, group, tile):
        """out of a chunk, turned into rows of tokens, by way of shared memory; TMA leaves out what is past its end."""
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        wait(DeltaBarrier.OUT_FREE, WARPGROUP, group)
        for i in cutlass.range_constexpr(CHUNK // 16):
            four = [pack16(o[8 * i + 2 * m], o[8 * i + 2 * m + 1], self.dtype) for m in range(4)]
            store_matrices(target + i * (16 * COLUMNS), four, transposed=True)
        cute.arch.fence_view_async_shared()
        wait(DeltaBarrier.OUT_WRITTEN, WARPGROUP, group)
        if warp == 0:
            cute.copy(tma.atom, tma.shared[None, group], tma.tiles[(None, *tile)])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def first_state(self, given, s, state, column, lane):
        """The state before the sequence, transposed; zeros where there is none."""
        s.fill(0.0)
        if state.shape[0] > given.sequence:
            for i in cutlass.range_constexpr(cute.size(s)):
                e, m = i // 4 * 8 + lane % 4 * 2 + i % 2, column + i // 2 % 2 * 8
                if e < state.shape[2] and m < state.shape[3]:
                    s[i] = state[given.sequence, given.head, e, m]

    @cute.jit
    def last_state(self, given, s, last, column, lane):
        """The state after the sequence, where it is asked for."""
        if last.shape[0] > given.sequence:
            for i in cutlass.range_constexpr(cute.size(s)):
                e, m = i // 4 * 8 + lane % 4 * 2 + i % 2, column + i // 2 % 2 * 8
                if e < last.shape[2] and m < last.shape[3]:
                    last[given.sequence, given.head, e, m] = s[i]
