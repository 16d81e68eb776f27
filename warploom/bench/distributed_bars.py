"""What is asked of the distributed suite: of one device's own kernel a share, of torch's a factor, even work, ring's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from warploom.bench.mask_bars import Bar, Row

SHARES = {  # of ideal by pass: causal, a window, the other masks
    "forward": {"causal": 0.95, "window": 0.90, "": 0.90},
    "backward": {"causal": 0.92, "window": 0.88, "": 0.87},
}
MANY_RANKS = 8
OF_MANY = {
    "forward": {"causal": 0.92, "": 0.87},
    "backward": {"causal": 0.88, "": 0.84},
}
TORCH, TORCH_OVER_OURS = "torch context_parallel", 1.3
IMBALANCE = 0.03
RING = "warploom, ring"
RING_MEMORY = 1.2  # times q, out, their gradients, dk and dv, and two blocks of keys and values


def _bars(measure: str, rows: Sequence[Row]) -> list[Bar]:
    """Of rows with a fixed number of tokens a rank; those of a number in all are the table of strong scaling."""
    rows = [row for row in rows if "tokens a rank" in row["case"]]
    found: list[Bar] = []
    for row in rows:
        mask = row["case"].split(",")[0]
        shares = (OF_MANY if row["ranks"] >= MANY_RANKS else SHARES)[measure]
        least = shares.get(mask.partition(" ")[0] if mask.startswith("window") else mask, shares[""])
        found.append((f"one device's own kernel, over the ranks, over ours, {mask}", least, _ours(row).get("of_ideal")))
    found.append(("torch's context parallel over ours", TORCH_OVER_OURS, _torch(rows)))
    uneven = [each["imbalance"] for each in map(_ours, rows) if "imbalance" in each]
    found.append((f"1 + {IMBALANCE:g} over 1 + the imbalance of the plan, the worst case", 1.0,
                  (1 + IMBALANCE) / (1 + max(uneven)) if uneven else None))  # fmt: skip
    ratios = [ratio for ratio in (_ring(measure, row) for row in rows) if ratio is not None]
    found.append((f"{RING_MEMORY} of what a rank holds anyway, over the peak of ring, the worst case", 1.0,
                  min(ratios, default=None)))  # fmt: skip
    return found


def _ours(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = row["contenders"].get("warploom", {})
    return found


def _torch(rows: Sequence[Row]) -> float | None:
    """Of the causal case, the better of torch's ways."""
    for row in rows:
        theirs = [each["ms"] for name, each in row["contenders"].items() if name.startswith(TORCH) and "ms" in each]
        if theirs and "ms" in _ours(row):
            return float(min(theirs) / _ours(row)["ms"])
    return None


def _ring(measure: str, row: Row) -> float | None:
    """Peak bytes are those beside q, k and v, and in a backward pass beside out and its gradient too; numbers have 16 bits."""
    peak = row["contenders"].get(RING, {}).get("peak_bytes")
    if not peak:
        return None
    rows = row["batch"] * row["seqlen"] // row["ranks"]
    q, kv = (2 * rows * row[heads] * row["head_dim"] for heads in ("heads", "heads_kv"))
    held = (3 if measure == "backward" else 2) * q  # q, the gradient of out, and out
    return float(RING_MEMORY * (4 * q + 3 * 2 * kv) / (held + peak))


def _of(measure: str) -> Callable[[Sequence[Row]], list[Bar]]:
    return lambda rows: _bars(measure, rows)


BARS: dict[tuple[str, str], Callable[[Sequence[Row]], list[Bar]]] = {
    ("distributed", measure): _of(measure) for measure in SHARES
}
