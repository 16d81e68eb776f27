"""Charts as SVG text: narrow enough for a phone, on a card of their own that follows the reader's light or dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from warploom.runtime.card import WIDTH, style, text, whole

EDGE = 14
ROW, BAR = 40, 12  # a row: its name, its bar below
VALUE = 54  # room for our number right of the bars

# Light and dark; ours first, then the slots of peers.
COLOURS = (
    ("#0b6e4f", "#3fb68b"),
    ("#c44536", "#ff8a73"),
    ("#b7791f", "#f2b84b"),
    ("#3d5a80", "#8fb3e0"),
    ("#7b3f98", "#cf9be8"),
    ("#5f6672", "#aab2bf"),
)
# Peers of many charts keep their slots; others take what is free.
SLOTS = {"cuDNN": 1, "cuDNN's FlexAttention": 1, "FlashAttention-2": 2, "FlashAttention-4": 3, "FlexAttention": 4}
SHAPES = ("circle", "diamond", "square", "triangle", "cross")
STYLE = style(
    ".grid{stroke:#d8dee4}.roof{stroke:#1f2328;stroke-dasharray:2 3}.line{fill:none;stroke-width:1.6}.mark{stroke:#fff}"
    + "".join(f".f{n}{{fill:{light}}}.s{n}{{stroke:{light}}}" for n, (light, _) in enumerate(COLOURS)),
    ".grid{stroke:#30363d}.roof{stroke:#e6edf3}.mark{stroke:#161b22}"
    + "".join(f".f{n}{{fill:{dark}}}.s{n}{{stroke:{dark}}}" for n, (_, dark) in enumerate(COLOURS)),
)


@dataclass(frozen=True)
class Chart:
    """Rows of one number of ours and those of peers.

    Ours is a bar from zero and peers are marks on it; on a logarithmic axis, which has no zero, all are marks.
    """

    title: str
    unit: str
    rows: Sequence[tuple[str, Mapping[str, float]]]  # a case, and the numbers by name
    ours: str = "warploom"
    roof: tuple[str, float] | None = None
    logarithmic: bool = False

    @property
    def names(self) -> list[str]:
        found = dict.fromkeys(name for _, numbers in self.rows for name in numbers)
        return [*([self.ours] if self.ours in found else []), *(name for name in found if name != self.ours)]

    @property
    def slots(self) -> dict[str, int]:
        """Which colour and shape each peer has."""
        found = {name: SLOTS[name] for name in self.names if name in SLOTS}
        for name in self.names:
            if name != self.ours and name not in found:
                found[name] = next(n for n in count(1) if n not in found.values())
        return found


@dataclass(frozen=True)
class Curves:
    """Lines over steps, in panels one below the other."""

    title: str
    panels: Sequence[tuple[str, Mapping[str, Sequence[float]]]]  # what is shown, and the lines by name
    axis: str


def bars(chart: Chart) -> str:
    """The chart's SVG, one line an element."""
    slots = chart.slots
    top, lines = _head(chart.title, chart.names, slots, chart.roof)
    left, right = EDGE, WIDTH - EDGE - VALUE
    highest = max([value for _, numbers in chart.rows for value in numbers.values()] + ([chart.roof[1]] if chart.roof else []))
    lowest = min(value for _, numbers in chart.rows for value in numbers.values())
    first, ticks = _decades(lowest, highest) if chart.logarithmic else (0.0, _ticks(highest))
    last = max(highest, ticks[-1])

    def at(value: float) -> float:
        share = math.log(value / first) / math.log(last / first) if chart.logarithmic else value / last
        return left + share * (right - left)

    lines.append(text(EDGE, top + 14, chart.unit, "quiet"))
    top += 40
    bottom = top + ROW * len(chart.rows) + 4
    for tick in ticks:
        where = at(tick)
        lines.append(f'<path class="grid" d="M{where:.1f} {top}V{bottom}"/>')
        lines.append(text(where, top - 6, f"{tick:g}", "quiet", "start" if where < left + 4 else "middle"))
    if chart.roof:
        lines.append(f'<path class="roof" d="M{at(chart.roof[1]):.1f} {top}V{bottom}"/>')
    for number, (case, numbers) in enumerate(chart.rows):
        y = top + number * ROW
        lines.append(text(EDGE, y + 16, case))
        middle = y + 22 + BAR / 2
        ours = numbers.get(chart.ours)
        if chart.logarithmic:
            ends = at(min(numbers.values())), at(max(numbers.values()))
            lines.append(f'<path class="grid" d="M{ends[0]:.1f} {middle}H{ends[1]:.1f}"/>')
        elif ours is not None:
            lines.append(f'<rect class="f0" x="{left}" y="{middle - BAR / 2}" width="{at(ours) - left:.1f}" height="{BAR}"/>')
        for name, value in numbers.items():
            if name != chart.ours:
                lines.append(_mark(slots[name], at(value), middle))
        if ours is not None:
            if chart.logarithmic:
                lines.append(f'<rect class="f0 mark" x="{at(ours) - 4:.1f}" y="{middle - 8}" width="8" height="16"/>')
            lines.append(text(WIDTH - EDGE, middle + 5, f"{ours:.3g}" if ours < 100 else f"{ours:.0f}", "", "end"))
    return whole(chart.title, STYLE, lines, bottom + EDGE)


def curves(chart: Curves) -> str:
    """The chart's SVG; the colours are those of the first panel's names."""
    names = list(dict.fromkeys(name for _, lines in chart.panels for name in lines))
    top, found = _head(chart.title, names, None, None)
    left, right = EDGE + 56, WIDTH - EDGE
    steps = max(len(line) for _, lines in chart.panels for line in lines.values())
    for (what, lines), height in zip(chart.panels, (200, *([120] * (len(chart.panels) - 1))), strict=True):
        found.append(text(EDGE, top + 14, what, "quiet"))
        top += 26
        low, high = (pick(pick(line) for line in lines.values()) for pick in (min, max))
        high = high if high > low else low + 1.0
        for tick in _between(low, high):
            y = top + (high - tick) / (high - low) * height
            found.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
            found.append(text(left - 6, y + 5, f"{tick:g}", "quiet", "end"))
        for name, line in lines.items():
            points = " ".join(
                f"{left + n * (right - left) / max(steps - 1, 1):.1f},{top + (high - value) / (high - low) * height:.1f}"
                for n, value in enumerate(line)
            )
            found.append(f'<polyline class="line s{names.index(name)}" points="{points}"/>')
        top += height + 12
    found.append(text(left, top + 10, "0", "quiet"))
    found.append(text(right, top + 10, f"{chart.axis} {steps}", "quiet", "end"))
    return whole(chart.title, STYLE, found, top + 10 + EDGE)


def _head(
    title: str, names: Sequence[str], slots: Mapping[str, int] | None, roof: tuple[str, float] | None
) -> tuple[int, list[str]]:
    """Where the chart begins below, and the title and the legend: of bars and marks by their slots, without any of lines."""
    found, y = [], EDGE
    for part in _wrapped(title, 44):
        y += 18
        found.append(text(EDGE, y - 2, part, "title"))
    x, y = EDGE, y + 24
    for number, name in enumerate([*names, *([roof[0]] if roof else [])]):
        wide = 24 + 8.2 * len(name)
        if x > EDGE and x + wide > WIDTH - EDGE:
            x, y = EDGE, y + 24
        if roof and number == len(names):
            found.append(f'<path class="roof" d="M{x + 8} {y - 12}V{y + 3}"/>')
        elif slots is None:
            found.append(f'<path class="line s{number}" d="M{x} {y - 5}H{x + 16}"/>')
        elif name not in slots:
            found.append(f'<rect class="f0" x="{x}" y="{y - 11}" width="16" height="{BAR}"/>')
        else:
            found.append(_mark(slots[name], x + 8, y - 5))
        found.append(text(x + 22, y, name))
        x += round(wide) + 16
    return y + 10, found


def _mark(slot: int, x: float, y: float) -> str:
    """A peer's: a shape too, for those who do not tell colours apart. Past the last colour they begin anew, shapes moved."""
    again, colour = divmod(slot - 1, len(COLOURS) - 1)
    shape = SHAPES[(colour + again) % len(SHAPES)]
    kind = f"f{colour + 1} mark"
    if shape == "circle":
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:g}" r="6.5"/>'
    path = {
        "diamond": "m0 -8l7.5 8l-7.5 8l-7.5 -8z",
        "square": "m-5.5 -5.5h11v11h-11z",
        "triangle": "m0 -7.5l7.5 13h-15z",
        "cross": "m-2.5 -7h5v4.5h4.5v5h-4.5v4.5h-5v-4.5h-4.5v-5h4.5z",
    }[shape]
    return f'<path class="{kind}" d="M{x:.1f} {y:g}{path}"/>'


def _wrapped(text: str, most: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > most:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0, five or so."""
    step = _round(highest / 5)
    return [n * step for n in range(int(highest / step * (1 + 1e-9)) + 1)]


def _between(low: float, high: float) -> list[float]:
    """Round numbers within both, three to six."""
    step = _round((high - low) / 4)
    found = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [float(f"{tick:.6g}") for tick in found]


def _round(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return float(f"{next(n for n in (1, 2, 2.5, 5, 10) if n * power >= step * (1 - 1e-9)) * power:.6g}")


def _decades(low: float, high: float) -> tuple[float, list[float]]:
    """Where a logarithmic axis begins, and the powers of ten on it."""
    first = math.floor(math.log10(low))
    return 10.0**first, [float(f"{10.0**n:.6g}") for n in range(first, math.floor(math.log10(high)) + 1)]
