"""Pictures of masks: tiles by class, and single elements where they can still be told apart."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import describe, integer
from warploom.masks.intervals import Resolvable, visible_per_column
from warploom.masks.tiles import FULL, HIDDEN, PARTIAL, TileClasses
from warploom.masks.visible import visible

COLORS = {HIDDEN: "#eceff1", PARTIAL: "#ffcc80", FULL: "#2a6f97"}
ELEMENT = "#12405c"
MEANING = {HIDDEN: "hidden: skipped", PARTIAL: "partial: tested by element", FULL: "full: no test"}
ELEMENTS_UP_TO = 64  # rows and columns drawn one by one
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def draw(
    mask: Resolvable,
    path: Any,
    seqlen_q: int,
    seqlen_k: int,
    *,
    block_m: int | None = None,
    block_n: int | None = None,
    batch: int = 0,
    head: int = 0,
) -> None:
    """See `Mask.draw`."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path takes a name ending in .svg or .png, got {describe(path)}")
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"path takes a name ending in .svg or .png, got {str(path)!r}")
    if not seqlen_q or not seqlen_k:
        raise ValueError(f"there is nothing to draw: seqlen_q={seqlen_q}, seqlen_k={seqlen_k}")
    default_m, default_n = tile_size(seqlen_q, seqlen_k)
    block_m = default_m if block_m is None else integer("block_m", block_m, minimum=1)
    block_n = default_n if block_n is None else integer("block_n", block_n, minimum=1)
    tiles = TileClasses.of(mask.resolve(seqlen_q, seqlen_k), seqlen_q, seqlen_k, block_m, block_n, device=mask.device)
    classes = tiles.matrix(batch, head)
    try:
        import matplotlib.colors
        import matplotlib.ticker
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing masks needs matplotlib: pip install matplotlib, or 'warploom[lab]'") from error

    # A figure of its own rather than pyplot's: no global state, no window, whatever backend is set.
    figure = Figure(figsize=_figure_size(seqlen_q, seqlen_k), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    palette = matplotlib.colors.ListedColormap([COLORS[kind] for kind in (HIDDEN, PARTIAL, FULL)])
    x_edges = [min(n * block_n, seqlen_k) for n in range(tiles.shape[1] + 1)]
    y_edges = [min(m * block_m, seqlen_q) for m in range(tiles.shape[0] + 1)]
    line = 0.8 if max(tiles.shape) <= 64 else 0.2 if max(tiles.shape) <= 128 else 0.0
    axes.pcolormesh(
        x_edges,
        y_edges,
        classes.cpu().numpy(),
        cmap=palette,
        vmin=HIDDEN,
        vmax=FULL,
        edgecolors="white" if line else "none",
        linewidth=line,
        rasterized=max(tiles.shape) > 128,
    )
    small = max(seqlen_q, seqlen_k) <= ELEMENTS_UP_TO and block_m * block_n > 1
    if small:
        _draw_elements(axes, mask, seqlen_q, seqlen_k, batch, head)
    axes.set(xlim=(0, seqlen_k), ylim=(seqlen_q, 0), aspect="equal", xlabel="keys", ylabel="queries")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.MultipleLocator(_tick_step(max(seqlen_q, seqlen_k))))
    axes.xaxis.set_ticks_position("top")
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=2, labelsize=8)
    for spine in axes.spines.values():
        spine.set_color("#90a4ae")
    _label(figure, axes, mask, tiles, classes, small, batch, head)
    figure.savefig(path, format=path.suffix[1:], dpi=150)


def tile_size(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Queries and keys per tile of a picture.

    The smallest usual size that makes at most 8 tiles along the longer side where elements show, else at most 32. It is
    128 at most, and no more than half of a side.
    """
    longest = max(seqlen_q, seqlen_k)
    across = 8 if longest <= ELEMENTS_UP_TO else 32
    size = next((size for size in _SIZES if size * across >= longest), _SIZES[-1])

    def within(side: int) -> int:
        return max(1, *(s for s in _SIZES if s <= size and 2 * s <= side), 1)

    return within(seqlen_q), within(seqlen_k)


def _tick_step(length: int) -> int:
    """The power of two that makes at most eight steps."""
    return 1 << max(0, (length - 1).bit_length() - 3)


def _figure_size(seqlen_q: int, seqlen_k: int) -> tuple[float, float]:
    """Inches: the matrix in proportion and room for the words."""
    longest = max(seqlen_q, seqlen_k)
    return max(5.2 * seqlen_k / longest + 0.8, 5.0), max(5.2 * seqlen_q / longest, 0.3) + 1.6


def _draw_elements(axes: Any, mask: Resolvable, seqlen_q: int, seqlen_k: int, batch: int, head: int) -> None:
    """A small square for every visible element."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    rows, columns = torch.arange(seqlen_q, device=mask.device), torch.arange(seqlen_k, device=mask.device)
    dense = visible(mask.resolve(seqlen_q, seqlen_k), rows, columns, seqlen_k - seqlen_q)
    shown = dense[batch if dense.shape[0] > 1 else 0, head if dense.shape[1] > 1 else 0].nonzero().tolist()
    squares = [Rectangle((j + 0.2, i + 0.2), 0.6, 0.6) for i, j in shown]
    axes.add_collection(PatchCollection(squares, facecolor=ELEMENT, edgecolor="none"))


def _label(
    figure: Any,
    axes: Any,
    mask: Resolvable,
    tiles: TileClasses,
    classes: Tensor,
    elements: bool,
    batch: int,
    head: int,
) -> None:
    """The mask's name, its numbers, and a legend that counts the tiles drawn."""
    from matplotlib.patches import Patch

    total = classes.numel()
    counts = {kind: int((classes == kind).sum()) for kind in MEANING}
    q, k = tiles.seqlen_q, tiles.seqlen_k
    shown = visible_per_column(mask.resolve(q, k), q, k, mask.device)
    batches, heads = shown.shape[:2]
    one = shown[batch if batches > 1 else 0, head if heads > 1 else 0]
    density = int(one.sum()) / (q * k)
    which = f", batch {batch}, head {head}" if batches * heads > 1 else ""
    width = int(figure.get_size_inches()[0] * 11)
    title = textwrap.fill(f"{mask!r}{which}", width, max_lines=3, placeholder=" ...")
    figure.suptitle(title, fontsize=10, fontweight="bold")
    axes.set_title(
        f"{q} x {k} in tiles of {tiles.block_m} x {tiles.block_n}; "
        f"{density:.1%} visible, {counts[HIDDEN] / total:.1%} of tiles skipped",
        fontsize=8.5,
    )
    handles = [
        Patch(facecolor=COLORS[kind], edgecolor="#90a4ae", label=f"{meaning} ({counts[kind]:,})")
        for kind, meaning in MEANING.items()
    ]
    if elements:
        handles.append(Patch(facecolor=ELEMENT, label="visible element"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
