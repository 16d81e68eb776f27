"""One problem of each variant in this process, for tools that watch a process: compute-sanitizer, a debugger, a profiler."""

from __future__ import annotations

import sys

import torch

from tests.fuzz import plan
from tests.fuzz.check import LostDevice, Outcome, check
from tests.fuzz.plan import Options

TRIES = 40  # problems of a variant until one has work to do


def run_inline(options: Options, part: int, parts: int, only: list[int] | None = None) -> int:
    """Every `parts`-th variant from `part` on, or the problems of these numbers; 1 where one fails, 2 where the GPU is lost.

    A line a problem, before it runs, so that a tool's report stands under what it is about.
    """
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    failed = done = 0
    for number in only or _numbers(options, part, parts):
        job, problem = plan.problem(options, number)
        print(f"{job.family}/{job.backend} problem {number}: {options.words()} --only {number}", flush=True)
        try:
            outcome: Outcome = check(job.family, problem, job.backend, device)
        except LostDevice as error:
            print(f"crash: {error}", flush=True)
            return 2
        done += 1
        failed += outcome.failed
        if outcome.failed:
            print(f"{outcome.status}: {outcome.words}", file=sys.stderr, flush=True)
    print(f"{done} problems, {failed} failed")
    return int(failed > 0)


def _numbers(options: Options, part: int, parts: int) -> list[int]:
    """Of each variant the first problem that is not empty, which would launch nothing."""
    every = plan.jobs(options)
    found = []
    for first in [n for n, job in enumerate(every) if job.copy == 0][part::parts]:
        numbers = [first + n * len(every) for n in range(TRIES)]
        found.append(next((n for n in numbers if _has_work(options, n)), first))
    return found


def _has_work(options: Options, number: int) -> bool:
    problem = plan.problem(options, number)[1]
    shapes = getattr(problem, "shapes", None)
    return shapes is None or all(0 not in shape for shape in shapes.values())
