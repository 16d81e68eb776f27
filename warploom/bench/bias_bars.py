"""What is asked of the bias suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from warploom.bench.mask_bars import Bar, Row

NO_BIAS, TABLE = "warploom, no bias", "warploom, gradient of the table"


def _over(rows: Sequence[Row], above: str, below: str, start: str = "", what: str = "ms") -> float | None:
    """The smallest quotient of two contenders' times, or of another number of theirs, over the cases that begin so."""
    found = []
    for row in rows:
        a, b = (row["contenders"].get(name, {}).get(what) for name in (above, below))
        if row["case"].startswith(start) and a and b:
            found.append(a / b)
    return min(found, default=None)


def _times(number: float, value: float | None) -> float | None:
    return None if value is None else number * value


def _described(rows: Sequence[Row]) -> list[Bar]:
    return [
        ("1.03 of no bias over ALiBi, the worst case", 1.0, _times(1.03, _over(rows, NO_BIAS, "warploom", "ALiBi"))),
        ("1.08 of no bias over T5 buckets, the worst case", 1.0, _times(1.08, _over(rows, NO_BIAS, "warploom", "T5"))),
    ]


def _both(rows: Sequence[Row]) -> list[Bar]:
    memory = [_over(rows, NO_BIAS, name, "T5", "peak_bytes") for name in (TABLE, "warploom")]
    most = _times(1.05, min((value for value in memory if value), default=None))
    return [
        ("torch's efficient kernel over ours, a matrix, the worst case", 1.3, _over(rows, "efficient", "warploom", "a matrix")),
        ("FlexAttention over ours, a matrix, the worst case", 1.2, _over(rows, "FlexAttention", "warploom", "a matrix")),
        *_described(rows),
        ("1.05 of no bias's peak memory over T5 buckets', gradient included, the worst case", 1.0, most),
    ]


def _stats(rows: Sequence[Row]) -> list[Bar]:
    plain = "warploom, no stats"
    return [
        ("1.5 of a forward pass over one with column sums, the worst case", 1.0, _times(1.5, _over(rows, plain, "warploom"))),
        ("1.01 of a forward pass over one with max logits, the worst case", 1.0,
         _times(1.01, _over(rows, plain, "warploom, max logits"))),
    ]  # fmt: skip


def _encoder(rows: Sequence[Row]) -> list[Bar]:
    return [
        ("eager over ours", 1.5, _over(rows, "eager", "warploom")),
        ("sdpa over ours", 1.15, _over(rows, "sdpa", "warploom")),
    ]


BARS: dict[tuple[str, str], Callable[[Sequence[dict[str, Any]]], list[Bar]]] = {
    ("bias", "forward"): _described,
    ("bias", "forward and backward"): _both,
    ("bias", "forward, stats"): _stats,
    ("bias", "encoder step"): _encoder,
}
