"""A process that checks problems: it reads numbers and answers, a line of JSON each, and may die without harm to the rest."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from typing import Any

import torch

from tests.fuzz import families, plan
from tests.fuzz.check import LostDevice, check, shrink
from tests.fuzz.plan import Options
from tests.fuzz.problem import to_json


def main() -> None:
    """Lines in: first the options, then {"numbers": […], "until": unix time}. Lines out: start, end, shrunk, idle."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    warnings.simplefilter("ignore")

    def say(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    first = json.loads(sys.stdin.readline())
    options, patience = Options.from_json(first["options"]), first["shrink"]
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests import interpreter_patches

        interpreter_patches.apply_for_any_problem()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    say(idle=True)
    for line in sys.stdin:
        order = json.loads(line)
        for number in order["numbers"]:
            if time.time() > order["until"]:
                break
            _one(options, number, device, patience, say)
        say(idle=True)


def _one(options: Options, number: int, device: torch.device, patience: float, say: Any) -> None:
    say(start=number)
    begun = time.monotonic()
    job, problem = plan.problem(options, number)
    features = sorted(families.load(job.family).features(problem))
    said = {"job": [job.family, job.backend, job.index], "features": features}
    try:
        found = check(job.family, problem, job.backend, device)
    except LostDevice as error:
        say(end=number, **said, status="crash", words=[str(error)[:800]], problem=to_json(problem), seconds=0.0)
        os._exit(3)
    except Exception as error:  # the fuzzer's own
        words = [f"{type(error).__name__}: {error}", *traceback.format_exc().splitlines()[-8:]]
        say(end=number, **said, status="fuzzer", words=words, problem=to_json(problem), seconds=0.0)
        return
    said["features"] += found.observed
    said |= {"status": found.status, "words": found.words, "worst": found.worst, "seconds": time.monotonic() - begun}
    if not found.failed:
        say(end=number, **said)
        return
    say(end=number, **said, problem=to_json(problem))
    if patience > 0:
        say(shrinking=number)
        try:
            smaller, outcome = shrink(job.family, problem, job.backend, device, patience)
        except LostDevice:
            os._exit(3)
        if outcome is not None:
            say(shrunk=number, problem=to_json(smaller), words=outcome.words)
        else:
            say(shrunk=number, problem=to_json(problem), words=["does not fail again when it is run again"])


if __name__ == "__main__":
    main()
