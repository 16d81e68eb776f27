"""The demo's two pictures: what padding and packing compute, and how fast each way was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import Timing
from .routes import groups

INK = "#222222"
FAINT = "#d9d9d9"
TONES = ("#2a6f97", "#7fb3d5")  # neighbouring sentences in turn
OURS = "#c8553d"
THEIRS = "#6c757d"
TITLE = 11
SHOWN_TOKENS = 256  # of the packed row: more would make sentences too small to see


def draw(
    folder: Path,
    timings: Sequence[Timing],
    lengths: Sequence[int],
    batch_size: int,
    row_tokens: int,
    machine: str,
    dtype: str,
) -> list[str]:
    """Write mask.png and timings.png into `folder`, which is made if missing.

    Returns:
        Their paths.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("the pictures need matplotlib (pip install 'warploom[demo]'), or --no-pictures") from error
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, size, paint in (
        ("mask.png", (11.0, 5.2), lambda f: _masks(f, lengths, batch_size, row_tokens)),
        ("timings.png", (9.5, 4.4), lambda f: _timings(f, timings, machine, dtype)),
    ):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        paint(figure)
        figure.savefig(folder / name, dpi=130, facecolor="white")
        written.append(str(folder / name))
    return written


def _masks(figure: Any, lengths: Sequence[int], batch_size: int, row_tokens: int) -> None:
    """Left: the first padded batch, token by token. Right: the start of the first packed row, query × key."""
    from matplotlib.patches import Patch, Rectangle

    left, right = figure.subplots(1, 2)
    batch = [lengths[i] for i in groups(lengths, "padded", batch_size, row_tokens)[0]]
    longest = max(batch)
    left.add_patch(Rectangle((0, 0), longest, len(batch), color=FAINT, linewidth=0))
    for row, length in enumerate(batch):
        left.add_patch(Rectangle((0, row + 0.08), length, 0.84, color=TONES[row % 2], linewidth=0))
    left.set(xlim=(0, longest), ylim=(len(batch), 0), xlabel="token", ylabel="sentence")
    wasted = 1 - sum(batch) / (longest * len(batch))
    left.set_title(f"A padded batch: {len(batch)} sentences, {wasted:.0%} padding", loc="left", fontsize=TITLE)
    handles = [Patch(color=tone, label=label) for tone, label in zip(TONES, ("real tokens,", "in two tones"), strict=True)]
    left.legend(handles=[*handles, Patch(color=FAINT, label="padding")], loc="upper right", bbox_to_anchor=(1.0, -0.09),
                ncols=3, frameon=False, borderpad=0.0)  # fmt: skip

    row_lengths = [lengths[i] for i in groups(lengths, "packed", batch_size, row_tokens)[0]]
    side = min(SHOWN_TOKENS, sum(row_lengths))
    start = seen = 0
    for number, length in enumerate(row_lengths):
        seen += length * length
        if start < side:
            right.add_patch(Rectangle((start, start), length, length, color=TONES[number % 2], linewidth=0))
        start += length
    right.set(xlim=(0, side), ylim=(side, 0), xlabel="key token", ylabel="query token", aspect="equal")
    right.set_title(
        f"A packed row: {len(row_lengths)} sentences, {start:,} tokens, no padding\n"
        f"coloured: visible pairs, {seen / start**2:.1%} of all (first {side} tokens shown)",
        loc="left",
        fontsize=TITLE,
    )
    for axes in (left, right):
        _plain(axes)


def _timings(figure: Any, timings: Sequence[Timing], machine: str, dtype: str) -> None:
    """Tokens a second of every way: the spread of its passes, its padding and its peak memory beside it."""
    axes = figure.subplots()
    most = max(t.real_tokens / min(t.seconds) for t in timings)
    for row, timing in enumerate(timings):
        speed = timing.tokens_per_second
        slowest, fastest = timing.real_tokens / max(timing.seconds), timing.real_tokens / min(timing.seconds)
        colour = OURS if timing.key.startswith("warploom") else THEIRS
        axes.barh(row, speed, color=colour, height=0.62)
        axes.plot([slowest, fastest], [row, row], color=INK, linewidth=1.5, solid_capstyle="butt")
        memory = "" if timing.peak_bytes is None else f", {timing.peak_bytes / 2**20:,.0f} MiB peak"
        axes.annotate(
            f"{speed:,.0f}  ({timing.padding:.0%} padding{memory})",
            (max(speed, fastest), row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    passes = len(timings[0].seconds)
    axes.set(
        yticks=range(len(timings)),
        yticklabels=[t.name for t in timings],
        ylim=(len(timings) - 0.4, -0.6),
        xlim=(0, most * 1.6),
        xlabel="real tokens per second (padding not counted)",
    )
    several = f"median of {passes} passes over all sentences, line: slowest to fastest"
    axes.set_title(
        f"MiniLM, {timings[0].real_tokens:,} tokens, {dtype} on {machine}\n"
        f"bar: {several if passes > 1 else 'one pass over all sentences'}",
        loc="left",
        fontsize=TITLE,
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)
