"""Decode by clusters on an H100 or H200: every case that it takes, bits, windows, pages, graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.decode.harness import Case, check, check_bits, run
from warploom.decode.api import decode
from warploom.decode.hopper import BACKEND, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_gpu_memory"),
    pytest.mark.skipif(BACKEND.available() is not None, reason=str(BACKEND.available())),
]

SHAPE: dict[str, Any] = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
CASES: dict[str, dict[str, Any]] = {
    "ragged": {"lengths": [5000, 0, 77, 513, 2049]},
    "pages of 16": {"lengths": [5000, 1, 300], "page_size": 16},
    "pages of 256": {"lengths": [5000, 1, 300], "page_size": 256},
    "one page each, no power of two": {"lengths": [70, 90], "capacity": 90, "page_size": 90},
    "group of 7, 2 queries": {"lengths": [3000, 700], "queries": 2, "heads_q": 56},
    "16 queries": {"lengths": [999, 7], "queries": 16, "heads_q": 8},
    "more queries than keys, sink": {"lengths": [1, 0, 60], "queries": 4, "sink": True},
    "window, pages of 16": {"lengths": [3000, 700], "queries": 3, "keywords": {"window": (500, 0)}, "page_size": 16},
    "window that hides the newest": {"lengths": [3000, 4], "queries": 2, "keywords": {"window": (500, -5)}},
    "window that hides all": {"lengths": [100, 4], "keywords": {"window": (-1, None)}, "sink": True},
    "softcap, pages of 16": {"lengths": [3000, 200], "keywords": {"softcap": 3.0}, "spread": 4.0, "page_size": 16},
    "sink": {"lengths": [3000, 280, 0], "sink": True},
    "negative scale": {"lengths": [900], "keywords": {"scale": -0.3}},
    "float16": {"lengths": [3000, 100], "dtype": torch.float16},
    "head_dim 64": {"lengths": [3000, 1], "head_dim": 64},
    "head_dim 40, head_dim_v 64": {"lengths": [3000, 1], "head_dim": 40, "head_dim_v": 64},
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    check(Case(random.randrange(2**31), **(SHAPE | CASES[name])), "hopper")


@pytest.mark.parametrize("dim", plan.HEAD_DIMS)
def test_bits_do_not_depend_on_who_merges(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block with all splits, and clusters of every size."""
    c = Case(random.randrange(2**31), [5000, 0, 77, 513, 2049, 256], queries=2, **(SHAPE | {"head_dim": dim}))
    found = []
    for size in plan.config(torch.bfloat16, dim, dim, None).clusters:
        monkeypatch.setattr(plan, "cluster", lambda variant, pairs, processors, size=size: size)
        found.append(run(c, "hopper"))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1]), c


@pytest.mark.parametrize("length", [1, 500, 3000, 9000, 40000])
def test_bits_do_not_depend_on_neighbours_or_layout(length: int) -> None:
    check_bits("hopper", length, ([1] * 20, 0, 8), **SHAPE)


def test_what_tma_cannot_read_goes_on() -> None:
    """A cache whose keys lie 8 bytes past a multiple of 16."""
    c = Case(random.randrange(2**31), [700, 20], **SHAPE)
    cache, q = c.cache(), c.q()
    moved = [torch.empty(t.numel() + 4, dtype=t.dtype, device="cuda")[4:].view_as(t).copy_(t) for t in (cache.k, cache.v)]
    odd = type(cache)(*moved, cache.lengths)
    assert torch.equal(decode(q, odd, backend="hopper"), decode(q, cache, backend="triton"))


def test_graph_follows_lengths() -> None:
    c = Case(random.randrange(2**31), [2000, 20], capacity=4096, **SHAPE)
    q, cache = c.q(), c.cache(poison=0.5)
    decode(q, cache, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, cache, backend="hopper")
    for lengths in ([2000, 20], [4096, 0], [1, 3000]):
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, decode(q, cache, backend="hopper")), lengths
