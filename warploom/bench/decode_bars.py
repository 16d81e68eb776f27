"""What is asked of the decode suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean

from warploom.bench.decode import LATENCY
from warploom.bench.harness import floor_ms
from warploom.bench.mask_bars import Bar, Row

NEAR, BESIDE_NEAR = 1.04, 0.99  # a peer within so much of the floor leaves nothing: ours need only be about as fast
LARGE = 64e6  # bytes of keys and values from which the rate is judged
PAGED, PLAIN = "warploom, pages of 16", "warploom, plain"
LATENT_SHARE, LATENT_TFLOPS = 0.85, 560.0  # of a latent cache, the one or the other


def best_peer(row: Row) -> float | None:
    """Milliseconds of the fastest that is not ours."""
    times = [each["ms"] for name, each in row["contenders"].items() if not name.startswith("warploom") and "ms" in each]
    return min(times, default=None)


def floor(row: Row) -> float:
    return floor_ms(LATENCY, row["bytes"], row["copy_gb_s"])


def of_floor(row: Row) -> float:
    """The floor over our time."""
    return floor(row) / row["contenders"]["warploom"]["ms"]


def graph(rows: Sequence[Row]) -> list[Bar]:
    """One captured call, contiguous and paged, of sequences of one length and of many."""
    found, ratios = [], []
    for row in rows:
        peer, ours = best_peer(row), ms(row)
        if peer is None or ours is None:
            continue
        if not _is_ragged(row):  # some peers read all keys there, and would lift the mean
            ratios.append(peer / ours)
        found.append(peer / ours / (BESIDE_NEAR if "bytes" in row and peer <= NEAR * floor(row) else 1.0))
    large = [of_floor(row) for row in rows if row.get("bytes", 0) >= LARGE and ms(row) and not _is_ragged(row)]
    paged, even = times(rows, "warploom", PAGED), times(rows, "warploom, uniform", "warploom")
    return [
        ("the best peer over ours, the worst (0.99 where it is within 4 % of the floor)", 1.0, min(found, default=None)),
        ("the best peer over ours, mean without ragged batches", 1.12, geometric_mean(ratios) if ratios else None),
        *smallest(rows),
        ("the floor over ours, the worst from 64 MB of keys and values on", 0.9, min(large, default=None)),
        ("contiguous over pages of 16, the worst", 1 / 1.03, min(paged, default=None)),
        ("uniform over ragged, the same bytes", 1 / 1.05, min(even, default=None)),
    ]


def smallest(rows: Sequence[Row]) -> list[Bar]:
    """One sequence of 8192 keys, where waits count and not the rate of the memory."""
    found = times([row for row in rows if "B1 KV8k" in row["case"] and _is_usual(row)], "cuDNN", "warploom")
    return [("cuDNN over ours, B1 KV8k 32/8", 1.25, min(found, default=None))]


def fp8(rows: Sequence[Row]) -> list[Bar]:
    return [("bf16 over an FP8 cache, the worst", 1 / 0.6, min(times(rows, "warploom, bf16", "warploom"), default=None))]


def latent(rows: Sequence[Row]) -> list[Bar]:
    found = [
        max(of_floor(row) / LATENT_SHARE, row["contenders"]["warploom"]["tflops"] / LATENT_TFLOPS) for row in rows if ms(row)
    ]
    what = f"the floor over ours, over {LATENT_SHARE}, or {LATENT_TFLOPS:.0f} TFLOP/s: the one that is nearer, the worst"
    return [(what, 1.0, min(found, default=None))]


def prefill(rows: Sequence[Row]) -> list[Bar]:
    dense = better(rows, "warploom, contiguous")
    return [
        ("the better of cuDNN and FA4, contiguous, over ours, the worst", 1.0, min(better(rows), default=None)),
        ("the same over ours, contiguous too, the worst", 1.0, min(dense, default=None)),
    ]


def few_keys(rows: Sequence[Row]) -> list[Bar]:
    return [("the better of cuDNN and FA4 over ours, the worst", 1.0, min(better(rows), default=None))]


def shared(rows: Sequence[Row]) -> list[Bar]:
    return [("plain decode over the same with its prefix, the worst", 4.0, min(times(rows, PLAIN, "warploom"), default=None))]


def apart(rows: Sequence[Row]) -> list[Bar]:
    found = times([row for row in rows if row.get("bytes", 0) >= LARGE], PLAIN, "warploom")
    what = "plain decode over the same that asks, the worst from 64 MB of keys and values on"
    return [(what, 0.98, min(found, default=None))]


def invariant(rows: Sequence[Row]) -> list[Bar]:
    found: list[Bar] = []
    for what, wide, most in (("head_dim to 128", False, 1.08), ("head_dim 256", True, 1.25)):
        plain = times([row for row in rows if (row.get("head_dim", 128) > 128) == wide], PLAIN, "warploom")
        found.append((f"a plain call over one of one set of bits, {what}, the worst", 1 / most, min(plain, default=None)))
    return found


def host(rows: Sequence[Row]) -> list[Bar]:
    found = [ms(row, name) for row in rows for name in ("warploom", PAGED)]
    slowest = max((each for each in found if each), default=None)
    return [("15 us over the host time of a call, the worst", 1.0, 15e-3 / slowest if slowest else None)]


def better(rows: Sequence[Row], ours: str = "warploom") -> list[float]:
    """The time of the better of FA4 and, where it ran, cuDNN over one of ours: cuDNN alone would read a mask of chunks."""
    found = []
    for row in rows:
        cudnn = [each["ms"] for name, each in row["contenders"].items() if name.startswith("cuDNN") and "ms" in each]
        fa4, mine = ms(row, "FA4"), ms(row, ours)
        if fa4 and mine:
            found.append(min([*cudnn, fa4]) / mine)
    return found


def ms(row: Row, name: str = "warploom") -> float | None:
    found: float | None = row["contenders"].get(name, {}).get("ms")
    return found


def times(rows: Sequence[Row], over: str, under: str) -> list[float]:
    """One contender's time over another's, where both ran."""
    found = [(ms(row, over), ms(row, under)) for row in rows]
    return [a / b for a, b in found if a and b]


def _is_ragged(row: Row) -> bool:
    return "ragged" in row["case"]


def _is_usual(row: Row) -> bool:
    return (row.get("heads", 32), row.get("heads_kv", 8), row.get("head_dim", 128)) == (32, 8, 128)


BARS: Mapping[tuple[str, str], Callable[[Sequence[Row]], list[Bar]]] = {
    ("decode", "graph"): graph,
    ("decode", "eager"): smallest,
    ("decode", "graph, a layer"): smallest,
    ("decode", "graph, FP8 cache"): fp8,
    ("decode", "graph, latent"): latent,
    ("decode", "graph, prefill over pages"): prefill,
    ("decode", "graph, few keys"): few_keys,
    ("decode", "graph, shared prefix"): shared,
    ("decode", "graph, nothing shared"): apart,
    ("decode", "graph, batch invariant"): invariant,
    ("decode", "host in a row"): host,
}
