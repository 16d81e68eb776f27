"""The options of `warploom bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from warploom.bench.choice import MOST, SUITES
from warploom.commands.numbers import whole

EXAMPLES = """examples:
  warploom bench --suite forward --suite backward --out benchmarks/results/dense.json
  warploom bench --suite forward --against cuDNN --against FA4
  warploom bench masks --masks tree prefix-LM --shapes S8192 --passes forward backward
  warploom bench masks --peers cuDNN-Flex --list       what would run, and about how long
  warploom bench --suite masks --warm 8        compile everything first, eight processes at once
  warploom bench linear --only decay delta     some cases of a suite, by parts of their names
  warploom bench fp8 --only "D128 S16384" --peers "cuDNN, FP8"
  warploom bench decode --list                  the cases, and about how many seconds each takes
  warploom bench serving --device cpu --quick
  warploom bench report                        docs/performance.md and README.md's table from benchmarks/results/*.json
  warploom bench report run.json --docs out    out/performance.md from one file; README.md stays as it is
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=["run", "report", *SUITES], default="run", help="report, or a suite to run; default: run"
    )
    parser.add_argument("files", nargs="*", type=Path, help="for report; default: benchmarks/results/*.json, and README.md")
    parser.add_argument("--suite", action="append", choices=SUITES, help="may be repeated; default: forward")
    parser.add_argument(
        "--only", action="extend", nargs="+", metavar="TEXT", help="cases whose names contain it, or one of several texts"
    )
    parser.add_argument(
        "--peers",
        "--against",
        dest="against",
        action="extend",
        nargs="+",
        metavar="PEER",
        help="peers to time besides ours; default: all that are installed",
    )
    for name, what in (("masks", "of these names"), ("shapes", "with this in their names"), ("passes", "of these names")):
        parser.add_argument(
            f"--{name}", action="extend", nargs="+", metavar="NAME", help=f"for the masks suite: {name} {what}; see --list"
        )
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    parser.add_argument("--repeats", type=whole(1, 10**6), default=MOST, metavar="N", help=f"rounds at most; default: {MOST}")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin no case that would end later")
    parser.add_argument(
        "--peer-seconds", type=float, metavar="SECONDS", help="leave out a peer whose first call, which compiles, takes longer"
    )
    parser.add_argument("--warm", type=whole(1, 1024), metavar="JOBS", help="compile all cases in JOBS processes, time none")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here, case by case")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for report: where performance.md goes; default: docs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    from warploom.commands.bench import run

    return run(options)
