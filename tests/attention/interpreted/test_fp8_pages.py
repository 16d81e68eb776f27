"""The Triton kernel in the interpreter over FP8 pages: every place of scales."""

from __future__ import annotations

import secrets

import pytest
import torch

from tests.attention.fp8_pages import CASES, Fp8Pages


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    Fp8Pages(secrets.randbelow(2**31), **CASES[name]).check("triton")


def test_queries_in_fp32() -> None:
    Fp8Pages(secrets.randbelow(2**31), dtype=torch.float32, **CASES["token, pages of 8"]).check("triton")
