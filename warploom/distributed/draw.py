"""The picture of a plan: the mask by who holds each query, and what work that makes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from warploom.distributed.layout import Layout
from warploom.distributed.whole import Whole
from warploom.runtime import arguments

_COLORS = ("#2a6f97", "#e07a5f", "#3d9970", "#9b5de5", "#f2b134", "#577590", "#c9184a", "#6a994e")
_HIDDEN = "#eceff1"
_BLOCKS = 64  # at most so many along each side


def draw(path: str | os.PathLike[str], whole: Whole, queries: Layout, chunk: int, work: tuple[int, ...]) -> None:
    """See `ShardPlan.draw`."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path takes a name ending in .svg or .png, got {arguments.describe(path)}")
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"path takes a name ending in .svg or .png, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"path {path} cannot be written: there is no folder {path.parent}")
    seqlen_q, seqlen_k, ranks = whole.seqlen_q, whole.seqlen_k, len(work)
    if not seqlen_q or not seqlen_k:
        raise ValueError(f"there is nothing to draw: seqlen_q={seqlen_q}, seqlen_k={seqlen_k}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing plans needs matplotlib: pip install matplotlib, or 'warploom[lab]'") from error

    rows, columns = _edges(seqlen_q, chunk), _edges(seqlen_k, chunk)
    shown = _shown(whole, rows, columns)
    holders = torch.empty(seqlen_q, dtype=torch.int64)
    for rank in range(ranks):
        holders[queries.positions(rank)] = rank
    colors = [_color(rank, to_rgb) for rank in range(ranks)]
    hidden = torch.tensor(to_rgb(_HIDDEN))
    held = torch.tensor(colors)[holders[rows[:-1]]][:, None]
    # A block of which little shows is pale, not hidden.
    strength = torch.where(shown > 0, 0.25 + 0.75 * shown, 0.0)[..., None]
    picture = hidden + strength * (held - hidden)

    figure = Figure(figsize=(8.4, max(5.2, 0.24 * ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2.1, 1.0))
    left.imshow(picture.numpy(), extent=(0, seqlen_k, seqlen_q, 0), interpolation="nearest", aspect="auto")
    left.set(xlabel="keys", ylabel="queries")
    left.set_title(f"{seqlen_q} × {seqlen_k}, chunks of {chunk}: colour is who holds the query", fontsize=9)
    total = max(sum(work), 1)
    names = [f"rank {rank}" for rank in range(ranks)]
    shares = [work / total for work in work]
    right.barh(names, shares, color=colors)
    right.axvline(1 / ranks, color="#37474f", linewidth=1, linestyle="--")
    between = "\n " if ranks <= len(_COLORS) else ", "  # bars of more are as high as one line
    for at, (share, count) in enumerate(zip(shares, queries.counts, strict=True)):
        color = "white" if 2 * share > max(shares) else "#37474f"  # beside a short bar
        right.annotate(f" {share:.1%}{between}{count} tokens", (0, at), va="center", fontsize=8, color=color)
    right.invert_yaxis()
    right.set_xlabel("share of the visible work")
    right.set_title(f"imbalance {max(shares) * ranks - 1:.2%}", fontsize=9)
    figure.savefig(path, format=path.suffix[1:], dpi=150)


def _color(rank: int, to_rgb: Callable[[str], tuple[float, float, float]]) -> tuple[float, ...]:
    """Of a rank: darker at every turn through the colours that there are."""
    shade = 0.75 ** (rank // len(_COLORS))
    return tuple([shade * part for part in to_rgb(_COLORS[rank % len(_COLORS)])])


def _edges(length: int, chunk: int) -> Tensor:
    """Of blocks that chunks consist of, or that are chunks together where they are too many to show."""
    step = chunk
    while -(-length // step) > _BLOCKS:
        step += chunk
    while step % 2 == 0 and -(-length // (step // 2)) <= _BLOCKS:
        step //= 2
    return torch.arange(0, length + step, step).clamp(max=length)


def _shown(whole: Whole, rows: Tensor, columns: Tensor) -> Tensor:
    """Visible fraction of each block, over all batch entries and heads, in O(seqlen_k) a row of blocks."""
    first, end, hidden = whole.shown
    found = []
    for a, b in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
        count = end.clamp(a, b).long() - first.clamp(a, b)
        for c, d in hidden:
            count = count - (d.clamp(a, b).long() - c.clamp(a, b))
        mean = count.double().mean((0, 1)) / (b - a)
        sums = torch.nn.functional.pad(mean.cumsum(0), (1, 0))[columns].diff()
        found.append(sums / columns.diff())
    return torch.stack(found).float()
