"""Where a lane finds its rows in a shared tile: the laboratory's swizzle, split into what is a lane's and what is constant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from warploom.smem.layout import Tile
from warploom.smem.swizzle import design

# Written by cp.async, whose lanes store like sts.128, and read as matrices: K as it is, V transposed.
ACCESSES = ("sts.128", "ldmatrix.x4", "ldmatrix.x4.trans")
ROWS = 16  # lanes address a block of so many rows by 16 columns; the rest of an offset is the same for all of them


@cache
def swizzled(tile: Tile) -> Tile:
    """The tile in the layout that the laboratory's search finds; RuntimeError if conflicts are left."""
    found = design(tile, ACCESSES)
    if found.excess or found.swizzle is None:
        raise RuntimeError(f"no swizzle of {tile} is free of bank conflicts")
    return replace(tile, swizzles=(found.swizzle,))


@dataclass(frozen=True)
class Places:
    """Byte offsets in a tile: ``base`` of a lane's row and column, and ``split`` of a constant block of ROWS × 16.

    A swizzle XORs, and a block's offset has no bit in common with a lane's: so a place is (base ^ flips) + offset, with
    few different flips, which are worth a register each, and offsets that the instruction itself adds.
    """

    tile: Tile

    def base(self, row: Any, column: Any) -> Any:
        """The place of a row and a column below ROWS, run-time values or numbers."""
        offset = row * self.tile.pitch_bytes + column * self.tile.itemsize
        for swizzle in self.tile.swizzles:
            one = swizzle.in_bytes(self.tile.itemsize)
            offset = offset ^ (((offset >> (one.m + one.s)) & ((1 << one.b) - 1)) << one.m)
        return offset

    def split(self, row: int, column: int) -> tuple[int, int]:
        """(flips, offset) of a block that starts at ``row``, a multiple of ROWS, and ``column``, one of 16."""
        start = row * self.tile.pitch_bytes + column * self.tile.itemsize
        if not self.tile.swizzles:
            return 0, start
        moved = self.tile.moved(start)
        flipped = 0
        for swizzle in self.tile.swizzles:
            one = swizzle.in_bytes(self.tile.itemsize)
            flipped |= ((1 << one.b) - 1) << one.m
        return moved & flipped, moved & ~flipped
