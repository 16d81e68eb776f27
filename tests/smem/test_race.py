"""What the search leaves out against counting everything, and the phases of whole tiles against one instruction at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from warploom.smem import Swizzle, Tile, count, design, parse_pattern
from warploom.smem.classes import PhaseClasses, Places, banks_from, distinct, encode, excess_by_phase, joined
from warploom.smem.race import Race, Work
from warploom.smem.swizzle import candidates
from warploom.smem.walk import addresses, lane_addresses

TILES = [
    (Tile(24, 23, "f32"), ["sts.32", "lds.32@columns"]),
    (Tile(61, 44), ["lds.16@columns", "sts.64", "lds.32"]),
    (Tile(48, 40, "f64"), ["sts.128", "lds.64@columns", "lds.8@columns"]),
    (Tile(64, 96), ["sts.128", "ldmatrix.x4", "sts.32@fragment"]),
]


def classes(tile: Tile, names: list[str]) -> list[PhaseClasses]:
    places = [Places.of(parse_pattern(name), tile) for name in names]
    return [one.merged() for one in joined([PhaseClasses.of(one, tile.pitch_bytes) for one in places])]


def everything(tables: list[PhaseClasses], stacks: torch.Tensor) -> list[int]:
    """The excess of every stack, phase by phase."""
    return [sum(int((t.excess(s.expand(len(t), -1, -1)) * t.weights).sum()) for t in tables) for s in stacks]


@pytest.mark.parametrize(("tile", "names"), TILES, ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_the_race_finds_the_least(tile: Tile, names: list[str], depth: int) -> None:
    tables, patterns = classes(tile, names), [parse_pattern(name) for name in names]
    draw = random.Random(depth)
    singles = candidates(tile, patterns)
    stacks = encode([draw.choices(singles, k=depth) for _ in range(60)])
    scores = everything(tables, stacks)
    work = Work()
    lowest = min(one.m for one in singles)
    race = Race(tables, lowest, work)
    assert race.plain == sum(count(name, tile).excess for name in names)
    least = min(scores)
    for limit in (None, least + 1, max(scores) + 5):
        found = race.least(stacks, limit)
        assert found == (least, scores.index(least))
    assert race.least(stacks, least) is None


def test_the_race_counts_little_where_little_decides() -> None:
    """Of 24 swizzles on some 300 classes: those that conflict everywhere are dropped after a few."""
    tile, names = Tile(250, 120), ["lds.32@columns", "sts.32"]
    tables, patterns = classes(tile, names), [parse_pattern(name) for name in names]
    singles = candidates(tile, patterns)
    work = Work()
    race = Race(tables, 2, work)
    many = sum(map(len, tables))
    assert work.phases == many
    assert race.least(encode([(one,) for one in singles]), 1) is None
    assert work.phases - many <= 3 * 8 * len(singles) < many * len(singles) / 10


def test_swizzles_of_equal_banks_conflict_alike() -> None:
    tile, names = Tile(40, 44), ["lds.16@columns", "sts.32"]
    tables, draw = classes(tile, names), random.Random(3)
    singles = candidates(tile, [parse_pattern(name) for name in names])
    stacks = encode([draw.choices(singles, k=2) for _ in range(300)])
    by_banks: dict[tuple[int, ...], set[int]] = {}
    for key, score in zip(map(tuple, banks_from(stacks).tolist()), everything(tables, stacks), strict=True):
        by_banks.setdefault(key, set()).add(score)
    assert 20 < len(by_banks) < len(stacks)
    assert all(len(scores) == 1 for scores in by_banks.values())
    # A bit XORed among the bank bits themselves renames banks.
    assert not banks_from(encode([(Swizzle(1, 3, 2),)])).any()


def test_the_floor_is_a_floor() -> None:
    tile, names = Tile(40, 20, "f64"), ["lds.8@columns", "lds.32", "sts.16@columns"]
    tables = classes(tile, names)
    stacks = encode([(one,) for one in candidates(tile, [parse_pattern(name) for name in names])])
    for table in tables:
        floor = table.floor(3)
        least = torch.stack([table.excess(stack.expand(len(table), -1, -1)) for stack in stacks]).amin(0)
        assert (floor <= least).all()
        assert floor.any()  # 8-byte elements of one word each leave half of the banks


def test_distinct_rows() -> None:
    rows = torch.tensor([[1, 2], [3, 4], [1, 2], [2, 1], [3, 4], [3, 4]], dtype=torch.int32)
    first, weights = distinct(rows, torch.tensor([1, 10, 100, 1000, 10000, 100000]))
    found = dict(zip(first.tolist(), weights.tolist(), strict=True))
    assert found == {0: 101, 1: 110010, 3: 1000}


LAYOUTS = [
    (Tile(24, 20), "lds.16"),
    (Tile(24, 20), "lds.64@columns"),
    (Tile(16, 64, pad=8), "ldmatrix.x4"),
    (Tile(16, 128), "sts.32@fragment"),
    (Tile(16, 256), "ldmatrix.x4@256x16"),
    (Tile(7, 12, "f32"), "lds.128"),
    (Tile(32, 32, "f8", pad=3), "lds.8@columns"),
    (Tile(16, 32), "ldmatrix.x1"),
]


@pytest.mark.parametrize(("tile", "name"), LAYOUTS, ids=str)
@pytest.mark.parametrize("swizzles", [(), (Swizzle(1, 4, 3),), (Swizzle(1, 4, 2), Swizzle(2, 4, 3))], ids=str)
def test_all_phases_at_once(tile: Tile, name: str, swizzles: tuple[Swizzle, ...]) -> None:
    tile, pattern = replace(tile, swizzles=swizzles), parse_pattern(name)
    by_phase = excess_by_phase(pattern, tile).tolist()
    for found, each in zip(by_phase, count(pattern, tile).instructions, strict=True):
        want = [phase.wavefronts - 1 for phase in each.phases]
        assert found == want + [0] * (len(found) - len(want))
    if pattern.view is None:
        # Lane by lane, as the tile itself says.
        for lanes, tensor in zip(lane_addresses(pattern, tile), addresses(pattern, tile).tolist(), strict=True):
            assert [-1 if lane is None else lane for lane in lanes] == tensor


def test_addresses_refuse_what_the_tile_refuses() -> None:
    with pytest.raises(ValueError, match="rows of 36 bytes put row 1 off the 8-byte alignment"):
        addresses(parse_pattern("lds.64"), Tile(8, 16, pad=2))
    with pytest.raises(ValueError, match="the 16 bytes of one lane at row 1 do not stay together"):
        addresses(parse_pattern("lds.128"), Tile(16, 16, swizzles=(Swizzle(1, 2, 2),)))


HARD = [
    # What took longest when every layout was counted on every phase: up to 19 million phases, 17 s.
    (Tile(200, 253, "f64"), ["lds.16@columns", "sts.8", "lds.8@columns", "lds.32@columns"], 2_500_000),
    (Tile(250, 255, "f32"), ["lds.16@columns", "lds.8@columns", "lds.32@columns", "sts.32"], 3_200_000),
    (Tile(248, 248, "f32"), ["sts.128", "lds.128@columns", "lds.32@columns", "sts.32@fragment"], 1_000_000),
    (Tile(256, 256, "f32"), ["sts.32", "lds.32@columns", "sts.64@fragment", "lds.128"], 150_000),
    (Tile(256, 256), ["sts.128", "ldmatrix.x4", "sts.32@fragment", "lds.32@columns"], 100_000),
]


@pytest.mark.parametrize(("tile", "names", "most"), HARD, ids=str)
def test_large_tiles_take_little_work(tile: Tile, names: list[str], most: int) -> None:
    """A core counts some three million phases a second; designs are to take two seconds at most."""
    found = design(tile, names)
    assert found.work <= most
    layouts = found.searched + found.pairs + found.padded.searched
    phases = sum(len(one.phases) for name in names for one in count(name, replace(tile, rows=8)).instructions) * tile.rows // 8
    assert found.work < layouts * phases / 10
