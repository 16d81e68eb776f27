"""Caches and other results that are copied, pickled and saved: what comes back is read and grown as the first one."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from warploom import AttentionStats, KVCache, LinearState, PagedKVCache
from warploom.decode.prefix import SharedPrefix

Cache = KVCache | PagedKVCache
E4M3 = torch.float8_e4m3fn
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16},
    "latent": {"dtype": torch.float32, "latent": True, "head_dim_v": 8},
    "FP8 by token, rotated": {"dtype": E4M3},
    "FP8 by head, not rotated": {"dtype": E4M3, "granularity": "head", "hadamard_seed": None},
    "FP8 by tensor, unequal dims": {"dtype": E4M3, "granularity": "tensor", "head_dim_v": 8},
}


def saved(value: Any) -> Any:
    """Through torch.save and torch.load, which trusts weights only."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
}


def filled(kind: str, page_size: int | None, seed: int) -> Cache:
    options = KINDS[kind] if page_size is None else {**KINDS[kind], "page_size": page_size}
    cache: Cache = (KVCache if page_size is None else PagedKVCache).allocate(2, 24, 2, 16, **options)
    if cache.k_scale is not None and cache.k_scale.ndim == 1:
        cache.k_scale.fill_(0.02)
        assert cache.v_scale is not None
        cache.v_scale.fill_(0.03)
    grow(cache, 11, seed)
    return cache


def grow(cache: Cache, count: int, seed: int) -> None:
    k = torch.randn(2, count, 2, 16, generator=torch.Generator().manual_seed(seed)).to(cache_dtype(cache))
    cache.append(k, *([] if cache.latent else [k[..., : cache_values(cache).shape[-1]].neg()]))


def cache_values(cache: Cache) -> Tensor:
    return cache.v if isinstance(cache, KVCache) else cache.v_pages


def cache_dtype(cache: Cache) -> torch.dtype:
    dtype = cache_values(cache).dtype
    return torch.bfloat16 if dtype == E4M3 else dtype


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_comes_back(kind: str, page_size: int | None, way: str) -> None:
    seed = random.randrange(2**31)
    cache = filled(kind, page_size, seed)
    q = torch.randn(2, 1, 4, 16, generator=torch.Generator().manual_seed(seed + 1)).to(cache_dtype(cache))
    before = warploom.decode(q, cache)
    other = WAYS[way](cache)
    assert type(other) is type(cache) and other.latent == cache.latent and other.hadamard_seed == cache.hadamard_seed
    v, kept = cache_values(cache), cache_values(other)
    assert (kept.dtype, kept.stride()) == (v.dtype, v.stride())
    assert torch.equal(warploom.decode(q, other), before), seed
    grow(other, 3, seed + 2)
    assert other.lengths.tolist() == [14, 14] and cache.lengths.tolist() == [11, 11]
    assert torch.equal(warploom.decode(q, cache), before), seed  # whose memory is its own
    grow(cache, 3, seed + 2)
    assert torch.equal(warploom.decode(q, other), warploom.decode(q, cache)), seed


@pytest.mark.parametrize("kind", KINDS)
def test_a_shallow_copy_has_the_same_memory(kind: str) -> None:
    cache = filled(kind, None, random.randrange(2**31))
    other = copy.copy(cache)
    assert other is not cache and cache_values(other).data_ptr() == cache_values(cache).data_ptr()


@pytest.mark.parametrize("way", WAYS)
def test_results_come_back(way: str) -> None:
    one = torch.ones(2)
    for value in (AttentionStats(one, None), LinearState(one, one)):
        found = WAYS[way](value)
        assert type(found) is type(value) and torch.equal(found[0], one)
    found = WAYS[way](PagedKVCache.allocate(2, 8, 1, 16).shared_prefix())
    assert type(found) is SharedPrefix and found.keys.tolist() == [0, 0, 0]
