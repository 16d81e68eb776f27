"""What `cp.async` of 16 bytes a lane costs: as no store does, it depends on where the bytes come from.

Counted on an H100, and not in NVIDIA's documents: bytes of one 128-byte line of global memory go to one 128-byte line of shared
memory at a time, by sectors of 32 bytes. A wavefront brings sectors in one way only: whole ones as they are, whole ones with
their halves exchanged, or one half of each to one half. And it takes a line's four sectors in one of eight orders, the
rotations of 0 1 2 3 and of 3 2 1 0: modulo 4, numbers of source and destination differ by the same for all of them, or add up
to the same. So swizzles of whole pieces and of whole rows' bits cost nothing; padding makes lines straddle lines, and by an
odd number of pieces halves of sectors go apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

from warploom.smem.access import parse_pattern
from warploom.smem.layout import Tile
from warploom.smem.walk import walk

NAME = "cp.async.128"
WIDTH, SECTOR, LINE = 16, 32, 128  # bytes
SECTORS = LINE // SECTOR

Place = tuple[int, int] | None  # byte addresses in global and in shared memory; None for a lane that is off


def wavefronts(places: Sequence[Place]) -> int:
    """Wavefronts of one instruction."""
    # By lines: for each move of a sector, which of its halves go to which.
    halves: dict[tuple[int, int], dict[tuple[int, int], set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
    for place in places:
        if place is not None:
            source, shared = place
            move = source // SECTOR % SECTORS, shared // SECTOR % SECTORS
            halves[source // LINE, shared // LINE][move].add((source // WIDTH % 2, shared // WIDTH % 2))
    total = 0
    for line in halves.values():
        ways: dict[frozenset[tuple[int, int]], set[tuple[int, int]]] = defaultdict(set)
        for move, way in line.items():
            ways[frozenset(way)].add(move)
        total += sum(_orders(frozenset(moves)) for moves in ways.values())
    return total


@cache
def _orders(moves: frozenset[tuple[int, int]]) -> int:
    """The fewest orders of sectors that hold all moves (source, destination)."""
    kinds: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    for source, shared in moves:
        kinds["difference", (shared - source) % SECTORS].add((source, shared))
        kinds["sum", (shared + source) % SECTORS].add((source, shared))
    for count in range(1, len(moves)):
        if any(len(set().union(*chosen)) == len(moves) for chosen in combinations(kinds.values(), count)):
            return count
    return len(moves)


def ideal(places: Sequence[Place]) -> int:
    """Wavefronts that as many bytes take at the least, in whole lines."""
    active = sum(place is not None for place in places)
    return -(-active * WIDTH // LINE)


@dataclass(frozen=True)
class CopyCount:
    """The instructions that fill a tile once, and their sums."""

    tile: Tile
    instructions: int
    wavefronts: int
    ideal: int

    @property
    def excess(self) -> int:
        return self.wavefronts - self.ideal

    def to_dict(self) -> dict[str, Any]:
        # A phase is what a whole line would take.
        counts = {"phases": self.ideal, "wavefronts": self.wavefronts, "ideal": self.ideal, "excess": self.excess}
        return {"access": NAME, **counts}


def count(tile: Tile) -> CopyCount:
    """What filling a tile costs, lane after lane along its rows, each of which starts a line of global memory."""
    across = -(-tile.row_bytes // LINE) * LINE
    instructions = all_of = least = 0
    for lanes in walk(parse_pattern("sts.128"), tile):
        places = [
            None if lane is None else (lane[0] * across + lane[1], tile.address(lane[0], lane[1], WIDTH)) for lane in lanes
        ]
        instructions += 1
        all_of += wavefronts(places)
        least += ideal(places)
    return CopyCount(tile, instructions, all_of, least)
