"""Draw the documentation's own pictures: masks in tiles, and the card that shows where a page is shared.

    python tools/docs_pictures.py        docs/images/masks.svg, social-card.png, shard-causal.png and shard-documents.png

The SVG has colours that read on light and on dark pages; the others need matplotlib.
"""

from __future__ import annotations

from pathlib import Path

from warploom import masks
from warploom.distributed.plan import planned
from warploom.masks.draw import COLORS
from warploom.masks.tiles import FULL, HIDDEN, PARTIAL

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SEQLEN, TILE = 96, 4
ACROSS = SEQLEN // TILE
SHOWN: dict[str, masks.Mask] = {
    "Document": masks.Document([28, 12, 38, 18]),
    "SlidingWindow": masks.SlidingWindow(23),
    "PrefixLM": masks.PrefixLM(36),
    "SharedQuestion": masks.SharedQuestion([30], [[22, 26, 18]]),
    "GlobalWindow": masks.GlobalWindow(10, 18),
    "CausalBlockwise": masks.CausalBlockwise([26, 20, 24, 26]),
    "BlockDiffusion": masks.BlockDiffusion(48, 16),
    "PrefixDocument": masks.PrefixDocument([44, 52], [20, 30]),
}
# What a picture of one mask has (warploom/masks/draw.py), but for hidden tiles: those let the page through.
ON_A_PAGE = COLORS | {HIDDEN: "#80808026", FULL: "#3f8fbf", PARTIAL: "#ffb74d"}
ON_THE_CARD = COLORS | {HIDDEN: "#24344a", FULL: "#4fa3d1", PARTIAL: "#ffcc80"}
TEXT = "#7a828c"  # 3.9 to 1 on white, 4.2 to 1 on the dark theme's page
LEGEND = {FULL: "full: no test", PARTIAL: "partial: tested by element", HIDDEN: "hidden: skipped"}


def classes(mask: masks.Mask) -> list[list[int]]:
    """Tile classes of a mask, a row of tiles after the other."""
    return mask.tiles(TILE, TILE, SEQLEN, SEQLEN).matrix(0, 0).tolist()


def svg() -> str:
    """All masks of ``SHOWN``, four in a row, with a legend."""
    cell, gap, columns = 8, 30, 4
    side = ACROSS * cell
    width, height = columns * side + (columns - 1) * gap, 2 * (side + 52) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">',
        f"<title>Eight masks of {SEQLEN} tokens in tiles of {TILE}</title>",
    ]
    for n, (name, mask) in enumerate(SHOWN.items()):
        x, y = n % columns * (side + gap), n // columns * (side + 52)
        for kind, color in ON_A_PAGE.items():
            tiles = [
                f"M{x + j * cell} {y + i * cell}h{cell - 1}v{cell - 1}h-{cell - 1}z"
                for i, row in enumerate(classes(mask))
                for j, found in enumerate(row)
                if found == kind
            ]
            parts.append(f'<path fill="{color}" d="{"".join(tiles)}"/>')
        parts.append(f'<text x="{x}" y="{y + side + 29}" font-size="24" fill="{TEXT}">{name}</text>')
    x = 0
    for kind, meaning in LEGEND.items():
        parts.append(f'<rect x="{x}" y="{height - 26}" width="20" height="20" fill="{ON_A_PAGE[kind]}"/>')
        parts.append(f'<text x="{x + 28}" y="{height - 9}" font-size="22" fill="{TEXT}">{meaning}</text>')
        x += 70 + 12 * len(meaning)
    return "\n".join([*parts, "</svg>", ""])


def card(path: Path) -> None:
    """The card of 1200 by 630 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(12, 6.3), facecolor="#101b2b")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 1200), ylim=(630, 0))
    axes.axis("off")
    axes.text(72, 138, "Warploom", color="white", fontsize=62, fontweight="bold", va="center")
    says = "Exact attention for PyTorch, with any column-sparse mask.\nOne dependency, nothing to compile."
    axes.text(74, 248, says, color="#c3d0de", fontsize=26, va="center", linespacing=1.5)
    cell, gap = 10, 32
    for n, name in enumerate(("Document", "SlidingWindow", "SharedQuestion", "BlockDiffusion")):
        x, y = 76 + n * (ACROSS * cell + gap), 338
        for i, row in enumerate(classes(SHOWN[name])):
            for j, kind in enumerate(row):
                axes.add_patch(Rectangle((x + j * cell, y + i * cell), cell - 1, cell - 1, facecolor=ON_THE_CARD[kind]))
    figure.savefig(path, dpi=100, metadata={"Software": None})


def main() -> None:
    (IMAGES / "masks.svg").write_text(svg(), encoding="utf-8")
    card(IMAGES / "social-card.png")
    for name, mask in (("causal", masks.Causal()), ("documents", masks.Document([3000, 9000, 1500, 6000, 2268, 11000]))):
        planned(32768, 4, 0, mask=mask).draw(IMAGES / f"shard-{name}.png")


if __name__ == "__main__":
    main()
