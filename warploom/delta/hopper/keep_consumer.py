"""The warpgroups of the walk that leaves states and Y, each with COLUMNS columns of the state.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from warploom.delta.hopper.back_base import TILE, BackBase, entry, item_of
from warploom.delta.hopper.config import BACK_ITEM, BETA, CHUNK, CLOSING, COLUMNS, MATRIX, NUMBERS, READS, WHOLE, WRITES
from warploom.delta.hopper.walk_base import place_of_y, rows_of
from warploom.kernels.cute.barriers import DeltaBarrier, wait
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.instructions import from_bfloat16, ldmatrix_x4, load_shared
from warploom.kernels.cute.memory import bulk_store
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.tiles import tma_views, transposed
from warploom.kernels.cute.wgmma import gemm, pack, words


class KeepConsumer(BackBase):
    """What each of the warpgroups runs."""

    @cute.jit
    def play(
        self, given, shared, group, prepared, state, last, resume, states, missing, missing_odd, size, begin, end, carriers,
        tma_missing, tma_odd, mma, mma_update,
    ):  # fmt: skip
        """Y of all chunks, states of range ``end``, and those at the starts of ranges behind ``begin``."""
        config = self.config
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = own % 32, own // 32
        part, update = mma.get_slice(0), mma_update.get_slice(0)
        keys, matrices = (mma.make_fragment_B(part.partition_B(t)) for t in (shared.k, shared.matrices))
        keys_turned = mma_update.make_fragment_B(update.partition_B(transposed(shared.k)))
        s = mma_update.make_fragment_C(update.partition_shape_C((COLUMNS, config.width)))
        s_operand = mma.make_fragment_A(part.partition_shape_A((COLUMNS, config.width)))
        y = mma.make_fragment_C(part.partition_shape_C((COLUMNS, CHUNK)))
        operand, written = (mma.make_fragment_A(part.partition_shape_A((COLUMNS, CHUNK))) for _ in range(2))
        column = (given.block + group) * COLUMNS + warp * 16 + lane // 4
        tiles = tile_offset(warp, lane)
        kept, target = shared.kept + group * (config.width * COLUMNS), shared.y_start + (group * TILE + tiles)
        values = (shared.v_start + (group * TILE + tiles)).toint()
        which, head = place_of_y(given.head, given.heads, missing)
        store_y, store_odd = (
            tma_views(atom, shared.y, cute.local_tile(rows, (CHUNK, COLUMNS), (None, None)))
            for atom, rows in (
                (atom, rows_of(t, head, given.batch, given.start, given.live))
                for atom, t in ((tma_missing, missing), (tma_odd, missing_odd))
            )
        )
        self.start(given, s, state, resume, begin, carriers, group, column, lane)
        stage, phase = Int32(0), Int32(0)
        for n in cutlass.range(given.low, given.high, unroll=1):
            place = given.origin + n
            if place > begin * size and place % size == 0 and n > given.low:
                self.hold(s, resume, given, (place // size - 1) * carriers + given.carrier, group)
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            numbers = (shared.numbers + stage * NUMBERS).toint() + lane % 4 * 8
            pack(s, s_operand, self.dtype)
            gemm(mma, y, s_operand, keys[None, None, None, stage], False)
            whole = load_shared(numbers, WHOLE * CHUNK * 4, 1)[0]
            found, reads = self.tile_words(values + stage * (2 * config.warpgroups * TILE)), self.line(numbers, READS)
            for i in cutlass.range_constexpr(cute.size(s)):
                s[i] = s[i] * whole
            warpgroup.wait_group(0)
            self.take_values(y, found, reads)
            pack(y, operand, self.dtype)
            self.rounded(y, words(operand))
            gemm(mma, y, operand, matrices[None, None, None, stage], True)
            until, betas = self.line(numbers, WRITES), self.line(numbers, BETA)
            factors = [until[i] * betas[i] for i in range(CHUNK // 4)]
            warpgroup.wait_group(0)
            # Of Y as it is kept: so a walk again has the same states.
            pack(y, operand, self.dtype)
            self.scaled_words(words(operand), words(written), factors)
            gemm(mma_update, s, written, keys_turned[None, None, None, stage], True)
            self.clear_way(group, warp)
            if place >= end * size:
                self.put_tile(words(s_operand), kept + tiles)
            self.put_tile(words(operand), target)
            cute.arch.fence_view_async_shared()
            wait(DeltaBarrier.OUT_WRITTEN, WARPGROUP, group)
            if warp == 0:
                at = None, n, given.block + group
                if which == 0:
                    cute.copy(store_y.atom, store_y.shared[None, group], store_y.tiles[at])
                else:
                    cute.copy(store_odd.atom, store_odd.shared[None, group], store_odd.tiles[at])
                if place >= end * size:
                    with cute.arch.elect_one():
                        self.send_state(given, group, kept, states, n)
                cute.arch.cp_async_bulk_commit_group()
            warpgroup.wait_group(0)
            release(shared.empty + stage)
            stage, phase = advance(stage, phase, config.stages)
        if given.low < given.high and given.high == given.count:
            self.close(given, s, last, prepared, group, column, lane, warp)
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def close(self, given, s, last, prepared, group, column, lane, warp):
        """A warp's part of the product of the last state and its gradient, which a chunk of few tokens passes through."""
        total = Float32(0.0)
        if last.shape[0] > given.sequence:
            for i in cutlass.range_constexpr(cute.size(s)):
                e, m = i // 4 * 8 + lane % 4 * 2 + i % 2, column + i // 2 % 2 * 8
                if e < last.shape[2] and m < last.shape[3]:
                    total = total + s[i] * last[given.sequence, given.head, e, m]
        for i in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << i)
        place = 2 * MATRIX + WHOLE * CHUNK + CLOSING + 4 * (given.block + group) + warp
        target = prepared.iterator + (item_of(given, given.count - 1) * BACK_ITEM + place)
        if lane == 0:
            target[0] = total

    def tile_words(self, address: Any) -> list[list[Any]]:
        """The words of a tile of values, transposed: of each 16 tokens those of four 8 x 8 tiles."""
        return [ldmatrix_x4(address, i * (2 * 16 * COLUMNS), True) for i in range(CHUNK // 16)]

    @cute.jit
    def take_values(self, y, values, reads):
        """y becomes v less what the state answers, y, times the decay since the chunk's start."""
        for i in cutlass.range_constexpr(cute.size(y)):
            y[i] = from_bfloat16(values[i // 8][i // 2 % 4], i % 2) - y[i] * reads[i // 4 * 2 + i % 2]

    @cute.jit
    def play_again(self, given, shared, group, state, resume, states, begin, carriers, mma, mma_update):
        """Tiles of states of range ``begin``."""
        config = self.config
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = own % 32, own // 32
        part, update = mma.get_slice(0), mma_update.get_slice(0)
        keys_turned = mma_update.make_fragment_B(update.partition_B(transposed(shared.k)))
        s = mma_update.make_fragment_C(update.partition_shape_C((COLUMNS, config.width)))
        s_operand = mma.make_fragment_A(part.partition_shape_A((COLUMNS, config.width)))
        operand, written = (mma.make_fragment_A(part.partition_shape_A((COLUMNS, CHUNK))) for _ in range(2))
        column = (given.block + group) * COLUMNS + warp * 16 + lane // 4
        tiles = tile_offset(warp, lane)
        kept = shared.kept + group * (config.width * COLUMNS)
        values = (shared.v_start + (group * TILE + tiles)).toint()
        self.start(given, s, state, resume, begin, carriers, group, column, lane)
        stage, phase = Int32(0), Int32(0)
        for n in cutlass.range(given.low, given.high, unroll=1):
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            numbers = (shared.numbers + stage * NUMBERS).toint() + lane % 4 * 8
            whole = load_shared(numbers, WHOLE * CHUNK * 4, 1)[0]
            until, betas = self.line(numbers, WRITES), self.line(numbers, BETA)
            factors = [until[i] * betas[i] for i in range(CHUNK // 4)]
            self.take_tile(values + stage * (2 * config.warpgroups * TILE), words(operand))
            self.scaled_words(words(operand), words(written), factors)
            pack(s, s_operand, self.dtype)
            for i in cutlass.range_constexpr(cute.size(s)):
                s[i] = s[i] * whole
            gemm(mma_update, s, written, keys_turned[None, None, None, stage], True)
            self.clear_way(group, warp)
            self.put_tile(words(s_operand), kept + tiles)
            cute.arch.fence_view_async_shared()
            wait(DeltaBarrier.OUT_WRITTEN, WARPGROUP, group)
            if warp == 0:
                with cute.arch.elect_one():
                    self.send_state(given, group, kept, states, n)
                cute.arch.cp_async_bulk_commit_group()
            warpgroup.wait_group(0)
            release(shared.empty + stage)
            stage, phase = advance(stage, phase, config.stages)
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def start(self, given, s, state, resume, begin, carriers, group, column, lane):
        """The state before the first chunk that is walked."""
        s.fill(0.0)
        if given.low == 0:
            if state.shape[0] > given.sequence:
                self.get_state(s, state, given.sequence, given.head, column, lane)
        elif given.low < given.high:
            self.take_held(s, resume, given, (begin - 1) * carriers + given.carrier, group)

    @cute.jit
    def send_state(self, given, group, kept, states, n):
        """One thread sends a state."""
        size = self.config.width * COLUMNS
        bulk_store(states.iterator + entry(given, n, group) * size, kept, 2 * size)


def tile_offset(warp: Any, lane: Any) -> Any:
    """Where this lane's row of the first four 8 x 8 tiles of a warp lies: tokens, or key dims, down, columns across."""
    matrix = lane // 8
    return (matrix // 2 * 8 + lane % 8) * 64 + ((warp * 2 + matrix % 2) ^ lane % 8) * 8
