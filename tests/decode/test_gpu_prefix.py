"""Shared prefixes on a CUDA device: bits of plain decode at real sizes, graphs, no synchronisation, what is read once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.decode.prefixes import Alike, check_bits
from warploom.bias import ALiBi
from warploom.decode.api import decode
from warploom.decode.arguments import decode_args
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.decode.triton import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a cache is."""
    monkeypatch.setattr(launch, "worth_sharing", lambda _: True)


def drawn(lengths: list[int], common: list[int], **changes: Any) -> Alike:
    shape: dict[str, Any] = {"heads_q": 8, "heads_kv": 2, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    return Alike(random.randrange(2**31), lengths, common, **shape | changes)


RAGGED = ([4500, 1400, 3000, 0, 2100, 2048, 900], [0, 1024, 2048, 2048, 0, 2048, 512])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 72, 128, 192, 256])
@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 256])
def test_bits(head_dim: int, dtype: torch.dtype, page_size: int | None) -> None:
    check_bits(drawn(*RAGGED, head_dim=head_dim, dtype=dtype, page_size=page_size))


@pytest.mark.parametrize("queries,heads_q,heads_kv", [(1, 1, 1), (1, 7, 1), (3, 14, 2), (5, 8, 2), (16, 2, 1), (8, 8, 2)])
def test_bits_of_rows(queries: int, heads_q: int, heads_kv: int) -> None:
    check_bits(drawn(*RAGGED, queries=queries, heads_q=heads_q, heads_kv=heads_kv))


@pytest.mark.parametrize("heads_kv", [1, 8])
def test_bits_of_crowds(heads_kv: int) -> None:
    """Enough programs for groups of splits, several chunks, and sequences with splits longer than the least."""
    lengths = [5000 + 300 * (b % 7) for b in range(70)]
    check_bits(drawn(lengths, [0, *[4224 if b % 20 else 0 for b in range(1, 70)]], heads_q=4 * heads_kv, heads_kv=heads_kv))
    lengths = [33000, 33100, 34500, 33050, 600]
    check_bits(drawn(lengths, [0, 32768, 32768, 32768, 512], heads_q=4 * heads_kv, heads_kv=heads_kv))


@pytest.mark.parametrize(
    "changes",
    [
        {"keywords": {"softcap": 20.0}},
        {"queries": 4, "keywords": {"window": (None, -3)}},
        {"keywords": {"window": (700, 0)}},
        {"queries": 7, "tree": True},
        {"queries": 7, "tree": True, "alibi": True},
        {"queries": 2, "alibi": True},
    ],
    ids=str,
)
def test_bits_of_options(changes: dict[str, Any]) -> None:
    changes = {**changes, "keywords": dict(changes.get("keywords", {}), sink=torch.ones(8, device="cuda"))}
    if changes.pop("tree", False):
        changes["keywords"]["tree"] = torch.tensor([[-1, 0, 0, 1, 1, 2, 2]], device="cuda")
    if changes.pop("alibi", False):
        changes["keywords"]["bias"] = ALiBi.standard(8).to("cuda")
    check_bits(drawn(*RAGGED, **changes))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs e4m3 in hardware")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("granularity", ["token", "head"])
def test_bits_of_fp8(head_dim: int, granularity: Any) -> None:
    c = drawn(*RAGGED, head_dim=head_dim)
    made = c.cache()
    assert isinstance(made, PagedKVCache)
    k, v = (t.nan_to_num(3.0).to(torch.float8_e4m3fn) for t in (made.k_pages, made.v_pages))
    scales = [torch.rand(k.shape[:3] if granularity == "token" else (2,), device="cuda") for _ in range(2)]
    cache = PagedKVCache(k, v, made.block_table, made.lengths, *scales, hadamard_seed=0)
    for a, b in zip(c.run(None, cache=cache), c.run(c.hint(cache), cache=cache), strict=True):
        assert torch.equal(a, b), c


def test_what_is_shared_is_read_once() -> None:
    c = drawn([2600, 2100, 2500, 2048], [0, 2048, 2048, 2048], page_size=None)
    cache = c.cache()
    assert isinstance(cache, KVCache)
    want = c.run(None, cache=cache)
    cache.k[1:, :2048], cache.v[1:, :2048] = float("nan"), float("nan")
    for a, b in zip(want, c.run(2048, cache=cache), strict=True):
        assert torch.equal(a, b), c


def test_a_graph_follows_the_table_and_the_lengths() -> None:
    """Found and used in one graph: replays share what the table of the moment shares."""
    c = drawn([3000, 2500, 2100, 2900], [0, 2048, 1024, 2048])
    cache = c.cache()
    assert isinstance(cache, PagedKVCache)
    cache.k_pages.nan_to_num_(0.5)
    cache.v_pages.nan_to_num_(0.5)
    q = c.q()

    def step() -> torch.Tensor:
        return c.run(cache.shared_prefix(), cache=cache)[0]

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = decode_args(q, cache, None, 0.0, None, None, None, None, cache.shared_prefix())
    assert launch._plan_of(found)[0].chunk == 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.forward(decode_args(q, cache, None, 0.0, None, None, None, None, cache.shared_prefix()))[0]
    own = cache.block_table.clone()
    for lengths, rows in (([3000] * 4, own[:1].expand(4, -1)), ([0, 5, 3000, 513], own), ([2048] * 4, own.flip(0))):
        cache.block_table.copy_(rows)
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, c.run(None, cache=cache)[0]), lengths


@pytest.mark.parametrize("heads_kv", [2, 8])
def test_layers_in_a_graph(heads_kv: int) -> None:
    """Each layer's launches start before those ahead of them have ended: an append, what is shared, what is not, a merge."""
    c = drawn([1200 + b % 3 for b in range(64)], [0, *[1024] * 63], heads_q=4 * heads_kv, heads_kv=heads_kv)
    caches = [c.cache() for _ in range(2)]
    for cache in caches:
        assert isinstance(cache, PagedKVCache)
        cache.k_pages.nan_to_num_(0.5)
        cache.v_pages.nan_to_num_(0.5)
        cache.lengths.sub_(8)
    q, k = c.q(), torch.randn(64, 1, heads_kv, 128, device="cuda").bfloat16()

    def step(cache: Any, prefix: Any) -> list[torch.Tensor]:
        outs, x = [], q
        for _ in range(4):
            cache.append(x[:, :, ::4] + k, x[:, :, 1::4])
            x = decode(x, cache, prefix=prefix)
            outs.append(x)
        return outs

    prefix = c.hint(caches[0])
    lengths = caches[0].lengths.clone()
    step(caches[0], prefix)
    caches[0].lengths.copy_(lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step(caches[0], prefix)
    for _ in range(50):
        for cache in caches:
            cache.lengths.copy_(lengths)
        graph.replay()
        for a, b in zip(outs, step(caches[1], None), strict=True):
            assert torch.equal(a, b)


def test_small_caches_go_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    c = drawn([1024] * 16, [0, *[960] * 15], heads_q=32, heads_kv=8)
    cache = c.cache()
    assert isinstance(cache, PagedKVCache)
    args = decode_args(c.q(), cache, None, 0.0, None, None, None, None, cache.shared_prefix())
    assert launch._plan_of(args)[0] is launch._plan_of(args._replace(prefix=None))[0]
    check_bits(c)


def test_thousand_repeats() -> None:
    c = drawn([2600] * 40, [0, *[2048] * 39])
    cache = c.cache()
    want = c.run(None, cache=cache)[0]
    prefix = c.hint(cache)
    for _ in range(1000):
        assert torch.equal(c.run(prefix, cache=cache)[0], want)
