"""The tables of docs/performance.md: what a run measured, what was asked of it, and where it was made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from warploom.bench import mask_bars
from warploom.bench.mask_bars import Bar, Row

Run = dict[str, Any]
MOST_ROWS = 10  # of a table that a page shows at once
FLOOR = ("floor", "floor over ours")  # columns of rows that have one


def where(name: str, run: Run) -> str:
    """Machine, day, tree, versions, roofs of the same run and the file in one line, as far as the file says."""
    device = run.get("device") or f"{run['processor']}, {run['threads']} threads"
    parts = [f"{run['ranks']} × {device}" if "ranks" in run else device]
    parts += [str(run["date"])] if "date" in run else []
    parts += [f"commit {run['commit']}"] if run.get("commit") else []
    parts += [f"{version} {run[version]}" for version in ("torch", "triton", "cuda", "cudnn") if run.get(version)]
    if "roofs" in run:
        product = run["roofs"]["gemm_tflops"]
        size = "" if str(run.get("device")).startswith("CPU") else " of 8192³"  # a CPU's is smaller
        parts.append(f"bf16 product{size} {product:.{0 if product >= 10 else 2}f} TFLOP/s")
        parts.append(f"copy {run['roofs']['copy_gb_s']:.0f} GB/s")
    return f"Measured on {', '.join(parts)}. Data: `{name}`.\n"


def rounded_down(ratio: float | None) -> str:
    """Two decimals, never better than measured; – where nothing was."""
    return "–" if ratio is None else f"{math.floor(ratio * 100 + 1e-6) / 100:.2f}"


def folded(table: str) -> str:
    """The table behind a line to click on, where it is long; its notes stay below."""
    rows, _, notes = table.partition("\n\n")
    cases = rows.count("\n| ") - 1
    if cases <= MOST_ROWS:
        return table
    found = f'<details markdown="1">\n<summary>All {cases} rows</summary>\n\n{rows.rstrip()}\n\n</details>\n'
    return f"{found}\n{notes}" if notes else found


def timed(rows: Sequence[Row], compared: bool) -> str:
    """A row a case, a column a contender: its time, its rate and, if `compared`, its time over ours."""
    names = list(dict.fromkeys(["warploom", *(name for row in rows for name in row["contenders"])]))
    columns = [n for n in names if any("ms" in row["contenders"].get(n, {}) for row in rows)]
    verdicts, floors = any("verdict" in row for row in rows), any("floor_ms" in row for row in rows)
    if verdicts:  # the dense call is another one: its rate counts, not its time
        columns = [name for name in columns if name != mask_bars.DENSE]
    lines = [*_head(["case"], [*columns, *(mask_bars.COLUMNS if verdicts else ()), *(FLOOR if floors else ())])]
    for row in rows:
        ours = row["contenders"].get("warploom", {}).get("ms") if compared else None
        cells = [_time(row["contenders"].get(name, {}), ours, name) for name in columns]
        cells += mask_bars.cells(row.get("verdict")) if verdicts else []
        cells += _floor(row) if floors else []
        lines.append(_line([row["case"], *cells]))
    notes: dict[str, str] = {}
    for row in rows:
        for name, found in row["contenders"].items():
            if why := found.get("wrong") or found.get("refused"):
                notes.setdefault(name, f"- {name} does not appear everywhere: {row['case']}: {why}")
    return "\n".join([*lines, "", *(f"{notes[name]}" for name in names if name in notes)]).rstrip("\n") + "\n"


def strong(rows: Sequence[Row]) -> str:
    """A row a case and pass, a column a number of ranks: its time, and how many times as fast as one it is."""
    counts = sorted({count for row in rows for count in row["strong"]}, key=int)
    lines = [*_head(["case", "pass"], [f"{count} ranks" if count != "1" else "one device" for count in counts])]
    for row in rows:
        found: dict[str, float] = row["strong"]
        cells = [
            f"{_milliseconds(found[count])} ({found['1'] / found[count]:.2f})" if count in found else "–" for count in counts
        ]
        lines.append(_line([row["case"], row["measure"], *cells]))
    return "\n".join(lines) + "\n"


def _floor(row: Row) -> list[str]:
    """The least time that a call's bytes can take, and its share of our time."""
    least, ours = row.get("floor_ms"), row["contenders"].get("warploom", {}).get("ms")
    return ["–" if least is None else _milliseconds(least), rounded_down(least / ours if least and ours else None)]


def _milliseconds(ms: float) -> str:
    return f"{ms * 1e3:.1f} us" if ms < 0.2 else f"{ms:.2f} ms"


def _time(found: dict[str, Any], ours: float | None, name: str) -> str:
    if "ms" not in found:
        return "wrong" if "wrong" in found else "–"
    ms = found["ms"]
    text = _milliseconds(ms)
    if "tflops" in found:
        text += f", {found['tflops']:.0f} TFLOP/s"
    elif "gb_s" in found:
        text += f", {found['gb_s']:.0f} GB/s"
    elif "tokens_s" in found:
        text += f", {found['tokens_s']:.0f} tokens/s"
    return text + (f" ({ms / ours:.2f}×)" if ours and name != "warploom" else "")


def asked(bars: Iterable[Bar]) -> str:
    """What a suite asks of a run, and whether the run met it."""
    lines = ["| bar | at least | measured | |", "| --- | ---: | ---: | --- |"]
    for what, least, found in bars:
        verdict = "not measured" if found is None else "met" if found >= least else "missed"
        lines.append(_line([what, f"{least:.2f}", rounded_down(found), verdict]))
    return "\n".join(lines) + "\n"


def processor(run: Run) -> str:
    """Of benchmarks/cpu_attention.py's file, or cpu_linear.py's."""
    lines = [*_head(["case", "dtype", "pass", "what"], ["ms", "p20", "p80", "MiB"])]
    for row in run["rows"]:
        memory = "–" if row.get("peak_mib") is None else f"{row['peak_mib']:.0f}"
        cells = [row["case"], row["dtype"], "forward + backward" if row["backward"] else "forward", row["what"]]
        lines.append(_line([*cells, *(f"{row[n]:.1f}" for n in ("ms", "p20", "p80")), memory]))
    return "\n".join(lines) + "\n"


def training(run: Run) -> str:
    """Of benchmarks/training.py's file."""
    fp32 = run["loss"]["fp32"]
    lines = [*_head(["attention"], ["last loss", "mean distance from fp32's"])]
    for name, losses in run["loss"].items():
        apart = sum(abs(a - b) for a, b in zip(losses, fp32, strict=True)) / len(fp32)
        lines.append(_line([name, f"{losses[-1]:.4f}", f"{apart:.5f}"]))
    return "\n".join(lines) + "\n"


def counted(run: Run) -> str:
    """Of a file of `warploom banks --verify --json`."""
    large = run.get("large", [])
    small, agree = run["kernels"] - len(large), run["agree"] - sum(kernel["agrees"] for kernel in large)
    found = []
    if small:
        kinds = {row.get("kernel") for row in run.get("rows", ())}
        what = "single shared-memory instructions, whole and partial, and a 16×16×16 product in six layouts"
        what = "single copies by cp.async" if kinds == {"cp.async.128"} else what
        found.append(
            f"The [bank model](smem.md) predicted the counters of {agree} of {small} kernels exactly: {what}, counted by ncu.\n"
        )
    if large:
        found.append("Larger kernels, excess wavefronts of all their instructions:\n")
        lines = [*_head(["kernel", "work"], ["predicted", "counted"])]
        lines += [_line([k["kernel"], k["work"], f"{k['predicted_excess']:,}", f"{k['excess']:,}"]) for k in large]
        found.append("\n".join(lines) + "\n")
    return "\n".join(found)


def trials(run: Run) -> str:
    """Of a file of `warploom banks --ladder --gemm --attention --json`."""
    found = ["The [laboratory's kernels](smem.md), checked and timed; excess wavefronts are predicted.\n"]
    for trial in run["trials"]:
        lines = [f"{trial['work']}:", "", *_head(["kernel"], ["excess", "us", "TFLOP/s"])]
        for kernel in trial["kernels"]:
            excess = f"{kernel['excess']:,}" if "excess" in kernel else "–"
            if "ms" in kernel:
                cells = [f"{kernel['ms'] * 1e3:.1f}", f"{kernel['tflops']:.3g}"]
            else:
                cells = [str(kernel.get("wrong") or kernel.get("refused")), "–"]
            lines.append(_line([kernel["kernel"], excess, *cells]))
        found.append("\n".join(lines) + "\n")
    return "\n".join(found)


def _head(words: Sequence[str], numbers: Sequence[str]) -> tuple[str, str]:
    return _line([*words, *numbers]), "|" + " --- |" * len(words) + " ---: |" * len(numbers)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
