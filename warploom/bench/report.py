"""docs/performance.md from the JSON of benchmark runs: tables, ratios to the peers, and pictures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from warploom.bench import mask_bars
from warploom.bench.mask_bars import Bar, Row

INTRODUCTION = """# Performance

Made by `warploom bench report` from the JSON files in `benchmarks/results/`; every number below is in one of them. How
they are measured, and what they do not say, is in [Benchmarks](bench.md). Ratios are the peer's time over ours, so more
than 1 means that ours is faster; means are geometric.
"""


# What tells the kinds of files that have a section.
KINDS = ("roofs", "processor", "agree", "trials", "loss", "call")


def is_run(path: Path) -> bool:
    """Whether a JSON file holds speeds or bank conflicts, and not what fuzzers, sanitizers or sweeps found."""
    run = json.loads(path.read_text())
    return isinstance(run, dict) and any(kind in run for kind in KINDS)


def write(files: Sequence[Path], docs: Path) -> list[Path]:
    """Write performance.md and its pictures; returns what was written."""
    runs = [(path, json.loads(path.read_text())) for path in files]
    sections, pictures = [INTRODUCTION], []
    for path, run in runs:
        if "roofs" in run:
            text, drawn = _device_run(path, run, docs)
            sections.append(text)
            pictures += drawn
        elif "processor" in run:
            sections.append(_cpu_run(path, run))
        elif "agree" in run:
            sections.append(_banks_run(path, run))
        elif "trials" in run:
            sections.append(_trials_run(path, run))
        elif "loss" in run:
            sections.append(_training_run(path, run))
        elif "call" in run:
            sections.append(
                "## Bank conflicts of an attention kernel\n\n"
                "The wavefronts of every shared-memory instruction of the Ampere forward, predicted and counted, are in "
                f"`{path}`; [Shared memory](smem.md) has their sums.\n"
            )
        else:
            raise ValueError(f"{path} is no file of `warploom bench`, `warploom banks` or a program in benchmarks/")
    if not any("roofs" in run and "CPU" not in run["device"] for _, run in runs):
        sections.append("No run on a GPU is among the files.\n")
    docs.mkdir(parents=True, exist_ok=True)
    page = docs / "performance.md"
    page.write_text("\n".join(sections))
    return [page, *pictures]


def mean(ratios: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(r) for r in ratios]
    return math.exp(sum(logs) / len(logs))


def ratios(rows: Sequence[Row], peer: str, ours: str = "warploom") -> dict[str, float]:
    """The peer's time over ours by case, where both ran."""
    found = {}
    for row in rows:
        a, b = row["contenders"].get(ours, {}), row["contenders"].get(peer, {})
        if "ms" in a and "ms" in b:
            found[row["case"]] = b["ms"] / a["ms"]
    return found


def _device_run(path: Path, run: dict[str, Any], docs: Path) -> tuple[str, list[Path]]:
    rows = _measured(run)
    lines = [f"## {path.stem.capitalize()}\n", _where(path, run)]
    if run.get("left_out"):
        lines.append(f"Left out for want of time: {', '.join(run['left_out'])}.\n")
    lines += [f"{row['case']} failed: {row['failed']}.\n" for row in run["rows"] if "failed" in row]
    drawn: list[Path] = []
    for suite, measure in dict.fromkeys((row["suite"], row["measure"]) for row in rows):
        chosen = [row for row in rows if (row["suite"], row["measure"]) == (suite, measure)]
        lines.append(f"### {suite.capitalize()}: {measure}\n")
        bars = BARS.get((suite, measure))
        if bars is not None:
            lines.append(_bars(bars(chosen)))
        # What a mask costs before its first use differs in kind, not only in time.
        lines.append(_table(chosen, compared=measure != "mask"))
        if any("tflops" in found for row in chosen for found in row["contenders"].values()):
            name = path.stem if path.stem.startswith(suite) else f"{path.stem}-{suite}"
            picture = docs / "images" / f"performance-{name}-{measure}.svg"
            draw(chosen, picture, f"{suite}, {measure}: {run['device']}", run["roofs"]["gemm_tflops"])
            lines.append(f"![TFLOP/s by case](images/{picture.name})\n")
            drawn.append(picture)
    return "\n".join(lines), drawn


def _measured(run: dict[str, Any]) -> list[Row]:
    """The rows that hold times, each with the run's roofs."""
    return [{**row, **run["roofs"]} for row in run["rows"] if "contenders" in row]


def judged(run: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run of `warploom bench` met of its bars, without those that it did not measure."""
    rows = _measured(run)
    found = []
    for (suite, measure), bars in BARS.items():
        chosen = [row for row in rows if (row["suite"], row["measure"]) == (suite, measure)]
        for what, least, value in bars(chosen) if chosen else ():
            if value is not None:
                bar = {"bar": what, "at_least": least, "found": value, "met": value >= least}
                found.append({"suite": suite, "measure": measure, **bar})
    return found


def _where(path: Path, run: dict[str, Any]) -> str:
    roofs = run["roofs"]
    versions = ", ".join(f"{name} {run[name]}" for name in ("torch", "triton", "cuda", "cudnn") if run.get(name))
    return (
        f"{run['device']}, {run['date']}, commit {run['commit']}, {versions}. In the same run a bf16 product of 8192³ reached "
        f"{roofs['gemm_tflops']:.0f} TFLOP/s and a copy {roofs['copy_gb_s']:.0f} GB/s. Data: `{path.as_posix()}`.\n"
    )


def _table(rows: Sequence[Row], compared: bool) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
    timed = [n for n in names if any("ms" in row["contenders"].get(n, {}) for row in rows)]
    verdicts = any("verdict" in row for row in rows)
    if verdicts:  # the dense call is another one: its rate counts, not its time
        timed = [name for name in timed if name != mask_bars.DENSE]
    columns = [*timed, *(mask_bars.COLUMNS if verdicts else ())]
    lines = ["| case | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    notes: dict[str, str] = {}
    for row in rows:
        ours = row["contenders"].get("warploom", {}).get("ms")
        cells = [_cell(row["contenders"].get(name, {}), ours if compared else None, name) for name in timed]
        cells += mask_bars.cells(row.get("verdict")) if verdicts else []
        lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    for name in names:
        for row in rows:
            found = row["contenders"].get(name, {})
            why = found.get("wrong") or found.get("refused")
            if why and name not in notes:
                notes[name] = f"{row['case']}: {why}"
    found = [f"- {name} does not appear everywhere: {why}" for name, why in notes.items()]
    return "\n".join(lines) + "\n" + ("\n" + "\n".join(found) + "\n" if found else "")


def _cell(found: dict[str, Any], ours: float | None, name: str) -> str:
    if "ms" not in found:
        return "wrong" if "wrong" in found else "–"
    ms = found["ms"]
    text = f"{ms * 1e3:.1f} us" if ms < 0.2 else f"{ms:.2f} ms"
    if "tflops" in found:
        text += f", {found['tflops']:.0f} TFLOP/s"
    elif "gb_s" in found:
        text += f", {found['gb_s']:.0f} GB/s"
    return text + (f" ({ms / ours:.2f}×)" if ours and name != "warploom" else "")


COLOURS = {"warploom": "#0b6e4f", "FlexAttention": "#3d5a80", "cuDNN": "#c44536", "FA2": "#7d8597", "FA4": "#e09f3e"}


def _bars(bars: Sequence[Bar]) -> str:
    lines = ["| bar | at least | measured | |", "| --- | ---: | ---: | --- |"]
    for what, least, found in bars:
        verdict = "not measured" if found is None else "met" if found >= least else "missed"
        # Rounded down: a bar that is missed by a hair does not look met.
        shown = "–" if found is None else f"{math.floor(found * 100 + 1e-6) / 100:.2f}"
        lines.append(f"| {what} | {least:.2f} | {shown} | {verdict} |")
    return "\n".join(lines) + "\n"


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
        best = _better(rows, ("cuDNN", "FA4"))
        square = [
            ratio for case, ratio in best.items() if re.fullmatch(r"D(64|128|256) S(1024|4096|16384) (full|causal)", case)
        ]
        further = [ratio for case, ratio in best.items() if " heads " in case or case.startswith("D192/128 ")]
        rest = [
            ratio
            for case, ratio in _better(rows, peers).items()
            if case.startswith(others) or " window" in case or "documents" in case
        ]
        return [
            ("the better of cuDNN and FA4 over ours, mean of D64, D128, D256", least, mean(square) if square else None),
            ("the same, the worst case", 0.98, min(square, default=None)),
            ("the same, the worst of grouped heads and D192/128", 0.98, min(further, default=None)),
            (f"{held_to} over ours, the worst of D96, D192, window, documents", 1.0, min(rest, default=None)),
        ]

    return bars


def _rates(rows: Sequence[Row]) -> dict[str, float]:
    """TFLOP/s of ours by case."""
    return {row["case"]: row["contenders"].get("warploom", {}).get("tflops") for row in rows}


def _hopper_forward(rows: Sequence[Row]) -> list[Bar]:
    rate = _rates(rows).get("D128 S16384 full")
    share = rate / rows[0]["gemm_tflops"] if rate else None
    return [*_hopper(1.03, ("D96 ", "D192 "), ("FA4",))(rows), ("D128 S16384 full over the product's rate", 0.8, share)]


def _hopper_backward(rows: Sequence[Row]) -> list[Bar]:
    wide = [ratio for case, ratio in _better(rows, ("cuDNN", "FA4")).items() if case.startswith("D256 ")]
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


def _smallest_decode(rows: Sequence[Row]) -> list[Bar]:
    cudnn = ratios(rows, "cuDNN").items()
    return [("cuDNN over ours, B1 KV8k", 1.2, next((ratio for case, ratio in cudnn if "B1 KV8k" in case), None))]


def _decode(rows: Sequence[Row]) -> list[Bar]:
    cudnn = ratios(rows, "cuDNN")
    paged = [
        row["contenders"]["warploom"]["ms"] / found["ms"]
        for row in rows
        for name, found in row["contenders"].items()
        if name.startswith("warploom, pages") and "ms" in found
    ]
    return [
        ("cuDNN over ours, the worst contiguous case", 0.97, min(cudnn.values(), default=None)),
        *_smallest_decode(rows),
        ("contiguous over paged, the worst case", 0.9, min(paged, default=None)),
    ]


def _better(rows: Sequence[Row], peers: tuple[str, ...]) -> dict[str, float]:
    """The time of the best of these peers over ours, by case where both ran; peers by the starts of their names."""
    found = {}
    for row in rows:
        ours = row["contenders"].get("warploom", {}).get("ms")
        theirs = [each["ms"] for name, each in row["contenders"].items() if name.startswith(peers) and "ms" in each]
        if ours and theirs:
            found[row["case"]] = min(theirs) / ours
    return found


def _linear(least: float) -> Callable[[Sequence[Row]], list[Bar]]:
    def bars(rows: Sequence[Row]) -> list[Bar]:
        found = list(_better(rows, ("fla",)).values())
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
    found = list(_better(rows, ("fla",)).values())
    return [("the better fla kernel over ours, mean", 4.0, mean(found) if found else None)]


def _linear_step(rows: Sequence[Row]) -> list[Bar]:
    return [("copy of the state over ours", 0.8, min(ratios(rows, "copy").values(), default=None))]


BARS: dict[tuple[str, str], Callable[[Sequence[Row]], list[Bar]]] = {
    **mask_bars.BARS,
    ("dense", "forward"): _dense(_hopper_forward),
    ("dense", "backward"): _dense(_hopper_backward),
    ("decode", "graph"): _decode,
    ("decode", "eager"): _smallest_decode,
    ("decode", "graph, a layer"): _smallest_decode,
    ("linear", "forward"): _linear_forward,
    ("linear", "forward, normalized"): _linear_normalized,
    ("linear", "backward"): _linear(1.7),
    ("linear", "backward, normalized"): _linear_normalized,
    ("linear", "graph"): _linear_step,
}


def _cpu_run(path: Path, run: dict[str, Any]) -> str:
    """benchmarks/cpu_attention.py's file, or cpu_linear.py's."""
    lines = [
        f"## {run.get('title', 'Attention on a CPU')}\n",
        f"{run['processor']}, {run['threads']} threads, torch {run['torch']}, {run['date']}, commit {run['commit']}; "
        f"{run['shape']}. Data: `{path.as_posix()}`.\n",
        "| case | dtype | pass | what | ms | p20 | p80 | MiB |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in run["rows"]:
        memory = "–" if row.get("peak_mib") is None else f"{row['peak_mib']:.0f}"
        cells = [row["case"], row["dtype"], "forward + backward" if row["backward"] else "forward", row["what"]]
        lines.append("| " + " | ".join([*cells, *(f"{row[n]:.1f}" for n in ("ms", "p20", "p80")), memory]) + " |")
    return "\n".join(lines) + "\n"


def _training_run(path: Path, run: dict[str, Any]) -> str:
    """benchmarks/training.py's file."""
    fp32 = run["loss"]["fp32"]
    lines = [
        "## Training\n",
        f"A small transformer on one {run['device']}, {len(fp32)} steps: its loss with bf16 kernels and with fp32 attention. "
        f'"again" is fp32 attention of q, k and v rounded to bf16. [Hopper kernels](hopper.md#backward) has the curves. '
        f"Data: `{path.as_posix()}`.\n",
        "| attention | last loss | mean distance from fp32's |",
        "| --- | ---: | ---: |",
    ]
    for name, losses in run["loss"].items():
        apart = sum(abs(a - b) for a, b in zip(losses, fp32, strict=True)) / len(fp32)
        lines.append(f"| {name} | {losses[-1]:.4f} | {apart:.5f} |")
    return "\n".join(lines) + "\n"


def _banks_run(path: Path, run: dict[str, Any]) -> str:
    """A file of `warploom banks --verify --json`."""
    large = run.get("large", [])
    small, agree = run["kernels"] - len(large), run["agree"] - sum(kernel["agrees"] for kernel in large)
    section = "## Bank conflicts, predicted and counted\n\n"
    if small:
        kinds = {row.get("kernel") for row in run.get("rows", ())}
        what = "single shared-memory instructions, whole and partial, and a 16×16×16 product in six layouts"
        what = "single copies by cp.async" if kinds == {"cp.async.128"} else what
        section += (
            f"On one {run['device']} the [bank model](smem.md) predicted the counters of {agree} of {small} "
            f"kernels exactly: {what}, counted by ncu. "
        )
    if large:
        section += (
            f"Larger kernels on one {run['device']}, excess wavefronts of all their instructions:\n\n"
            "| kernel | work | predicted | counted |\n| --- | --- | --- | --- |\n"
            + "".join(f"| {k['kernel']} | {k['work']} | {k['predicted_excess']:,} | {k['excess']:,} |\n" for k in large)
            + "\n"
        )
    return f"{section}Data: `{path.as_posix()}`.\n"


def _trials_run(path: Path, run: dict[str, Any]) -> str:
    """A file of `warploom banks --ladder --gemm --attention --json`."""
    lines = [
        "## What bank conflicts cost",
        "",
        f"The [laboratory's kernels](smem.md) on one {run['device']}, checked and timed; excess wavefronts are predicted.",
    ]
    for trial in run["trials"]:
        lines += ["", f"{trial['work']}:", "", "| kernel | excess | us | TFLOP/s |", "| --- | --- | --- | --- |"]
        for kernel in trial["kernels"]:
            excess = f"{kernel['excess']:,}" if "excess" in kernel else "–"
            if "ms" in kernel:
                cells = f"{kernel['ms'] * 1e3:.1f} | {kernel['tflops']:.3g}"
            else:
                cells = f"{kernel.get('wrong') or kernel.get('refused')} | –"
            lines.append(f"| {kernel['kernel']} | {excess} | {cells} |")
    return "\n".join([*lines, "", f"Data: `{path.as_posix()}`.", ""])


def draw(rows: Sequence[Row], path: Path, title: str, roof: float) -> None:
    """Horizontal bars of TFLOP/s, a group for each case, and the product's rate as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [n for n in dict.fromkeys(n for row in rows for n in row["contenders"]) if n != "efficient"]
    names = [n for n in names if any("tflops" in row["contenders"].get(n, {}) for row in rows)]
    height = 0.8 / len(names)
    with matplotlib.rc_context({"svg.hashsalt": "warploom", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(8, 0.9 + len(rows) * (0.16 * len(names) + 0.12)), layout="constrained")
        for number, name in enumerate(names):
            at = [i + (number - (len(names) - 1) / 2) * height for i in range(len(rows))]
            values = [row["contenders"].get(name, {}).get("tflops", 0.0) for row in rows]
            axes.barh(at, values, height * 0.92, label=name, color=COLOURS.get(name, "#9c6644"))
        axes.set_yticks(range(len(rows)), [row["case"] for row in rows])
        axes.margins(y=0.01)
        axes.invert_yaxis()
        axes.axvline(roof, color="black", linewidth=0.8, linestyle=":", label="bf16 product")
        axes.set_xlabel("TFLOP/s of visible work")
        axes.set_title(title, fontsize=10)
        axes.legend(loc="lower right", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
