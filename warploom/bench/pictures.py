"""The pictures of docs/performance.md and README.md, from runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from warploom.bench import svg
from warploom.bench.bars import measured
from warploom.bench.mask_bars import DENSE, Row
from warploom.bench.summary import SHAPE, Runs, kernels, machine
from warploom.bench.tables import Run

NAMES = {
    "FA2": "FlashAttention-2",
    "FA4": "FlashAttention-4",
    "cuDNN-Flex": "cuDNN's FlexAttention",
    "efficient": "memory-efficient",
}
HEADLINE = r"(D64|D128|D256) S16384 causal"  # 16k tokens in one sequence


def rates(title: str, rows: Sequence[Row], roofs: Mapping[str, float]) -> str | None:
    """TFLOP/s by case, or GB/s, or tokens a second; None where the rows have none of them, or are one case alone."""
    for unit, what, roof in (
        ("tflops", "TFLOP/s of visible work, longer is faster", ("bf16 product", roofs["gemm_tflops"])),
        ("gb_s", "GB/s, longer is faster", None),
        ("tokens_s", "tokens a second, longer is faster", None),
    ):
        found = [
            (
                row["case"],
                {
                    NAMES.get(name, name): each[unit]
                    for name, each in row["contenders"].items()
                    if unit in each and name != DENSE
                },
            )
            for row in rows
        ]
        found = [(case, numbers) for case, numbers in found if numbers]
        if found and (len(found) > 1 or unit == "tflops"):
            shapes = {shape[0] if (shape := re.search(SHAPE, case)) else "" for case, _ in found}
            if len(shapes) == 1:  # said once
                title += shapes.pop()
                found = [(re.sub(SHAPE, "", case), numbers) for case, numbers in found]
            return svg.bars(svg.Chart(title, what, found, roof=roof))
    return None


def headline(runs: Runs) -> str | None:
    """Causal calls of the Hopper kernels beside their peers; None where no run has them."""
    found: list[tuple[str, dict[str, float]]] = []
    machines: dict[str, None] = {}
    roof = 0.0
    for name, run in runs.items():
        if "roofs" not in run or kernels(name, run) != "Hopper":
            continue
        for row in measured(run):
            case = re.fullmatch(HEADLINE, row["case"])
            if case and row["suite"] == "dense":
                numbers = {NAMES.get(n, n): each["tflops"] for n, each in row["contenders"].items() if "tflops" in each}
                found.append((f"{row['measure']}, head_dim {case[1][1:]}", numbers))
                machines[machine(run)] = None
                roof = row["gemm_tflops"]
    if not found:
        return None
    found.sort(key=lambda row: (not row[0].startswith("forward"), int(row[0].rpartition(" ")[2])))
    title = f"Causal attention, 16384 tokens, bf16, {', '.join(machines)}"
    return svg.bars(svg.Chart(title, "TFLOP/s of visible work, longer is faster", found, roof=("bf16 product", roof)))


def processor(title: str, run: Run) -> str:
    """Milliseconds by case, on an axis that has room for the slowest."""
    found: dict[str, dict[str, float]] = {}
    for row in run["rows"]:
        if row["what"].endswith(", one thread"):
            continue
        case = f"{row['case']}, {row['dtype']}, {'both passes' if row['backward'] else 'forward'}"
        found.setdefault(case, {})[row["what"]] = row["ms"]
    title = f"{title}, {run['threads']} threads"
    return svg.bars(svg.Chart(title, "ms, logarithmic, further left is faster", list(found.items()), logarithmic=True))


def training(run: Run) -> str:
    """The losses by step, and their distances from fp32's."""
    losses = {"fp32, q, k, v rounded" if name == "again" else name: each for name, each in run["loss"].items()}
    apart = {
        name: [a - b for a, b in zip(each, losses["fp32"], strict=True)] for name, each in losses.items() if name != "fp32"
    }
    panels = [("loss", losses), *([("minus fp32's", apart)] if apart else [])]
    return svg.curves(svg.Curves("Training with bf16 kernels and with fp32 attention", panels, "step"))
