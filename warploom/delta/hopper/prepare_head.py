"""One value head of a chunk, by a warp: decays, the weights within the chunk, the inverse. Imports the CuTe DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from warploom.delta.hopper.config import CHUNK, ITEM, MATRIX, PrepareConfig
from warploom.delta.hopper.inverse import (
    BLOCK_BYTES,
    get,
    get_transposed,
    inverse_blocks,
    inverses,
    put_transposed,
    split,
)
from warploom.kernels.cute.basics import DTYPES, LOG2_E
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import exp2, load_shared, pack16, store_matrices, store_pair, store_shared
from warploom.kernels.cute.memory import bulk_store

FRAGMENT_BYTES = 1024  # of a block of 16 × 16: first what its left half has, 16 bytes a lane
# Below it e^x is 0 in fp32: what a decay is raised to, -inf too, so that no difference of sums is inf - inf.
LEAST = -128.0


class Room(Fields):
    """Shared memory of a warp; addresses, but for ``staging``, a pointer."""

    staging: Any  # 8 KB: a matrix, with the swizzle of 128 bytes
    keys: Any  # fragments of k kᵀ, and of q kᵀ
    queries: Any
    blocks: Any  # two of `inverse`
    numbers: Any  # coarse sums of decays, fine ones in log2 units, beta: CHUNK each
    norms: Any  # of keys, of queries: CHUNK each


def below(i: int, j: int) -> int:
    """The number of block (i, j) among those on and below the diagonal."""
    return i * (i + 1) // 2 + j


@cute.jit
def at_least(x, least):
    """``x``, NaN too, or ``least`` where it is less."""
    return least if x < least else x


@cute.jit
def where(condition, x):
    return x if condition else Float32(0.0)


class PrepareHead:
    """What a warp does for a value head."""

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def clear(self, room, lane):
        """Zeros above the diagonal, which stay."""
        address = room.staging.toint() + lane * 16
        for i in cutlass.range_constexpr(CHUNK * CHUNK * 2 // 512):
            store_shared(address, 512 * i, [Float32(0.0)] * 4)

    @cute.jit
    def play_head(self, room, at, beta, decay, prepared, slot, head, decays, lane):
        """(I + A)⁻¹ - I, P and the rows of numbers of a value head."""
        item = Int64(slot) * beta.shape[2] + head
        self.put_numbers(room, at, beta, decay, prepared, item, head, decays, lane)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        target = prepared.iterator + item * ITEM
        of_inverse: dict[Any, Any] = {}  # words of its blocks on the diagonal
        turned, straight = [], []
        for pair in cutlass.range_constexpr(0, 4, 2):
            for i in cutlass.range_constexpr(pair, pair + 2):
                keys, weights = self.block(room, i, i, lane)
                self.put_block(room, i, i, weights, lane, 0)
                put_transposed(room.blocks + (i - pair) * BLOCK_BYTES, keys, lane)
            cute.arch.sync_warp()
            inverses(room.blocks, lane)
            for i in cutlass.range_constexpr(pair, pair + 2):
                address = room.blocks + (i - pair) * BLOCK_BYTES
                x = get_transposed(address, lane)
                straight.append(split(x))
                turned.append(split(get(address, lane)))
                of_inverse[i, i] = self.packed(self.lower(x, lane, 1))
            cute.arch.sync_warp()
        a = {}
        for j in cutlass.range_constexpr(3):
            for i in cutlass.range_constexpr(j + 1, 4):
                keys, weights = self.block(room, i, j, lane)
                self.put_block(room, i, j, weights, lane)
                a[i, j] = split(keys)
        self.send(room, target + MATRIX, lane)
        found = inverse_blocks(a, turned, straight)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(i + 1):
                words = of_inverse[i, i] if i == j else self.packed(found[i, j])
                self.put_words(room, i, j, words, lane)
        self.send(room, target, lane)

    @cute.jit
    def put_numbers(self, room, at, beta, decay, prepared, item, head, decays, lane):
        """Sums of decays and beta into shared memory; what the walk multiplies by into global memory."""
        betas, coarse, fine = [], [], []
        for e in cutlass.range_constexpr(2):
            token = at.first + 2 * lane + e
            b, d = Float32(0.0), Float32(0.0)
            if token < at.live:
                row = at.start + token
                b = beta[at.batch, row, head]
                if decays != 0:
                    d = at_least(decay[at.batch, row, head], Float32(LEAST))
            betas.append(b)
            # Multiples of 2^-10 are added without an error: a small decay behind large ones keeps its bits in what is left.
            rounded = cute.math.floor(d * 1024.0 + 0.5) * (1.0 / 1024.0)
            coarse.append(rounded)
            fine.append(d - rounded)
        coarse, fine = summed(coarse, lane), summed(fine, lane)
        fine = [x * LOG2_E for x in fine]
        to = room.numbers + lane * 8
        for i, pair in enumerate((coarse, fine, betas)):
            store_shared(to, i * CHUNK * 4, pair)
        last = [cute.arch.shuffle_sync(pair[1], 31) for pair in (coarse, fine)]
        of_k, of_q = (load_shared(room.norms + lane * 8, i * CHUNK * 4, 2) for i in range(2))
        target = (prepared.iterator + item * ITEM).toint() + (2 * MATRIX * 4 + lane * 8)
        since = [exp2(coarse[e] * LOG2_E + fine[e]) for e in range(2)]
        until = [exp2((last[0] - coarse[e]) * LOG2_E + (last[1] - fine[e])) for e in range(2)]
        whole = exp2(last[0] * LOG2_E + last[1])
        store_pair(target, since[0] * of_k[0], since[1] * of_k[1])
        store_pair(target + CHUNK * 4, since[0] * of_q[0], since[1] * of_q[1])
        store_pair(target + 2 * CHUNK * 4, *(until[e] * of_k[e] * betas[e] for e in range(2)))
        store_pair(target + 3 * CHUNK * 4, whole, whole)
        cute.arch.sync_warp()

    def block(self, room: Any, i: int, j: int, lane: Any) -> tuple[list[Any], list[Any]]:
        """Fragments of A and of P of a block; above the diagonal they are 0."""
        at_row, at_column = room.numbers + lane // 4 * 4, room.numbers + lane % 4 * 8
        rows = [[load_shared(at_row, (n * CHUNK + 16 * i + 8 * r) * 4, 1)[0] for r in range(2)] for n in range(2)]
        across = [
            [x for h in range(2) for x in load_shared(at_column, (n * CHUNK + 16 * j + 8 * h) * 4, 2)] for n in range(3)
        ]
        start = below(i, j) * FRAGMENT_BYTES
        kk, qk = (
            [x for n in range(2) for x in load_shared(of + lane * 16, start + 512 * n, 4)] for of in (room.keys, room.queries)
        )
        keys, weights = [], []
        for at in range(8):
            r, column = at // 2 % 2, at // 4 * 2 + at % 2
            exponent = (rows[0][r] - across[0][column]) * LOG2_E + (rows[1][r] - across[1][column])
            pair = exp2(exponent) * across[2][column]
            keys.append(kk[at] * pair)
            weights.append(qk[at] * pair)
        return (self.lower(keys, lane, 1), self.lower(weights, lane, 0)) if i == j else (keys, weights)

    def lower(self, fragment: list[Any], lane: Any, diagonal: int) -> list[Any]:
        """The elements of a block below its diagonal, and on it unless ``diagonal`` is 1; else 0."""
        row, column = lane // 4, lane % 4 * 2
        return [
            where(row + 8 * (at // 2 % 2) >= column + 8 * (at // 4) + at % 2 + diagonal, fragment[at]) for at in range(8)
        ]

    def packed(self, fragment: list[Any]) -> list[Any]:
        """A fragment's words in the inputs' dtype."""
        return [pack16(fragment[2 * n], fragment[2 * n + 1], self.dtype) for n in range(4)]

    def put_block(self, room: Any, i: int, j: int, fragment: list[Any], lane: Any, _: int = 0) -> None:
        self.put_words(room, i, j, self.packed(fragment), lane)

    def put_words(self, room: Any, i: int, j: int, words: list[Any], lane: Any) -> None:
        """A block into the staged matrix."""
        matrix, row = lane // 8, lane % 8
        place = (matrix % 2 * 8 + row) * CHUNK + ((2 * j + matrix // 2) ^ row) * 8
        store_matrices(room.staging + (place + 16 * i * CHUNK), words)

    @cute.jit
    def send(self, room, target, lane):
        """The staged matrix, all of it, into global memory."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            bulk_store(target, room.staging, MATRIX * 4)
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def summed(pair, lane):
    """Of two numbers a lane, the sums up to each."""
    total = pair[0] + pair[1]
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, 1 << i, mask_and_clamp=0)
        total = total + where(lane >= (1 << i), below)
    before = cute.arch.shuffle_sync_up(total, 1, mask_and_clamp=0)
    before = where(lane >= 1, before)
    return [before + pair[0], before + pair[0] + pair[1]]
