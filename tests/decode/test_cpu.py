"""The reference and the CPU implementation against the rows of a prefill."""

from __future__ import annotations

import random

import pytest
import torch

from tests.decode.cases import CASES, case
from tests.decode.harness import Case, check, run
from warploom.decode.api import decode
from warploom.decode.cache import KVCache


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, backend: str) -> None:
    check(case(name, random.randrange(2**31)), backend)


def test_float64_runs_on_the_reference() -> None:
    for page_size in (None, 16):
        c = Case(random.randrange(2**31), [40, 3], queries=2, dtype=torch.float64, page_size=page_size)
        check(c, "reference")


def test_ones_give_one() -> None:
    c = Case(random.randrange(2**31), [600, 1, 30], queries=3)
    cache = c.cache()
    cache.v[~cache.v.isnan()] = 1.0
    out = decode(c.q(), cache, backend="cpu")
    sees = torch.tensor(c.lengths)[:, None] - 3 + torch.arange(3) >= 0
    assert torch.allclose(out, sees.float()[..., None, None], rtol=1e-6, atol=0), c


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
def test_bits_do_not_depend_on_neighbours_or_layout(page_size: int | None) -> None:
    seed = random.randrange(2**31)
    lone = run(Case(seed, [700], queries=2), "cpu")
    crowd = run(Case(seed, [700, 5, 1200, 0], queries=2, capacity=2048, page_size=page_size), "cpu")
    # The first sequence and query are drawn alike in both.
    for a, b in zip(lone, crowd, strict=True):
        assert torch.equal(a[0], b[0]), seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bits_do_not_follow_the_strides_of_cache_and_queries(backend: str, dtype: torch.dtype) -> None:
    """A matrix product sums in another order for other strides and addresses."""
    c = Case(random.randrange(2**31), [69, 34], queries=3, heads_q=6, heads_kv=3, head_dim=38, head_dim_v=66, dtype=dtype)
    q, cache = c.q(), c.cache()
    want = decode(q, cache, return_lse=True, backend=backend)
    for gap in (1, 3, 16):
        odd_q, odd_k, odd_v = (torch.nn.functional.pad(t, (gap, 2 * gap))[..., gap:-2 * gap] for t in (q, cache.k, cache.v))
        got = decode(odd_q, KVCache(odd_k, odd_v, cache.lengths), return_lse=True, backend=backend)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), (c, gap)


@pytest.mark.parametrize("window", [(-1, None), (0, -1), (-5, -30)])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_window_that_keeps_no_key_reads_none(backend: str, queries: int, window: tuple[int, int | None]) -> None:
    """NaN in keys that every query's window hides once reached all queries but one."""
    cache = Case(0, [40, 3], queries=queries).cache()
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("inf"))
    out, lse = decode(torch.ones(2, queries, 4, 16), cache, window=window, return_lse=True, backend=backend)
    assert not out.any() and bool((lse == float("-inf")).all())
