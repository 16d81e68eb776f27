"""Pictures of banks as SVG, without any library: panels one below the other, on a card that a phone holds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from warploom.runtime.card import WIDTH, style, text, whole
from warploom.smem.laid import LaidTile
from warploom.smem.model import BANK_BYTES, BANKS
from warploom.smem.shown import Shown

EDGE = 8
ROW = 20  # a line of 128 bytes
GAP = 8  # in place of lines that are not touched
DIGIT = 9  # of numbers, in the widest of the fonts
SQUEEZED = 5.6  # of numbers drawn narrower than their font
COLORS = ("#9ecbf2", "#ffd08a", "#a8dba8", "#d9c2f0")  # by phase, light in the dark too: the numbers on them are dark
LABELLED_UP_TO = 64  # rows of numbers in the picture of a layout
# Neighbouring banks differ in hue and brightness.
BANK_COLORS = tuple(f"hsl({n * 360 / BANKS:g},62%,{66 if n % 2 else 76}%)" for n in range(BANKS))
STYLE = style(
    ".n{fill:#14202a;text-anchor:middle}.empty{fill:#eceff1}.cut{stroke:#fff}.rule{stroke:#d0d7de}.hit{stroke:#d62728;stroke-width:2}"
    + "".join(f".p{n}{{fill:{color}}}" for n, color in enumerate(COLORS)),
    ".empty{fill:#262d36}.cut{stroke:#161b22}.rule{stroke:#30363d}.hit{stroke:#e5292b}",
)


def svg(rows: Sequence[Sequence[Shown]]) -> str:
    """The picture of what `shown` gives."""
    panels = [one for row in rows for one in row]
    last = max(piece.line for one in panels for piece in one.pieces())
    card = _Card(DIGIT * len(str(last)) + 4)
    for number, one in enumerate(panels):
        if number:
            card.rule()
        _panel(card, one)
    tile = rows[0][-1].count.tile
    if isinstance(tile, LaidTile):
        card.rule()
        _elements(card, tile)
    return whole("; ".join(one.heading for one in panels), STYLE, card.found, card.y + EDGE)


class _Card:
    """Elements from the top down, and how far down they are; the banks of all panels stand in the same columns."""

    def __init__(self, gutter: int) -> None:
        self.found: list[str] = []
        self.y = EDGE
        self.left = EDGE + gutter
        self.cell = (WIDTH - EDGE - self.left) / BANKS

    def rule(self) -> None:
        self.found.append(f'<path class="rule" d="M{EDGE} {self.y + 8}H{WIDTH - EDGE}"/>')
        self.y += 16

    def words(self, words: str, kind: str = "", most: int = 48) -> None:
        for line in textwrap.wrap(words, most):
            self.y += 19
            self.found.append(text(EDGE, self.y - 4, line, kind))

    def axis(self) -> None:
        """The numbers of the banks."""
        self.y += 18
        for bank in range(0, BANKS, 4):
            self.found.append(text(self.left + (bank + 0.5) * self.cell, self.y - 4, str(bank), "quiet", "middle"))

    def empty(self) -> None:
        """A line's banks."""
        cuts = "".join(f"M{self.left + n * self.cell:.5g} {self.y}v{ROW}" for n in range(1, BANKS))
        self.found.append(
            f'<rect class="empty" x="{self.left}" y="{self.y}" width="{BANKS * self.cell:.5g}" height="{ROW - 1}"/>'
            f'<path class="cut" d="{cuts}"/>'
        )

    def block(self, bank: int, banks: int, phase: int, hit: bool, number: int) -> None:
        """A number in its banks of the line."""
        x, wide = self.left + bank * self.cell, banks * self.cell
        inset = 0 if hit else 0.5  # frames stand on the edges: neighbours share them, and numbers have the room within
        self.found.append(
            f'<rect class="p{phase % len(COLORS)}{" hit" * hit}" x="{x + inset:.5g}" y="{self.y + inset - 0.5:g}" '
            f'width="{wide - 2 * inset:.5g}" height="{ROW - 2 * inset:g}"/>' + _number(x + wide / 2, self.y, wide - 2.4, number)
        )


def _number(x: float, y: float, room: float, number: int) -> str:
    """Around `x`, narrower than its font where that may need more room."""
    digits = str(number)
    squeezed = f' textLength="{room:.4g}" lengthAdjust="spacingAndGlyphs"' if DIGIT * len(digits) > room else ""
    return f'<text class="n" x="{x:.5g}" y="{y + 15:g}"{squeezed}>{digits}</text>'


def _panel(card: _Card, one: Shown) -> None:
    """Lanes over lines and banks; below, the words of each bank, phase by phase: the largest number is the wavefronts."""
    card.words(one.heading, "title", 44)
    for numbers in one.numbers:
        card.words(numbers, "quiet")
    lines = {line: list(group) for line, group in groupby(sorted(one.pieces(), key=lambda p: p.word), lambda p: p.line)}
    part = f" ({len(lines)} of {one.lines})" if len(lines) < one.lines else ""
    card.words(f"lanes by bank and line of 128 bytes{part}", "quiet")
    card.axis()
    before = -1
    for line, pieces in lines.items():
        card.y += GAP if line > before + 1 and before >= 0 else 0
        card.found.append(text(card.left - 5, card.y + 15, str(line), "quiet", "end"))
        card.empty()
        for piece in pieces:
            card.block(piece.bank, piece.words, piece.phase, piece.crowded, piece.lane)
        card.y += ROW
        before = line
    card.y += 6
    card.words("different words in each bank, phase by phase", "quiet")
    for number, phase in enumerate(one.prediction.phases):
        first, last = phase.lanes[0], phase.lanes[-1]
        lanes = f"lanes {first} to {last}" if last > first else f"lane {first}"
        card.words(f"{lanes}: {phase.wavefronts} wavefront{'s' * (phase.wavefronts != 1)}")
        card.empty()
        for bank, words in phase.banks.items():
            card.block(bank, 1, number, len(words) > 1, len(words))
        card.y += ROW + 2


def _elements(card: _Card, tile: LaidTile) -> None:
    """Every element at its coordinate, coloured by its bank; with its offset where there is room."""
    where = tile.bytes
    banks, offsets = (where // BANK_BYTES % BANKS).tolist(), (where // tile.itemsize).tolist()
    left = EDGE + DIGIT * len(str(tile.rows - 1)) + 4
    room = WIDTH - EDGE - left
    fitting = int(room / (SQUEEZED * len(str(int(where.max()) // tile.itemsize)) + 4))
    across = min(tile.cols, 1 << max(fitting, 1).bit_length() - 1)
    labelled = -(-tile.cols // across) * tile.rows <= LABELLED_UP_TO
    across = across if labelled else tile.cols
    card.words(f"{tile}: " + ("offsets, coloured by bank" if labelled else "banks"), "title", 44)
    wide = room / across
    tall = ROW if labelled else min(ROW, room / tile.rows)
    for start in range(0, tile.cols, across):
        end = min(start + across, tile.cols)
        card.words(f"columns {start} to {end - 1}" if end > start + 1 else f"column {start}", "quiet")
        part = [line[start:end] for line in banks]
        card.found += _coloured(part, f"translate({left} {card.y}) scale({wide:.6g} {tall:.6g})")
        for row in range(tile.rows) if labelled else sorted({0, tile.rows - 1}):
            y = card.y + row * tall + (tall - ROW) * (row > 0)
            card.found.append(text(left - 5, y + 15, str(row), "quiet", "end"))
        if labelled:
            for row, line in enumerate(offsets):
                for column, offset in enumerate(line[start:end]):
                    card.found.append(_number(left + (column + 0.5) * wide, card.y + row * ROW, wide - 3, offset))
        card.y += round(tall * tile.rows) + 4
    card.words("the banks' colours", "quiet")
    card.axis()
    card.found += _coloured([list(range(BANKS))], f"translate({card.left} {card.y}) scale({card.cell:.6g} {ROW})")
    card.y += ROW + 4


def _coloured(banks: Iterable[Sequence[int]], transform: str) -> list[str]:
    """Rows of cells in the colours of their banks: a path each, as a rectangle for every element would be a large file."""
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(banks):
        x = 0
        for bank, run in groupby(row):
            width = len(list(run))
            paths.setdefault(bank, []).append(f"M{x} {y}h{width}v1h-{width}z")
            x += width
    found = [f'<path fill="{BANK_COLORS[bank]}" d="{"".join(runs)}"/>' for bank, runs in sorted(paths.items())]
    return [f'<g transform="{transform}" shape-rendering="crispEdges">', *found, "</g>"]
