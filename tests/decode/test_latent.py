"""Latent caches, whose values are the first columns of their keys: memory, append, accept, copies, refusals, dispatch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.decode.problem import DecodeProblem
from warploom.decode.triton import BACKEND as TRITON

Cache = KVCache | PagedKVCache


def allocated(page_size: int | None, **options: Any) -> Cache:
    options = {"head_dim_v": 4, "dtype": torch.float32, "latent": True} | options
    if page_size is None:
        return KVCache.allocate(2, 16, 1, 6, **options)
    return PagedKVCache.allocate(2, 16, 1, 6, page_size=page_size, **options)


def tensors(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    return (cache.k, cache.v) if isinstance(cache, KVCache) else (cache.k_pages, cache.v_pages)


PAGES = pytest.mark.parametrize("page_size", [None, 4])


@PAGES
def test_values_take_no_memory_and_follow_the_keys(page_size: int | None) -> None:
    cache = allocated(page_size)
    k, v = tensors(cache)
    assert cache.latent and v.data_ptr() == k.data_ptr() and v.shape[-1] == 4
    new = torch.randn(2, 5, 1, 6)
    cache.append(new)
    cache.append(new[:, :2])
    assert cache.lengths.tolist() == [7, 7]
    q = torch.randn(2, 1, 3, 6)
    keys = torch.cat([new, new[:, :2]], 1)
    want = warploom.attention(q, keys, keys[..., :4], causal=True)
    assert torch.allclose(warploom.decode(q, cache), want, atol=1e-6)


@pytest.mark.parametrize("sliced", [True, False])
def test_a_cache_of_views_is_latent_where_values_are_the_first_columns(sliced: bool) -> None:
    rows = torch.randn(2, 8, 1, 6)
    lengths = torch.zeros(2, dtype=torch.int32)
    assert KVCache(rows, rows[..., :4] if sliced else rows[..., 2:], lengths).latent is sliced
    assert not KVCache(rows, rows[..., :4].clone(), lengths).latent


@PAGES
def test_accepted_tokens_move_once(page_size: int | None) -> None:
    cache = allocated(page_size)
    new = torch.randn(2, 6, 1, 6)
    cache.append(new)
    cache.accept(torch.tensor([[0, 2, 3], [1, 3, -1]]), drafted=4)
    assert cache.lengths.tolist() == [5, 4]
    held = tensors(cache)[0].reshape(2, -1, 1, 6)
    assert torch.equal(held[0, :5], new[0, [0, 1, 2, 4, 5]]) and torch.equal(held[1, :4], new[1, [0, 1, 3, 5]])


@PAGES
@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_latent_too(page_size: int | None, way: Callable[[Cache], Cache]) -> None:
    """A pickle holds the memory of each tensor by itself: values in memory of their own would miss what is appended."""
    cache = way(allocated(page_size))
    k, v = tensors(cache)
    assert cache.latent and v.data_ptr() == k.data_ptr() and v.shape[-1] == 4
    new = torch.randn(2, 3, 1, 6)
    cache.append(new)
    q = torch.randn(2, 1, 3, 6)
    want = warploom.attention(q, new, new[..., :4], causal=True)
    assert torch.allclose(warploom.decode(q, cache), want, atol=1e-6)


def test_slots() -> None:
    cache = allocated(4)
    assert isinstance(cache, PagedKVCache)
    new = torch.randn(2, 1, 1, 6)
    cache.append(new, slot_mapping=torch.tensor([[1], [-1]]))
    assert torch.equal(cache.k_pages[0, 1], new[0, 0]) and cache.lengths.tolist() == [1, 0]


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "values given": (lambda: allocated(None).append(torch.ones(2, 1, 1, 6), torch.ones(2, 1, 1, 4)), TypeError, "no place"),
    "keys alone": (lambda: allocated(None, latent=False).append(torch.ones(2, 1, 1, 6)), TypeError, "v must be a torch.Tensor"),
    "keys of another width": (lambda: allocated(None).append(torch.ones(2, 1, 1, 4)), ValueError, "k must have shape"),
    "no dimensions": (lambda: allocated(None).append(torch.tensor(1.0)), ValueError, "k must have shape"),
    "no tensor": (lambda: allocated(None).append([1.0]), TypeError, "k must be a torch.Tensor"),
    "more values than keys": (lambda: allocated(None, head_dim_v=8), ValueError, "head_dim_v of a latent cache"),
    "FP8": (lambda: allocated(None, dtype=torch.float8_e4m3fn), TypeError, "a latent cache takes float16"),
    "no flag": (lambda: allocated(None, latent=1), TypeError, "latent must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("capacity,batch", [(0, 2), (8, 0)])
def test_nothing_in_it(capacity: int, batch: int) -> None:
    cache = KVCache.allocate(batch, capacity, 1, 6, head_dim_v=4, dtype=torch.float32, latent=True)
    out = warploom.decode(torch.randn(batch, 1, 3, 6), cache)
    assert out.shape == (batch, 1, 3, 4) and not out.any()


@pytest.mark.parametrize(
    "dims,words", [((576, 512), None), ((640, 512), None), ((700, 512), "at most 128"), ((576, 520), "from 16 to 512")]
)
def test_what_triton_takes(dims: tuple[int, int], words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(TRITON), "tensors_refusal", lambda *_: None)
    shape = {"batch": 1, "queries": 1, "capacity": 8, "heads_q": 16, "heads_kv": 1, "head_dim": dims[0], "head_dim_v": dims[1]}
    refused = TRITON.supports(DecodeProblem("cuda", torch.bfloat16, latent=True, **shape))
    assert refused is None if words is None else words in (refused or "")
