"""What is asked of the masks suite: of each row, and of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from torch import Tensor

import warploom
from warploom.masks import Mask
from warploom.masks.tiles import TileClasses

Row = dict[str, Any]
Bar = tuple[str, float, float | None]  # what, the least it should be, what it is

CUDNN, FLEX = "cuDNN-Flex", "FlexAttention"
# Contenders of ours beside "warploom".
DENSE, UNMASKED, PLAIN = "warploom, dense causal", "warploom, no mask", "warploom, without"
VECTORS, NEW = "warploom, with the vectors", "warploom, a new mask"

# A pass's share of the dense rate, given what of its tiles is visible; its mean over cuDNN's; over FlexAttention's.
ATTAINED = {"forward": 0.96, "backward": 0.92}
CUDNN_MEAN = {"forward": 1.05, "backward": 1.08}
FLEX_MEAN = 1.7
NOTHING_COSTS = 1.03, 0.2  # of a mask that hides nothing over none, in calls of so many milliseconds
# Seconds: a mask from its vectors, besides their bytes at a copy's rate; from lengths on the device; and of the host.
FROM_VECTORS, FROM_LENGTHS, HOST, HOST_NEW = 6e-6, 30e-6, 20e-6, 30e-6
BLOCK = 64  # columns whose bounds the kernels decide by, at the least


@dataclass(frozen=True)
class Share:
    """Of a call: who runs it, in which tiles, and which part of the elements of its tiles that run is visible (rho)."""

    backend: str
    tiles: dict[str, list[int]]  # queries × keys, by what they are the tiles of
    rho: float | None  # None: the backend does not tell its tiles


def share(measure: str, mask: Mask, seqlen: int, q: Tensor, k: Tensor, v: Tensor) -> Share:
    """Of the forward or backward pass of one call."""
    if measure == "backward":
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    plan = warploom.explain(q, k, v, mask=mask)
    if measure == "backward":
        tiles = {name: list(tile) for name, tile in plan.backward_tiles}
    else:
        tiles = {"out": list(plan.tile)} if plan.tile else {}
    resolved = mask.resolve(seqlen, seqlen, q.device)
    blocked = any(t is not None for t in resolved.vectors)
    counted = {}
    for queries, keys in {tuple(tile) for tile in tiles.values()}:
        keys = max(keys, BLOCK) if blocked else keys
        classes = TileClasses.of(resolved, seqlen, seqlen, queries, keys, q.device)
        counted[queries, keys] = int((classes.partial + classes.full).sum()) * queries * keys / classes.hidden.numel()
    if measure == "forward" and plan.tile and plan.tiles is None:  # which begin where documents do
        counted = {}
    processed = sum(counted.values()) / len(counted) if counted else 0
    rho = mask.density(seqlen, seqlen) * seqlen**2 / processed if processed else None
    return Share(plan.implementation, tiles, rho)


def verdict(measure: str, part: Share, contenders: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What follows from a row's times and rates.

    Returns:
        backend, tiles and rho of `share`; ratios: of each peer's time to ours; dense_tflops; efficiency: our rate over
        it; attained: our rate over rho times it, and at_least, what that should be; met: whether it is and cuDNN is not
        faster, None where neither is known.
    """
    ours = contenders.get("warploom", {})
    dense = contenders.get(DENSE, {}).get("tflops")
    found: dict[str, Any] = {"backend": part.backend, "tiles": part.tiles, "rho": part.rho}
    found["ratios"] = ratios = {
        name: each["ms"] / ours["ms"]
        for name, each in contenders.items()
        if "ms" in each and "ms" in ours and not name.startswith("warploom")
    }
    found["dense_tflops"] = dense
    found["efficiency"] = ours["tflops"] / dense if dense and "tflops" in ours else None
    found["attained"] = found["efficiency"] / part.rho if found["efficiency"] and part.rho else None
    found["at_least"] = ATTAINED[measure]
    asked = []
    if found["attained"] is not None:
        asked.append(found["attained"] >= ATTAINED[measure])
    if CUDNN in ratios:
        asked.append(ratios[CUDNN] >= 1.0)
    found["met"] = all(asked) if asked else None
    return found


COLUMNS = ("dense TFLOP/s", "rho", "of rho × dense", "bars")


def cells(found: dict[str, Any] | None) -> list[str]:
    """A verdict's cells under `COLUMNS`."""
    if found is None:
        return ["–"] * len(COLUMNS)
    numbers = [(found["dense_tflops"], ".0f"), (found["rho"], ".3f"), (found["attained"], ".3f")]
    met = "–" if found["met"] is None else "met" if found["met"] else "missed"
    return ["–" if value is None else format(value, spec) for value, spec in numbers] + [met]


def words(found: dict[str, Any]) -> str:
    """A verdict in one line's end; "" where nothing is known."""
    parts = [] if found["rho"] is None else [f"rho {found['rho']:.3f} ({found['backend']})"]
    if found["attained"] is not None:
        parts.append(f"{found['attained']:.3f} of rho × dense, {found['at_least']} asked")
    if found["met"] is not None:
        parts.append("met" if found["met"] else "missed")
    return ", ".join(parts)


def passes(measure: str) -> Callable[[Sequence[Row]], list[Bar]]:
    """Bars of the forward or backward rows."""

    def bars(rows: Sequence[Row]) -> list[Bar]:
        cudnn, flex = (_over_ours(rows, peer) for peer in (CUDNN, FLEX))
        attained = [row["verdict"]["attained"] for row in rows if row.get("verdict", {}).get("attained")]
        least_ms = NOTHING_COSTS[1]
        unmasked = [
            row["contenders"][UNMASKED]["ms"] / row["contenders"]["warploom"]["ms"]
            for row in rows
            if _ms(row, "warploom") and (_ms(row, UNMASKED) or 0.0) >= least_ms
        ]
        return [
            (f"{CUDNN} over ours, mean", CUDNN_MEAN[measure], geometric_mean(cudnn) if cudnn else None),
            ("the same, the worst case", 1.0, min(cudnn, default=None)),
            (f"{FLEX} over ours, mean", FLEX_MEAN, geometric_mean(flex) if flex else None),
            ("our rate over rho × the dense rate, the worst case", ATTAINED[measure], min(attained, default=None)),
            ("no mask over one that hides nothing, the worst case", 1 / NOTHING_COSTS[0], min(unmasked, default=None)),
        ]

    return bars


def preparation(rows: Sequence[Row]) -> list[Bar]:
    """Of the "mask" rows, which say the copy rate of their run."""
    shares = []
    for row in rows:
        if _ms(row, "warploom") and "vector_bytes" in row:
            moved = (row["vector_bytes"] + row["bound_bytes"]) / (row["copy_gb_s"] * 1e9)
            shares.append((FROM_VECTORS + moved) * 1e3 / row["contenders"]["warploom"]["ms"])
    made = [FROM_LENGTHS * 1e3 / ms for row in rows if (ms := _ms(row, VECTORS))]
    return [
        ("6 us and the bytes' copy over a mask from its vectors, the worst", 1.0, min(shares, default=None)),
        ("30 us over a mask from lengths on the device, the worst", 1.0, min(made, default=None)),
    ]


def host(rows: Sequence[Row]) -> list[Bar]:
    again, new = ([ms for row in rows if (ms := _ms(row, name))] for name in ("warploom", NEW))
    return [
        ("20 us over the host time of a masked call, the worst", 1.0, HOST * 1e3 / max(again) if again else None),
        ("30 us over the host time of a new mask's first call, the worst", 1.0, HOST_NEW * 1e3 / max(new) if new else None),
    ]


def option(name: str, narrow: float, middle: float, wide: float) -> Callable[[Sequence[Row]], list[Bar]]:
    """Bars of a call with an option: what it may cost at head_dim 64, 128 and 256, as times of a call without."""

    def bars(rows: Sequence[Row]) -> list[Bar]:
        found = []
        for dims, most in ((64, narrow), (128, middle), (256, wide)):
            shares = [
                row["contenders"][PLAIN]["ms"] / row["contenders"]["warploom"]["ms"]
                for row in rows
                if row["head_dim"] == dims and _ms(row, "warploom") and _ms(row, PLAIN)
            ]
            found.append((f"without over {name}, D{dims}, the worst case", 1 / most, min(shares, default=None)))
        return found

    return bars


def _ms(row: Row, contender: str) -> float | None:
    found: float | None = row["contenders"].get(contender, {}).get("ms")
    return found


def _over_ours(rows: Sequence[Row], peer: str) -> list[float]:
    """The peer's time over ours, where both ran."""
    return [theirs / ours for row in rows if (theirs := _ms(row, peer)) and (ours := _ms(row, "warploom"))]


BARS: dict[tuple[str, str], Callable[[Sequence[Row]], list[Bar]]] = {
    ("masks", "forward"): passes("forward"),
    ("masks", "backward"): passes("backward"),
    ("masks", "mask"): preparation,
    ("masks", "host"): host,
    ("masks", "deterministic"): option("deterministic", 1.08, 1.08, 1.20),
    ("masks", "dropout forward"): option("dropout", 1.70, 1.35, 1.35),
    ("masks", "dropout backward"): option("dropout", 1.40, 1.20, 1.20),
}
