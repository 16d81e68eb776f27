"""Wrong oracles: each must disagree with the package on some of a few problems on which the right one agrees with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from tests.fuzz import families, plan
from tests.fuzz.check import judged
from tests.fuzz.draw import Draw

SEED = 1
# Where another meets every mutant sooner: a sink, several splits and fp32 are seldom in one problem; or in smaller ones.
SEEDS = {"decode": 10, "fp8": 4}
MOST = 400  # problems until a mutant counts as not caught


@dataclass(frozen=True)
class Caught:
    """What told a mutant; number None: nothing did."""

    family: str
    mutant: str
    number: int | None
    words: str = ""


def _recording(oracle: Any) -> tuple[Any, set[str] | None]:
    """The same oracle, and the names of those of its functions that were called; None where it is no namespace of functions."""
    if not all(isinstance(function, FunctionType) for function in vars(oracle).values()):
        return oracle, None
    called: set[str] = set()

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return function(*args, **kwargs)

        return call

    return SimpleNamespace(**{name: recorded(name, function) for name, function in vars(oracle).items()}), called


def _replaced(right: Any, mutant: Any) -> set[str]:
    return {name for name, function in vars(mutant).items() if function is not vars(right)[name]}


def hunt(family_name: str, backend: str, most: int = MOST) -> list[Caught]:
    """Every mutant of a family, over problems 0 to `most` until all are caught."""
    family = families.load(family_name)
    left: dict[str, SimpleNamespace] = dict(getattr(family, "MUTANTS", {}))
    caught: list[Caught] = []
    for number in range(most):
        if not left:
            break
        problem = family.draw(Draw(SEEDS.get(family_name, SEED), family_name, number), None, backend)
        given = family.inputs(problem, torch.device("cpu"))
        if family.refusal(problem, given, backend) is not None:
            continue
        try:
            results = family.run(problem, given, backend)
        except Exception:
            continue  # a failure of its own, which the fuzzer finds
        right, called = _recording(family.oracle())
        if not all(v.right for v in judged(family, problem, given, results, right)):
            continue
        for name, oracle in list(left.items()):
            if called is not None and not called & _replaced(family.oracle(), oracle):
                continue  # it gives what the right one gives
            verdicts = judged(family, problem, given, results, oracle)
            wrong = [str(v) for v in verdicts if not v.right]
            if wrong:
                caught.append(Caught(family_name, name, number, wrong[0]))
                del left[name]
    return caught + [Caught(family_name, name, None) for name in left]


def report() -> int:
    """A line a mutant; 1 if one is not caught."""
    missed = 0
    for name in plan.present():
        for found in hunt(name, "cpu"):
            missed += found.number is None
            what = f"problem {found.number}: {found.words}" if found.number is not None else "NOT CAUGHT"
            print(f"{found.family:10} {found.mutant:52} {what}")
    return int(missed > 0)
