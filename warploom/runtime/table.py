"""Columns of text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], heading: Sequence[str] | None = None) -> str:
    """Rows of cells, left-aligned and indented by two, each column as wide as its longest cell."""
    every = [list(heading), *map(list, rows)] if heading else [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in every)
    return "\n".join("  " + line for line in lines)
