"""Biases in the interpreted kernels, beside the cases of test_kernels.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.decode import bias_checks
from tests.decode.fp8_case import Fp8Case, check_fp8
from tests.decode.interpreted.test_kernels import fresh_plans, shrink

__all__ = ["fresh_plans"]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def test_nan_behind_hidden_keys_changes_nothing() -> None:
    bias_checks.check_nan_behind_hidden("triton")


def test_the_lowest_number_hides_nothing() -> None:
    bias_checks.check_the_lowest_number("triton")


def test_a_tree_has_the_biases_of_its_paths() -> None:
    bias_checks.check_paths_under_biases("triton")


def test_bits_do_not_depend_on_neighbours_or_layout() -> None:
    bias_checks.check_bits("triton", 70, {"heads_q": 2, "heads_kv": 1})


@pytest.mark.parametrize("bias", ["alibi", "key of heads, hides"])
def test_fp8_caches(bias: str) -> None:
    shape: dict[str, Any] = {"queries": 3, "head_dim": 24, "heads_q": 2, "heads_kv": 1, "dtype": torch.float16}
    check_fp8(Fp8Case(random.randrange(2**31), [40, 9], bias=bias, page_size=8, **shape), "triton")
