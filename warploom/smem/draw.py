"""Pictures of a tile over the 32 banks: which lane reads which word, coloured by phase, with the conflicts marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from warploom.smem.bank_svg import svg
from warploom.smem.shown import shown
from warploom.smem.walk import TileCount


def draw(path: str | Path, counts: Sequence[TileCount]) -> None:
    """Write .svg or, with matplotlib, .png: for each access its worst instruction, in the plain tile and the layout given.

    `counts` holds accesses to one tile. Raises ValueError for other endings and ImportError for .png without matplotlib.
    """
    path = Path(path)
    if path.suffix == ".svg":
        path.write_text(svg(shown(counts)), encoding="utf-8")
    elif path.suffix == ".png":
        from warploom.smem.bank_png import write_png

        write_png(path, shown(counts))
    else:
        raise ValueError(f"--draw takes a name ending in .svg, .png or .html, got {str(path)!r}")
