"""Every wrong call is refused before any work, in words that name the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom import KVCache, PagedKVCache, decode


def cache(batch: int = 2, capacity: int = 32, heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32) -> KVCache:
    held = KVCache.allocate(batch, capacity, heads, dim, dtype=dtype)
    held.k.zero_(), held.v.zero_(), held.lengths.fill_(4)
    return held


def paged(page_size: int = 8) -> PagedKVCache:
    return PagedKVCache.allocate(2, 32, 2, 16, page_size=page_size, dtype=torch.float32)


def query(batch: int = 2, queries: int = 1, heads: int = 4, dim: int = 16) -> torch.Tensor:
    return torch.zeros(batch, queries, heads, dim)


@pytest.mark.parametrize(
    "arguments,error,words",
    [
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"q": torch.zeros(2, 4, 16)}, ValueError, r"q must have 4 dimensions \(batch, T, heads_q, head_dim\)"),
        ({"cache": torch.zeros(2)}, TypeError, "cache must be a KVCache or PagedKVCache, got Tensor"),
        ({"q": query(batch=3)}, ValueError, "q has batch 3 but the cache holds 2 sequences"),
        ({"q": query(dim=8)}, ValueError, "q has head_dim 8 but the cache has 16"),
        ({"q": query(heads=3)}, ValueError, "q has 3 heads, which is not a multiple of the cache's 2"),
        ({"q": query(queries=4, heads=1)}, ValueError, r"q is \(batch, T, heads_q, head_dim\), got \(2, 4, 1, 16\)"),
        ({"q": query().half()}, TypeError, "q has dtype torch.float16 but the cache has torch.float32"),
        ({"q": query(queries=17)}, ValueError, "decode takes 1 to 16. attention_varlen"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number"),
        ({"softcap": -1.0}, ValueError, "softcap must be 0"),
        ({"window": 5}, TypeError, "window must be a pair"),
        ({"window": (5, 1.5)}, TypeError, "window's right must be an int or None"),
        ({"sink": torch.zeros(3)}, ValueError, r"sink must have shape \(4,\)"),
        ({"backend": "fast"}, ValueError, "backend must be one of 'hopper', 'triton', 'cpu', 'reference'"),
        ({"backend": "triton"}, ValueError, "backend='triton' cannot run this call"),
    ],
)
def test_decode(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        decode(**{"q": query(), "cache": cache(), **arguments})


@pytest.mark.parametrize("name", ["q", "sink", "k"])
def test_no_gradient(name: str) -> None:
    held, q, sink = cache(), query(), torch.zeros(4)
    {"q": q, "sink": sink, "k": held.k}[name].requires_grad_()
    with pytest.raises(ValueError, match=r"requires grad.*attention\(\)"):
        decode(q, held, sink=sink)
    with torch.no_grad():
        decode(q, held, sink=sink)


def test_no_tangent_and_no_transform() -> None:
    held = cache()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
        decode(torch.autograd.forward_ad.make_dual(query(), query()), held)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.vmap(lambda q: decode(q, held))(query()[None])


def tensors(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    k = torch.zeros(2, 32, 2, 16)
    return {"k": k, "v": k.clone(), "lengths": torch.zeros(2, dtype=torch.int32), **changes}


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"k": torch.zeros(2, 32, 16)}, ValueError, r"k must have 4 dimensions \(batch, max_seqlen, heads_kv, head_dim\)"),
        ({"v": torch.zeros(2, 31, 2, 16)}, ValueError, "must agree in all but the last dimension"),
        ({"v": torch.zeros(2, 32, 2, 16).half()}, TypeError, "v has dtype torch.float16 but k has torch.float32"),
        ({"k": torch.zeros(2, 32, 2, 16).int()}, TypeError, "k has dtype torch.int32"),
        ({"k": torch.zeros(2, 32, 16, 2).transpose(2, 3)}, ValueError, "contiguous in its last dimension"),
        ({"lengths": torch.zeros(2)}, TypeError, "lengths must be an int32 tensor"),
        ({"lengths": torch.zeros(4, dtype=torch.int32)[::2]}, ValueError, r"lengths must be contiguous, got strides \(2,\)"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, ValueError, "lengths has 3 entries but k has batch 2"),
    ],
)
def test_contiguous_cache(changes: dict[str, torch.Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        KVCache(**tensors(**changes))


@pytest.mark.parametrize(
    "page_size,table,error,words",
    [
        (12, torch.zeros(2, 3, dtype=torch.int32), ValueError, "page_size must be a power of two, got 12"),
        (8, torch.zeros(3, 3, dtype=torch.int32), ValueError, "block_table describes 3 sequences"),
        (8, torch.zeros(2, 3), TypeError, "block_table must be an int32 tensor"),
        (8, torch.zeros(2, dtype=torch.int32), ValueError, "block_table must have 2 dimensions"),
    ],
)
def test_paged_cache(page_size: int, table: torch.Tensor, error: type[Exception], words: str) -> None:
    pages = torch.zeros(6, page_size, 2, 16)
    with pytest.raises(error, match=words):
        PagedKVCache(pages, pages, table, torch.zeros(2, dtype=torch.int32))


def test_contents() -> None:
    held = cache()
    held.lengths[1] = 33
    with pytest.raises(ValueError, match="from 0 to the 32 keys a sequence can hold, got 4 to 33"):
        decode(query(), held)
    held.lengths[1] = -1
    with pytest.raises(ValueError, match="got -1 to 4"):
        decode(query(), held)
    held = paged()
    held.lengths.fill_(9)
    held.block_table[1, 1] = 8
    with pytest.raises(ValueError, match=r"block_table\[1, 1\] is 8, outside the pool of 8 pages"):
        decode(query(), held)
    held.block_table[1, 1], held.block_table[0, 2] = 5, -1
    decode(query(), held)
    with pytest.raises(ValueError, match=r"block_table\[0, 2\] is -1"):
        held.append(torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16))


@pytest.mark.parametrize(
    "k,v,slots,error,words",
    [
        (torch.zeros(3, 1, 2, 16), torch.zeros(3, 1, 2, 16), None, ValueError, r"k must have shape .* = \(2, T, 2, 16\)"),
        (torch.zeros(2, 1, 2, 16), torch.zeros(2, 2, 2, 16), None, ValueError, "v must have shape"),
        (torch.zeros(2, 1, 2, 16).half(), torch.zeros(2, 1, 2, 16), None, TypeError, "k has dtype torch.float16"),
        (torch.zeros(2, 1, 2, 16), None, None, TypeError, "v must be a torch.Tensor"),
        (torch.zeros(2, 1, 2, 16), torch.zeros(2, 1, 2, 16), torch.zeros(2, 1), TypeError, "slot_mapping must be an int32"),
        (torch.zeros(2, 1, 2, 16), torch.zeros(2, 1, 2, 16), torch.zeros(2).long(), ValueError, r"\(batch, T\) = \(2, 1\)"),
        (torch.zeros(2, 1, 2, 16), torch.zeros(2, 1, 2, 16), torch.full((2, 1), 64), ValueError, "the pool has 64 slots"),
        (torch.zeros(2, 1, 2, 16, requires_grad=True), torch.zeros(2, 1, 2, 16), None, ValueError, r"k requires grad.*detach"),
    ],
)
def test_append_refuses(k: Any, v: Any, slots: Any, error: type[Exception], words: str) -> None:
    held = paged()
    with pytest.raises(error, match=words):
        held.append(k, v, slots)
    assert not held.lengths.any()


@pytest.mark.parametrize("kind", [cache, paged])
def test_tokens_past_the_capacity_are_refused_rather_than_dropped(kind: Any) -> None:
    held = kind()
    held.lengths.copy_(torch.tensor([32, 30]))
    with pytest.raises(ValueError, match="3 new tokens for sequence 0, which holds 32 keys already; the cache has room for 32"):
        held.append(torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 2, 16))
    held.lengths[0] = 29
    with pytest.raises(ValueError, match="3 new tokens for sequence 1, which holds 30 keys already"):
        held.append(torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 2, 16))
    if isinstance(held, PagedKVCache):
        with pytest.raises(ValueError, match="3 new tokens for sequence 1, which holds 30 keys already"):
            held.append(torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 2, 16), torch.arange(6).view(2, 3))
        held.append(torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 2, 16), torch.tensor([[1, 2, 3], [4, 5, -1]]))
        assert held.lengths.tolist() == [32, 32]
