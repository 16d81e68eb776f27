"""The part `bits`: digests of what calls of the fuzzer's problems return, gradients included."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import families, plan
from tests.fuzz.plan import Options
from tests.fuzz.problem import to_json
from tools.frozen.plans import digest


def record(numbers: Iterable[int], device: str) -> dict[str, Any]:
    """Of each problem every result's bits; "varies" where a second run has others, as sums by atomic additions do."""
    torch.set_num_threads(1)
    options, found = Options(device=device, seed=17), {}
    for number in numbers:
        job, problem = plan.problem(options, number)
        family = families.load(job.family)
        first, second = (_results(family, problem, job.backend, torch.device(device)) for _ in range(2))
        same = {n: bits if second.get(n) == bits else "varies" for n, bits in first.items()}
        found[f"{number:05} {job.family} {job.backend}"] = {"problem": digest(to_json(problem)), "results": same}
    return {"options": options.words(), "entries": found}


def _results(family: Any, problem: Any, backend: str, device: torch.device) -> dict[str, str]:
    given = family.inputs(problem, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = family.run(problem, given, backend)
        except Exception as error:  # what a call refuses, and how, is part of what it does
            return {"error": f"{type(error).__name__}: {error}"}
    return {name: bits(t) for name, t in results.items() if t is not None}


def bits(t: Tensor) -> str:
    """Dtype, shape and a digest of the contents."""
    content = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(t.dtype).removeprefix("torch.")
    return f"{dtype} {list(t.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
