"""prefix= on the CPU: what a table shows, promises that do not hold, results that it does not change."""

from __future__ import annotations

import pickle
import random
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.decode.prefixes import Alike
from warploom.decode.api import decode
from warploom.decode.arguments import decode_args
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.decode.hopper import BACKEND as HOPPER
from warploom.decode.prefix import SharedPrefix
from warploom.decode.problem import DecodeProblem


def drawn(**changes: Any) -> Alike:
    return replace(Alike(random.randrange(2**31), [60, 40, 50, 9], [0, 32, 32, 8], page_size=8), **changes)


@pytest.mark.parametrize(
    "table,keys",
    [
        ([[1, 2, 3], [1, 2, 4], [1, 5, 4], [1, 5, 4]], [0, 8, 4, 12, 12]),
        ([[1, 2, 3], [2, 2, 3]], [0, 0, 0]),
        ([[3], [3], [4]], [0, 4, 0, 4]),
        ([[1, 2]], [0, 0]),
        ([[], []], [0, 0, 0]),
        ([], [0]),
    ],
)
def test_what_a_table_shows(table: list[list[int]], keys: list[int]) -> None:
    """Equal leading columns of neighbours, four keys each, whatever is held."""
    rows = torch.tensor(table, dtype=torch.int32).view(len(table), -1 if table and table[0] else 0)
    pages = torch.zeros(6, 4, 1, 16)
    found = PagedKVCache(pages, pages, rows, torch.zeros(len(table), dtype=torch.int32)).shared_prefix()
    assert found.keys.tolist() == keys and found.keys.dtype == torch.int32
    assert isinstance(found, warploom.SharedPrefix)
    assert pickle.loads(pickle.dumps(found)).keys.tolist() == keys
    with pytest.raises(FrozenInstanceError):
        found.keys = found.keys  # type: ignore[misc]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("page_size", [None, 8])
def test_it_changes_no_result(backend: str, page_size: int | None) -> None:
    c = drawn(page_size=page_size, keywords={"window": (None, -2)}, queries=2)
    cache = c.cache()
    want = c.run(None, backend, cache)
    for prefix in (c.hint(cache), 8, 0):
        for a, b in zip(want, c.run(prefix, backend, cache), strict=True):
            assert torch.equal(a, b), (prefix, c)


def test_a_promise_that_does_not_hold() -> None:
    paged, rows = drawn(), drawn(page_size=None)
    with pytest.raises(ValueError, match="sequences 0 and 1 share 33 keys, but they begin with other pages"):
        paged.run(33, "cpu")
    paged.run(8, "cpu")
    with pytest.raises(ValueError, match="sequences 0 and 1 share 33 keys, but they begin with other keys"):
        rows.run(33, "cpu")
    # Three sequences begin with 32 like keys; the fourth has 9 in all, of which 8 are theirs.
    with pytest.raises(ValueError, match="sequences 2 and 3 share 9 keys"):
        rows.run(32, "cpu")
    rows.run(8, "cpu")
    cache = paged.cache()
    assert isinstance(cache, PagedKVCache)
    found = cache.shared_prefix()
    cache.block_table[2, 1] = cache.block_table[0, 5]
    with pytest.raises(ValueError, match=r"sequences 1 and 2 share 32 keys.*ask cache.shared_prefix\(\) again"):
        paged.run(found, "cpu", cache)
    # Pages behind a sequence's last key are nobody's.
    cache = paged.cache()
    assert isinstance(cache, PagedKVCache)
    found = cache.shared_prefix()
    cache.block_table[3, 2:] = 2**30
    paged.run(found, "cpu", cache)


@pytest.mark.parametrize(
    "prefix,error,words",
    [
        (-1, ValueError, "prefix must be at least 0, got -1"),
        (2.5, TypeError, "prefix must be an int"),
        ("8", TypeError, "prefix must be an int"),
        (torch.zeros(5), TypeError, r"what cache.shared_prefix\(\) returns, or a number of keys, not a tensor"),
        (SharedPrefix(torch.zeros(4, dtype=torch.int32)), ValueError, "found in a batch of 3, but the cache holds 4 sequences"),
        (
            SharedPrefix(torch.zeros(5, dtype=torch.int32, device="meta")),
            ValueError,
            "prefix is on meta but the cache is on cpu",
        ),
        (
            SharedPrefix(torch.tensor([0, 8, 0, 0, 0], dtype=torch.int32)),
            ValueError,
            "the last entry of prefix.keys is 0, but must be the largest of the others, 8",
        ),
    ],
)
def test_refused_in_words(prefix: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        drawn().run(prefix, "cpu")


def test_a_table_is_of_pages() -> None:
    with pytest.raises(TypeError, match="which is of pages; of a KVCache give the number of keys"):
        drawn(page_size=None).run(SharedPrefix(torch.zeros(5, dtype=torch.int32)), "cpu")


def test_hopper_refuses_in_words() -> None:
    p = DecodeProblem("cuda", torch.bfloat16, 2, 1, 512, 32, 8, 128, 128)
    assert "shared prefixes" in (HOPPER.supports(replace(p, prefix=True)) or "")
    assert "shared prefixes" not in (HOPPER.supports(p) or "")


def test_compiled() -> None:
    c = drawn()
    cache = c.cache()

    def step(q: Tensor, cache: PagedKVCache) -> Tensor:
        found = cache.shared_prefix()
        return decode(q, cache, prefix=found) + decode(q, cache, prefix=8)

    assert isinstance(cache, PagedKVCache)
    want = step(c.q(), cache)
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(c.q(), cache), want)


def test_opcheck() -> None:
    c = drawn()
    cache = c.cache()
    assert not isinstance(cache, KVCache)
    for prefix in (cache.shared_prefix(), 8):
        args = decode_args(c.q(), cache, None, 0.0, None, None, None, None, prefix)
        torch.library.opcheck(torch.ops.warploom.decode.default, tuple(args._replace(backend="cpu")))
