"""What `cp.async` of 16 bytes a lane costs: as no store does, it depends on where the bytes come from.

Counted on an H100, and not in NVIDIA's documents: bytes of one 128-byte line of global memory go to one 128-byte line of shared
memory at a time, by sectors of 32 bytes. In a wavefront a sector of the source feeds one sector of the destination, and a
sector of the destination is fed by one. So permuting the 16-byte pieces of a line costs nothing as long as sectors stay
together, which swizzles of whole pieces and of whole rows' bits do; padding makes lines straddle lines, and by an odd number of
pieces sectors straddle sectors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from warploom.smem.access import parse_pattern
from warploom.smem.layout import Tile
from warploom.smem.walk import walk

NAME = "cp.async.128"
WIDTH, SECTOR, LINE = 16, 32, 128  # bytes

Place = tuple[int, int] | None  # byte addresses in global and in shared memory; None for a lane that is off


def wavefronts(places: Sequence[Place]) -> int:
    """Of one instruction."""
    moves: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for place in places:
        if place is not None:
            source, shared = place
            moves[source // LINE, shared // LINE].add((source // SECTOR, shared // SECTOR))
    # Pairs of sectors are the edges of a bipartite graph, wavefronts a colouring of them: as many colours as the
    # largest degree suffice (Kőnig, 1916).
    return sum(max(max(Counter(side).values()) for side in zip(*pairs, strict=True)) for pairs in moves.values())


def ideal(places: Sequence[Place]) -> int:
    """Of as many bytes: whole lines."""
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
