"""The Triton kernels in the interpreter: every feature and mask, packed and paged calls, outputs poisoned."""

from __future__ import annotations

import random

import pytest
import torch

from tests.attention.cases import CASES, MASKS, NARROWED, case, masked
from tests.attention.harness import check
from tests.attention.packed import PACKED, Packed

# The interpreter multiplies bfloat16 as integers, so half precision is float16 here.
HALF = torch.float16
# Not 320 of them: every program costs milliseconds.
SMALLER = {"many short ones": {"lengths_q": [3, 1, 0, 2] * 8, "keywords": {"causal": True}}}


def seed() -> int:
    return random.randrange(2**31)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    check(case(name, seed(), dtype=HALF), "triton")


@pytest.mark.parametrize("name", ["full", "causal", "softcap, sink and lse", "head_dim 104", "head_dim 256", "dropout"])
def test_case_in_float32(name: str) -> None:
    check(case(name, seed(), dtype=torch.float32), "triton")


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str) -> None:
    check(masked(name, seed(), dtype=HALF), "triton")


@pytest.mark.parametrize("name", NARROWED)
def test_mask_narrowed_by_the_call(name: str) -> None:
    check(masked(name, seed(), dtype=HALF, narrow=True), "triton")


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    Packed(seed=seed(), **{**PACKED[name], **SMALLER.get(name, {})}).check("triton")
