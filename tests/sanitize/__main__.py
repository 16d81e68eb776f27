"""compute-sanitizer over one small problem of each compiled kernel: memcheck over all, racecheck over a sample.

Three stages. All problems run once without the tool, in parallel, so that every kernel is compiled into one cache and it is
known which problem brings which. Then memcheck runs those that bring a kernel, and racecheck some of them, several processes
at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.runner import commit, device_name
from tests.sanitize.problems import Options, names
from tests.sanitize.stage import Stage, command, run
from warploom.smem.device.profiler import find

TOOL = "compute-sanitizer"
EXAMPLES = """examples:
  python -m tests.sanitize                             Triton: memcheck over 300 kernels or more, racecheck over 24 problems
  python -m tests.sanitize --json sanitize.json        and the result in a file
  python -m tests.sanitize --only attention/triton/12  one problem again
  python -m tests.sanitize --backend hopper --variants 60 --at-least 0
"""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    backends = ("triton", "hopper", "ampere")
    parser.add_argument("--backend", action="append", choices=backends, help="may be repeated; default: triton")
    parser.add_argument("--seed", type=int, default=0, help="of variants and problems; default 0")
    parser.add_argument("--variants", type=int, default=110, help="drawn from the fuzzer's families, all together; default 110")
    parser.add_argument("--race", type=int, default=24, help="problems under racecheck; default 24")
    parser.add_argument("--at-least", type=int, default=300, help="fewer kernels under memcheck are a failure; default 300")
    parser.add_argument("--only", action="append", metavar="NAME", help="this problem alone, under both tools; may be repeated")
    parser.add_argument("--jobs", type=int, default=min(10, os.cpu_count() or 1), help="processes under the tool at once")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin no problem later; default 420")
    parser.add_argument("--folder", metavar="DIR", help="keep Triton's cache and the logs there")
    parser.add_argument("--json", metavar="PATH", help="write the result there")
    parser.add_argument("--list", action="store_true", help="print the problems' names and end")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: this command's own tests")
    return parser


def main(words: list[str] | None = None) -> int:
    given = arguments().parse_args(words)
    options = Options(given.seed, given.variants, tuple(given.backend or ["triton"]), given.device)
    every = names(options)
    if given.list:
        print("\n".join(every))
        return 0
    unknown = sorted(set(given.only or []) - set(every))
    if unknown:
        return refuse(f"--only {unknown[0]} is no problem of {options.words()}; --list prints them")
    tool = find(TOOL)
    if tool is None:
        return refuse(f"{TOOL} is neither on the PATH nor in the CUDA toolkit's folder")
    if given.device == "cuda" and not torch.cuda.is_available():
        return refuse("no CUDA device is visible")
    with ExitStack() as stack:
        folder = Path(given.folder) if given.folder else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
        return check(given, options, given.only or every, tool, folder)


def refuse(words: str) -> int:
    print(f"sanitize: {words}", file=sys.stderr)
    return 2


def check(given: argparse.Namespace, options: Options, wanted: list[str], tool: str, folder: Path) -> int:
    begun = time.time()
    until = begun + given.seconds
    logs = Path(tempfile.mkdtemp(prefix="logs-", dir=_made(folder)))

    def stage(name: str, prefix: list[str], some: list[str], workers: int) -> Stage:
        done = run(prefix, options, some, workers=workers, folder=logs / name, until=until)
        counts = f"{len(done.results)} of {len(some)} problems, {len(done.kernels)} kernels"
        print(f"{name}: {counts}, {done.seconds:.0f} s", flush=True)
        return done

    compiled = stage("compile", [], wanted, os.cpu_count() or 1)
    bring = [name for name in wanted if name in given.only] if given.only else bringing(wanted, compiled)
    functions = sorted({kernel.split()[0].rpartition(".")[2] for kernel in compiled.kernels})
    only = functions if options.backends == ("triton",) and options.device == "cuda" else []
    sample = bring if given.only else spread(bring, given.race)
    stages = {
        "compile": compiled,
        "memcheck": stage("memcheck", command(tool, "memcheck", only), bring, given.jobs),
        "racecheck": stage("racecheck", command(tool, "racecheck", only), sample, given.jobs),
    }
    report = describe(given, options, stages, {"memcheck": bring, "racecheck": sample}, tool, begun)
    if given.json:
        Path(given.json).parent.mkdir(parents=True, exist_ok=True)
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)
    return int(not report["passed"])


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def bringing(wanted: list[str], compiled: Stage) -> list[str]:
    """The problems that bring a kernel which none before them does, and those that did not run to the end."""
    seen: set[str] = set()
    found = []
    for name in wanted:
        result = compiled.results.get(name)
        if result is not None and (result.wrong or set(result.kernels) - seen):
            found.append(name)
            seen |= set(result.kernels)
    return found


def spread(bring: list[str], count: int) -> list[str]:
    """So many of all, evenly over the list and so over the families."""
    count = min(count, len(bring))
    return [bring[n * len(bring) // count] for n in range(count)]


def describe(
    given: argparse.Namespace, options: Options, stages: dict[str, Stage], some: dict[str, list[str]], tool: str, begun: float
) -> dict[str, Any]:
    """The result as JSON."""
    errors = []
    for check_name, stage in stages.items():
        for name, result in sorted(stage.results.items()):
            if result.wrong:
                replay = f"python -m tests.sanitize {options.words()} --only '{name}'"
                entry = {"check": check_name, "problem": name, "status": result.status, "words": result.words}
                errors.append({**entry, "reports": result.reports, "replay": replay})
        errors += [{"check": check_name, "problem": "", "status": "trouble", "words": words} for words in stage.troubles]
    left_out = {name: sorted(set(wanted) - set(stages[name].results)) for name, wanted in some.items()}
    checked = stages["memcheck"].kernels
    enough = len(checked) >= (0 if given.only else given.at_least)
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout.strip().splitlines()
    return {
        "passed": not errors and enough and not any(left_out.values()),
        "device": device_name(options.device),
        "commit": commit(),
        "torch": torch.__version__,
        "tool": version[-1] if version else "",
        "command": f"python -m tests.sanitize {options.words()}",
        "problems": {name: len(stage.results) for name, stage in stages.items()},
        "kernels": {name: len(stage.kernels) for name, stage in stages.items()},
        "kernels_by_function": dict(sorted(Counter(kernel.split()[0] for kernel in checked).items())),
        "refused": {name: r.words for name, r in sorted(stages["compile"].results.items()) if r.status == "refused"},
        "left_out": left_out,
        "errors": errors,
        "wanted_kernels": 0 if given.only else given.at_least,
        "seconds": {**{name: round(stage.seconds, 1) for name, stage in stages.items()}, "all": round(time.time() - begun, 1)},
    }


def print_report(report: dict[str, Any]) -> None:
    for error in report["errors"]:
        print(f"\n{error['check']}, {error['problem'] or 'no problem'}: {error['status']} {error['words']}")
        print("\n".join(error.get("reports", [])[:4]))
        print(f"again: {error['replay']}" if "replay" in error else "")
    for name, left in report["left_out"].items():
        if left:
            print(f"{name} did not reach {len(left)} problems in time: {', '.join(left[:5])}{' …' * (len(left) > 5)}")
    for function, count in report["kernels_by_function"].items():
        print(f"{count:5} {function}")
    kernels = report["kernels"]
    print(
        f"memcheck over {kernels['memcheck']} kernels (at least {report['wanted_kernels']}), racecheck over "
        f"{kernels['racecheck']}: {len(report['errors'])} errors, {report['seconds']['all']:.0f} s on {report['device']}: "
        f"{'passed' if report['passed'] else 'FAILED'}"
    )


if __name__ == "__main__":
    sys.exit(main())
