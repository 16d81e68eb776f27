"""A few small problems on the Triton kernels; tests/fuzz/test_fuzz.py runs them with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import plan
from tests.fuzz.check import check
from tests.fuzz.plan import Options

SEED = 20261122
CELLS = 1500  # of batch × heads × queries × keys: the interpreter takes seconds for a small problem


@pytest.mark.parametrize("family", ["attention", "varlen"])
def test_small_problems_agree_with_the_oracle(family: str) -> None:
    options, checked = Options("cpu", (family,), ("triton",), SEED), 0
    print(f"TRITON_INTERPRET=1 python -m tests.fuzz {options.words()}")
    for number in range(10_000):
        job, problem = plan.problem(options, number)
        queries, keys = (problem.shapes[n][0] * problem.shapes[n][-3] * problem.heads_q for n in ("q", "k"))
        rounded = getattr(problem, "bias_gradient", False) and problem.bias_dtype == "bfloat16"  # towards zero there
        if rounded or problem.dtype == "bfloat16" or not 100 < queries * keys < CELLS:
            continue
        outcome = check(job.family, problem, job.backend, torch.device("cpu"))
        assert not outcome.failed, f"{outcome.words}\n{options.words()} --only {number}\n{problem}"
        checked += 1
        if checked == 2:
            return
    pytest.fail(f"{checked} of 10,000 problems are small enough to be checked")
