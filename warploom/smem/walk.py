"""Which lanes of which instructions touch which part of a tile, and the totals over a whole tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from warploom.smem.access import WARP, Access, Pattern, parse_pattern
from warploom.smem.layout import Tile
from warploom.smem.model import Prediction, predict

Lane = tuple[int, int] | None  # (row, byte within the row); None: the tile ends before this lane


@dataclass(frozen=True)
class TileCount:
    """The instructions that cover a tile once, and their sums."""

    pattern: Pattern
    tile: Tile
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
        return {
            "access": str(self.pattern),
            "phases": self.phases,
            "wavefronts": self.wavefronts,
            "ideal": self.ideal,
            "excess": self.excess,
            "instructions": [one.to_dict() for one in self.instructions],
        }


def viewed(tile: Tile, pattern: Pattern) -> Tile:
    """The tile as the pattern sees it: itself, or another shape over the same memory."""
    if pattern.view is None:
        return tile
    rows, cols = pattern.view
    if rows * cols != tile.rows * tile.cols or tile.pad:
        raise ValueError(
            f"access {pattern}: a view takes the {tile.rows * tile.cols} elements of a tile without padding, got {tile}"
        )
    return replace(tile, rows=rows, cols=cols)


def walk(pattern: Pattern, tile: Tile) -> Iterator[list[Lane]]:
    """For each instruction, where each of its lanes reads or writes; the last ones may have lanes without work."""
    tile = viewed(tile, pattern)
    which = pattern.access
    if tile.row_bytes % which.width:
        raise ValueError(
            f"cols takes rows of a multiple of {which.width} bytes for {which.name}, got {tile.cols} × {tile.itemsize} bytes"
        )
    across = tile.row_bytes // which.width
    places = _matrices(which, tile, across) if which.matrix else _lines(pattern, tile, across)
    lanes = [(row, piece * which.width) for row, piece in places]
    for start in range(0, len(lanes), which.lanes):
        group: list[Lane] = list(lanes[start : start + which.lanes])
        yield group + [None] * (which.lanes - len(group))


def _lines(pattern: Pattern, tile: Tile, across: int) -> Iterator[tuple[int, int]]:
    if pattern.order == "rows":
        return ((row, piece) for row in range(tile.rows) for piece in range(across))
    if pattern.order == "columns":
        return ((row, piece) for piece in range(across) for row in range(tile.rows))
    if tile.rows % 8 or across % 4:
        raise ValueError(
            f"access {pattern}: fragments take 8 rows by {4 * pattern.access.width} bytes, "
            f"got {tile.rows} rows of {tile.row_bytes} bytes"
        )
    return (
        (top + lane // 4, left + lane % 4)
        for left in range(0, across, 4)
        for top in range(0, tile.rows, 8)
        for lane in range(WARP)
    )


def _matrices(which: Access, tile: Tile, across: int) -> Iterator[tuple[int, int]]:
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
    return (
        (top + 8 * matrix_row + row, left + matrix_column)
        for top in range(0, tile.rows, 8 * down)
        for left in range(0, across, right)
        for matrix_column in range(right)
        for matrix_row in range(down)
        for row in range(8)
    )


def lane_addresses(pattern: Pattern, tile: Tile) -> Iterator[list[int | None]]:
    """For each instruction, the byte address of each of its lanes."""
    seen = viewed(tile, pattern)
    for lanes in walk(pattern, tile):
        yield [None if lane is None else seen.address(*lane, pattern.access.width) for lane in lanes]


def count(pattern: Pattern | str, tile: Tile) -> TileCount:
    """What reading or writing the whole tile once costs.

    `pattern` is an instruction with the order of its lanes, or its name as `parse_pattern` takes it.
    """
    if isinstance(pattern, str):
        pattern = parse_pattern(pattern)
    return TileCount(pattern, tile, tuple(predict(pattern.access, one) for one in lane_addresses(pattern, tile)))
