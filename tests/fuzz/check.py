"""One problem: run it, judge it, make it smaller where it is wrong."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import families
from tests.fuzz.judge import Verdict, judge
from tests.fuzz.problem import DTYPES
from tests.fuzz.views import bits, checksum


@dataclass
class Outcome:
    """What came of a problem.

    status: "right", "wrong" (a result is), "error" (raised what it should not), "refused" (as documented).
    worst: the largest error in units of its bound, where all results are numbers.
    """

    status: str
    words: list[str] = field(default_factory=list)
    observed: list[str] = field(default_factory=list)
    worst: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status in ("wrong", "error")


class LostDevice(Exception):
    """The GPU's context is lost: this process can do no more."""


def check(family_name: str, problem: Any, backend: str, device: torch.device, oracle: SimpleNamespace | None = None) -> Outcome:
    """Run one problem on a backend and judge all its results.

    oracle: another than the family's own, to see that it is told apart.
    """
    family = families.load(family_name)
    given = family.inputs(problem, device)
    observed = sorted(given.get("observed", ()))
    buffers = list(given.get("buffers", ()))
    before = checksum(buffers)
    refused = family.refusal(problem, given, backend)
    try:
        _soil(given, device)
        results = family.run(problem, given, backend)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        if _is_lost(error):
            raise LostDevice(f"{type(error).__name__}: {error}") from error
        if refused is not None and refused in str(error):
            return Outcome("refused", [refused], observed)
        excuse = getattr(family, "excuse", None)
        why = excuse(problem, given, error) if excuse is not None else None
        if why is not None:
            return Outcome("refused", [why], observed)
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("error", [f"{type(error).__name__}: {str(error)[:600]} ({last.filename}:{last.lineno})"], observed)
    if refused is not None:
        return Outcome("error", [f"was not refused, which the documentation says: {refused}"], observed)
    verdicts = judged(family, problem, given, results, oracle or family.oracle())
    verdicts += _unchanged(buffers, before)
    if getattr(problem, "deterministic", None) is True and oracle is None:
        verdicts += _same(results, family.run(problem, given, backend))
    wrong = [str(v) for v in verdicts if not v.right]
    worst = max((v.ratio for v in verdicts), default=0.0)
    return Outcome("wrong" if wrong else "right", wrong, observed, worst)


def judged(
    family: Any, problem: Any, given: dict[str, Any], results: dict[str, Tensor | None], oracle: SimpleNamespace
) -> list[Verdict]:
    """A verdict on each result. The error of one model may be small by luck: before a result is wrong, more are asked."""
    dtype = DTYPES[problem.dtype]
    verdicts = judge(results, family.expect(problem, given, oracle), dtype)
    if any(not v.right and not v.why for v in verdicts):
        verdicts = judge(results, family.expect(problem, given, oracle, again=True), dtype)
    return verdicts


def _is_lost(error: Exception) -> bool:
    text = f"{type(error).__name__} {error}"
    return any(words in text for words in ("CUDA error", "AcceleratorError", "illegal memory access", "cudaError"))


def _soil(given: dict[str, Any], device: torch.device) -> None:
    """Leave NaN in freed memory, which uninitialised results and workspaces are then made of."""
    soiled = []
    for t in given.values():
        if isinstance(t, Tensor) and t.is_floating_point():
            for dtype in {t.dtype, torch.float32}:
                soiled.append(torch.full((max(t.numel(), 128),), float("nan"), dtype=dtype, device=device))
    del soiled


def _unchanged(buffers: list[Tensor], before: list[Tensor]) -> list[Verdict]:
    if not buffers:
        return []
    changed = torch.stack([(bits(a) != bits(b)).any() for a, b in zip(buffers, before, strict=True)]).tolist()
    return [Verdict("inputs", why=f"buffer {n} was written to") for n, one in enumerate(changed) if one]


def _same(first: dict[str, Tensor | None], second: dict[str, Tensor | None]) -> list[Verdict]:
    names = [n for n, t in first.items() if t is not None and t.numel()]
    if not names:
        return []
    pairs = [(first[n].contiguous(), second[n].contiguous()) for n in names]  # type: ignore[union-attr]
    differ = torch.stack([(bits(a) != bits(b)).any() for a, b in pairs]).tolist()
    return [Verdict(n, why="has other bits when run again") for n, one in zip(names, differ, strict=True) if one]


def shrink(family_name: str, problem: Any, backend: str, device: torch.device, seconds: float) -> tuple[Any, Outcome | None]:
    """The simplest problem found in that time that fails in the same way (wrong, or an error), and its outcome."""
    family = families.load(family_name)
    end = time.monotonic() + seconds
    outcome = check(family_name, problem, backend, device)
    if not outcome.failed:
        return problem, None
    smaller = True
    while smaller and time.monotonic() < end:
        smaller = False
        for candidate in family.shrink(problem):
            if time.monotonic() > end:
                break
            try:
                found = check(family_name, candidate, backend, device)
            except LostDevice:
                raise
            except Exception:
                continue  # not a problem that can be posed
            if found.failed and found.status == outcome.status:
                problem, outcome, smaller = candidate, found, True
                break
    return problem, outcome
