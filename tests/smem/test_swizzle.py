"""The search against brute force with the model, and its words against the search."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.smem import Swizzle, Tile, count, design
from warploom.smem.explain import describe
from warploom.smem.swizzle import check


def total(tile: Tile, patterns: list[str]) -> int:
    return sum(count(pattern, tile).excess for pattern in patterns)


def inside(tile: Tile) -> bool:
    offsets = range(0, tile.size_bytes, tile.itemsize)
    return max(map(tile.moved, offsets)) < tile.size_bytes


def brute_force(tile: Tile, patterns: list[str]) -> dict[int, int]:
    """The least excess of every swizzle that the model counts and that stays in the tile, by bits: no candidate is left out."""
    top = (tile.size_bytes // tile.itemsize).bit_length()
    best = {0: total(tile, patterns)}
    for b, m, s in itertools.product(range(1, 6), range(0, 7), range(1, top + 1)):
        swizzled = replace(tile, swizzles=(Swizzle(b, m, s),))
        if s < b or m + s >= top or not inside(swizzled):
            continue
        try:
            excess = total(swizzled, patterns)
        except ValueError:  # the swizzle takes an access apart
            continue
        best[b] = min(excess, best.get(b, excess))
    return best


SMALL = [
    (Tile(16, 16), ["sts.128", "ldmatrix.x4"]),
    (Tile(8, 32), ["sts.64", "lds.32@columns"]),
    (Tile(24, 24), ["sts.128", "lds.128@columns"]),
    (Tile(16, 8, "f32"), ["sts.64@fragment", "lds.32@columns"]),
    (Tile(16, 64), ["sts.128", "ldmatrix.x2"]),
]


@pytest.mark.parametrize(("tile", "patterns"), SMALL, ids=str)
def test_no_swizzle_is_better(tile: Tile, patterns: list[str]) -> None:
    found = design(tile, patterns)
    best = brute_force(tile, patterns)
    assert found.before == best[0]
    assert found.excess == min(best.values())
    if found.swizzle is not None:
        assert all(best[b] > found.excess for b in range(found.swizzle.b) if b in best)
        assert found.by_bits[found.swizzle.b] == best[found.swizzle.b]


@pytest.mark.parametrize(("tile", "patterns"), SMALL, ids=str)
def test_no_padding_is_better(tile: Tile, patterns: list[str]) -> None:
    found = design(tile, patterns)
    by_pad = {}
    for pad in range(200):  # beyond a line of banks, to see that they repeat
        try:
            by_pad[pad] = total(replace(tile, pad=pad), patterns)
        except ValueError:  # rows off the alignment
            continue
    assert found.pad_excess == min(by_pad.values())
    assert found.pad == min(pad for pad, excess in by_pad.items() if excess == found.pad_excess)


def test_padding_with_a_swizzle() -> None:
    """Against every swizzle of every padded tile, by the model's count."""
    tile, patterns = Tile(24, 20), ["lds.16", "lds.64@columns"]
    found = design(tile, patterns)
    assert (found.excess, found.stack_excess, found.pad_excess) == (2, None, 2)
    assert (found.padded.pad, found.padded.swizzle, found.padded.excess) == (4, Swizzle(1, 2, 4), 0)
    for pad in range(1, 5):
        padded = replace(tile, pad=pad)
        if all(fits(padded, pattern) for pattern in patterns):
            assert min(brute_force(padded, patterns).values()) == (0 if pad == 4 else 2)
    assert found.best == replace(tile, pad=4, swizzles=(Swizzle(1, 2, 4),))
    words = describe(found)
    assert "both      4 elements a row with <1,2,4> leave 0" in words and "4 elements after each row make rows of 48" in words


@pytest.mark.parametrize(
    ("tile", "patterns", "searched"),
    [
        (Tile(32, 32, "f32"), ["sts.128", "lds.32@columns"], True),
        (Tile(16, 16), ["sts.128", "ldmatrix.x4"], False),  # a swizzle suffices
        (Tile(16, 24), ["ldmatrix.x2", "lds.128@columns"], False),  # nothing to remove
        (Tile(16, 256), ["lds.32@columns@256x16", "sts.128"], False),  # no rows to pad
    ],
    ids=str,
)
def test_padding_with_a_swizzle_is_searched_where_it_may_help(tile: Tile, patterns: list[str], searched: bool) -> None:
    found = design(tile, patterns)
    assert (found.padded.searched > 0, found.padded.swizzle) == (searched, None)
    assert ("no padding with a swizzle leaves fewer" in describe(found)) == searched


NAMES = [
    "ldmatrix.x4",
    "ldmatrix.x2.trans",
    "stmatrix.x1",
    "sts.128",
    "lds.64",
    "lds.16",
    "lds.8@columns",
    "lds.32@columns",
    "lds.64@columns",
    "sts.32@fragment",
]


def fits(tile: Tile, pattern: str) -> bool:
    try:
        count(pattern, tile)
    except ValueError:
        return False
    return True


@settings(max_examples=30)
@given(
    st.sampled_from([8, 16, 24, 32]) | st.integers(1, 40),
    st.sampled_from([8, 16, 24, 40]) | st.integers(1, 40),
    st.sampled_from(["f8", "f16", "f32", "f64"]),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
)
def test_search_and_model_agree(rows: int, cols: int, dtype: str, names: list[str]) -> None:
    tile = Tile(rows, cols, dtype)
    patterns = [name for name in names if fits(tile, name)] or ["lds.8"]
    found = design(tile, patterns)
    check(found)
    reached = [found.before, found.excess, found.pad_excess]
    if found.stack_excess is not None:
        assert found.stack_excess < found.excess and found.stack_excess <= found.pad_excess
        reached.append(found.stack_excess)
    if found.padded.excess is not None:
        assert found.padded.excess < min(reached)
        reached.append(found.padded.excess)
    assert max(reached) == found.before
    assert describe(found)
    assert total(found.best, patterns) == min(reached)


@pytest.mark.parametrize(
    ("cols", "swizzle"), [(16, (1, 3, 3)), (32, (2, 3, 3)), (64, (3, 3, 3)), (128, (3, 3, 4)), (256, (3, 3, 5))]
)
def test_the_articles_swizzles_are_found(cols: int, swizzle: tuple[int, int, int]) -> None:
    found = design(Tile(16, cols), ["sts.128", "ldmatrix.x4"])
    assert (found.swizzle, found.excess) == (Swizzle(*swizzle), 0)


def test_transpose_of_words_needs_five_bits() -> None:
    found = design(Tile(32, 32, "f32"), ["sts.32", "lds.32@columns"])
    assert (found.swizzle, found.excess, found.pad, found.pad_excess) == (Swizzle(5, 0, 5), 0, 1, 0)
    assert found.by_bits == {0: 992, 1: 480, 2: 224, 3: 96, 4: 32, 5: 0}


def test_none_exists_and_the_reason() -> None:
    """16-byte stores keep 4 words together, so that a column of words keeps meeting 4 at a time."""
    found = design(Tile(32, 32, "f32"), ["sts.128", "lds.32@columns"])
    assert (found.excess, found.pad_excess, found.stack) == (96, 96, None)
    words = describe(found)
    assert "none removes every conflict" in words and "no two swizzles in a row leave fewer than 96" in words
    assert "wherever the pieces are moved, at least 4 lanes still meet" in words


def test_two_stacked_swizzles_where_one_is_not_enough() -> None:
    patterns = ["ldmatrix.x4", "ldmatrix.x4@256x16"]
    found = design(Tile(16, 256), patterns)
    assert (found.excess, found.stack, found.stack_excess) == (64, (Swizzle(1, 3, 3), Swizzle(3, 3, 5)), 0)
    assert found.best.swizzles == found.stack
    assert total(found.best, patterns) == 0


def test_words_of_the_four_steps() -> None:
    words = describe(design(Tile(16, 16), ["sts.128", "ldmatrix.x4"]))
    for phrase in (
        "bits 1 to 4 are column bits 0 to 3 and bits 5 to 8 are row bits 0 to 3",
        "of sts.128 differ in bit 4 (column bit 3) and bits 5 to 6 (row bits 0 to 1). All of these choose banks",
        "bit 7 (row bit 2) chooses no bank, so 2 lanes share one",
        "The bank bit left free, alike in all lanes: bit 4 (column bit 3)",
        "<1,3,3> XORs bit 7 (row bit 2) into bit 4 (column bit 3). Within a row, pieces only change places.",
        "no phase of any access has two words in one bank",
    ):
        assert phrase in words


def test_words_name_the_lanes_where_bits_do_not() -> None:
    words = describe(design(Tile(24, 48), ["lds.128@columns"]))
    assert "no power of two" in words and "different words in bank" in words


@pytest.mark.parametrize(
    ("tile", "pattern", "phrase"),
    [
        (Tile(1, 1, "f32"), "lds.32", "touches one place only: no conflicts"),
        (Tile(1, 4, "f8"), "lds.8@columns", "touches one place only: no conflicts"),
        (Tile(24, 64), "lds.32@columns", "lds.32@columns"),
        (Tile(5, 64, "f32"), "lds.128@columns", "lds.128@columns"),
    ],
    ids=str,
)
def test_words_of_small_and_uneven_tiles(tile: Tile, pattern: str, phrase: str) -> None:
    found = design(tile, [pattern])
    words = describe(found)
    assert phrase in words
    assert ("no conflicts" in words) == (found.before == 0)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="at least one access, got none"):
        design(Tile(16, 16), [])
    with pytest.raises(ValueError, match="without padding and swizzles, got 16×16 \\+ 8 f16"):
        design(Tile(16, 16, pad=8), ["lds.32"])
