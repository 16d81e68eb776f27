"""The part `plans`: what calls of the fuzzer's problems would launch on a Hopper GPU."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from tests.fuzz import families, plan
from tests.fuzz.plan import Options
from tests.fuzz.problem import to_json
from tools.frozen.pretend import Recorder, hopper

OPTIONS = Options(device="cuda", seed=17)


def digest(value: Any) -> str:
    """SHA-256 of JSON, without the parameters' names: these only help to read differences."""

    def bare(v: Any) -> Any:
        if isinstance(v, dict):
            return {n: bare(x) for n, x in v.items() if n != "names"}
        return [bare(x) for x in v] if isinstance(v, list) else v

    return hashlib.sha256(json.dumps(bare(value), sort_keys=True).encode()).hexdigest()[:16]


def record(numbers: Iterable[int], options: Options = OPTIONS) -> dict[str, Any]:
    """Of each problem the launches of the backend that it is drawn for, and of the one that dispatch chooses."""
    torch.set_num_threads(1)
    recorder, found = Recorder(), {}
    cpu = torch.device("cpu")
    for number in numbers:
        job, problem = plan.problem(options, number)
        family = families.load(job.family)
        given = family.inputs(problem, cpu)
        ways: dict[str, Any] = {}
        with hopper(recorder) as fresh:
            for way, backend in (("asked", job.backend), ("chosen", None)):
                fresh()
                ways[way] = _called(family, problem, dict(given), backend, recorder)
        if ways["chosen"] == ways["asked"]:
            ways["chosen"] = "as asked"
        entry = {"problem": digest(to_json(problem)), **ways}
        found[f"{number:05} {job.family} {job.backend}"] = {"digest": digest(entry), **entry}
    counts = {name: len(kinds) for name, kinds in sorted(recorder.specialisations.items())}
    return {"options": options.words(), "specialisations": counts, "entries": found}


def _called(family: Any, problem: Any, given: dict[str, Any], backend: str | None, recorder: Recorder) -> dict[str, Any]:
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            family.run(problem, given, backend)
        except Exception as e:  # what a call refuses, and how, is part of what it does
            error = f"{type(e).__name__}: {e}"
    found: dict[str, Any] = {"backends": recorder.backends, "launches": _folded(recorder.launches)}
    return found if error is None else {**found, "error": error}


def _folded(launches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Equal launches one after another as one, with their number."""
    found: list[dict[str, Any]] = []
    for launch in launches:
        if found and {**found[-1], "times": 1} == {**launch, "times": 1}:
            found[-1]["times"] += 1
        else:
            found.append({**launch, "times": 1})
    return found
