"""The inverse of a unit lower triangular 64 × 64 matrix by one warp, in blocks of 16. Imports the CuTe DSL.

Blocks on the diagonal are inverted in fp32, a lane to a column. The others are products of blocks, each factor as the sum of
two bf16 numbers. A block in registers, a "fragment", is eight fp32 a lane, as mma.m16n8k16 leaves two results side by side:
element 4 n + 2 r + e is row lane // 4 + 8 r, column 8 n + 2 (lane % 4) + e. So it is a left factor, and transposed a right one.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from warploom.kernels.cute.instructions import from_bfloat16, load_shared, mma_m16n8k16, pack16, store_shared

PITCH = 20  # fp32 of a row of a block in shared memory: none of the accesses below meets another's bank
BLOCK_BYTES = 16 * PITCH * 4

Split = tuple[list[Any], list[Any]]  # the words of a fragment's high parts and of its low parts, bf16


def split(fragment: list[Any]) -> Split:
    """A fragment as the sum of two bf16 numbers each, which hold 16 bits of it."""
    high = [pack16(fragment[2 * i], fragment[2 * i + 1], cutlass.BFloat16) for i in range(4)]
    rest = [fragment[i] - from_bfloat16(high[i // 2], i % 2) for i in range(8)]
    return high, [pack16(rest[2 * i], rest[2 * i + 1], cutlass.BFloat16) for i in range(4)]


def times(a: Split, b: Split, onto: list[Any] | None = None) -> list[Any]:
    """The fragment of a bᵀ, added to ``onto``."""
    found: list[Any] = []
    for n in range(2):
        acc = [Float32(0.0)] * 4 if onto is None else onto[4 * n : 4 * n + 4]
        for left, right in ((a[1], b[0]), (a[0], b[1]), (a[0], b[0])):
            acc = mma_m16n8k16(left, [right[n], right[n + 2]], acc, cutlass.BFloat16)
        found += acc
    return found


def put_transposed(address: Any, fragment: list[Any], lane: Any) -> None:
    """A fragment into shared memory, columns as rows of PITCH."""
    base = address + (lane % 4 * (2 * PITCH) + lane // 4) * 4
    for n in range(2):
        for r in range(2):
            for e in range(2):
                store_shared(base, ((8 * n + e) * PITCH + 8 * r) * 4, [fragment[4 * n + 2 * r + e]])


def inverses(address: Any, lane: Any) -> None:
    """In place of two blocks that ``put_transposed`` left one after the other, their inverses, transposed.

    The lower triangles below the diagonals are read, the rest is taken for the unit matrix.
    """
    base = address + lane // 16 * BLOCK_BYTES
    x: list[Any] = [Float32(0.0) for _ in range(16)]
    column = lane % 16
    for i in range(16):
        x[i] = one_where(column == i)
    for j in range(15):
        for m in range((j + 1) // 4, 4):
            four = load_shared(base, (j * PITCH + 4 * m) * 4, 4)
            for i in range(max(4 * m, j + 1), 4 * m + 4):
                x[i] = x[i] - four[i - 4 * m] * x[j]
    cute.arch.sync_warp()
    own = base + column * (PITCH * 4)
    for m in range(4):
        store_shared(own, 16 * m, x[4 * m : 4 * m + 4])
    cute.arch.sync_warp()


def carry(address: Any, fade: Any, lane: Any) -> None:
    """In place of what ``inverses`` left, its numbers in bf16, each with what rounding left of those above it in its column.

    ``fade``: the decay from the row before to row lane % 16 of the lane's block.
    """
    own = address + lane // 16 * BLOCK_BYTES + lane % 16 * (PITCH * 4)
    left = Float32(0.0)
    for m in range(4):
        four = load_shared(own, 16 * m, 4)
        for i in range(4):
            given = four[i] + left * cute.arch.shuffle_sync(fade, lane // 16 * 16 + (4 * m + i))
            four[i] = from_bfloat16(pack16(given, Float32(0.0), cutlass.BFloat16), 0)
            left = given - four[i]
        store_shared(own, 16 * m, four)
    cute.arch.sync_warp()


@cute.jit
def one_where(condition):
    return Float32(1.0) if condition else Float32(0.0)


def get(address: Any, lane: Any) -> list[Any]:
    """The fragment whose rows are rows of PITCH in shared memory."""
    base = address + (lane // 4 * PITCH + lane % 4 * 2) * 4
    found: list[Any] = [None] * 8
    for n in range(2):
        for r in range(2):
            at = 4 * n + 2 * r
            found[at : at + 2] = load_shared(base, (8 * r * PITCH + 8 * n) * 4, 2)
    return found


def get_transposed(address: Any, lane: Any) -> list[Any]:
    """The fragment whose columns are rows of PITCH in shared memory."""
    base = address + (lane % 4 * (2 * PITCH) + lane // 4) * 4
    found: list[Any] = [None] * 8
    for n in range(2):
        for r in range(2):
            for e in range(2):
                found[4 * n + 2 * r + e] = load_shared(base, ((8 * n + e) * PITCH + 8 * r) * 4, 1)[0]
    return found
