"""Decode on a CUDA device: every case in every dtype, bits, graphs, streams, compile, sizes past 32 bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.decode import fp8_checks
from tests.decode.cases import BROAD, CASES, DEEP, case
from tests.decode.fp8_case import Fp8Case, check_fp8
from tests.decode.harness import Case, check, check_bits
from warploom.decode.api import decode
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.kernels.e4m3 import E4M3

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def on_gpu(c: Case, **changes: Any) -> Case:
    return replace(c, device="cuda", **changes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, dtype: torch.dtype) -> None:
    drawn = case(name, random.randrange(2**31))
    if dtype == torch.float32:  # scores of thousands are exact to 1e-4 in fp32, which no order of sums changes
        drawn = replace(drawn, spread=min(drawn.spread, 4.0))
    check(on_gpu(drawn, dtype=dtype), "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (24, 24), (64, 64), (72, 72), (104, 40), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("page_size", [None, 16])
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype, page_size: int | None) -> None:
    shape = {"head_dim": dims[0], "head_dim_v": dims[1], "page_size": page_size, "dtype": dtype}
    c = Case(random.randrange(2**31), [1300, 77], queries=2, heads_q=6, heads_kv=2, device="cuda", **shape)
    check(c, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(576, 512), (288, 256), (96, 64), (72, 72), (104, 40)])
@pytest.mark.parametrize("heads,queries,page_size", [(16, 1, None), (128, 1, 64), (6, 3, 16)])
def test_latent(dims: tuple[int, int], heads: int, queries: int, page_size: int | None, dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {"head_dim": dims[0], "head_dim_v": dims[1], "page_size": page_size, "dtype": dtype, "latent": True}
    check(Case(random.randrange(2**31), [1300, 77, 0], queries, heads, 1, device="cuda", **shape), "triton")


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs e4m3 in hardware")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (72, 40), (128, 128), (256, 256)])
@pytest.mark.parametrize("page_size,granularity", [(None, "head"), (16, "tensor"), (64, "head")])
def test_fp8_caches(dims: tuple[int, int], dtype: torch.dtype, page_size: int | None, granularity: str) -> None:
    shape: dict[str, Any] = {"head_dim": dims[0], "head_dim_v": dims[1], "page_size": page_size, "dtype": dtype}
    for queries, tree in ((1, None), (7, [DEEP])):
        shape |= {"queries": queries, "tree": tree, "heads_q": 6, "heads_kv": 2, "device": "cuda"}
        check_fp8(Fp8Case(random.randrange(2**31), [1300, 77], granularity=granularity, **shape), "triton")


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs e4m3 in hardware")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("check", fp8_checks.CHECKS, ids=lambda check: check.__name__)
def test_numbers_and_scales(check: Callable[[torch.dtype, str], None], dtype: torch.dtype) -> None:
    check(dtype, "cuda")


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs e4m3 in hardware")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (64, 24), (128, 128), (256, 72)], ids=str)
@pytest.mark.parametrize("granularity,paged,slots", [("token", False, False), ("token", True, False), ("head", True, True)])
def test_quantizing_append(granularity: str, paged: bool, slots: bool, dims: tuple[int, int], dtype: torch.dtype) -> None:
    fp8_checks.quantizing_append("cuda", dtype, dims, granularity, paged, slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_rotated_queries(dim: int, dtype: torch.dtype) -> None:
    fp8_checks.rotated_rows("cuda", dtype, dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [None, 16])
def test_fp8_scales_a_token(page_size: int | None, dim: int, dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {"head_dim": dim, "page_size": page_size, "dtype": dtype, "device": "cuda"}
    shape |= {"heads_q": 6, "heads_kv": 2}
    check_fp8(Fp8Case(random.randrange(2**31), [1300, 77], granularity="token", **shape), "triton")


@pytest.mark.parametrize("queries,group", [(1, 1), (1, 8), (3, 7), (16, 2), (16, 4), (16, 8)])
def test_rows(queries: int, group: int) -> None:
    shape = {"heads_q": 2 * group, "heads_kv": 2, "head_dim": 128, "dtype": torch.bfloat16}
    check(Case(random.randrange(2**31), [5000, 1200, 3], queries=queries, device="cuda", **shape), "triton")


SHAPE: dict[str, Any] = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.parametrize("length", [1, 500, 3000, 9000, 20000, 40000])
def test_bits_do_not_depend_on_neighbours_or_layout(length: int) -> None:
    check_bits("triton", length, ([1] * 99, 0, 64), **SHAPE)


def test_thousand_repeats() -> None:
    c = Case(random.randrange(2**31), [9000, 20, 4000], queries=2, **SHAPE)
    q, cache = c.q(), c.cache()
    first = decode(q, cache).clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        different += (decode(q, cache) != first).sum()
    assert int(different) == 0, c


def test_short_way_equals_the_long_one() -> None:
    c = Case(random.randrange(2**31), [2000, 20], **SHAPE)
    q, cache, sink = c.q(), c.cache(), torch.randn(32, device="cuda")
    for options in ({}, {"sink": sink}, {"window": (300, 0)}, {"softcap": 5.0}, {"scale": 0.2}):
        out, lse = decode(q, cache, return_lse=True, **options)
        assert cache.ready
        for _ in range(2):
            again, lse_again = decode(q, cache, return_lse=True, **options)
            assert torch.equal(out, again) and torch.equal(lse, lse_again)
            assert torch.equal(out, decode(q, cache, **options))
        assert torch.equal(out, decode(q, KVCache(cache.k, cache.v, cache.lengths), **options))
    other = torch.randn_like(q)
    assert torch.equal(decode(other, cache), decode(other, KVCache(cache.k, cache.v, cache.lengths)))
    odd = torch.randn(q.numel() + 1, device="cuda").to(q.dtype)[1:].view_as(q)
    assert torch.equal(decode(odd, cache), decode(odd.clone(), cache))
    with pytest.raises(ValueError, match="requires grad"):
        decode(q.clone().requires_grad_(), cache)
    with pytest.raises(ValueError, match="head"):
        decode(q[:, :, :31], cache)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs e4m3 in hardware")
@pytest.mark.parametrize("head_dim", [72, 128])
@pytest.mark.parametrize("page_size,granularity,seed", [(None, "token", 4), (16, "head", -1), (16, "token", None)])
def test_short_way_over_fp8_is_the_long_one(page_size: int | None, granularity: Any, seed: int | None, head_dim: int) -> None:
    options = {"dtype": E4M3, "device": "cuda", "granularity": granularity, "hadamard_seed": seed}
    if page_size is None:
        cache: Any = KVCache.allocate(2, 2100, 8, head_dim, **options)
    else:
        cache = PagedKVCache.allocate(2, 2100, 8, head_dim, page_size=page_size, **options)
    for tokens in (2000, 1):
        cache.append(*(torch.randn(2, tokens, 8, head_dim, device="cuda") for _ in range(2)))
        for dtype in (torch.bfloat16, torch.float32):
            for _ in range(3):
                q = torch.randn(2, 1, 32, head_dim, device="cuda").to(dtype)
                out, lse = decode(q, cache, return_lse=True)
                want, want_lse = decode(q, replace(cache), return_lse=True)
                assert torch.equal(out, want) and torch.equal(lse, want_lse)
        cache.v_scale.mul_(2)
    assert len(cache.ready) == 2
    odd = torch.randn(q.numel() + 1, device="cuda")[1:].view_as(q)
    assert torch.equal(decode(odd, cache), decode(odd.clone(), replace(cache)))


@pytest.mark.parametrize("page_size", [None, 16])
def test_graph_of_append_and_decode(page_size: int | None) -> None:
    """One captured step, replayed, follows the lengths and matches eager steps bit for bit."""
    steps, shape = 40, (3, 1, 8, 128)
    caches: list[KVCache | PagedKVCache] = []
    for _ in range(2):
        if page_size is None:
            cache = KVCache.allocate(3, 600, 8, 128, device="cuda")
        else:
            cache = PagedKVCache.allocate(3, 600, 8, 128, page_size=page_size, device="cuda")
        cache.lengths.copy_(torch.tensor([500, 0, 599]))
        caches.append(cache)
    storage = [(c.k, c.v) if isinstance(c, KVCache) else (c.k_pages, c.v_pages) for c in caches]
    for t in storage[0]:
        t.normal_()
    for a, b in zip(*storage, strict=True):
        b.copy_(a)
    q, k, v = (torch.randn(steps, 3, 1, heads, 128, device="cuda").bfloat16() for heads in (32, 8, 8))
    now = [torch.empty_like(t[0]) for t in (q, k, v)]
    caches[1].append(torch.zeros(shape, device="cuda").bfloat16(), torch.zeros(shape, device="cuda").bfloat16())
    decode(now[0], caches[1])
    caches[1].lengths.copy_(torch.tensor([500, 0, 599]))
    for a, b in zip(*storage, strict=True):
        b.copy_(a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        caches[1].append(now[1], now[2])
        out = decode(now[0], caches[1])
    for step in range(steps):
        for live, drawn in zip(now, (q, k, v), strict=True):
            live.copy_(drawn[step])
        graph.replay()
        caches[0].append(k[step], v[step])
        assert torch.equal(out, decode(q[step], caches[0])), step
    assert caches[0].lengths.tolist() == caches[1].lengths.tolist() == [540, 40, 600 if page_size is None else 608]


def test_no_synchronisation() -> None:
    c = Case(random.randrange(2**31), [2000, 20], page_size=16, **SHAPE)
    q, cache = c.q(), c.cache()
    k = torch.randn(2, 1, 8, 128, device="cuda").bfloat16()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            cache.append(k, k)
            decode(q, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("page_size", [None, 16])
def test_graph_of_a_draft(page_size: int | None) -> None:
    """Append, judge and accept in one graph: replays follow trees and paths that are written into its tensors."""
    c = Case(random.randrange(2**31), [900, 40], queries=7, page_size=page_size, capacity=960, **SHAPE)
    tree, path = (torch.zeros(2, n, dtype=torch.int32, device="cuda") for n in (7, 3))
    captured, eager = c.cache(poison=0.0), c.cache(poison=0.0)
    q, k = c.q(), torch.randn(2, 7, 8, 128, device="cuda").bfloat16()

    def step(cache: KVCache | PagedKVCache) -> torch.Tensor:
        cache.append(k, 2 * k)
        out = decode(q, cache, tree=tree)
        cache.accept(path, 7)
        return out

    tree.copy_(torch.tensor([BROAD, DEEP]))
    step(c.cache(poison=0.0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(captured)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    captured.lengths.copy_(eager.lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    for trees, paths in (([DEEP, BROAD], [[0, 2, -1], [1, 4, -1]]), ([BROAD, BROAD], [[-1, -1, -1], [0, 3, -1]])):
        tree.copy_(torch.tensor(trees))
        path.copy_(torch.tensor(paths))
        graph.replay()
        assert torch.equal(out, step(eager)) and torch.equal(captured.lengths, eager.lengths)


def test_on_another_stream() -> None:
    c = Case(random.randrange(2**31), [9000] * 4, **SHAPE)
    q, cache = c.q(), c.cache()
    want = decode(q, cache)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = q + 0
        got = decode(late, cache)
    stream.synchronize()
    assert torch.equal(got, want)


def test_compile() -> None:
    c = Case(random.randrange(2**31), [2000, 20], **SHAPE)
    q, cache = c.q(), c.cache()
    k = torch.randn(2, 1, 8, 128, device="cuda").bfloat16()

    def step(q: torch.Tensor, cache: KVCache, k: torch.Tensor) -> torch.Tensor:
        cache.append(k, k)
        return decode(q, cache)

    grown = KVCache(*(torch.cat([t, t[:, :1]], 1) for t in (cache.k, cache.v)), cache.lengths.clone())
    twin = KVCache(grown.k.clone(), grown.v.clone(), grown.lengths.clone())
    want = step(q, grown, k)
    got = torch.compile(step, fullgraph=True)(q, twin, k)
    assert torch.equal(got, want) and torch.equal(twin.lengths, grown.lengths)


@pytest.mark.parametrize("paged", [False, True])
def test_past_32_bits(paged: bool) -> None:
    """Keys whose offsets pass 2³¹ elements, at the far end of the cache."""
    capacity = 2**31 // 1024 + 4096
    k, v = (torch.zeros(1, capacity, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k[:, -3000:].normal_(), v[:, -3000:].normal_()
    q = torch.randn(1, 1, 32, 128, device="cuda").bfloat16()
    lengths = torch.tensor([capacity], dtype=torch.int32, device="cuda")
    small = KVCache(k[:, -4096:].clone(), v[:, -4096:].clone(), lengths * 0 + 4096)
    want = decode(q, small, window=(2000, 0))
    if paged:
        table = torch.arange(capacity // 16, dtype=torch.int32, device="cuda")[None]
        cache = PagedKVCache(k.view(-1, 16, 8, 128), v.view(-1, 16, 8, 128), table, lengths)
    else:
        cache = KVCache(k, v, lengths)
    got = decode(q, cache, window=(2000, 0))
    assert torch.equal(got, want)
    cache.lengths.sub_(1)
    cache.append(q[:, :, :8], 2 * q[:, :, :8])
    assert torch.equal(k[0, -1], q[0, 0, :8]) and torch.equal(v[0, -1], 2 * q[0, 0, :8])


def test_bad_contents_stay_in_bounds() -> None:
    c = Case(random.randrange(2**31), [900, 30], page_size=16, **SHAPE)
    q, cache = c.q(), c.cache(poison=0.0)
    cache.block_table.random_(-(2**31), 2**31 - 1)
    cache.lengths.copy_(torch.tensor([2**30, -4]))
    out = decode(q, cache)
    assert out.isfinite().all() and not out[1].any()
    cache.append(q[:, :, :8], q[:, :, :8])
    torch.cuda.synchronize()


def test_strided_and_expanded() -> None:
    c = Case(random.randrange(2**31), [900, 300], **SHAPE)
    q, cache = c.q(), c.cache(poison=0.0)
    want = decode(q, cache)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (cache.k, cache.v)]
    assert torch.equal(decode(q, KVCache(*heads_first, cache.lengths)), want)
    wide = [torch.cat([t, t], -1)[..., :128] for t in (cache.k, cache.v)]
    assert torch.equal(decode(q, KVCache(*wide, cache.lengths)), want)
    odd = [torch.cat([t, t[..., :1]], -1)[..., :128] for t in (cache.k, cache.v)]
    assert torch.equal(decode(q, KVCache(*odd, cache.lengths)), want)
    shared = KVCache(cache.k[:1].expand(2, -1, -1, -1), cache.v[:1].expand(2, -1, -1, -1), cache.lengths)
    assert torch.equal(decode(q, shared)[0], want[0])
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(decode(turned, cache), want)


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_empty_calls_return_early(kind: Any) -> None:
    """An empty batch divided by zero while its short way was made ready."""
    for batch, queries, heads, capacity in ((0, 1, 4, 64), (2, 0, 4, 64), (2, 1, 0, 64), (2, 1, 4, 0)):
        cache = kind.allocate(batch, capacity, 2, 64, device="cuda")
        q = torch.zeros(batch, queries, heads, 64, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            out, lse = decode(q, cache, return_lse=True)
            assert out.shape == q.shape and lse.shape == (batch, heads, queries)
            assert not out.any() and (lse == float("-inf")).all()


def test_a_bad_value_does_not_find_the_short_way_of_a_good_one() -> None:
    cache = KVCache.allocate(2, 64, 2, 64, device="cuda")
    q = torch.zeros(2, 1, 4, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        decode(q, cache, scale=1.0, softcap=0.0, window=(1, 0))
    for name, bad in (("scale", True), ("softcap", False), ("window", (True, 0)), ("window", (1.0, 0)), ("return_lse", 0)):
        with pytest.raises(TypeError, match=name):
            decode(q, cache, **{"scale": 1.0, "softcap": 0.0, "window": (1, 0), name: bad})


def test_lengths_and_tables_of_64_bits() -> None:
    c = on_gpu(Case(3, [40, 7], capacity=64, page_size=16))
    drawn = c.cache()
    assert isinstance(drawn, PagedKVCache)
    q = torch.randn(2, 1, 4, drawn.k_pages.shape[3], device="cuda").to(drawn.k_pages.dtype)
    wide = PagedKVCache(drawn.k_pages, drawn.v_pages, drawn.block_table.long(), drawn.lengths.long())
    assert torch.equal(decode(q, wide), decode(q, drawn))
