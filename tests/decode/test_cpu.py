"""The reference and the CPU implementation against the rows of a prefill."""

from __future__ import annotations

import secrets

import pytest
import torch

from tests.decode.cases import CASES, case
from tests.decode.harness import Case, check, run
from warploom.decode.api import decode


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, backend: str) -> None:
    check(case(name, secrets.randbelow(2**31)), backend)


def test_float64_runs_on_the_reference() -> None:
    for page_size in (None, 16):
        c = Case(secrets.randbelow(2**31), [40, 3], queries=2, dtype=torch.float64, page_size=page_size)
        check(c, "reference")


def test_ones_give_one() -> None:
    c = Case(secrets.randbelow(2**31), [600, 1, 30], queries=3)
    cache = c.cache()
    cache.v[~cache.v.isnan()] = 1.0
    out = decode(c.q(), cache, backend="cpu")
    sees = torch.tensor(c.lengths)[:, None] - 3 + torch.arange(3) >= 0
    assert torch.allclose(out, sees.float()[..., None, None], rtol=1e-6, atol=0), c


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
def test_bits_do_not_depend_on_neighbours_or_layout(page_size: int | None) -> None:
    seed = secrets.randbelow(2**31)
    lone = run(Case(seed, [700], queries=2), "cpu")
    crowd = run(Case(seed, [700, 5, 1200, 0], queries=2, capacity=2048, page_size=page_size), "cpu")
    # The first sequence and query are drawn alike in both.
    for a, b in zip(lone, crowd, strict=True):
        assert torch.equal(a[0], b[0]), seed
