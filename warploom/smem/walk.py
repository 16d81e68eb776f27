"""Which lanes of which instructions touch which part of a tile, and the totals over a whole tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from warploom.smem.access import WARP, Access, Pattern, parse_pattern
from warploom.smem.laid import LaidTile
from warploom.smem.layout import Tile
from warploom.smem.model import Prediction, predict

Lane = tuple[int, int] | None  # (row, byte within the row); None: the tile ends before this lane
AnyTile = Tile | LaidTile
NOWHERE = -1  # the row, byte and address of such a lane in a tensor


@dataclass(frozen=True)
class TileCount:
    """The instructions that cover a tile once, and their sums.

    Attributes:
        pattern: the access and the order of its lanes.
        tile: what it covers.
        instructions: what each costs, in order.
    """

    pattern: Pattern
    tile: AnyTile
    instructions: tuple[Prediction, ...]

    @property
    def phases(self) -> int:
        return sum(len(one.phases) for one in self.instructions)

    @property
    def wavefronts(self) -> int:
        return sum(one.wavefronts for one in self.instructions)

    @property
    def ideal(self) -> int:
        return sum(one.ideal for one in self.instructions)

    @property
    def excess(self) -> int:
        return self.wavefronts - self.ideal

    def to_dict(self) -> dict[str, Any]:
        """What `warploom banks --access --json` prints of it: sums, and each instruction."""
        return {
            "access": str(self.pattern),
            "phases": self.phases,
            "wavefronts": self.wavefronts,
            "ideal": self.ideal,
            "excess": self.excess,
            "instructions": [one.to_dict() for one in self.instructions],
        }


@overload
def viewed(tile: Tile, pattern: Pattern) -> Tile: ...


@overload
def viewed(tile: AnyTile, pattern: Pattern) -> AnyTile: ...


def viewed(tile: AnyTile, pattern: Pattern) -> AnyTile:
    """The tile as the pattern sees it: itself, or another shape over the same memory."""
    if pattern.view is None:
        return tile
    if isinstance(tile, LaidTile):
        raise ValueError(f"access {pattern}: a view takes a tile of rows, and no layout")
    rows, cols = pattern.view
    if rows * cols != tile.rows * tile.cols or tile.pad:
        raise ValueError(
            f"access {pattern}: a view takes the {tile.rows * tile.cols} elements of a tile without padding, got {tile}"
        )
    return replace(tile, rows=rows, cols=cols)


def places(pattern: Pattern, tile: AnyTile) -> Tensor:
    """Row and byte within it of every lane: int32 (instructions, lanes, 2), NOWHERE past the end of the tile."""
    tile = viewed(tile, pattern)
    which = pattern.access
    if tile.row_bytes % which.width:
        raise ValueError(
            f"cols takes rows of a multiple of {which.width} bytes for {which.name}, got {tile.cols} × {tile.itemsize} bytes"
        )
    across = tile.row_bytes // which.width
    rows, pieces = _matrices(which, tile, across) if which.matrix else _lines(pattern, tile, across)
    table = torch.full((-(-len(rows) // which.lanes) * which.lanes, 2), NOWHERE, dtype=torch.int32)
    table[: len(rows), 0] = rows
    table[: len(rows), 1] = pieces * which.width
    return table.reshape(-1, which.lanes, 2)


def walk(pattern: Pattern, tile: AnyTile) -> Iterator[list[Lane]]:
    """For each instruction, where each of its lanes reads or writes; the last ones may have lanes without work."""
    for group in places(pattern, tile).tolist():
        yield [None if row == NOWHERE else (row, byte) for row, byte in group]


def _lines(pattern: Pattern, tile: AnyTile, across: int) -> tuple[Tensor, Tensor]:
    """Rows and pieces, one lane after the other."""
    index = torch.arange(tile.rows * across)
    if pattern.order == "rows":
        return index // across, index % across
    if pattern.order == "columns":
        return index % tile.rows, index // tile.rows
    if tile.rows % 8 or across % 4:
        raise ValueError(
            f"access {pattern}: fragments take 8 rows by {4 * pattern.access.width} bytes, "
            f"got {tile.rows} rows of {tile.row_bytes} bytes"
        )
    block, lane = index // WARP, index % WARP
    tops = tile.rows // 8
    return block % tops * 8 + lane // 4, block // tops * 4 + lane % 4


def _matrices(which: Access, tile: AnyTile, across: int) -> tuple[Tensor, Tensor]:
    """Rows of 8×8 matrices, one instruction's after the other."""
    count = which.lanes // 8
    shapes = [(2, 2), (1, 4), (4, 1)] if count == 4 else [(2, 1), (1, 2)] if count == 2 else [(1, 1)]
    shape = next(((d, r) for d, r in shapes if tile.rows % (8 * d) == 0 and across % r == 0), None)
    if shape is None:
        raise ValueError(
            f"rows and cols take whole groups of {count} 8-row matrices of 16 bytes for {which.name}, "
            f"got {tile.rows} rows of {tile.row_bytes} bytes"
        )
    down, right = shape
    index = torch.arange(tile.rows * across)
    instruction, lane = index // which.lanes, index % which.lanes
    top, left = instruction // (across // right) * 8 * down, instruction % (across // right) * right
    return top + lane // 8 % down * 8 + lane % 8, left + lane // 8 // down


def addresses(pattern: Pattern, tile: AnyTile) -> Tensor:
    """The byte address of every lane: int64 (instructions, lanes), NOWHERE past the end of the tile."""
    seen, width = viewed(tile, pattern), pattern.access.width
    lanes = places(pattern, tile).long()
    absent = lanes[..., 0] == NOWHERE
    rows, starts = lanes.clamp(min=0).unbind(-1)
    first = _at(seen, rows, starts)
    apart = first % width != 0
    for n in range(seen.itemsize, width, seen.itemsize):
        apart |= _at(seen, rows, starts + n) != first + n
    if apart.any():
        row, start = lanes[apart][0].tolist()
        seen.address(row, start, width)  # says what is wrong
    return first.masked_fill(absent, NOWHERE)


def _at(tile: AnyTile, rows: Tensor, starts: Tensor) -> Tensor:
    """The address of a byte of each row."""
    if isinstance(tile, LaidTile):
        return tile.bytes[rows, starts // tile.itemsize] + starts % tile.itemsize
    offsets = rows * tile.pitch_bytes + starts
    for swizzle in tile.swizzles:
        one = swizzle.in_bytes(tile.itemsize)
        offsets = offsets ^ (offsets >> one.s & ((1 << one.b) - 1) << one.m)
    return offsets


def lane_addresses(pattern: Pattern, tile: AnyTile) -> Iterator[list[int | None]]:
    """For each instruction, the byte address of each of its lanes."""
    for lanes in addresses(pattern, tile).tolist():
        yield [None if address == NOWHERE else address for address in lanes]


def count(pattern: Pattern | str, tile: AnyTile) -> TileCount:
    """What reading or writing the whole tile once costs.

    Args:
        pattern: an instruction with the order of its lanes, or its name as `parse_pattern` takes it.
        tile: a `Tile` or `LaidTile`.

    Returns:
        A `TileCount`, with wavefronts, their ideal number and the excess.

    Raises:
        ValueError: a name that is unknown, or an access that does not fit the tile.
    """
    if isinstance(pattern, str):
        pattern = parse_pattern(pattern)
    return TileCount(pattern, tile, tuple(predict(pattern.access, one) for one in lane_addresses(pattern, tile)))
