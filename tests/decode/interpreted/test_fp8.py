"""FP8 caches in the interpreted kernels: every place of keys and scales, and the append kernel on bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.decode import fp8_checks
from tests.decode.fp8_case import Fp8Case, check_fp8
from tests.decode.interpreted.test_kernels import HALVES, fresh_plans, shrink
from warploom.decode.api import decode
from warploom.decode.append import append as torch_append
from warploom.decode.arguments import decode_args
from warploom.decode.cache import PagedKVCache
from warploom.decode.problem import AppendArgs
from warploom.decode.triton import launch, plan
from warploom.decode.triton.tokens import append as triton_append

__all__ = ["fresh_plans"]

# Over tiles of 16 keys: in a row, across pages, within a page, in the one page of a sequence.
CASES: list[dict[str, Any]] = [
    {"granularity": "token", "keywords": {"window": (20, 0)}},
    {"granularity": "token", "page_size": 8, "keywords": {"softcap": 2.0}, "tree": [[-1, 0, 0]]},
    {"granularity": "token", "page_size": 64},
    {"granularity": "head", "page_size": 16, "dtype": torch.float16, "sink": True},
    {"granularity": "tensor", "dtype": torch.float16},
]


@pytest.mark.parametrize("constants", [{}, {"halved": 64, "crowd": 0}], ids=str)
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_case(changes: dict[str, Any], constants: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, **constants)
    shape: dict[str, Any] = {"queries": 3, "heads_q": 4, "heads_kv": 2, "head_dim": 24, "head_dim_v": 16}
    check_fp8(Fp8Case(random.randrange(2**31), [60, 9], **shape, **changes), "triton")


@pytest.mark.parametrize("page_size", [None, 8])
def test_bits_of_halves(page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    c = Fp8Case(random.randrange(2**31), [120, 33], granularity="token", page_size=page_size, dtype=torch.float16)
    results = []
    for constants in HALVES:
        shrink(monkeypatch, **constants)
        plan.plan.cache_clear()
        results.append(decode(c.straight(), c.cache(), return_lse=True, backend="triton"))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), c


@pytest.mark.parametrize("dtype,dim", [(torch.uint8, 24), (torch.float32, 1)], ids=str)
def test_append_of_bytes_and_scales(dtype: torch.dtype, dim: int) -> None:
    k, v = (torch.randint(0, 255, (2, 3, 2, dim)).to(dtype) for _ in range(2))
    table, lengths = torch.tensor([[1, 3], [0, 2]], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    kept = []
    for run in (torch_append, triton_append):
        state = [torch.zeros(4, 4, 2, dim, dtype=dtype), torch.zeros(4, 4, 2, dim, dtype=dtype), lengths.clone()]
        run(AppendArgs(*state, table, None, k, v, False))
        kept.append(state)
    for torchs, tritons in zip(*kept, strict=True):
        assert torch.equal(torchs, tritons)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (64, 24), (128, 72)], ids=str)
@pytest.mark.parametrize("granularity,paged,slots", [("token", False, False), ("token", True, False), ("head", True, True)])
def test_quantizing_append(
    granularity: Any, paged: bool, slots: bool, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    fp8_checks.quantizing_append("cpu", dtype, dims, granularity, paged, slots)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_rotated_queries(dim: int, dtype: torch.dtype) -> None:
    fp8_checks.rotated_rows("cpu", dtype, dim)


@pytest.mark.parametrize("check", fp8_checks.CHECKS, ids=lambda check: check.__name__)
def test_numbers_and_scales(check: Callable[[torch.dtype, str], None]) -> None:
    check(torch.float16, "cpu")


def test_strides_of_pages_may_take_64_bits() -> None:
    """Of a pool of one page, which nothing multiplies by more than 0; strides of 32 bits have an instruction of their own."""
    options: dict[str, Any] = {"page_size": 16, "dtype": torch.float8_e4m3fn}
    cache = PagedKVCache.allocate(1, 16, 2, 32, **options)
    cache.append(torch.randn(1, 16, 2, 32), torch.randn(1, 16, 2, 32))
    table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([27], dtype=torch.int32)
    pages = [cache.k_pages, cache.v_pages]
    wide = [t.as_strided(t.shape, (2**40, *t.stride()[1:])) for t in pages]
    q, found, narrow = torch.randn(1, 1, 4, 32).half(), [], []
    for k, v in (pages, wide):
        one = PagedKVCache(k, v, table, lengths, cache.k_scale, cache.v_scale, cache.hadamard_seed)
        found.append(decode(q, one, backend="triton"))
        args = decode_args(q, one, None, 0.0, None, None, None, None, None)
        narrow.append(launch._plan_of(args)[0].split._constants["PLACES"])
    assert torch.equal(*found) and narrow == [2, 0]
