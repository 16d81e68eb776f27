"""What the actions of `warploom banks` that count print and draw alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warploom.smem.copies import CopyCount
from warploom.smem.model import Prediction
from warploom.smem.walk import TileCount


def draw_counts(path: str, counts: Sequence[TileCount]) -> None:
    if Path(path).suffix == ".html":
        from warploom.smem.page import write_page

        write_page(path, counts)
    else:
        from warploom.smem.draw import draw

        draw(path, counts)


def many(instructions: int) -> str:
    return f"{instructions} instruction{'s' * (instructions > 1)}"


def totals(one: Prediction | TileCount | CopyCount) -> str:
    phases: int = one.to_dict()["phases"]
    shown = f"{phases} phase{'s' * (phases != 1)}, {one.wavefronts} wavefront{'s' * (one.wavefronts != 1)}"
    return f"  {shown}, {one.ideal} ideal, {one.excess} excess"


def sums(counts: Sequence[TileCount | CopyCount]) -> dict[str, Any]:
    if len(counts) == 1:
        return counts[0].to_dict()
    each = [one.to_dict() for one in counts]
    sums = {name: sum(one[name] for one in each) for name in ("phases", "wavefronts", "ideal", "excess")}
    return {**sums, "accesses": each}
