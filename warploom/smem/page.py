"""`--draw page.html`: the interactive page, opened at the tile and access that were asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from warploom.smem.access import ACCESSES
from warploom.smem.draw import shown_instruction
from warploom.smem.layout import Swizzle, Tile, parse_swizzles
from warploom.smem.page_template import TEMPLATE
from warploom.smem.walk import TileCount, count

DTYPES = {"f64": 8, "f32": 4, "f16": 2, "f8": 1}
ORDERS = ["rows", "columns", "fragment"]

# Recomputed by the page's own script when it opens: every kind of access and layout.
CHECKED = [
    *((name, Tile(16, 64, "f16", 0, ())) for name in ACCESSES),
    *((name, Tile(32, 128, "f16", 8, ())) for name in ("ldmatrix.x4", "sts.128", "lds.128@columns", "lds.32@columns")),
    *((name, Tile(16, 128, "f16", 0, parse_swizzles("3,3,4"))) for name in ("ldmatrix.x4", "sts.128", "sts.32@fragment")),
    ("ldmatrix.x4", Tile(16, 256, "f16", 0, parse_swizzles("1,3,3+3,3,5"))),
    ("lds.32@columns", Tile(32, 32, "f32", 1, ())),
    ("lds.64@columns", Tile(32, 32, "f64", 0, parse_swizzles("4,0,5"))),
    ("lds.8@columns", Tile(24, 20, "f8", 0, ())),
    ("lds.128", Tile(7, 12, "f32", 0, ())),
    ("ldmatrix.x4", Tile(8, 64, "f16", 0, ())),
    ("ldmatrix.x2", Tile(40, 32, "f16", 0, ())),
]


def write_page(path: str | Path, counts: Sequence[TileCount]) -> None:
    """Write the page of one access to one tile; it holds everything it needs and loads nothing."""
    if len(counts) != 1 or counts[0].pattern.view is not None:
        raise ValueError("--draw to .html takes one access, without a view; the page offers the others in a list")
    start = {**_config(counts[0]), "instruction": shown_instruction(counts)}
    if counts[0].tile.rows > 256 or counts[0].tile.cols > 256:
        raise ValueError(f"--draw to .html takes a tile of up to 256×256, got {counts[0].tile}")
    checks = []
    for name, tile in CHECKED:
        one = count(name, tile)
        checks.append([_config(one), one.phases, one.wavefronts, one.excess])
    accesses = {name: {**asdict(one), "matrix": one.matrix} for name, one in ACCESSES.items()}
    page = TEMPLATE
    for name, value in (
        ("START", start),
        ("CHECKS", checks),
        ("ACCESSES", accesses),
        ("DTYPES", DTYPES),
        ("ORDERS", ORDERS),
    ):
        page = page.replace(f"/*{name}*/", json.dumps(value))
    Path(path).write_text(page, encoding="utf-8")


def _config(one: TileCount) -> dict[str, Any]:
    tile = one.tile
    dtype = next(name for name, size in DTYPES.items() if size == tile.itemsize)
    return {
        "rows": tile.rows,
        "cols": tile.cols,
        "dtype": dtype,
        "access": one.pattern.access.name,
        "order": one.pattern.order,
        "pad": tile.pad,
        "swizzle": "+".join(map(_numbers, tile.swizzles)),
    }


def _numbers(swizzle: Swizzle) -> str:
    return f"{swizzle.b},{swizzle.m},{swizzle.s}"
