"""Tiles are counted, not walked: the counts are those of a walk, and nothing as long as the sequence is made for a band."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import Sizes
from warploom.masks import Causal, Chunked, ColumnMask, Document, Full, Mask, SlidingWindow
from warploom.masks.band_counts import count_band
from warploom.masks.tiles import TileClasses

lengths = st.integers(0, 70)
blocks = st.integers(1, 90)
sides = st.none() | st.integers(-80, 80)


def walked(mask: Mask, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> tuple[int, ...]:
    tiles = mask.tiles(block_m, block_n, seqlen_q, seqlen_k)
    classes = [one for _, _, one in tiles.rows()]
    return tuple(sum(int((one == kind).sum()) for one in classes) for kind in range(3))


def counted(tiles: TileClasses) -> tuple[int, ...]:
    return tuple(int(n.sum()) for n in (tiles.hidden, tiles.partial, tiles.full))


@settings(deadline=None, max_examples=400)
@given(lengths, lengths, blocks, blocks, sides, sides)
def test_the_closed_form_of_a_band_is_the_walk(
    seqlen_q: int, seqlen_k: int, block_m: int, block_n: int, left: int | None, right: int | None
) -> None:
    if left is not None and right is not None and left < 0 and right < 0:
        assert count_band(left, right, seqlen_q, seqlen_k, block_m, block_n)[1:] == (0, 0)
        return
    found = walked(SlidingWindow(left, right), seqlen_q, seqlen_k, block_m, block_n)
    assert count_band(left, right, seqlen_q, seqlen_k, block_m, block_n) == found


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 70), st.lists(st.integers(-3, 75), min_size=280, max_size=280), st.integers(1, 70), blocks, blocks, sides)
def test_counts_under_column_vectors_are_the_walk(
    seqlen_q: int, values: list[int], seqlen_k: int, block_m: int, block_n: int, left: int | None
) -> None:
    vectors = torch.tensor(values, dtype=torch.int32).view(4, 1, 1, 70)[..., :seqlen_k].contiguous()
    mask = ColumnMask(*vectors) & SlidingWindow(left, None)
    assert counted(mask.tiles(block_m, block_n, seqlen_q, seqlen_k)) == walked(mask, seqlen_q, seqlen_k, block_m, block_n)


@pytest.mark.parametrize("seqlen", [2**20, 2**24, 2**29])
@pytest.mark.parametrize("block", [1, 3, 64, 128, 1000])
@pytest.mark.parametrize("make", [Full, Causal, lambda: SlidingWindow(1023), lambda: SlidingWindow(None, -5)])
def test_a_band_makes_nothing_as_long_as_the_sequence(seqlen: int, block: int, make: Callable[[], Mask]) -> None:
    with Sizes() as sizes:
        tiles = make().tiles(block, block, seqlen, seqlen)
    each = -(-seqlen // block)
    assert sum(counted(tiles)) == each**2
    assert sizes.largest <= 64
    if isinstance(make(), Causal):
        single = each if block == 1 else int(seqlen % block == 1)  # tiles of one element on the diagonal
        below = each * (each - 1) // 2
        assert counted(tiles) == (below, each - single, below + single)


def test_a_mask_of_a_million_keys_makes_no_matrix_of_tiles() -> None:
    """16384 × 16384 tiles."""
    for mask in (Chunked(4096), Document([2**18, 2**18, 2**19])):
        with Sizes() as sizes:
            tiles = mask.tiles(64, 64, 2**20, 2**20)
        assert sum(counted(tiles)) == 2**28
        assert sizes.largest <= 8 * 2**20
