"""`warploom bench`: time ours and its peers on one machine, and make the page that says what came of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from warploom.bench import mask_bars
from warploom.bench.choice import SUITES, Choice
from warploom.bench.harness import Case, Timer, environment, first_line, roofs, run_case
from warploom.bench.patience import PATIENCE
from warploom.bench.report import judged
from warploom.bench.suites import builds, cases
from warploom.commands.outputs import fitted, writable_file, writable_folder
from warploom.commands.processes import in_processes

# What a contender's row may hold, the first that it has is shown.
RATES = {"tflops": "TFLOP/s", "gb_s": "GB/s", "tokens_s": "tokens/s"}


def run(options: argparse.Namespace) -> int:
    if options.action == "report":
        return _report(options)
    if options.files:
        raise ValueError(f"a run takes no files, got {', '.join(map(str, options.files))}")
    options.suite = [*(options.suite or []), *([options.action] if options.action in SUITES else [])] or ["forward"]
    if "masks" not in options.suite and (options.masks or options.shapes or options.passes):
        raise ValueError("--masks, --shapes and --passes choose among the masks suite's cases: warploom bench masks …")
    if options.budget is not None and not options.budget >= 0:
        raise ValueError(f"--budget must be a number of seconds from 0, got {options.budget}")
    if options.peer_seconds is not None and not 0 < options.peer_seconds < math.inf:
        raise ValueError(f"--peer-seconds must be a positive number of seconds, got {options.peer_seconds}")
    if options.device == "cuda" and not torch.cuda.is_available() and not options.list:
        raise ValueError("torch sees no CUDA device here; --device cpu --quick shows that the harness runs")
    if "distributed" in options.suite:
        return _on_ranks(options)
    device = torch.device(options.device)
    chosen = _cases(options, device)
    chosen = _named(chosen, options.only)
    if not chosen:
        raise ValueError("no case of these suites has what was chosen; see --list")
    if options.list:
        listed = [{"suite": c.suite, "case": c.name, **c.shape, "seconds": c.seconds} for c in chosen]
        print(json.dumps(listed) if options.json else _names(chosen))
        return 0
    if options.out is not None:
        writable_file("--out", options.out)
    if options.warm is not None:
        return _warm(chosen, options)
    with PATIENCE.during(options.against, options.peer_seconds):
        return _time(chosen, device, options)


def _named(cases: list[Any], texts: list[str] | None) -> list[Any]:
    """Those with any of the texts in their names, all without texts; ValueError for a text that none has."""
    for text in texts or ():
        if not any(text in case.name for case in cases):
            raise ValueError(f"--only {text}: no case of these suites has that in its name; see --list")
    return [case for case in cases if not texts or any(text in case.name for text in texts)]


def _on_ranks(options: argparse.Namespace) -> int:
    """The distributed suite: this process is one rank of those that torchrun started. The first one prints and writes."""
    from warploom.bench import distributed

    if set(options.suite) != {"distributed"}:
        raise ValueError("the distributed suite runs alone, under torchrun: leave the other suites out")
    if options.warm is not None or options.budget is not None or options.peer_seconds is not None:
        raise ValueError("--warm, --budget and --peer-seconds are not for the distributed suite, whose ranks go together")
    chosen = _named(distributed.distributed_cases(options.quick), options.only)
    if options.list:
        listed = [{"suite": "distributed", "case": case.name, **case.__dict__} for case in chosen]
        print(json.dumps(listed) if options.json else "\n".join(f"distributed  {case.name}" for case in chosen))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device here; --device cpu --quick shows that the harness runs")
    if options.only is None:
        chosen = [case for case in chosen if not case.one_step]
    first = os.environ.get("RANK", "0") == "0"
    if options.out is not None and first:
        writable_file("--out", options.out)
    device = distributed.begin(options.device)
    found: dict[str, Any] = {**environment(device), "ranks": torch.distributed.get_world_size(), "rows": []}
    if first and not options.json:
        print(distributed.HEAD)
    for case in chosen:
        for row in distributed.rows_of(case, device, options.against, options.repeats):
            found["rows"].append(row)
            if first:
                _write(found, options.out)
                print(*([] if options.json else distributed.lines(row)), sep="\n", end="" if options.json else "\n", flush=True)
    if first and device.type == "cuda":
        found["bars"] = judged(found)
        _write(found, options.out)
    if first and options.json:
        print(json.dumps(found))
    elif first:
        print(*(f"{_bar(bar)}\n" for bar in found.get("bars", ())), sep="", end="")
    torch.distributed.destroy_process_group()
    ours = [each for row in found["rows"] for name, each in row["contenders"].items() if name.startswith("warploom")]
    return int(any("wrong" in each for each in ours))


def _cases(options: argparse.Namespace, device: torch.device) -> list[Case]:
    choice = Choice(options.masks, options.shapes, options.passes, options.against)
    return cases(options.suite, device, options.quick, choice)


def _names(chosen: list[Case]) -> str:
    """A line a case, with the seconds it takes where somebody reckoned, and a line a suite with their sum."""
    lines = [
        f"{case.suite:<7} {case.name}" + ("" if case.seconds is None else f"  ({max(case.seconds, 1):.0f} s)")
        for case in chosen
    ]
    for suite in dict.fromkeys(case.suite for case in chosen if case.seconds is not None):
        seconds = [case.seconds for case in chosen if case.suite == suite and case.seconds is not None]
        what = f"{len(seconds)} cases of the {suite} suite"
        lines.append(f"about {sum(seconds):.0f} s on a Hopper GPU for the {what}, compiling included")
    return "\n".join(lines)


def _time(chosen: list[Case], device: torch.device, options: argparse.Namespace) -> int:
    started = time.perf_counter()
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    timer = Timer(device)
    found: dict[str, Any] = {**environment(device), "seed": seed, "roofs": roofs(timer), "rows": []}
    timer.copy_gb_s = found["roofs"].get("copy_gb_s")
    longest = 0.0
    for number, case in enumerate(chosen, 1):
        begun = time.perf_counter()
        if options.budget is not None and begun - started + longest > options.budget:
            found["left_out"] = [c.name for c in chosen[number - 1 :]]
            print(f"stopped after {begun - started:.0f} s: {len(found['left_out'])} cases left out", file=sys.stderr)
            break
        place = f"[{number}/{len(chosen)}] {case.name} …"
        for row in _rows(case, timer, place):
            found["rows"].append(row)
            _write(found, options.out)
            if not options.json:
                print(fitted(f"[{number}/{len(chosen)}] {describe(row)}", 4), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        longest = max(longest, time.perf_counter() - begun)
    met = {name for row in found["rows"] for name in row.get("contenders", ())}
    for peer in options.against or ():
        if peer not in met:
            print(f"warploom bench: --peers {peer}: no case of this run has it", file=sys.stderr)
    if device.type == "cuda":
        found["bars"] = judged(found)
    _write(found, options.out)
    if options.json:
        print(json.dumps(found))
    else:
        print(*(f"{_bar(bar)}\n" for bar in found.get("bars", ())), sep="", end="")
    ours = [each for row in found["rows"] for name, each in row.get("contenders", {}).items() if name.startswith("warploom")]
    return int(any("wrong" in each for each in ours))


def _rows(case: Case, timer: Timer, place: str) -> Iterator[dict[str, Any]]:
    """The case's rows. What a peer prints while it compiles goes to stderr, so that stdout holds what was asked for.

    A terminal shows ``place`` until a row is there: a case may take a minute.
    """
    rows = run_case(case, timer)
    shown = sys.stderr.isatty()
    while True:
        if shown:
            print(f"\r\x1b[K{place}", end="", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(sys.stderr):
            row = next(rows, None)
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        if row is None:
            return
        yield row


def _bar(bar: dict[str, Any]) -> str:
    # Rounded down: a bar that is missed by a hair does not look met.
    shown = math.floor(bar["found"] * 1000 + 1e-6) / 1000
    met = "met" if bar["met"] else "missed"
    return f"{bar['suite']}, {bar['measure']}: {bar['bar']}: {shown:.3f}, at least {bar['at_least']:.3f}: {met}"


def _write(found: dict[str, Any], path: Path | None) -> None:
    """Write the whole file at once: a run that is killed leaves the file before, never half of one."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def describe(row: dict[str, Any]) -> str:
    """One line: times, ours first, and the ratio to each peer."""
    if "failed" in row:
        return f"{row['case']}: failed: {row['failed']}"
    parts = []
    ours = row["contenders"].get("warploom", {}).get("ms")
    for name, found in row["contenders"].items():
        if "ms" not in found:
            parts.append(f"{name} {'wrong' if 'wrong' in found else 'refused'}: {found.get('wrong') or found['refused']}")
            continue
        rate = (
            next((f" {_rate(found[key])} {unit}" for key, unit in RATES.items() if key in found), "")
        )
        other = name in ("warploom", mask_bars.DENSE)  # the dense call is another one: its rate counts, not its time
        ratio = f" ({found['ms'] / ours:.2f}×)" if ours and not other else ""
        parts.append(f"{name} {found['ms']:.4g} ms{rate}{ratio}")
    if "verdict" in row:
        parts.append(mask_bars.words(row["verdict"]))
    if "floor_ms" in row and ours:
        parts.append(f"floor {row['floor_ms']:.4g} ms, {row['floor_ms'] / ours:.2f} of ours")
    return f"{row['case']}, {row['measure']}: " + "; ".join(part for part in parts if part)


def _rate(rate: float) -> str:
    """Whole numbers where there are three digits of them, else three digits: cases of --quick are tiny."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _warm(chosen: list[Case], options: argparse.Namespace) -> int:
    """One process a case: what they compile lands in the caches that the timing run reads.

    A case that fails beside the others, for memory say, is tried once more alone. One that fails again is named, and the
    timing run compiles it or says in its row why not.
    """
    # The processes compile side by side already; each would start a pool as large as the machine besides.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    names = [case.name for case in chosen]
    started = time.perf_counter()
    failed = dict.fromkeys(names, "")
    for jobs in dict.fromkeys((options.warm, 1)):
        found = in_processes(partial(_build_one, options), list(failed), jobs)
        with contextlib.closing(found):
            for name, why in found:
                failed[name] = why
                print(f"{name}: {why or 'compiled'}, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        failed = {name: why for name, why in failed.items() if why}
        if not failed:
            break
    if options.json:
        print(json.dumps({"compiled": [name for name in names if name not in failed], "failed": failed}))
    return int(bool(failed))


def _build_one(options: argparse.Namespace, name: str) -> str:
    """Why the case failed, or an empty string."""
    device = torch.device(options.device)
    case = next(case for case in _cases(options, device) if case.name == name)
    try:
        with PATIENCE.during(options.against, options.peer_seconds):
            builds(case, device)()
    except Exception as error:  # a peer may fail in any way
        return first_line(error)
    return ""


def _report(options: argparse.Namespace) -> int:
    from warploom.bench.report import fill, is_run, read, write

    files = options.files or [path for path in sorted(Path("benchmarks/results").glob("*.json")) if is_run(path)]
    if not files:
        raise ValueError("report found no files in benchmarks/results: run it in a checkout, or name the files")
    for path in options.files:
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"report: {path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"report: {path} is not JSON: {error}") from None
    writable_folder("--docs", options.docs)
    pages = write(files, options.docs)
    # Of some files the table would be a part of itself.
    for page in [] if options.files else [Path("README.md"), options.docs / "index.md"]:
        if page.exists():
            before = page.read_text()
            after = fill(before, read(files))
            if after != before:
                page.write_text(after)
                pages.append(page)
    print(json.dumps({"written": [str(p) for p in pages]}) if options.json else "\n".join(f"wrote {p}" for p in pages))
    return 0
