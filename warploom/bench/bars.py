"""What is asked of the dense, linear and FP8 suites, and of a whole run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import geometric_mean as mean
from typing import Any

from warploom.bench import bias_bars, decode_bars, distributed_bars, mask_bars
from warploom.bench.mask_bars import Bar, Row


def ratios(rows: Sequence[Row], peer: str, ours: str = "warploom") -> dict[str, float]:
    """The peer's time over ours by case, where both ran."""
    found = {}
    for row in rows:
        a, b = row["contenders"].get(ours, {}), row["contenders"].get(peer, {})
        if "ms" in a and "ms" in b:
            found[row["case"]] = b["ms"] / a["ms"]
    return found


def better(rows: Sequence[Row], peers: tuple[str, ...]) -> dict[str, float]:
    """The time of the best of these peers over ours, by case where both ran; peers by the starts of their names."""
    found = {}
    for row in rows:
        ours = row["contenders"].get("warploom", {}).get("ms")
        theirs = [each["ms"] for name, each in row["contenders"].items() if name.startswith(peers) and "ms" in each]
        if ours and theirs:
            found[row["case"]] = min(theirs) / ours
    return found


def measured(run: dict[str, Any]) -> list[Row]:
    """The rows that hold times, each with the run's roofs, which the distributed suite does not measure."""
    return [{**row, **run.get("roofs", {})} for row in run["rows"] if "contenders" in row]


def judged(run: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run of `warploom bench` met of its bars, without those that it did not measure."""
    rows = measured(run)
    found = []
    for (suite, measure), bars in BARS.items():
        chosen = [row for row in rows if (row["suite"], row["measure"]) == (suite, measure)]
        for what, least, value in bars(chosen) if chosen else ():
            if value is not None:
                bar = {"bar": what, "at_least": least, "found": value, "met": value >= least}
                found.append({"suite": suite, "measure": measure, **bar})
    return found


def _dense(hopper: Callable[[Sequence[Row]], list[Bar]]) -> Callable[[Sequence[Row]], list[Bar]]:
    def bars(rows: Sequence[Row]) -> list[Bar]:
        flex, flash = (list(ratios(rows, peer).values()) for peer in ("FlexAttention", "FA2"))
        if not flex:
            return hopper(rows)
        return [
            ("FlexAttention over ours, mean", 1.05, mean(flex)),
            ("torch's FlashAttention-2 over ours, mean", 1.2, mean(flash) if flash else None),
        ]

    return bars


def _hopper(least: float, others: tuple[str, ...], peers: tuple[str, ...]) -> Callable[[Sequence[Row]], list[Bar]]:
    """Bars of the Hopper kernels; cases that begin with one of ``others``, windows and documents are held to ``peers``."""
    held_to = "the better of " + " and ".join(peers) if len(peers) > 1 else peers[0]

    def bars(rows: Sequence[Row]) -> list[Bar]:
        best = better(rows, ("cuDNN", "FA4"))
        square = [
            ratio for case, ratio in best.items() if re.fullmatch(r"D(64|128|256) S(1024|4096|16384) (full|causal)", case)
        ]
        further = [ratio for case, ratio in best.items() if " heads " in case or case.startswith("D192/128 ")]
        rest = [
            ratio
            for case, ratio in better(rows, peers).items()
            if case.startswith(others) or " window" in case or "documents" in case
        ]
        level = [ratio for case, ratio in best.items() if re.match(r"D80 |D64 S(128|197) ", case)]
        return [
            ("the better of cuDNN and FA4 over ours, mean of D64, D128, D256", least, mean(square) if square else None),
            ("the same, the worst case", 0.98, min(square, default=None)),
            ("the same, the worst of grouped heads and D192/128", 0.98, min(further, default=None)),
            (f"{held_to} over ours, the worst of D96, D192, window, documents", 1.0, min(rest, default=None)),
            ("the better of cuDNN and FA4 over ours, the worst of D80, 128 and 197 tokens", 1.0, min(level, default=None)),
        ]

    return bars


def _rates(rows: Sequence[Row], ours: str = "warploom") -> dict[str, float]:
    """TFLOP/s of ours by case."""
    return {row["case"]: row["contenders"].get(ours, {}).get("tflops") for row in rows}


def _hopper_forward(rows: Sequence[Row]) -> list[Bar]:
    rate = _rates(rows).get("D128 S16384 full")
    share = rate / rows[0]["gemm_tflops"] if rate else None
    return [*_hopper(1.03, ("D96 ", "D192 "), ("FA4",))(rows), ("D128 S16384 full over the product's rate", 0.8, share)]


def _hopper_backward(rows: Sequence[Row]) -> list[Bar]:
    best = better(rows, ("cuDNN", "FA4"))
    wide = [ratio for case, ratio in best.items() if case.startswith("D256 ") and " window" not in case]
    rates = _rates(rows)
    rate = rates.get("D128 S16384 full")
    grouped = [
        rates[f"D128 S8192 heads 32/8 {mask}"] / rates[f"D128 S8192 {mask}"]
        for mask in ("full", "causal")
        if rates.get(f"D128 S8192 heads 32/8 {mask}") and rates.get(f"D128 S8192 {mask}")
    ]
    memory = [
        each["FA4"]["peak_bytes"] / each["warploom"]["peak_bytes"]
        for each in (row["contenders"] for row in rows)
        if each.get("FA4", {}).get("peak_bytes") and each.get("warploom", {}).get("peak_bytes")
    ]
    return [
        *_hopper(1.08, ("D96 ", "D192"), ("cuDNN", "FA4"))(rows),
        ("the better of cuDNN and FA4 over ours, the worst of D256", 1.25, min(wide, default=None)),
        ("D128 S16384 full over 600 TFLOP/s", 1.0, rate / 600 if rate else None),
        ("heads 32/8 over heads 32/32 (D128 S8192), the worse of full and causal", 1.0, min(grouped, default=None)),
        ("FA4's peak memory over ours, the worst case", 1.0, min(memory, default=None)),
    ]


def _linear(least: float) -> Callable[[Sequence[Row]], list[Bar]]:
    def bars(rows: Sequence[Row]) -> list[Bar]:
        found = list(better(rows, ("fla",)).values())
        return [
            ("the better fla kernel over ours, mean", least, mean(found) if found else None),
            ("the better fla kernel over ours, the worst case", 1.0, min(found, default=None)),
        ]

    return bars


def _linear_forward(rows: Sequence[Row]) -> list[Bar]:
    copy = ratios(rows, "copy")
    long = [ratio for case, ratio in copy.items() if case.startswith("B1 H16 L16384")]
    return [
        *_linear(2.0)(rows),
        ("copy over ours, B4 H32 L8192 D128", 0.65, copy.get("B4 H32 L8192 D128")),
        ("copy over ours, B8 H16 L2048 D64", 0.65, copy.get("B8 H16 L2048 D64")),
        ("copy over ours, B1 H16 L16384, the worse head_dim", 0.45, min(long, default=None)),
    ]


def _linear_normalized(rows: Sequence[Row]) -> list[Bar]:
    found = list(better(rows, ("fla",)).values())
    return [("the better fla kernel over ours, mean", 4.0, mean(found) if found else None)]


def _linear_step(rows: Sequence[Row]) -> list[Bar]:
    return [("copy of the state over ours", 0.8, min(ratios(rows, "copy").values(), default=None))]


def _decay(times: float) -> Callable[[Sequence[Row]], list[Bar]]:
    def bars(rows: Sequence[Row]) -> list[Bar]:
        plain = [times * ratio for ratio in ratios(rows, "warploom, plain").values()]
        return [(f"{times:.2f} of the same call without a decay over ours, the worst case", 1.0, min(plain, default=None))]

    return bars


def _delta(most: dict[str, float], least: float | None = None) -> Callable[[Sequence[Row]], list[Bar]]:
    """Milliseconds by case; ``least`` is for fla's time over ours."""

    def bars(rows: Sequence[Row]) -> list[Bar]:
        times = {row["case"]: row["contenders"].get("warploom", {}).get("ms") for row in rows}
        found: list[Bar] = []
        for case, ms in most.items():
            ours = times.get(f"delta rule, {case}")
            found.append((f"{ms:g} ms over ours, {case}", 1.0, ms / ours if ours else None))
        if least is not None:
            fla = list(ratios(rows, "fla, chunk").values())
            longest = [float(ms is not None) for case, ms in times.items() if "L262144" in case]
            found.append(("fla over ours, mean", least, mean(fla) if fla else None))
            found.append(("256k tokens in one call, right and timed", 1.0, min(longest, default=None)))
        return found

    return bars


def _fp8(rows: Sequence[Row]) -> list[Bar]:
    cudnn, rates = ratios(rows, "cuDNN, FP8"), _rates(rows)
    asked = {"D128 S16384 full": 1050, "D128 S16384 causal": 980, "D256 S16384 full": 1080, "D64 S16384 full": 620}
    found: list[Bar] = [("cuDNN's FP8 over ours, the worst case", 1.0, min(cudnn.values(), default=None))]
    for case, least in asked.items():
        rate = rates.get(case)
        found.append((f"{case} over {least} TFLOP/s", 1.0, rate / least if rate else None))
    fast = _rates(rows, "warploom, fast sums").get("D256 S16384 full")
    found.append(("D256 S16384 full, fast sums, over 1150 TFLOP/s", 1.0, fast / 1150 if fast else None))
    for case in ("D64 S16384 full", "D128 S16384 full", "D256 S16384 full"):
        quantised = ratios(rows, "warploom, quantised too").get(case)
        found.append((f"1.08 of {case} over the same quantised too", 1.0, 1.08 / quantised if quantised else None))
    return found


def _host(rows: Sequence[Row]) -> list[Bar]:
    found = [row["contenders"].get(name, {}).get("ms") for row in rows for name in ("warploom", "warploom, a head")]
    slowest = max((ms for ms in found if ms), default=None)
    return [("25 us over the host time of a forward call, the worst", 1.0, 25e-3 / slowest if slowest else None)]


BARS: dict[tuple[str, str], Callable[[Sequence[Row]], list[Bar]]] = {
    **mask_bars.BARS,
    ("dense", "forward"): _dense(_hopper_forward),
    ("dense", "backward"): _dense(_hopper_backward),
    **decode_bars.BARS,
    **bias_bars.BARS,
    **distributed_bars.BARS,
    ("linear", "forward"): _linear_forward,
    ("linear", "forward, normalized"): _linear_normalized,
    ("linear", "backward"): _linear(1.7),
    ("linear", "backward, normalized"): _linear_normalized,
    ("linear", "graph"): _linear_step,
    **{("linear", f"{each}, decay a head"): _decay(1.1) for each in ("forward", "backward")},
    **{("linear", f"{each}, decay a token"): _decay(1.25) for each in ("forward", "backward")},
    ("linear", "host, decay"): _host,
    ("linear", "host in a row, decay"): _host,
    ("fp8", "forward"): _fp8,
    ("linear", "forward, delta rule"): _delta({"B1 H16/64 L32768 D128": 1.25, "B4 H16/64 L8192 D128": 0.85}, 2.5),
    ("linear", "backward, delta rule"): _delta({"B1 H16/32 L8192 D128": 0.65, "B1 H16/32 L32768 D128": 2.1}),
    ("linear", "host, delta rule"): _host,
    ("linear", "host in a row, delta rule"): _host,
    ("linear", "graph, delta rule"): _linear_step,
}
