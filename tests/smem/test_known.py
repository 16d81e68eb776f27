"""Counters that others measured and published, reproduced from the geometry of their kernels."""

from __future__ import annotations

import pytest

from warploom.smem.access import access
from warploom.smem.layout import Tile, parse_swizzles
from warploom.smem.model import predict
from warploom.smem.walk import count

SQUARE = Tile(16, 16, "f16")
PADDED = Tile(16, 16, "f16", pad=8)
SWIZZLED = Tile(16, 16, "f16", swizzles=parse_swizzles("1,3,3"))


def excess(pattern: str, tile: Tile) -> int:
    return count(pattern, tile).excess


def test_wmma_through_shared_memory() -> None:
    """The 16×16×16 product: Nsight Compute shows 8 load and 4 store conflicts, none in the 128-bit stores of A and B."""
    loads = excess("ldmatrix.x4", SQUARE) + excess("ldmatrix.x4.trans", SQUARE)
    assert (loads, excess("sts.128", SQUARE), excess("sts.32@fragment", SQUARE)) == (8, 0, 4)


def test_wmma_with_padding() -> None:
    """Loads 0; stores 12: 4 of C, which is not padded, and 4 each of A and B."""
    assert excess("ldmatrix.x4", PADDED) == 0
    assert 2 * excess("sts.128", PADDED) + excess("sts.32@fragment", SQUARE) == 12


def test_padded_store_conflicts_between_lanes_1_and_6() -> None:
    prediction = count("sts.128", PADDED).instructions[0]
    assert [phase.wavefronts for phase in prediction.phases] == [2, 2, 2, 2]
    crowded = {word for words in prediction.phases[0].banks.values() if len(words) > 1 for word in words}
    assert crowded == {4, 5, 6, 7, 36, 37, 38, 39}  # lane 1 at byte 16, lane 6 at byte 144


def test_swizzled() -> None:
    assert [excess(name, SWIZZLED) for name in ("ldmatrix.x4", "ldmatrix.x4.trans", "sts.128", "sts.32@fragment")] == [0] * 4


def test_emulated_and_real_stmatrix() -> None:
    assert excess("sts.32@fragment", SQUARE) == excess("stmatrix.x4", SQUARE) == 4
    assert excess("stmatrix.x4", SWIZZLED) == 0


def test_leetcuda_naive() -> None:
    """LeetCUDA's 1024³ product, one warp a block: A through ldmatrix.x4 from 16×16 halves. 2,097,152 → 0."""
    blocks, steps = (1024 // 8) * (1024 // 16), 1024 // 16

    def kernel(tile: Tile) -> int:
        b = count("ldmatrix.x2.trans", Tile(16, 8, "f16")).excess
        return blocks * steps * (count("ldmatrix.x4", tile).excess + b)

    assert kernel(SQUARE) == 2_097_152
    assert kernel(SWIZZLED) == 0


def test_leetcuda_warp_tiles() -> None:
    """The 128×128 block of 8 warps, 4 x4 loads of A and 4 x2.trans loads of B a warp and step. 2,359,296 → 0."""
    blocks, steps, warps = (1024 // 128) ** 2, 1024 // 16, 8

    def kernel(a: Tile, b: Tile) -> int:
        # One warp reads half of the rows of A and a quarter of the columns of B.
        per_warp = count("ldmatrix.x4", a).excess // 2 + count("ldmatrix.x2.trans", b).excess // 4
        return blocks * steps * warps * per_warp

    a, b = Tile(128, 16, "f16"), Tile(16, 128, "f16")
    assert kernel(a, b) == 2_359_296
    assert (
        kernel(
            Tile(128, 16, "f16", swizzles=parse_swizzles("1,3,3")),
            Tile(16, 128, "f16", swizzles=parse_swizzles("3,3,4")),
        )
        == 0
    )


@pytest.mark.parametrize(
    ("cols", "swizzle", "ways"),
    [(64, "", 8), (128, "", 8), (256, "", 8), (128, "3,3,4", 1), (64, "3,3,4", 2), (256, "3,3,4", 2), (128, "3,3,3", 2)],
)
def test_attention_tiles(cols: int, swizzle: str, ways: int) -> None:
    tile = Tile(16, cols, "f16", swizzles=parse_swizzles(swizzle) if swizzle else ())
    for instruction in count("ldmatrix.x4", tile).instructions:
        assert {phase.wavefronts for phase in instruction.phases} == {ways}


def test_attention_kernel_has_no_address_conflicts_left() -> None:
    """One warp and 16 keys of the kernel at head_dim 128: 712 excess wavefronts before its two swizzles, 0 after."""

    def kernel(wide: Tile, narrow: Tile) -> int:
        operands = 8 * 3 * count("ldmatrix.x4", wide).instructions[0].excess  # Q, K and V, 8 steps of 16 columns
        scores = excess("sts.32@fragment", narrow) + excess("ldmatrix.x4", narrow)
        output = 8 * excess("sts.32@fragment", narrow)
        softmax = 8 * (excess("lds.16", narrow) + excess("sts.16", narrow)) + 8 * excess("lds.16", narrow)
        return operands + scores + output + softmax + 3 * excess("sts.128", wide)

    assert kernel(Tile(16, 128), SQUARE) == 712
    assert kernel(Tile(16, 128, swizzles=parse_swizzles("3,3,4")), SWIZZLED) == 0


def test_softmax_statistics_of_the_attention_kernel() -> None:
    """8-byte records: two lanes write theirs, sixteen copy theirs, two rows are broadcast; none conflicts."""
    written = [8 * (lane // 16) if lane % 16 == 0 else None for lane in range(32)]
    copied = [8 * lane if lane < 16 else None for lane in range(32)]
    shared: list[int | None] = [8 * (lane // 16) for lane in range(32)]
    assert predict(access("sts.64"), written).excess == predict(access("lds.64"), copied).excess == 0
    assert predict(access("lds.32"), shared).excess == 0
