"""Tiles, swizzles, orders of lanes, and what TMA can hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom.smem import TMA_MODES, Swizzle, Tile, count, tma_refusals
from warploom.smem.access import ACCESSES, parse_pattern
from warploom.smem.layout import parse_swizzles
from warploom.smem.walk import lane_addresses, walk


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 6))
def test_swizzle_permutes_and_undoes_itself(b: int, m: int, s: int) -> None:
    swizzle = Swizzle(b, m, s)
    moved = [swizzle(n) for n in range(1 << (b + m + s))]
    assert sorted(moved) == list(range(len(moved)))
    if s >= b:
        assert [swizzle(n) for n in moved] == list(range(len(moved)))
    assert [swizzle(n) * 2 for n in range(64)] == [swizzle.in_bytes(2)(2 * n) for n in range(64)]


def test_swizzle_of_the_articles() -> None:
    """Lanes 8 to 15 of the 16×16 tile change places in pairs, lanes 0 to 7 stay."""
    moved = [Swizzle(1, 3, 3)(8 * lane) // 8 for lane in range(16)]
    assert moved == [0, 1, 2, 3, 4, 5, 6, 7, 9, 8, 11, 10, 13, 12, 15, 14]


def test_parse_swizzles() -> None:
    assert parse_swizzles("<1,3,3> + 3, 3, 5") == (Swizzle(1, 3, 3), Swizzle(3, 3, 5))
    for text in ("1,3", "1,3,3,", "a,b,c", "", "1,-3,3"):
        with pytest.raises(ValueError, match="swizzle takes B,M,S"):
            parse_swizzles(text)
    with pytest.raises(ValueError, match="S ≥ 1"):
        parse_swizzles("1,3,0")


TILES = [Tile(16, 32), Tile(32, 64, "f32"), Tile(8, 128, pad=8), Tile(64, 16, "f64"), Tile(16, 64, "f8", pad=16)]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", [*ACCESSES, "lds.32@columns", "sts.64@fragment"])
def test_an_access_covers_every_byte_once(name: str, tile: Tile) -> None:
    pattern = parse_pattern(name)
    starts = [lane for group in walk(pattern, tile) for lane in group if lane is not None]
    width = pattern.access.width
    covered = sorted((row, byte + n) for row, byte in starts for n in range(width))
    assert covered == [(row, byte) for row in range(tile.rows) for byte in range(tile.row_bytes)]


def test_canonical_orders() -> None:
    tile = Tile(16, 32)
    (first, second) = walk(parse_pattern("ldmatrix.x4"), tile)
    assert first == [(row, byte) for byte in (0, 16) for row in range(16)]
    assert second == [(row, byte) for byte in (32, 48) for row in range(16)]
    assert next(iter(walk(parse_pattern("sts.128"), tile))) == [(n // 4, n % 4 * 16) for n in range(32)]
    assert next(iter(walk(parse_pattern("lds.32@columns"), tile)))[:17] == [*((n, 0) for n in range(16)), (0, 4)]
    assert next(iter(walk(parse_pattern("sts.32@fragment"), tile))) == [(n // 4, n % 4 * 4) for n in range(32)]


def test_last_instruction_may_be_partial() -> None:
    (only,) = lane_addresses(parse_pattern("lds.128"), Tile(3, 8))
    assert only == [0, 16, 32, *[None] * 29]
    assert count("lds.128", Tile(3, 8)).phases == 1


def test_view_is_the_same_memory() -> None:
    tile = Tile(16, 256)
    view = Tile(256, 16)
    assert list(lane_addresses(parse_pattern("ldmatrix.x4@256x16"), tile)) == list(
        lane_addresses(parse_pattern("ldmatrix.x4"), view)
    )


@pytest.mark.parametrize(
    ("pattern", "tile", "message"),
    [
        ("lds.128", Tile(4, 12), "multiple of 16 bytes for lds.128, got 12 × 2 bytes"),
        ("sts.128", Tile(4, 8, pad=1), "rows of 18 bytes put row 1 off the 16-byte alignment"),
        ("ldmatrix.x4", Tile(12, 16), "whole groups of 4 8-row matrices"),
        ("sts.32@fragment", Tile(4, 8), "fragments take 8 rows by 16 bytes"),
        ("sts.128", Tile(8, 64, swizzles=(Swizzle(1, 2, 4),)), "do not stay together"),
        ("lds.32@7x7", Tile(8, 8), "a view takes the 64 elements"),
    ],
)
def test_refuses(pattern: str, tile: Tile, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count(pattern, tile)


@pytest.mark.parametrize("text", ["ldmatrix.x4@rows", "lds.32@matrices", "lds.32@diagonal", "lds.32@0x8"])
def test_refuses_orders(text: str) -> None:
    with pytest.raises(ValueError, match="access"):
        parse_pattern(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "rows takes a number from 1, got 0"),
        ((8, 8, "f7"), "dtype takes one of f64, .* got 'f7'"),
        ((8, 8, "f16", -1), "pad takes a number of elements from 0, got -1"),
        ((2048, 2048), "rows × cols takes at most"),
    ],
)
def test_refuses_tiles(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tile(*arguments)


def test_tma() -> None:
    assert [name for name, refusal in tma_refusals(Tile(64, 64)).items() if refusal is None] == ["SW128"]
    assert tma_refusals(Tile(64, 64, swizzles=(Swizzle(3, 3, 3),)))["SW128"] is None
    assert "<3,5,3>" in str(tma_refusals(Tile(64, 64, swizzles=(Swizzle(3, 4, 3),)))["SW128"])
    assert [name for name, refusal in tma_refusals(Tile(64, 16)).items() if refusal is None] == list(TMA_MODES)
    assert "2 panels" in str(tma_refusals(Tile(64, 128))["SW128"])
    assert "padding" in str(tma_refusals(Tile(64, 64, pad=8))["SW128"])


@pytest.mark.parametrize("name", TMA_MODES)
def test_tma_modes_serve_ldmatrix_on_their_rows(name: str) -> None:
    """A row as wide as the mode's span, read as 8×8 matrices: no conflicts, as NVIDIA promises."""
    swizzle = TMA_MODES[name]
    tile = Tile(64, 8 << swizzle.b, "f16", swizzles=(Swizzle(swizzle.b, 3, 3),))
    assert tma_refusals(tile)[name] is None
    assert count("ldmatrix.x4", tile).excess == 0
