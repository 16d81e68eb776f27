"""Caches: what append writes and where, for contiguous rows and pages."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch

from warploom import decode
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.decode.ops import append_op
from warploom.runtime import dispatch


def tokens(batch: int, count: int, dim: int = 8, dim_v: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, count, 2, dim), torch.randn(batch, count, 2, dim_v)


def test_an_allocation_names_all_dtypes_that_it_takes() -> None:
    for kind in (KVCache, PagedKVCache):
        with pytest.raises(TypeError, match="float64 or float8_e4m3fn, got str 'bf16'"):
            kind.allocate(1, 8, 2, 16, dtype="bf16")


def allocate(page_size: int | None, batch: int = 3, seqlen: int = 32) -> KVCache | PagedKVCache:
    options = {"head_dim_v": 4, "dtype": torch.float32}
    if page_size is None:
        return KVCache.allocate(batch, seqlen, 2, 8, **options)
    return PagedKVCache.allocate(batch, seqlen, 2, 8, page_size=page_size, **options)


def append_unread(cache: KVCache | PagedKVCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """As append() does where lengths are on a device and are not looked at."""
    if isinstance(cache, KVCache):
        append_op(cache.k, cache.v, cache.lengths, None, None, k, v, True)
    else:
        append_op(cache.k_pages, cache.v_pages, cache.lengths, cache.block_table, None, k, v, True)


def held(cache: KVCache | PagedKVCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = []
    for b, length in enumerate(cache.lengths.tolist()):
        if isinstance(cache, KVCache):
            rows.append((cache.k[b, :length], cache.v[b, :length]))
        else:
            pages = cache.block_table[b].long()
            rows.append(tuple(t[pages].flatten(0, 1)[:length] for t in (cache.k_pages, cache.v_pages)))
    return rows


@pytest.mark.parametrize("page_size", [None, 1, 8, 32])
def test_appends_follow_each_other(page_size: int | None) -> None:
    torch.manual_seed(random.randrange(2**31))
    cache = allocate(page_size)
    assert cache.batch == 3 and cache.capacity == 32 and cache.lengths.tolist() == [0, 0, 0]
    parts = [tokens(3, count) for count in (5, 1, 20, 1)]
    for k, v in parts:
        cache.append(k, v)
    assert cache.lengths.tolist() == [27] * 3
    for b, (k, v) in enumerate(held(cache)):
        assert torch.equal(k, torch.cat([p[0][b] for p in parts])) and torch.equal(v, torch.cat([p[1][b] for p in parts]))


@pytest.mark.parametrize("page_size", [None, 8])
def test_ragged_and_full(page_size: int | None) -> None:
    cache = allocate(page_size)
    cache.append(*tokens(3, 32))
    before = [(k.clone(), v.clone()) for k, v in held(cache)]
    cache.lengths.copy_(torch.tensor([30, 32, 4]))
    k, v = tokens(3, 4)
    append_unread(cache, k, v)
    assert cache.lengths.tolist() == [32, 32, 8]
    after = held(cache)
    for n in (0, 1):
        assert torch.equal(after[0][n], torch.cat([before[0][n][:30], (k, v)[n][0, :2]]))
        assert torch.equal(after[1][n], before[1][n])
        assert torch.equal(after[2][n], torch.cat([before[2][n][:4], (k, v)[n][2]]))


def test_slot_mapping_places_tokens_and_leaves_some_out() -> None:
    cache = allocate(8)
    cache.k_pages.zero_(), cache.v_pages.zero_()
    k, v = tokens(3, 2)
    cache.append(k, v, torch.tensor([[3, -1], [40, 41], [-1, -1]]))
    assert cache.lengths.tolist() == [1, 2, 0]
    assert torch.equal(cache.k_pages[0, 3], k[0, 0]) and torch.equal(cache.v_pages[5, 1], v[1, 1])
    assert int((cache.k_pages.abs().sum((-1, -2)) > 0).sum()) == 3


def test_pages_can_be_shared() -> None:
    cache = PagedKVCache.allocate(2, 16, 2, 8, page_size=8, dtype=torch.float32)
    cache.block_table[1, 0] = cache.block_table[0, 0]
    prefix = torch.randn(2, 8, 2, 8)
    cache.append(prefix[:1].expand(2, -1, -1, -1), prefix[:1].expand(2, -1, -1, -1))
    own = torch.randn(2, 3, 2, 8)
    cache.append(own, own)
    for b, (k, _) in enumerate(held(cache)):
        assert torch.equal(k, torch.cat([prefix[0], own[b]]))


def test_strided_cache_and_tokens() -> None:
    k, v = (torch.zeros(2, 3, 10, 4).transpose(1, 2) for _ in range(2))
    cache = KVCache(k, v, torch.zeros(2, dtype=torch.int32))
    new = torch.randn(4, 3, 5, 2).permute(3, 2, 1, 0)
    cache.append(new, 2 * new)
    assert torch.equal(cache.k[:, :5], new) and torch.equal(cache.v[:, :5], 2 * new)
    assert not cache.k[:, 5:].any()


def test_nothing_to_append() -> None:
    cache = allocate(None)
    cache.append(*tokens(3, 0))
    assert cache.lengths.tolist() == [0, 0, 0]
    empty = KVCache.allocate(2, 0, 2, 8, dtype=torch.float32)
    append_unread(empty, torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8))
    assert empty.lengths.tolist() == [0, 0]


def test_a_cache_grows_without_a_backend_that_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_families", {**dispatch._families, "decode": (dispatch.find("triton", "decode"),)})
    cache = KVCache.allocate(1, 4, 1, 8, dtype=torch.float32)
    cache.append(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    assert cache.lengths.tolist() == [2] and cache.k[0, :2].eq(1).all()


@pytest.mark.parametrize("page_size", [None, 8])
def test_a_copy_shares_nothing_with_the_cache(page_size: int | None) -> None:
    """On a GPU decode() keeps launches on the cache's own memory in it, which cannot be copied nor run for another."""
    torch.manual_seed(random.randrange(2**31))
    cache, q = allocate(page_size), torch.randn(3, 1, 2, 8)
    cache.append(*tokens(3, 5))
    cache.ready["a call"] = open(__file__)  # noqa: SIM115  (as little to be copied as a compiled kernel)
    want = decode(q, cache)
    with cache.ready["a call"]:
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    assert cache.ready.keys() == {"a call"}
    for each in copies:
        assert not each.ready and torch.equal(decode(q, each), want)
        each.append(*tokens(3, 1))
        assert each.lengths.tolist() == [6] * 3
    assert cache.lengths.tolist() == [5] * 3 and torch.equal(decode(q, cache), want)
