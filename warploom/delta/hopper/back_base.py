"""What the walks of a backward pass share. Imports the CuTe DSL; only what compiles kernels imports this module.

A pass is cut into ranges of chunks, each of which is walked, walked back and gives its gradients before the one before it. A
range has `size` chunks of every sequence, or, unless `per_sequence`, `size` slots, whose boundaries cut a sequence each at
most; the first has what the others leave. For every COLUMNS value columns of a value head walks leave tiles as they lie in
shared memory, 16 bits, with a swizzle of 128 bytes: of a chunk of a range (an "entry") a state (width, COLUMNS). Y of each
chunk lies as values do, in dq and dk where they have room for it: these are written when all that was there has been read.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.delta.hopper.config import BOX, BOX_ROWS, CHUNK, COLUMNS
from warploom.delta.hopper.walk_base import WalkBase, missed
from warploom.kernels.cute.barriers import DeltaBarrier, wait
from warploom.kernels.cute.basics import WARPGROUP, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import (
    assembly,
    from_bfloat16,
    ldmatrix_x4,
    load_shared,
    pack16,
    store_matrices,
)
from warploom.kernels.cute.memory import bulk_load

TILE = CHUNK * COLUMNS  # elements of a tile of tokens


class BackPart(Fields):
    """What a block works on."""

    block: Any  # which columns of v, in tiles of COLUMNS: its first
    tiles: Any  # of v, over all blocks
    head: Any  # of values
    head_qk: Any
    heads: Any  # of values
    batch: Any
    sequence: Any
    start: Any  # row of the sequence's first token in its batch
    live: Any  # tokens of the sequence that count
    slot: Any  # of the first chunk
    count: Any  # chunks of the sequence
    low: Any  # chunks from low to high are walked
    high: Any
    origin: Any  # what a chunk's number is added to for its place in all ranges
    shift: Any  # and that for its entry
    carrier: Any  # which state of those at a boundary is the sequence's


class BackBase(WalkBase):
    """Ranges, states in fp32, tiles that leave."""

    @cute.jit
    def part(self, index, heads, heads_qk, columns, seqlen, slots, lengths, cu, size, begin, end, per_sequence):
        """What a block walks: ranges ``begin`` to ``end``, of which the last has entries."""
        tiles = cute.ceil_div(columns, COLUMNS)
        blocks = cute.ceil_div(tiles, self.config.warpgroups)
        pair = index // blocks
        sequence = pair // heads
        head = pair - sequence * heads
        batch, start, _, live, slot = self.tokens(sequence, lengths, cu, seqlen)
        count = cute.ceil_div(live, CHUNK)
        origin = choose(per_sequence != 0, 0, slot) + missed(seqlen, slots, size, per_sequence)
        low = cutlass.min(cutlass.max(begin * size - origin, 0), count)
        high = cutlass.min(cutlass.max((end + 1) * size - origin, 0), count)
        shift = origin - end * size + choose(per_sequence != 0, sequence * size, 0)
        carrier = choose(per_sequence != 0, sequence, 0)
        return BackPart(
            block=(index - pair * blocks) * self.config.warpgroups,
            tiles=tiles,
            head=head,
            head_qk=head // (heads // heads_qk),
            heads=heads,
            batch=batch,
            sequence=sequence,
            start=start,
            live=live,
            slot=slot,
            count=count,
            low=low,
            high=high,
            origin=origin,
            shift=shift,
            carrier=carrier,
        )

    @cute.jit
    def load_matrix(self, to, item, barrier):
        """One thread loads a matrix of ``prepared``: each box from the first row on that is not 0."""
        for box in cutlass.range_constexpr(len(BOX_ROWS)):
            words = BOX_ROWS[box] * BOX // 2
            bulk_load(to + (box * CHUNK + CHUNK - BOX_ROWS[box]) * BOX, item, 4 * words, barrier)
            item = item + words

    @cute.jit
    def get_state(self, s, states, index, head, column, lane):
        """A state in fp32, transposed, past its dims zeros."""
        for i in cutlass.range_constexpr(cute.size(s)):
            e, m = i // 4 * 8 + lane % 4 * 2 + i % 2, column + i // 2 % 2 * 8
            if e < states.shape[2] and m < states.shape[3]:
                s[i] = states[index, head, e, m]

    @cute.jit
    def put_state(self, s, states, index, head, column, lane):
        """The way back."""
        for i in cutlass.range_constexpr(cute.size(s)):
            e, m = i // 4 * 8 + lane % 4 * 2 + i % 2, column + i // 2 % 2 * 8
            if e < states.shape[2] and m < states.shape[3]:
                states[index, head, e, m] = s[i]

    @cute.jit
    def take_held(self, s, held, given, number, group):
        """A state that another range left: sixteen bytes of each thread are neighbours of the next thread's."""
        address = self.held_at(held, given, number, group)
        for i in cutlass.range_constexpr(cute.size(s) // 4):
            four = load_four(address + i * (16 * WARPGROUP))
            for j in cutlass.range_constexpr(4):
                s[4 * i + j] = four[j]

    @cute.jit
    def hold(self, s, held, given, number, group):
        """The way back."""
        address = self.held_at(held, given, number, group)
        for i in cutlass.range_constexpr(cute.size(s) // 4):
            store_four(address + i * (16 * WARPGROUP), [s[4 * i + j] for j in range(4)])

    @cute.jit
    def held_at(self, held, given, number, group):
        """Where a thread has its part of a value head's state with this number."""
        index = (Int64(number) * given.heads + given.head) * given.tiles + (given.block + group)
        own = cute.arch.thread_idx()[0] % WARPGROUP
        return held.iterator.toint() + (index * (4 * self.config.width * COLUMNS) + own * 16)

    @cute.jit
    def clear_way(self, group, warp):
        """What left before has been read."""
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        wait(DeltaBarrier.OUT_FREE, WARPGROUP, group)

    @cute.jit
    def put_tile(self, found, target):
        """An operand, transposed, into a tile: columns down."""
        for i in cutlass.range_constexpr(cute.size(found) // 4):
            store_matrices(target + i * (16 * COLUMNS), [found[4 * i + j] for j in range(4)], transposed=True)

    @cute.jit
    def take_tile(self, address, found):
        """The words of an operand out of a tile, transposed: its rows down."""
        for i in cutlass.range_constexpr(cute.size(found) // 4):
            four = ldmatrix_x4(address, i * (2 * 16 * COLUMNS), True)
            for j in cutlass.range_constexpr(4):
                found[4 * i + j] = four[j]

    @cute.jit
    def scaled_words(self, source, target, factors):
        """The words of an operand times a number for each column."""
        for i in cutlass.range_constexpr(cute.size(source)):
            at = i // 2 * 2
            low, high = from_bfloat16(source[i], 0), from_bfloat16(source[i], 1)
            target[i] = pack16(low * factors[at], high * factors[at + 1], self.dtype)

    def line(self, numbers: Any, row: int) -> list[Any]:
        """Numbers of a row for a lane's columns of an accumulator. Loaded before a wait, they come while it lasts."""
        return [x for i in range(CHUNK // 8) for x in load_shared(numbers, (row * CHUNK + 8 * i) * 4, 2)]

    @cute.jit
    def scaled(self, y, factors):
        """An accumulator times a number for each column."""
        for i in cutlass.range_constexpr(cute.size(y)):
            y[i] = y[i] * factors[i // 4 * 2 + i % 2]

    @cute.jit
    def rounded(self, y, found):
        """An accumulator as the rounded values of its words."""
        for i in cutlass.range_constexpr(cute.size(y)):
            y[i] = from_bfloat16(found[i // 2], i % 2)


def entry(given: Any, chunk: Any, group: Any) -> Any:
    """The number of a chunk's state, of a warpgroup's columns."""
    return (Int64(chunk + given.shift) * given.heads + given.head) * given.tiles + (given.block + group)


@dsl_user_op
def store_four(address: Int64, values: list[Float32], *, loc: Any = None, ip: Any = None) -> None:
    """Four fp32 to global memory by one store."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in values)]
    assembly(None, operands, "st.global.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f,~{memory}", side_effects=True)


@dsl_user_op
def load_four(address: Int64, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Four fp32 of global memory by one load, past the first cache: a walk back waits for no kernel before it begins."""
    values, text = [Int64(address).ir_value(loc=loc, ip=ip)], "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];"
    kind = llvm.StructType.get_literal([T.f32()] * 4)
    parts = assembly(kind, values, text, "=f,=f,=f,=f,l,~{memory}", side_effects=True)
    return [Float32(llvm.extractvalue(T.f32(), parts, [i], loc=loc, ip=ip)) for i in range(4)]


def item_of(given: Any, chunk: Any) -> Any:
    """The number of a chunk in ``prepared``."""
    return Int64(given.slot + chunk) * given.heads + given.head
