"""Latent caches on an H100 or H200: every case that the kernel takes, bits, windows, pages, graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.decode.harness import Case, check, check_bits, run
from warploom.decode.api import decode
from warploom.decode.cache import KVCache
from warploom.decode.hopper import BACKEND, latent_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_gpu_memory"),
    pytest.mark.skipif(BACKEND.available() is not None, reason=str(BACKEND.available())),
]

SHAPE: dict[str, Any] = {
    "heads_q": 128, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "latent": True, "dtype": torch.bfloat16, "device": "cuda"
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ragged": {"lengths": [2100, 0, 77, 513, 1]},
    "16 heads": {"lengths": [5000, 0, 77, 64, 65], "heads_q": 16},
    "64 heads": {"lengths": [1400, 700], "heads_q": 64},
    "32 heads": {"lengths": [5000, 0, 77, 64, 65, 8192], "heads_q": 32},
    "70 heads": {"lengths": [1100, 130], "heads_q": 70},
    "8 heads, whole tiles": {"lengths": [4096, 8192, 64, 128, 192], "heads_q": 8},
    "24 heads": {"lengths": [5000, 0, 77], "heads_q": 24},
    "one head": {"lengths": [1100, 130], "heads_q": 1},
    "room left over": {"lengths": [1000, 63], "heads_q": 16, "capacity": 9000},
    "pages of 64": {"lengths": [3000, 1, 300], "heads_q": 32, "page_size": 64},
    "pages of 256": {"lengths": [3000, 1, 300], "heads_q": 32, "page_size": 256},
    "pages of 32": {"lengths": [3000, 1, 300], "heads_q": 32, "page_size": 32},
    "pages of 16": {"lengths": [3000, 1, 300], "heads_q": 32, "page_size": 16},
    "pages of 8": {"lengths": [3000, 1, 0, 300], "heads_q": 32, "page_size": 8},
    "one page each, no power of two": {"lengths": [70, 90], "heads_q": 16, "capacity": 90, "page_size": 90},
    "one small page each": {"lengths": [7, 40], "heads_q": 16, "capacity": 40, "page_size": 40},
    "2 queries": {"lengths": [900, 2], "queries": 2},
    "7 queries of 12 heads": {"lengths": [900, 33, 0], "queries": 7, "heads_q": 12},
    "16 queries": {"lengths": [700, 7], "queries": 16, "heads_q": 16},
    "window, pages": {"lengths": [900, 70], "queries": 3, "heads_q": 9, "page_size": 16, "keywords": {"window": (500, 0)}},
    "window that hides the newest": {"lengths": [3000, 4], "queries": 2, "heads_q": 16, "keywords": {"window": (500, -5)}},
    "window that hides all": {"lengths": [100, 4], "heads_q": 16, "keywords": {"window": (-1, None)}},
    "negative scale": {"lengths": [900], "keywords": {"scale": -0.05}, "heads_q": 16},
    "scores that peak": {"lengths": [900, 3000], "spread": 6.0, "heads_q": 64},
    "float16": {"lengths": [3000, 100], "heads_q": 64, "dtype": torch.float16},
    "float16, pages of 64": {"lengths": [3000, 100], "heads_q": 16, "dtype": torch.float16, "page_size": 64},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    check(Case(random.randrange(2**31), **(SHAPE | CASES[name])), "hopper")


@pytest.mark.parametrize("number", range(24))
def test_drawn(number: int) -> None:
    """Any lengths, heads, queries, pages, windows and scores."""
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    heads, queries = draw.choice([1, 5, 16, 24, 32, 64, 100, 128]), draw.choice([1, 1, 1, 2, 3, 8, 16])
    longest = draw.choice([70, 700, 3000])
    lengths = [draw.choice([0, draw.randint(1, 70), draw.randint(1, longest), longest]) for _ in range(draw.randint(1, 5))]
    options: dict[str, Any] = {"heads_q": heads, "queries": queries, "dtype": draw.choice([torch.bfloat16, torch.float16])}
    options |= {"page_size": draw.choice([None, None, 8, 16, 32, 64, 128]), "spread": draw.choice([1.0, 1.0, 5.0])}
    options["capacity"] = max(*lengths, 1) + draw.choice([0, 0, 1, 100])
    if draw.random() < 0.4:
        options["keywords"] = {"window": (draw.choice([None, draw.randint(5, longest)]), draw.choice([None, 0, -3]))}
    check(Case(seed, lengths, **(SHAPE | options)), "hopper")


@pytest.mark.parametrize("heads", [16, 128])
def test_bits_do_not_depend_on_who_merges(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block with all splits of a sequence, and as many blocks as there may be."""
    c = Case(random.randrange(2**31), [5000, 0, 77, 513, 2049, 9000], queries=2, **(SHAPE | {"heads_q": heads}))
    found = []
    for log in range(latent_plan.MOST_LOG + 1):
        monkeypatch.setattr(latent_plan, "blocks_log", lambda units, tiles, processors, log=log: log)
        found.append(run(c, "hopper"))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1]), c


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("factors", [(1, 60, 0.1, 200, 1, 500, 5, 3), (300, 1, 1, 1), (0.1, 1, 10, 100, 1000, 3000, 1, 6000)])
def test_scores_that_jump_from_split_to_split(factors: tuple[float, ...], heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than a total's reference bears, up and down: against fp64, and bits whoever adds."""
    seed, length = random.randrange(2**31), 8192
    generator = torch.Generator("cuda").manual_seed(seed)
    k = torch.randn(1, length, 1, 576, device="cuda", generator=generator)
    tiles = length // latent_plan.TILE
    if latent_plan.few(1, heads):
        tiles = tiles * latent_plan.LEAST // latent_plan.FEW_LEAST
    split = torch.arange(length, device="cuda") // (length >> latent_plan.splits_log(tiles))
    # Of the columns that are no values, so that out stays of the order of one.
    k[0, :, 0, 512:] *= torch.tensor(factors, device="cuda")[split % len(factors), None]
    k = k.bfloat16()
    q = torch.randn(1, 1, heads, 576, device="cuda", generator=generator).bfloat16()
    cache = KVCache(k, k[..., :512], torch.tensor([length], dtype=torch.int32, device="cuda"))
    keys = k[0, :, 0].double()
    scores = q[0, 0].double() @ keys.T * 576**-0.5
    want = scores.softmax(-1) @ keys[:, :512]
    found = []
    for log in range(latent_plan.splits_log(tiles) + 1):
        monkeypatch.setattr(latent_plan, "blocks_log", lambda units, tiles, processors, log=log: log)
        found.append(decode(q, cache, return_lse=True, backend="hopper"))
    out, lse = found[0]
    assert float((out[0, 0].double() - want).abs().max()) <= 0.02 * float(want.abs().max()), seed
    assert torch.allclose(lse[0, :, 0].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-3), seed
    for other, other_lse in found[1:]:
        assert torch.equal(other, out) and torch.equal(other_lse, lse), seed


@pytest.mark.parametrize("heads", [1, 4])
def test_splits_that_some_rows_do_not_see(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of a tile: the first one is hidden from the last queries, and the last one from the first."""
    monkeypatch.setattr(latent_plan, "LEAST", 1)
    monkeypatch.setattr(latent_plan, "FEW_LEAST", 1)
    options = SHAPE | {"heads_q": heads, "queries": 16, "keywords": {"window": (500, -54)}}
    c = Case(random.randrange(2**31), [3000, 64, 0, 1025], **options)
    check(c, "hopper")
    found = []
    for log in range(latent_plan.MOST_LOG + 1):
        monkeypatch.setattr(latent_plan, "blocks_log", lambda units, tiles, processors, log=log: min(log, 5))
        found.append(run(c, "hopper"))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1]), c


@pytest.mark.parametrize("length", [1, 500, 3000, 20000])
def test_bits_do_not_depend_on_neighbours_or_layout(length: int) -> None:
    check_bits("hopper", length, ([1] * 20, 0, 8), ([1] * 20, 0, 64), **(SHAPE | {"heads_q": 16}))


def test_what_tma_cannot_read_goes_on() -> None:
    """A cache whose keys lie 8 bytes past a multiple of 16."""
    c = Case(random.randrange(2**31), [700, 20], **(SHAPE | {"heads_q": 16}))
    cache, q = c.cache(), c.q()
    k = torch.empty(cache.k.numel() + 4, dtype=cache.k.dtype, device="cuda")[4:].view_as(cache.k).copy_(cache.k)
    odd = type(cache)(k, k[..., :512], cache.lengths)
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


def test_repeats_are_equal() -> None:
    c = Case(random.randrange(2**31), [9000, 20, 4000], queries=2, **SHAPE)
    q, cache = c.q(), c.cache()
    first = decode(q, cache, backend="hopper").clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        different += (decode(q, cache, backend="hopper") != first).sum()
    assert int(different) == 0, c


def test_strided_queries_and_keys() -> None:
    c = Case(random.randrange(2**31), [900, 300], queries=2, **(SHAPE | {"heads_q": 16}))
    q, cache = c.q(), c.cache(poison=0.0)
    want = decode(q, cache, backend="hopper")
    wide = torch.cat([cache.k, cache.k[..., :64]], -1)[..., :576]
    assert torch.equal(decode(q, type(cache)(wide, wide[..., :512], cache.lengths), backend="hopper"), want)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(decode(turned, cache, backend="hopper"), want)
