"""Where the kernel's lanes read and write: the same bytes as the laboratory's tile, and no bank conflict."""

from __future__ import annotations

import itertools

import pytest

from warploom.attention.ampere.config import ForwardConfig
from warploom.attention.ampere.layout import Places, swizzled
from warploom.smem.access import access
from warploom.smem.layout import Swizzle, Tile
from warploom.smem.model import predict

# A lane's row and column in a 16 × 16 block, as forward.py has them.
DOWN = [(lane % 16, lane // 16 * 8) for lane in range(32)]
ACROSS = [(lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8) for lane in range(32)]


def tiles(head_dim: int) -> dict[str, Tile]:
    config = ForwardConfig("float16", head_dim, 64)
    return {
        "swizzled": swizzled(config.tile(16)),
        "plain": config.tile(16),
        "padded": ForwardConfig("float16", head_dim, 64, swizzle=False, pad=8).tile(16),
    }


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_swizzle_is_the_designed_one(head_dim: int) -> None:
    assert swizzled(Tile(16, head_dim)).swizzles == (Swizzle(3, 3, {64: 3, 128: 4}[head_dim]),)


@pytest.mark.parametrize("kind", ["swizzled", "plain", "padded"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_places_are_the_tile(head_dim: int, kind: str) -> None:
    """base ^ flips + offset is the laboratory's address, for every block and lane."""
    tile = tiles(head_dim)[kind]
    places = Places(tile)
    for row, column in itertools.product(range(0, 64, 16), range(0, head_dim, 16)):
        flips, offset = places.split(row, column)
        for r, c in DOWN + ACROSS:
            want = tile.moved((row + r) * tile.pitch_bytes + (column + c) * 2)
            assert (places.base(r, c) ^ flips) + offset == want
    for row in range(8, 64, 8):  # what a thread copies, 8 or more rows apart
        for r, c in itertools.product(range(8), range(0, head_dim, 8)):
            assert places.base(r, c) + row * tile.pitch_bytes == tile.moved((row + r) * tile.pitch_bytes + c * 2)


@pytest.mark.parametrize(("kind", "excess"), [("swizzled", 0), ("plain", 7), ("padded", 0)])
def test_conflicts_of_reads(kind: str, excess: int) -> None:
    """Of each of the four phases of an ldmatrix.x4 at head dim 128; for 64, rows of 128 bytes conflict as badly."""
    for head_dim in (64, 128):
        places = Places(tiles(head_dim)[kind])
        for lanes, column in itertools.product((DOWN, ACROSS), range(0, head_dim, 16)):
            flips, offset = places.split(0, column)
            found = predict(access("ldmatrix.x4"), [(places.base(r, c) ^ flips) + offset for r, c in lanes])
            assert found.excess == 4 * excess


@pytest.mark.parametrize("kind", ["swizzled", "plain"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_copies_do_not_conflict(head_dim: int, kind: str) -> None:
    places = Places(tiles(head_dim)[kind])
    pieces = head_dim // 8
    assert predict(access("sts.128"), [places.base(n // pieces, n % pieces * 8) for n in range(32)]).excess == 0
