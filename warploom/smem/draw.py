"""Pictures of a tile over the 32 banks: which lane reads which word, coloured by phase, with the conflicts marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from warploom.smem.layout import Tile
from warploom.smem.model import BANK_BYTES, BANKS, Prediction
from warploom.smem.walk import TileCount, count

COLORS = ("#4c78a8", "#f2a65a", "#6aa36f", "#b279a2")  # by phase
UNTOUCHED = "#eceff1"
CONFLICT = "#d62728"
LINES_UP_TO = 40  # lines of 128 bytes drawn in full; of larger tiles only those that the instruction touches


def plain(tile: Tile) -> Tile:
    """The same tile without padding and swizzles."""
    return replace(tile, pad=0, swizzles=())


def shown_instruction(counts: Sequence[TileCount]) -> int:
    """The instruction to draw: the first with the most excess in any of the layouts."""
    excess = [max(column) for column in zip(*([p.excess for p in one.instructions] for one in counts), strict=True)]
    return excess.index(max(excess))


def draw(path: str | Path, counts: Sequence[TileCount]) -> None:
    """Write .svg or .png: for each access its worst instruction, in the plain tile and in the layout given."""
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"--draw takes a name ending in .svg, .png or .html, got {str(path)!r}")
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing banks needs matplotlib: pip install 'warploom[lab]'") from error

    columns = [_layouts(one) for one in counts]
    lines = [[_lines(one, shown_instruction(layouts)) for one in layouts] for layouts in columns]
    heights = [max(map(len, row)) for row in lines]
    figure = Figure(figsize=(9.5 * max(map(len, columns)), sum(0.2 * h + 2.6 for h in heights) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)  # a figure of its own rather than pyplot's: no global state, no window
    outer = figure.subfigures(len(counts), 1, squeeze=False, height_ratios=[0.2 * h + 2.6 for h in heights])
    for part, layouts, height in zip(outer[:, 0], columns, heights, strict=True):
        number = shown_instruction(layouts)
        axes = part.subplots(2, len(layouts), squeeze=False, height_ratios=[max(height, 3), 4])
        for above, below, one in zip(axes[0], axes[1], layouts, strict=True):
            _draw_words(above, one, number, height)
            _draw_banks(below, one.instructions[number])
    # Words stay words in the SVG, and the same picture is the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "warploom"}):
        figure.savefig(path, format=path.suffix[1:], dpi=110, metadata=metadata)


def _layouts(one: TileCount) -> list[TileCount]:
    before = plain(one.tile)
    return [one] if before == one.tile else [count(one.pattern, before), one]


def _lines(one: TileCount, number: int) -> list[int]:
    """Which lines of 128 bytes to draw."""
    total = -(-one.tile.size_bytes // (BANKS * BANK_BYTES))
    if total <= LINES_UP_TO:
        return list(range(total))
    phases = one.instructions[number].phases
    return sorted({word // BANKS for phase in phases for words in phase.banks.values() for word in words})[:LINES_UP_TO]


def _draw_words(axes: Any, one: TileCount, number: int, height: int) -> None:
    from matplotlib.patches import Rectangle

    lines = _lines(one, number)
    place = {line: n for n, line in enumerate(lines)}
    _grid(axes, len(lines))
    prediction = one.instructions[number]
    for index, phase in enumerate(prediction.phases):
        for bank, words in phase.banks.items():
            for word in words:
                if word // BANKS in place:
                    crowded = len(words) > 1
                    axes.add_patch(
                        Rectangle(
                            (bank + 0.06, place[word // BANKS] + 0.06),
                            0.88,
                            0.88,
                            facecolor=COLORS[index % len(COLORS)],
                            edgecolor=CONFLICT if crowded else "none",
                            linewidth=1.6 if crowded else 0,
                        )
                    )
    for lane, word in first_words(one, number):
        if word // BANKS in place:
            axes.text(
                word % BANKS + 0.5,
                place[word // BANKS] + 0.54,
                str(lane),
                ha="center",
                va="center",
                fontsize=6.5,
                color="white",
            )
    step = max(1, len(lines) // 16)
    axes.set(xlim=(0, BANKS), ylim=(max(height, 1), 0), ylabel="line of 128 bytes")
    axes.set_xticks([n + 0.5 for n in range(0, BANKS, 4)], [str(n) for n in range(0, BANKS, 4)])
    axes.set_yticks([n + 0.5 for n in range(0, len(lines), step)], [str(line) for line in lines[::step]])
    _quiet(axes)
    many = f", instruction {number} of {len(one.instructions)}" if len(one.instructions) > 1 else ""
    axes.set_title(
        f"{one.pattern} on {one.tile}{many}\n"
        f"{prediction.wavefronts} wavefronts, {prediction.ideal} ideal, {prediction.excess} excess; "
        f"{one.excess} excess over the tile",
        fontsize=9.5,
    )


def first_words(one: TileCount, number: int) -> list[tuple[int, int]]:
    """(lane, first word) of every lane of an instruction; of several lanes in one word the first."""
    from warploom.smem.walk import lane_addresses

    for index, addresses in enumerate(lane_addresses(one.pattern, one.tile)):
        if index == number:
            words: dict[int, int] = {}
            for lane, address in enumerate(addresses):
                if address is not None:
                    words.setdefault(address // BANK_BYTES, lane)
            return [(lane, word) for word, lane in words.items()]
    raise IndexError(f"there is no instruction {number}")


def _draw_banks(axes: Any, prediction: Prediction) -> None:
    """Words in each bank, phase by phase: the largest number of a row is its wavefronts."""
    from matplotlib.patches import Rectangle

    _grid(axes, len(prediction.phases))
    for index, phase in enumerate(prediction.phases):
        for bank, words in phase.banks.items():
            edge = CONFLICT if len(words) > 1 else "none"
            color = COLORS[index % len(COLORS)]
            axes.add_patch(Rectangle((bank + 0.05, index + 0.06), 0.9, 0.88, facecolor=color, edgecolor=edge, linewidth=1.4))
            axes.text(bank + 0.5, index + 0.54, str(len(words)), ha="center", va="center", fontsize=6.5, color="white")
    rows = len(prediction.phases)
    axes.set(xlim=(0, BANKS), ylim=(rows, 0), xlabel="bank: distinct words in it, by phase")
    axes.set_xticks([n + 0.5 for n in range(0, BANKS, 4)], [str(n) for n in range(0, BANKS, 4)])
    axes.set_yticks(
        [n + 0.5 for n in range(rows)],
        [f"{phase.lanes[0]}-{phase.lanes[-1]}: {phase.wavefronts}" for phase in prediction.phases],
    )
    axes.set_ylabel("lanes: wavefronts")
    _quiet(axes)


def _grid(axes: Any, rows: int) -> None:
    """Empty cells, as one surface under white lines: a rectangle for each would be most of an SVG's bytes."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((0, 0), BANKS, rows, facecolor=UNTOUCHED, edgecolor="none", zorder=0))
    segments = [[(x, 0), (x, rows)] for x in range(BANKS + 1)] + [[(0, y), (BANKS, y)] for y in range(rows + 1)]
    axes.add_collection(LineCollection(segments, colors="white", linewidths=0.8, zorder=0.5))


def _quiet(axes: Any) -> None:
    axes.tick_params(length=0, labelsize=7.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
