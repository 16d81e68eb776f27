"""`warploom banks --layout` and `--atom`: layouts written in CuTe's notation, and Hopper's own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from warploom.commands.banks_text import draw_counts, many, sums, totals
from warploom.smem.access import ACCESSES, parse_pattern
from warploom.smem.atom_svg import svg
from warploom.smem.atoms import describe, picture
from warploom.smem.explain import first_conflict
from warploom.smem.laid import LaidTile
from warploom.smem.layout import TMA_MODES
from warploom.smem.walk import count

NOT_WITH_LAYOUT = ("rows", "cols", "pad", "swizzle", "addresses", "design")
NOT_WITH_ATOM = ("layout", "access", *NOT_WITH_LAYOUT)


def run_layout(options: argparse.Namespace) -> int:
    _alone(options, "layout", NOT_WITH_LAYOUT)
    if not options.access:
        raise ValueError(f"--layout takes an --access beside it, one of {', '.join(ACCESSES)}")
    counts = []
    for text in options.access:
        pattern = parse_pattern(text)
        tile = LaidTile.of(options.layout, options.dtype, pattern.access.width, options.swizzle_bytes)
        counts.append(count(pattern, tile))
    if options.draw:
        draw_counts(options.draw, counts)
    tile = LaidTile.of(options.layout, options.dtype, swizzle_bytes=options.swizzle_bytes)
    shown = {"layout": str(tile.layout), "rows": tile.rows, "cols": tile.cols, "dtype": tile.dtype, "bytes": tile.size_bytes}
    if options.json:
        unit = "bytes" if tile.in_bytes else "elements"
        print(json.dumps({**shown, "swizzle_unit": unit, **sums(counts), "drawn": options.draw}))
        return 0
    print(f"layout    {tile}\ntile      {tile.rows}×{tile.cols}, bytes 0 to {tile.size_bytes - 1}")
    if not tile.in_bytes and tile.itemsize > 1 and any(one in TMA_MODES.values() for one in tile.swizzles):
        print("note      the swizzle is of elements; where it was printed for wgmma or TMA it is of bytes: --swizzle-bytes")
    for one in counts:
        turned = ", rows along the second mode" if isinstance(one.tile, LaidTile) and one.tile.turned else ""
        print(f"access    {one.pattern}, {many(len(one.instructions))}{turned}\n{totals(one)}")
        conflict = first_conflict(one)
        if conflict:
            print(f"  first conflict: {conflict}")
    if options.draw:
        print(f"drawn     {options.draw}")
    return 0


def run_atom(options: argparse.Namespace) -> int:
    _alone(options, "atom", NOT_WITH_ATOM)
    shown = picture(options.atom)
    if options.draw:
        path = Path(options.draw)
        if path.suffix != ".svg":
            raise ValueError(f"--draw takes a name ending in .svg for an atom, got {options.draw!r}")
        path.write_text(svg(shown), encoding="utf-8")
    if options.json:
        print(json.dumps({**shown.to_dict(), "drawn": options.draw}))
        return 0
    print(describe(shown))
    if options.draw:
        print(f"drawn     {options.draw}")
    return 0


def _alone(options: argparse.Namespace, action: str, others: tuple[str, ...]) -> None:
    named = [f"--{name}" for name in others if getattr(options, name)]
    if named:
        raise ValueError(f"--{action} takes no {' and no '.join(named)}")
