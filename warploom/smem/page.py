"""`--draw page.html`: the interactive page, opened at the tile or layout and the access that were asked for.

The page is one file of what `web/` holds, with the laboratory's tables and Hopper's pictures from Python.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from warploom.smem.access import ACCESSES
from warploom.smem.atom_svg import STYLE, svg
from warploom.smem.atoms import ATOMS, picture
from warploom.smem.laid import LaidTile
from warploom.smem.layout import Swizzle, Tile, parse_swizzles
from warploom.smem.shown import shown_instruction
from warploom.smem.walk import TileCount, count

DTYPES = {"f64": 8, "f32": 4, "f16": 2, "f8": 1}
ORDERS = ["rows", "columns", "fragment"]
SCRIPTS = ("model.js", "notation.js", "search.js", "view.js", "start.js")
LARGEST = 256  # rows and columns of a tile, which the page draws and searches at every key
LARGEST_LAID = 1 << 16  # elements of a layout

# Recomputed by the page's own script when it opens: every kind of access and layout.
CHECKED: list[tuple[str, Tile | LaidTile]] = [
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
    ("ldmatrix.x4", LaidTile.of("Swizzle<3,4,3> o smem_ptr[16b] o ((8,2),(64,2)):((64,512),(1,1024))", "f16", 16)),
    ("ldmatrix.x4.trans", LaidTile.of("Swizzle<3,3,3> o (64,16):(1,64)", "f16", 16)),
    ("lds.64", LaidTile.of("(8,32):(0,1)", "f32", 8)),
]


def write_page(path: str | Path, counts: Sequence[TileCount]) -> None:
    """Write the page of one or two accesses to one tile; it holds everything it needs and loads nothing."""
    if len(counts) > 2 or any(one.pattern.view is not None for one in counts):
        raise ValueError("--draw to .html takes one or two accesses, without a view; the page offers the others in a list")
    tile = counts[0].tile
    if isinstance(tile, LaidTile) and tile.rows * tile.cols > LARGEST_LAID:
        raise ValueError(f"--draw to .html takes a layout of up to {LARGEST_LAID} elements, got {tile}")
    if isinstance(tile, Tile) and max(tile.rows, tile.cols) > LARGEST:
        raise ValueError(f"--draw to .html takes a tile of up to {LARGEST}×{LARGEST}, got {tile}")
    start = {**_config(counts[0]), "instruction": shown_instruction(counts[:1])}
    if len(counts) == 2:
        start |= {"access2": counts[1].pattern.access.name, "order2": counts[1].pattern.order}
    Path(path).write_text(page(start), encoding="utf-8")


def page(start: dict[str, Any]) -> str:
    """The page that opens with these settings."""
    checks = []
    for name, tile in CHECKED:
        one = count(name, tile)
        checks.append([_config(one), one.phases, one.wavefronts, one.excess])
    shown = [picture(name) for name in ATOMS]
    atoms = [{"name": one.name, "title": one.title, "layout": one.layout, "notes": one.notes} for one in shown]
    parts = {
        "STYLE": script("page.css").rstrip() + "\n" + STYLE,
        "ATOMS": "\n".join(
            f'<div class="atom" id="atom-{one.name}" hidden>{svg(one, style=False).strip()}</div>' for one in shown
        ),
        "DATA": json.dumps({**data(), "start": start, "checks": checks, "atoms": atoms}).replace("</", "<\\/"),
        "SCRIPT": script(*SCRIPTS).rstrip(),
    }
    text = script("page.html")
    for name, value in parts.items():
        text = text.replace(f"@{name}@", value)
    return text


def data() -> dict[str, Any]:
    """The tables that the script shares with the model."""
    accesses = {name: {**asdict(one), "matrix": one.matrix} for name, one in ACCESSES.items()}
    limits = {"side": LARGEST, "elements": LARGEST_LAID}
    return {"accesses": accesses, "dtypes": DTYPES, "orders": ORDERS, "limits": limits}


def script(*names: str) -> str:
    """Files of the page, one after the other."""
    folder = files("warploom.smem") / "web"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _config(one: TileCount) -> dict[str, Any]:
    tile = one.tile
    dtype = next(name for name, size in DTYPES.items() if size == tile.itemsize)
    seen = {"dtype": dtype, "access": one.pattern.access.name, "order": one.pattern.order}
    if isinstance(tile, LaidTile):
        return {**seen, "layout": str(tile.layout), "swizzle_bytes": tile.swizzle_bytes}
    return {**seen, "rows": tile.rows, "cols": tile.cols, "pad": tile.pad, "swizzle": "+".join(map(_numbers, tile.swizzles))}


def _numbers(swizzle: Swizzle) -> str:
    return f"{swizzle.b},{swizzle.m},{swizzle.s}"
