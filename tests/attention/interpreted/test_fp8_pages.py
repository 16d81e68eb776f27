"""The Triton kernel in the interpreter over FP8 pages: every place of scales."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.attention.fp8_pages import CASES, Fp8Pages, same_bits
from tests.decode.test_fp8 import drawn, filled
from warploom import PagedKVCache, attention, attention_varlen
from warploom.fp8 import Fp8Tensor, quantize


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    Fp8Pages(random.randrange(2**31), **CASES[name]).check("triton")


def test_queries_in_fp32() -> None:
    Fp8Pages(random.randrange(2**31), dtype=torch.float32, **CASES["token, pages of 8"]).check("triton")


@pytest.mark.usefixtures("products_in_order")
def test_one_set_of_bits() -> None:
    same_bits("triton", torch.float16, 170, chunks=True)


def test_compiled_calls() -> None:
    """In one graph: an op over pages, and quantised tensors, which are dequantised before theirs."""
    cache = filled(drawn(1, 1, 20, 2, 16), drawn(2, 1, 20, 2, 16), "token", 3, 8)
    x = quantize(*[drawn(n, 1, 20, 2, 16).half() for n in range(3)])
    starts = torch.tensor([0, 9], dtype=torch.int32)

    def call(q: Tensor, cache: PagedKVCache, x: tuple[Fp8Tensor, ...]) -> tuple[Tensor, Tensor]:
        paged = attention_varlen(q, cache, cu_seqlens_q=starts, causal=True, backend="triton")
        return paged, attention(*x, causal=True, backend="triton", out_dtype=torch.float32)

    given = drawn(4, 9, 2, 16).half(), cache, x
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(*given), call(*given), strict=True))
