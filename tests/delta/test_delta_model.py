"""The model that kernels are held against is, in fp64, the specification token by token and autograd through it."""

from __future__ import annotations

import random

import pytest
import torch

from tests.delta.cases import CASES, Case, truth
from tests.delta.delta_model import results


@pytest.mark.parametrize("name", CASES)
def test_chunks_equal_the_recurrence(name: str) -> None:
    seed = random.randrange(2**31)
    case = Case(seed, **{**CASES[name], "dtype": torch.float64})
    call, dout, dstate = case.call()
    want, got = truth(call, dout, dstate), results(call, dout, dstate, exact=True)
    for field, a, b in zip(want._fields, got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, field=field: f"{field}: {m}\n{case}")
