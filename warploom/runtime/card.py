"""What pictures as SVG text share: a card that a phone holds, in colours for light and dark.

A page shows them through `<img>`, where neither its styles nor its fonts reach. So every picture has a background: where a
page is dark and the reader's system is not, or the other way round, text still stands on what it was made for. A width of
460 and text of 15 leave 11 pixels of text on a screen 390 wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 460
LIGHT = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;font-size:15px;fill:#1f2328}"
    ".card{fill:#fff;stroke:#d0d7de}.title{font-weight:600}.quiet{fill:#57606a}"
)
DARK = "text{fill:#e6edf3}.card{fill:#161b22;stroke:#30363d}.quiet{fill:#9da7b3}"


def style(light: str, dark: str) -> str:
    """The rules of the card, and a picture's own in light and what changes of them in the dark."""
    return f"{LIGHT}{light}@media (prefers-color-scheme:dark){{{DARK}{dark}}}"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words from, around or up to `x` on the line `y`; `kind` is their class."""
    kind = f' class="{kind}"' if kind else ""
    anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.4g}" y="{y:g}"{kind}{anchor}>{escape(words, quote=False)}</text>'


def whole(title: str, rules: str, lines: Sequence[str], height: float) -> str:
    """The SVG of these elements, one a line, on a card of that height."""
    size = f'width="{WIDTH}" height="{height:g}"'
    card = f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>'
    return "\n".join(
        [
            '<?xml version="1.0" encoding="utf-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} viewBox="0 0 {WIDTH} {height:g}">',
            f"<title>{escape(title, quote=False)}</title>",
            f"<style>{rules}</style>",
            card,
            *lines,
            "</svg>\n",
        ]
    )
