"""The CPU implementation and its backward by hand against the specification in fp64."""

from __future__ import annotations

import secrets

import pytest
import torch

from tests.delta.cases import CASES, Case, check
from warploom.delta import cpu


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("poisoned_memory")
def test_case(name: str) -> None:
    check(Case(secrets.randbelow(2**31), **CASES[name]), cpu.BACKEND)


@pytest.mark.parametrize("name", ["default", "packed", "lengths"])
def test_without_a_gradient_of_the_state(name: str) -> None:
    check(Case(secrets.randbelow(2**31), **CASES[name]), cpu.BACKEND, gradient_of_state=False)


@pytest.mark.parametrize("name", CASES)
def test_to_nine_digits(name: str) -> None:
    check(Case(secrets.randbelow(2**31), **{**CASES[name], "dtype": torch.float64}), cpu.BACKEND)
