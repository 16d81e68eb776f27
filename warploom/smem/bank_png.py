"""Pictures of banks as PNG, by matplotlib: the layouts of an access side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warploom.smem.laid import LaidTile
from warploom.smem.model import BANK_BYTES, BANKS, Prediction
from warploom.smem.shown import Shown

COLORS = ("#4c78a8", "#f2a65a", "#6aa36f", "#b279a2")  # by phase
UNTOUCHED = "#eceff1"
CONFLICT = "#d62728"
LABELS_UP_TO = 640  # elements whose offsets are written out
LINES_UP_TO = 40  # lines of 128 bytes drawn in full; of larger tiles only those that the instruction touches


def write_png(path: Path, rows: Sequence[Sequence[Shown]]) -> None:
    """A row for each access; `rows` is what `shown` gives."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("banks as .png need matplotlib (pip install 'warploom[lab]'); .svg and .html need nothing") from error

    heights = [max(len(_lines(one)) for one in row) for row in rows]
    inches = [0.2 * h + 2.6 for h in heights]
    # A layout is also shown in its own coordinates, below.
    tile = rows[0][-1].count.tile
    laid = [tile] if isinstance(tile, LaidTile) else []
    inches += [min(0.2 * tile.rows, 8) + 1 for tile in laid]
    figure = Figure(figsize=(9.5 * max(map(len, rows)), sum(inches) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)  # a figure of its own rather than pyplot's: no global state, no window
    outer = figure.subfigures(len(inches), 1, squeeze=False, height_ratios=inches)
    for part, tile in zip(outer[len(rows) :, 0], laid, strict=True):
        _draw_elements(part.subplots(), tile)
    for part, row, height in zip(outer[: len(rows), 0], rows, heights, strict=True):
        axes = part.subplots(2, len(row), squeeze=False, height_ratios=[max(height, 3), 4])
        for above, below, one in zip(axes[0], axes[1], row, strict=True):
            _draw_words(above, one, height)
            _draw_banks(below, one.prediction)
    figure.savefig(path, format="png", dpi=110)


def _lines(one: Shown) -> list[int]:
    """Which lines of 128 bytes to draw."""
    return list(range(one.lines)) if one.lines <= LINES_UP_TO else sorted({piece.line for piece in one.pieces()})


def _draw_words(axes: Any, one: Shown, height: int) -> None:
    from matplotlib.patches import Rectangle

    lines = _lines(one)
    place = {line: n for n, line in enumerate(lines)}
    _grid(axes, len(lines))
    for piece in one.pieces():
        y = place[piece.line]
        color, edge = COLORS[piece.phase % len(COLORS)], CONFLICT if piece.crowded else "none"
        for bank in range(piece.bank, piece.bank + piece.words):
            axes.add_patch(Rectangle((bank + 0.06, y + 0.06), 0.88, 0.88, facecolor=color, edgecolor=edge, linewidth=1.6))
        axes.text(piece.bank + 0.5, y + 0.54, str(piece.lane), ha="center", va="center", fontsize=6.5, color="white")
    step = max(1, len(lines) // 16)
    axes.set(xlim=(0, BANKS), ylim=(max(height, 1), 0), ylabel="line of 128 bytes")
    axes.set_xticks([n + 0.5 for n in range(0, BANKS, 4)], [str(n) for n in range(0, BANKS, 4)])
    axes.set_yticks([n + 0.5 for n in range(0, len(lines), step)], [str(line) for line in lines[::step]])
    _quiet(axes)
    axes.set_title(f"{one.heading}\n{'; '.join(one.numbers)}", fontsize=9.5)


def _draw_elements(axes: Any, tile: LaidTile) -> None:
    """Every element at its coordinate, coloured by its bank; with its offset where there is room."""
    where = tile.bytes
    banks = (where // BANK_BYTES % BANKS).tolist()
    axes.imshow(banks, cmap="twilight", vmin=0, vmax=BANKS, aspect="auto", interpolation="nearest")
    if tile.rows * tile.cols <= LABELS_UP_TO:
        for row, line in enumerate((where // tile.itemsize).tolist()):
            for column, offset in enumerate(line):
                dark = 8 < banks[row][column] < 24
                color = "white" if dark else "black"
                axes.text(column, row, str(offset), ha="center", va="center", fontsize=6, color=color)
    axes.set(xlabel="column", ylabel="row")
    what = "offsets, coloured by bank" if tile.rows * tile.cols <= LABELS_UP_TO else "banks"
    axes.set_title(f"{tile}: {what}", fontsize=9.5)
    _quiet(axes)


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
    """Empty cells: one surface under white lines."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((0, 0), BANKS, rows, facecolor=UNTOUCHED, edgecolor="none", zorder=0))
    segments = [[(x, 0), (x, rows)] for x in range(BANKS + 1)] + [[(0, y), (BANKS, y)] for y in range(rows + 1)]
    axes.add_collection(LineCollection(segments, colors="white", linewidths=0.8, zorder=0.5))


def _quiet(axes: Any) -> None:
    axes.tick_params(length=0, labelsize=7.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
