"""Lane addresses to measure: structured, random, and the ones that tell variants of the merging rule apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from warploom.smem.access import ACCESSES, WARP, Access, access, parse_pattern
from warploom.smem.copies import Place
from warploom.smem.layout import Tile, parse_swizzles
from warploom.smem.walk import lane_addresses

SHARED_BYTES = 48 * 1024  # what a kernel may use without asking for more

Lanes = list[int | None]


@dataclass(frozen=True)
class Measured:
    """One instruction to run: what it is called in the report, and the byte address of each lane."""

    name: str
    access: Access
    addresses: tuple[int | None, ...]


@dataclass(frozen=True)
class Copy:
    """One cp.async of 16 bytes a lane: the bytes in global and in shared memory where each lane's start, None: it is off."""

    name: str
    places: tuple[Place, ...]


def copies(seed: int = 0, randoms: int = 10) -> list[Copy]:
    """Copies to measure, the same for the same seed."""
    draw = random.Random(seed)
    found = [*_lines_moved(), *_rows_copied(), *_pieces_permuted(draw), *_copied_at_random(draw, randoms)]
    for one in found:
        assert len(one.places) == WARP and any(one.places), one.name
        assert all(place is None or place[1] + 16 <= SHARED_BYTES for place in one.places), one.name
    return found


def _copy(name: str, pieces: Iterable[tuple[int, int]]) -> Copy:
    """From the numbers of 16-byte pieces in global and in shared memory; further lanes are off."""
    places: list[Place] = [(16 * source, 16 * shared) for source, shared in pieces]
    return Copy(name, tuple(places + [None] * (WARP - len(places))))


def _lines_moved() -> Iterator[Copy]:
    for lanes in (1, 2, 4, 8, 12, 16, 24, 32):
        for further in (0, 1, 2, 3, 4, 7):
            yield _copy(f"{lanes} lanes, {further} pieces further", ((n, n + further) for n in range(lanes)))
    for start in (1, 2, 4):
        for lanes in (8, 32):
            yield _copy(f"{lanes} lanes from piece {start}", ((n + start, n) for n in range(lanes)))
            yield _copy(f"{lanes} lanes from piece {start} to {start}", ((n + start, n + start) for n in range(lanes)))
    for half in (0, 1):
        for further in range(8):
            yield _copy(f"half {half} of a line to piece {further}", ((n + 4 * half, n + further) for n in range(4)))
    for further in range(8):
        yield _copy(f"two halves of lines, {further} pieces further", ((n // 4 * 8 + n % 4, n + further) for n in range(8)))
    for lines in (2, 4, 8):
        yield _copy(f"{lines} lines to one", ((n % lines * 8 + n // lines, n) for n in range(8)))
        yield _copy(f"one line to {lines}", ((n, n % lines * 8 + n // lines) for n in range(8)))
        yield _copy(f"one line to {lines}, in its place", ((n, n % lines * 8 + n) for n in range(8)))


def _rows_copied() -> Iterator[Copy]:
    """Rows far apart in global memory, padded in shared memory."""
    for pieces in (4, 8, 16):
        for pad in range(0, 9):
            for first in (0, 1, 2, 3):
                if pieces == 16 or not first:
                    rows = ((n // pieces, n % pieces) for n in range(WARP))
                    places = ((row * 512 + piece, (first + row) * (pieces + pad) + piece) for row, piece in rows)
                    yield _copy(f"rows of {16 * pieces} bytes from row {first}, {16 * pad} bytes between", places)


def _pieces_permuted(draw: random.Random) -> Iterator[Copy]:
    for mask in range(1, 8):
        yield _copy(f"a line, pieces ^ {mask}", ((n, n ^ mask) for n in range(8)))
    for number in range(8):
        order = draw.sample(range(8), 8)
        yield _copy(f"a line, permuted {number}", enumerate(order))
        yield _copy(f"a line, lanes permuted {number}", ((n, n) for n in order))
        yield _copy(f"four lines, lanes permuted {number}", ((n, n) for n in draw.sample(range(WARP), WARP)))


def _copied_at_random(draw: random.Random, each: int) -> Iterator[Copy]:
    for lanes, spread in ((8, 8), (8, 32), (WARP, 64), (WARP, 256)):
        for number in range(each):
            sources, shared = draw.sample(range(max(spread, lanes)), lanes), draw.sample(range(max(spread, lanes)), lanes)
            what = f"{lanes} lanes over {spread} pieces, random {number}"
            yield _copy(f"{what}: shared", enumerate(shared))
            yield _copy(f"{what}: global", ((source, n) for n, source in enumerate(sources)))
            yield _copy(f"{what}: both", zip(sources, shared, strict=True))


def generate(seed: int = 0, randoms: int = 6) -> list[Measured]:
    """Every pattern to measure, the same for the same seed; `randoms` random ones for each instruction."""
    found = [*_merging(), *_predicated(), *_tiles(), *_strides(), *_random(random.Random(seed), randoms)]
    for one in found:
        assert all(a is None or a + one.access.width <= SHARED_BYTES for a in one.addresses), one.name
    return found


def _strides() -> Iterator[Measured]:
    for one in ACCESSES.values():
        if one.name.endswith(".trans"):
            continue
        for lanes_apart in (1, 2, 3, 8, 32):
            stride = lanes_apart * max(4, one.width)
            if stride * (WARP - 1) + one.width <= SHARED_BYTES:
                yield Measured(f"stride {stride}", one, tuple(stride * lane for lane in range(WARP)))


def _tiles() -> Iterator[Measured]:
    tiles = {
        "16x16": Tile(16, 16),
        "16x16 padded": Tile(16, 16, pad=8),
        "16x16 swizzled": Tile(16, 16, swizzles=parse_swizzles("1,3,3")),
        "16x128": Tile(16, 128),
        "16x128 <3,3,4>": Tile(16, 128, swizzles=parse_swizzles("3,3,4")),
        "16x128 <3,3,3>": Tile(16, 128, swizzles=parse_swizzles("3,3,3")),
    }
    patterns = ("sts.128", "ldmatrix.x4", "ldmatrix.x4.trans", "sts.32@fragment", "lds.128@columns", "stmatrix.x4")
    for name, tile in tiles.items():
        for text in patterns:
            pattern = parse_pattern(text)
            addresses = next(iter(lane_addresses(pattern, tile)))
            if len(addresses) == WARP:
                yield Measured(f"{text} on {name}", pattern.access, tuple(addresses))


def _merging() -> Iterator[Measured]:
    """Pairs of lanes at one address: whole warps, halves, quarters, and almost. Lanes of equal number read the same."""
    shapes: dict[str, Callable[[int], int]] = {
        "pairs n^1": lambda n: n & ~1,
        "pairs n^2": lambda n: n & ~2,
        "pairs n^3": lambda n: min(n, n ^ 3),
        "pairs n^4": lambda n: n & ~4,
        "pairs n^8": lambda n: n & ~8,
        "pairs n^16": lambda n: n & ~16,
        "fours": lambda n: n & ~3,
        "eights": lambda n: n & ~7,
        "all alike": lambda n: 0,
        "first half n^1, second apart": lambda n: n & ~1 if n < 16 else n,
        "second half n^1, first apart": lambda n: n & ~1 if n >= 16 else n,
        "halves n^1 and n^2": lambda n: n & ~1 if n < 16 else n & ~2,
        "halves n^2 and n^1": lambda n: n & ~2 if n < 16 else n & ~1,
        "quarters alternate n^1 and n^2": lambda n: n & ~1 if n // 8 % 2 == 0 else n & ~2,
        "fours alternate n^1 and n^2": lambda n: n & ~1 if n // 4 % 2 == 0 else n & ~2,
        "first quarter n^1, rest apart": lambda n: n & ~1 if n < 8 else n,
        "quarters 0 and 2 n^1, rest apart": lambda n: n & ~1 if n // 8 % 2 == 0 else n,
        "quarters alike": lambda n: n % 8,
        "halves alike": lambda n: n % 16,
        "pairs n^1, halves alike": lambda n: n % 16 & ~1,
    }
    for name in ("lds.64", "lds.128", "sts.64", "sts.128"):
        one = access(name)
        for shape, at in shapes.items():
            numbers = [at(n) for n in range(WARP)]
            yield Measured(shape, one, _side_by_side(numbers, one.width))
            if one.load:
                yield Measured(f"{shape}, with gaps", one, tuple(one.width * n for n in numbers))
                yield Measured(f"{shape}, in one bank", one, tuple(32 * one.width * n for n in numbers))
        if one.load:
            for distance in (1, 2):
                for lane in (0, 1, 7, 8, 15, 16, 23, 31):
                    addresses = list(_side_by_side([n & ~distance for n in range(WARP)], one.width))
                    addresses[lane] = one.width * 64
                    yield Measured(f"pairs n^{distance}, lane {lane} elsewhere", one, tuple(addresses))


def _side_by_side(numbers: list[int], width: int) -> tuple[int, ...]:
    """Addresses without gaps, so that a merged phase can be free of conflicts: equal numbers share one."""
    places = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
    return tuple(width * places[number] for number in numbers)


def _predicated() -> Iterator[Measured]:
    """Lanes switched off: whole phases, one of each pair, single lanes."""
    masks: dict[str, Callable[[int], bool]] = {
        "no lane": lambda n: False,
        "lane 0": lambda n: n == 0,
        "lane 31": lambda n: n == 31,
        "lanes 0 and 16": lambda n: n % 16 == 0,
        "even lanes": lambda n: n % 2 == 0,
        "odd lanes": lambda n: n % 2 == 1,
        "lanes with n & 2 = 0": lambda n: n & 2 == 0,
        "first half": lambda n: n < 16,
        "second half": lambda n: n >= 16,
        "first quarter": lambda n: n < 8,
        "quarters 0 and 2": lambda n: n // 8 % 2 == 0,
        "all but lane 0": lambda n: n != 0,
        "all but lane 5": lambda n: n != 5,
    }
    shapes: dict[str, Callable[[int], int]] = {
        "apart": lambda n: n,
        "pairs n^1": lambda n: n & ~1,
        "pairs n^2": lambda n: n & ~2,
    }
    for name in ("lds.32", "sts.32", "lds.64", "sts.64", "lds.128", "sts.128"):
        one = access(name)
        for mask, on in masks.items():
            for shape, at in shapes.items():
                if shape == "apart" or one.merges:
                    places = _side_by_side([at(n) for n in range(WARP)], one.width)
                    addresses = tuple(place if on(n) else None for n, place in enumerate(places))
                    yield Measured(f"{shape}, {mask}", one, addresses)


def _random(numbers: random.Random, each: int) -> Iterator[Measured]:
    for one in ACCESSES.values():
        for n in range(each):
            places = 1 << numbers.randint(3, 10)
            lanes: Lanes = [one.width * numbers.randrange(places) for _ in range(WARP)]
            if not one.matrix and n % 2:
                lanes = [None if numbers.random() < 0.25 else lane for lane in lanes]
            yield Measured(f"random {n} over {places} places", one, tuple(lanes))
