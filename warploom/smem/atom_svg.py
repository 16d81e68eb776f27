"""A picture of `atoms.py` as SVG, without any library: readable on light and dark pages and on a phone."""

from __future__ import annotations

from html import escape

from warploom.smem.atoms import Picture

COLORS = ("#9ecbf2", "#ffd08a", "#a8dba8", "#f5b5c8", "#cfbdf0", "#f7a58f", "#dfe08c", "#c3c9cf")
HEIGHT = 24  # of a cell

# A card of its own colour: whether the page around it is light or dark, the words stand on what they were made for.
STYLE = (
    "text{font:11px system-ui,sans-serif;text-anchor:middle;dominant-baseline:central;fill:#1b2730}"
    ".card{fill:#fff}.name{fill:#4d5a64}.title{font-size:13px;font-weight:600;text-anchor:start}"
    + "".join(f".c{n}{{fill:{color}}}" for n, color in enumerate(COLORS))
    + "@media(prefers-color-scheme:dark){.card{fill:#1f262c}.name,.title{fill:#d5dde3}}"
)


def svg(shown: Picture, style: bool = True) -> str:
    """The picture; without its style where the page around it has `STYLE` already."""
    longest = max(len(cell.label) for row in shown.cells for cell in row)
    names = max(map(len, shown.col_names))
    width = max(34, 6 * max(longest, names) + 8)
    left, top = 30 + 7 * max(map(len, shown.row_names)), 58
    right, bottom = left + width * len(shown.col_names), top + HEIGHT * len(shown.cells)
    whole = max(right + 10, 8 * len(shown.title) + 20)
    height = bottom + 12
    # In a page of its own it has its size; within another's document it takes the width there is, up to that.
    extent = f'width="{whole}" height="{height}"' if style else f'style="max-width:{whole}px"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {height}" {extent} role="img">',
        f"<title>{escape(shown.title)}</title>",
        f"<style>{STYLE}</style>" if style else "",
        f'<rect class="card" width="{whole}" height="{height}" rx="6"/>',
        f'<text class="title" x="10" y="16">{escape(shown.title)}</text>',
        f'<text class="name" x="{(left + right) / 2:g}" y="34">{escape(shown.across)}</text>',
        f'<text class="name" transform="translate(12 {(top + bottom) / 2:g}) rotate(-90)">{escape(shown.down)}</text>',
    ]
    for column, name in enumerate(shown.col_names):
        parts.append(f'<text class="name" x="{left + width * column + width / 2:g}" y="{top - 9}">{escape(name)}</text>')
    for row, (name, cells) in enumerate(zip(shown.row_names, shown.cells, strict=True)):
        y = top + HEIGHT * row
        parts.append(f'<text class="name" x="{left - 6 - 3 * len(name)}" y="{y + HEIGHT // 2}">{escape(name)}</text>')
        for column, cell in enumerate(cells):
            x = left + width * column
            parts.append(
                f'<g><title>{escape(cell.tip)}</title><path class="c{cell.color}" d="M{x} {y}h{width - 1}v{HEIGHT - 1}H{x}z"/>'
                f'<text x="{x + width / 2:g}" y="{y + HEIGHT // 2}">{escape(cell.label)}</text></g>'
            )
    return "".join([*parts, "</svg>\n"])
