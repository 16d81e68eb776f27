"""python -m tests.fuzz: draw problems, run them on every backend, compare with an oracle in fp64."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.fuzz import families, plan
from tests.fuzz.plan import Options
from tests.fuzz.runner import Run, Tally

EXAMPLES = """examples:
  python -m tests.fuzz                                    ten minutes of everything that runs on a CPU
  python -m tests.fuzz --family attention --backend cpu   one family on one backend
  python -m tests.fuzz --seed 7 --only 1234               one problem of a run again
  python -m tests.fuzz --replay fuzz-failures/*.json      problems that were kept
  python -m tests.fuzz --device cuda --problems 10000     a GPU: problems grouped by what is compiled
  compute-sanitizer python -m tests.fuzz --device cuda --inline 0/1    one problem of each compiled variant
"""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--family", action="append", default=[], choices=families.NAMES, help="may be repeated; default: all")
    parser.add_argument("--backend", action="append", default=[], metavar="NAME", help="may be repeated; default: all that run")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn; default 0")
    parser.add_argument("--problems", type=int, default=20000, help="problems 0 to this number; default 20000")
    parser.add_argument("--seconds", type=float, default=570.0, help="stop giving out problems after so long; default 570")
    parser.add_argument("--workers", type=int, default=0, help="processes; default: 12 on a GPU, else one a core")
    parser.add_argument("--variants", type=int, default=200, help="compiled variants on a GPU, of all families; default 200")
    parser.add_argument("--only", type=int, action="append", metavar="N", help="this problem of the run alone; may be repeated")
    parser.add_argument("--replay", nargs="+", metavar="FILE", help="problems kept as JSON, on their own backends or --backend")
    parser.add_argument("--failures", default="fuzz-failures", metavar="DIR", help="keeps failures; default %(default)s")
    parser.add_argument("--shrink", type=float, default=None, metavar="S", help="seconds to simplify a failure; 0: not at all")
    parser.add_argument("--json", metavar="PATH", help="write the result there")
    parser.add_argument(
        "--inline",
        metavar="I/N",
        help="one problem of each variant (every N-th from the I-th on), in this process: for compute-sanitizer",
    )
    parser.add_argument("--list-features", action="store_true", help="count features of the problems without running any")
    parser.add_argument("--list-variants", action="store_true", help="print the jobs of the run and end")
    parser.add_argument("--mutants", action="store_true", help="show that wrong oracles are told from the right one")
    parser.add_argument("--build-modules", metavar="DIR", help="compile the modules that the run needs into a cache, and end")
    return parser


def main(words: list[str] | None = None) -> int:
    options = arguments().parse_args(words)
    run = Options(options.device, tuple(options.family), tuple(options.backend), options.seed, options.variants)
    if options.replay:
        from tests.fuzz.replay import replay_files

        return replay_files(options.replay, options.backend, options.device)
    if options.mutants:
        from tests.fuzz.mutants import report

        return report()
    if options.list_variants:
        for n, job in enumerate(plan.jobs(run)):
            print(n, job.family, job.backend, job.variant)
        return 0
    if options.list_features:
        return _list_features(run, options.problems)
    if options.build_modules:
        from tests.fuzz.modules import build

        return build(run, options.problems, options.build_modules)
    if options.inline:
        from tests.fuzz.inline import run_inline

        part, _, parts = options.inline.partition("/")
        return run_inline(run, int(part), int(parts or 1), options.only)
    workers = options.workers or (12 if options.device == "cuda" else os.cpu_count() or 2)
    shrink = options.shrink if options.shrink is not None else (15.0 if options.device == "cpu" else 6.0)
    print(f"seed {options.seed}: python -m tests.fuzz {run.words()} --problems {options.problems}", file=sys.stderr)
    tally = Run(
        run,
        problems=options.problems,
        numbers=options.only,
        seconds=options.seconds,
        workers=min(workers, len(options.only)) if options.only else workers,
        shrink_seconds=shrink,
        folder=Path(options.failures),
        json_path=Path(options.json) if options.json else None,
    ).run()
    print(tally.coverage.table())
    print(summary(tally))
    return int(bool(tally.failures) or tally.done == 0)


def summary(tally: Tally) -> str:
    """A few lines about a run."""
    lines = [f"{n:7d}  {name}" for name, n in sorted(tally.backends.items())]
    found = ", ".join(f"{n} {s}" for s, n in sorted(tally.statuses.items()))
    return "\n".join([*lines, f"{tally.done} problems: {found}; {len(tally.failures)} failures"])


def _list_features(run: Options, problems: int) -> int:
    from tests.fuzz.coverage import Coverage

    coverage = Coverage(run.device)
    for number in range(problems):
        job, problem = plan.problem(run, number)
        coverage.add(job.family, sorted(families.load(job.family).features(problem)))
    print(coverage.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
