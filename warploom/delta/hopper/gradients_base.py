"""What the roles of the gradients' kernel share. Imports the CuTe DSL; only what compiles kernels imports this module.

An accumulator of a warpgroup has tokens down: element 4 n + 2 r + e is token 16 warp + lane // 4 + 8 r and column
8 n + 2 (lane % 4) + e. Tiles in shared memory are rows of tokens in boxes of COLUMNS with a swizzle of 128 bytes.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from warploom.delta.hopper.config import (
    ALL_NUMBERS,
    BETA,
    CHUNK,
    COARSE,
    COLUMNS,
    FINE,
    OF_K,
    GradientConfig,
)
from warploom.delta.hopper.place import place_of_slot
from warploom.kernels.cute.basics import DTYPES, LOG2_E, WARPGROUP, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import (
    bits_of,
    exp2,
    from_bfloat16,
    ldmatrix_x4,
    load_shared,
    pack16,
    store_matrices,
)

TILE = CHUNK * COLUMNS  # elements of a tile of tokens
BOX_BYTES = 2 * TILE
# Rows of CHUNK fp32 that roles tell each other of a value head, two of them for two heads by turns; and of each warp what
# passes through the chunk.
OF_QUERIES, OF_READS, LONE, WROTE, ALL_WROTE, _, _, THROUGH = range(8)
SUMS = 8 * CHUNK
# Below it beta is taken for so much: no gradient notices, and it may be divided by.
LEAST_BETA = 1e-12


class GradientShared(Fields):
    """A block's shared memory. Barriers are addresses of the first of a ring's."""

    full: Any  # of what is loaded for COLUMNS value columns
    empty: Any
    numbers_full: Any  # of a value head
    numbers_empty: Any
    qk_full: Any
    qk_empty: Any
    asked_full: Any  # dout Yᵀ within the chunk, times all that is known of its tokens
    asked_empty: Any
    read_full: Any  # dV Yᵀ likewise
    read_empty: Any
    sums_full: Any
    sums_empty: Any
    keys_full: Any  # what reading gives to dk
    keys_empty: Any
    q: Any  # (chunk, width, 1)
    k: Any
    boxes_q: Any  # the same as TMA fills it, (chunk, COLUMNS, box)
    boxes_k: Any
    q_start: Any  # pointers
    k_start: Any
    state: Any  # (width, COLUMNS, stage)
    dstate: Any
    state_start: Any
    dstate_start: Any
    y: Any  # (chunk, COLUMNS, stage)
    dv: Any
    dout: Any
    y_start: Any
    dv_start: Any
    dout_start: Any
    asked: Any  # (chunk, chunk, 1)
    read: Any
    read_rest: Any  # what rounding left of it
    asked_start: Any
    read_start: Any
    read_rest_start: Any
    numbers: Any  # two of ALL_NUMBERS
    sums: Any
    dq: Any  # (chunk, COLUMNS, box)
    dq_start: Any
    dk: Any
    keys: Any  # an accumulator in fp32, where dk lies afterwards


class Chunk(Fields):
    """A chunk of a key head."""

    inside: Any  # whether it has a token that counts
    entry: Any
    head: Any
    batch: Any
    start: Any  # row of the sequence's first token in its batch
    first: Any  # first token of the chunk, counted from there
    live: Any  # tokens of the sequence that count


@cute.jit
def where(condition, x):
    return x if condition else Float32(0.0)


class GradientBase:
    """Where a block works; tiles as operands, and as what accumulators are multiplied by row by row."""

    def __init__(self, config: GradientConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.boxes = config.width // 64  # of a chunk of q or k

    @cute.jit
    def place(self, index, heads, slots, seqlen, lengths, cu, size, origin, per_sequence):
        """The chunk with this number among those of a range, heads innermost. Called by whole warps."""
        entry = index // heads
        head = index - entry * heads
        slot = origin + entry
        inside = choose(slot >= 0 and slot < slots, 1, 0)
        if per_sequence != 0:
            sequence = entry // size
            number = slot - sequence * size
            chunks = cute.ceil_div(seqlen, CHUNK)
            slot = sequence * chunks + number
            inside = choose(number >= 0 and number < chunks, 1, 0)
        batch, start, first, live = place_of_slot(choose(inside == 1, slot, 0), lengths, cu, seqlen, CHUNK)
        inside = choose(first < live, inside, 0)
        return inside, entry, head, batch, start, first, live

    def rows(self, address: Any, i: int, warp: Any, lane: Any) -> list[Any]:
        """Words of a warp's rows of a tile: 16 columns as an operand has them, 4 i + (0, 1, 2, 3)."""
        return ldmatrix_x4(address + self.row_of(warp, lane) + self.piece(i, lane), i // 4 * BOX_BYTES, False)

    def row_of(self, warp: Any, lane: Any) -> Any:
        return (warp * 16 + lane // 8 % 2 * 8 + lane % 8) * 128

    def piece(self, i: int, lane: Any) -> Any:
        return ((2 * (i % 4) + lane // 16) ^ (lane % 8)) * 16

    @cute.jit
    def scaled(self, address, found, factors, warp, lane):
        """An operand's words: rows of a tile times a factor each."""
        for i in cutlass.range_constexpr(COLUMNS // 16):
            four = self.rows(address, i, warp, lane)
            for j in cutlass.range_constexpr(4):
                low, high = from_bfloat16(four[j], 0), from_bfloat16(four[j], 1)
                found[4 * i + j] = pack16(low * factors[j % 2], high * factors[j % 2], self.dtype)

    def factors(self, numbers: Any, line: int, warp: Any, lane: Any) -> list[Any]:
        """Both rows' numbers of a line."""
        return [load_shared(numbers + (warp * 16 + lane // 4) * 4, (line * CHUNK + 8 * r) * 4, 1)[0] for r in range(2)]

    @cute.jit
    def dots(self, acc, address, warp, lane):
        """Of both rows the product of an accumulator and a tile, on all lanes of a row."""
        found = [Float32(0.0), Float32(0.0)]
        for i in cutlass.range_constexpr(self.config.width // 16):
            four = self.rows(address, i, warp, lane)
            for j in cutlass.range_constexpr(4):
                for e in cutlass.range_constexpr(2):
                    at = 4 * (2 * i + j // 2) + 2 * (j % 2) + e
                    found[j % 2] = found[j % 2] + acc[at] * from_bfloat16(four[j], e)
        return self.across(found)

    @cute.jit
    def squares(self, address, warp, lane):
        """Sums of squares of both rows of a tile."""
        found = [Float32(0.0), Float32(0.0)]
        for i in cutlass.range_constexpr(self.config.width // 16):
            four = self.rows(address, i, warp, lane)
            for j in cutlass.range_constexpr(4):
                for e in cutlass.range_constexpr(2):
                    x = from_bfloat16(four[j], e)
                    found[j % 2] = found[j % 2] + x * x
        return self.across(found)

    @cute.jit
    def across(self, found):
        """Sums over the four lanes of a row."""
        for r in cutlass.range_constexpr(2):
            for distance in cutlass.range_constexpr(1, 3):
                found[r] = found[r] + cute.arch.shuffle_sync_bfly(found[r], distance)
        return found

    @cute.jit
    def put_rows(self, sums, row, values, warp, lane):
        """A number for each token."""
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                (sums + (row * CHUNK + warp * 16 + lane // 4 + 8 * r))[0] = values[r]

    @cute.jit
    def weigh(self, acc, numbers, of_rows, below, warp, lane):
        """Products of tokens times their decay, beta and ``OF_K`` of the column and a factor of the row, as an operand's words.

        Columns come before rows by ``below`` tokens at least; else 0.
        """
        row = warp * 16 + lane // 4
        at_row, at_column = numbers + row * 4, numbers + lane % 4 * 8
        coarse = [load_shared(at_row, (COARSE * CHUNK + 8 * r) * 4, 1)[0] for r in range(2)]
        fine = [load_shared(at_row, (FINE * CHUNK + 8 * r) * 4, 1)[0] for r in range(2)]
        for n in cutlass.range_constexpr(CHUNK // 8):
            across = [load_shared(at_column, (line * CHUNK + 8 * n) * 4, 2) for line in (COARSE, FINE, BETA, OF_K)]
            for e in cutlass.range_constexpr(2):
                factor = beta_of(across[2][e]) * across[3][e]
                column = 8 * n + lane % 4 * 2 + e
                for r in cutlass.range_constexpr(2):
                    pair = exp2((coarse[r] - across[0][e]) * LOG2_E + (fine[r] - across[1][e]))
                    value = acc[4 * n + 2 * r + e] * (pair * (factor * of_rows[r]))
                    acc[4 * n + 2 * r + e] = where(row + 8 * r >= column + below, value)

    @cute.jit
    def put_square(self, found, address, warp, lane):
        """An operand's words into a tile."""
        for i in cutlass.range_constexpr(CHUNK // 16):
            target = address + (self.row_of(warp, lane) + self.piece(i, lane)) // 2
            store_matrices(target, [found[4 * i + j] for j in range(4)])

    @cute.jit
    def through(self, shared, stage, half):
        """A thread's part of the products of half of a state and of its gradient."""
        own = cute.arch.thread_idx()[0] % WARPGROUP
        size = self.config.width * COLUMNS
        start = 2 * stage * size + half * size + own * 16
        first, second = shared.state_start.toint() + start, shared.dstate_start.toint() + start
        total = Float32(0.0)
        for i in cutlass.range_constexpr(size // (16 * WARPGROUP)):
            a, b = load_shared(first, i * 16 * WARPGROUP, 4), load_shared(second, i * 16 * WARPGROUP, 4)
            for j in cutlass.range_constexpr(4):
                for e in cutlass.range_constexpr(2):
                    total = total + from_bfloat16(bits_of(a[j]), e) * from_bfloat16(bits_of(b[j]), e)
        return total

    @cute.jit
    def put_through(self, sums, total, warp, half, lane):
        """A warp's sum."""
        for i in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << i)
        if lane == 0:
            (sums + (THROUGH * CHUNK + 4 * half + warp))[0] = total

    @cute.jit
    def put_gradient(self, acc, source, factors, target, warp, lane):
        """An accumulator less a tile times a factor for each row, into a tile."""
        for i in cutlass.range_constexpr(self.config.width // 16):
            four = self.rows(source, i, warp, lane)
            found = []
            for j in cutlass.range_constexpr(4):
                at = 4 * (2 * i + j // 2) + 2 * (j % 2)
                values = [acc[at + e] - from_bfloat16(four[j], e) * factors[j % 2] for e in range(2)]
                found.append(pack16(values[0], values[1], self.dtype))
            store_matrices(target + (i // 4 * TILE + (self.row_of(warp, lane) + self.piece(i, lane)) // 2), found)


@cute.jit
def beta_of(x):
    """beta, of which no gradient notices that it is not 0."""
    return x if x >= LEAST_BETA or x <= -LEAST_BETA else Float32(LEAST_BETA)


def numbers_at(shared: Any, parity: Any) -> Any:
    """The address of a value head's numbers."""
    return (shared.numbers + parity * ALL_NUMBERS).toint()
