"""Every implementation that can run here against the fp64 reference, over a small case of each feature."""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from warploom.attention.judge import Verdict, judge
from warploom.commands.selftest_cases import CASES, Call, Case
from warploom.runtime import dispatch
from warploom.runtime.table import table
from warploom.runtime.threads import one_thread

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """One implementation on one case and dtype; `ratio` is the worst error over its bound."""

    implementation: str
    device: str
    case: str
    dtype: str
    result: str  # "ok", "FAILED" or "refused"
    ratio: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Selftest:
    seed: int
    seconds: float
    rows: tuple[Row, ...]

    @property
    def failed(self) -> int:
        return sum(row.result == "FAILED" for row in self.rows)

    @property
    def ran(self) -> int:
        return sum(row.result != "refused" for row in self.rows)

    @property
    def passed(self) -> bool:
        """Something ran and nothing failed."""
        return self.ran > 0 and self.failed == 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        heading = ("implementation", "device", "case", "dtype", "result", "error/bound")
        cells = []
        for row in self.rows:
            if row.result != "refused":
                ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
                cells.append((row.implementation, row.device, row.case, row.dtype, row.result, ratio))
        details = [
            f"  {row.implementation}, {row.case}, {row.dtype} {row.result}: {row.detail}"
            for row in self.rows
            if row.result == "FAILED"
        ]
        refusals = Counter((r.implementation, r.device, r.detail) for r in self.rows if r.result == "refused")
        details += [f"  {name} refuses {n} cases on {device}: {why}" for (name, device, why), n in refusals.items()]
        end = f"{self.ran - self.failed} of {self.ran} passed in {self.seconds:.1f} s, seed {self.seed}"
        return "\n".join(["selftest against the fp64 reference", table(cells, heading), *details, end])


def selftest(seed: int | None = None, quiet: bool = False) -> Selftest:
    """Run every case on every implementation that can run here: forward, lse and backward.

    Args:
        seed: of the inputs; None draws a fresh one, kept in the result.
        quiet: no progress on stderr.
    """
    seed = secrets.randbelow(2**31) if seed is None else seed
    show = not quiet and sys.stderr.isatty()
    names = [choice.name for choice in dispatch.implementations() if choice.available() is None]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    calls = [(device, case, dtype) for device in devices for case in CASES for dtype in DTYPES]
    start = time.perf_counter()
    rows: list[Row] = []
    with one_thread():  # the cases are small
        for done, (device, case, dtype) in enumerate(calls, start=1):
            if show:
                line = f"\r\x1b[K{done}/{len(calls)} {device}: {case.name}"
                print(line, end="", file=sys.stderr, flush=True)
            rows += run_case(names, device, case, dtype, seed)
    if show:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: (row.device, names.index(row.implementation)))
    return Selftest(seed, time.perf_counter() - start, tuple(rows))


def run_case(names: list[str], device: str, case: Case, dtype: torch.dtype, seed: int) -> list[Row]:
    """Judge each named implementation on one case."""
    call = Call(case, dtype, device, seed)
    wanted, model = call.results("reference", torch.float64), call.model()

    def row(implementation: str) -> Row:
        place = (implementation, device, case.name, str(dtype).removeprefix("torch."))
        try:
            call.plan(implementation)
        except ValueError as refusal:
            return Row(*place, "refused", detail=str(refusal))
        try:
            got = call.results(implementation, dtype)
        except Exception as error:  # whatever goes wrong here is what the user asked to see
            return Row(*place, "FAILED", detail=f"{type(error).__name__}: {error}")
        worst = max((judge(part, got[part], wanted[part], model[part], dtype) for part in wanted), key=_badness)
        if worst.passed:
            return Row(*place, "ok", worst.ratio)
        return Row(*place, "FAILED", worst.ratio, str(worst))

    return [row(name) for name in names]


def _badness(verdict: Verdict) -> float:
    return math.inf if math.isnan(verdict.ratio) else verdict.ratio
