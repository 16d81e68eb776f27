"""A tree of drafts: each token as plain decode of its own path gives it, what is refused, what stays in bounds, acceptance."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.decode.cases import BROAD, DEEP
from tests.decode.harness import Case, run
from tests.decode.paths import WINDOWS, check_paths, random_trees
from warploom import KVCache, PagedKVCache, decode

BACKENDS = ["reference", "cpu"]


def drawn(**changes: Any) -> Case:
    return replace(Case(random.randrange(2**31), [40, 13, 700], queries=7, tree=[BROAD, DEEP, BROAD]), **changes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_gets_what_plain_decode_of_its_path_gives(backend: str) -> None:
    c = drawn()
    out, lse = run(c, backend)
    for b, (k, v) in enumerate(c.sequences()):
        base, kin = len(k) - 7, c.kin(b)
        assert kin is not None
        for t in range(7):
            kept = torch.cat([torch.arange(base), base + kin[t].nonzero().flatten()])
            alone = KVCache(k[kept][None], v[kept][None], torch.tensor([len(kept)], dtype=torch.int32))
            want, want_lse = decode(c.q()[b : b + 1, t : t + 1], alone, return_lse=True, backend="reference")
            assert torch.allclose(out[b, t], want[0, 0], rtol=1e-5, atol=1e-6), (c, b, t)
            assert torch.allclose(lse[b, :, t], want_lse[0, :, 0], rtol=1e-5, atol=1e-6), (c, b, t)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_shows_what_plain_decode_of_a_path_sees(backend: str, page_size: int | None) -> None:
    for window in WINDOWS:
        check_paths(random_trees(page_size, window), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_is_plain_decode(backend: str) -> None:
    c = drawn(tree=[[t - 1 for t in range(7)]], keywords={"window": (20, 0)})
    for chain, plain in zip(run(c, backend), run(replace(c, tree=None), backend), strict=True):
        assert torch.equal(chain, plain), c


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_do_not_depend_on_neighbours_or_layout(backend: str, page_size: int | None) -> None:
    seed = random.randrange(2**31)
    lone = run(Case(seed, [700], queries=7, tree=[BROAD]), backend)
    crowd = run(Case(seed, [700, 7, 0], queries=7, tree=[BROAD, DEEP, DEEP], capacity=2048, page_size=page_size), backend)
    for a, b in zip(lone, crowd, strict=True):
        assert torch.equal(a[0], b[0]), seed


def test_a_sibling_of_nan_keys_sees_none_of_them() -> None:
    """The reference is exact per element."""
    c = drawn(lengths=[40], tree=[BROAD])
    cache = c.cache()
    cache.k[0, 33 + 1], cache.v[0, 33 + 1] = float("nan"), float("inf")
    out = decode(c.q(), cache, tree=c.parents(), backend="reference")
    below = torch.tensor([1 in (t, BROAD[t]) for t in range(7)])
    assert out[0, below].isnan().all() and out[0, ~below].isfinite().all(), c


@pytest.mark.parametrize(
    "tree,error,words",
    [
        ([0], TypeError, "tree must be an int32 tensor, got list"),
        (torch.zeros(7), TypeError, "tree must be an int32 tensor"),
        (torch.full((7,), -1), ValueError, "tree must have 2 dimensions"),
        (torch.full((2, 7), -1), ValueError, r"tree must have shape \(batch or 1, T\) = \(3 or 1, 7\), got \(2, 7\)"),
        (torch.full((1, 6), -1), ValueError, r"tree must have shape .* got \(1, 6\)"),
        (torch.tensor([[-1, 1, 0, 0, 0, 0, 0]]), ValueError, r"tree\[0, 1\] is 1; a token's parent is an earlier one"),
        (torch.tensor([[-1] * 7] * 2 + [[-1, 0, 3, 2, 0, 0, 0]]), ValueError, r"tree\[2, 2\] is 3"),
        (torch.tensor([[-1, -2, 0, 0, 0, 0, 0]]), ValueError, r"tree\[0, 1\] is -2.*-1 for a root"),
        (torch.tensor([[-1, 0, 0, 0, 0, 0, 2**40]]), ValueError, "tree must hold values that fit int32"),
    ],
)
def test_refusals(tree: Any, error: type[Exception], words: str) -> None:
    c = drawn()
    with pytest.raises(error, match=words):
        decode(c.q(), c.cache(), tree=tree)


def test_64_queries_and_no_more() -> None:
    cache = KVCache.allocate(1, 80, 2, 16, dtype=torch.float32)
    cache.append(torch.randn(1, 70, 2, 16), torch.randn(1, 70, 2, 16))
    roots = torch.full((1, 65), -1)
    assert decode(torch.randn(1, 64, 4, 16), cache, tree=roots[:, :64]).isfinite().all()
    with pytest.raises(ValueError, match="q has 65 queries a sequence; under a tree decode takes 1 to 64"):
        decode(torch.randn(1, 65, 4, 16), cache, tree=roots)
    with pytest.raises(ValueError, match="decode takes 1 to 16"):
        decode(torch.randn(1, 17, 4, 16), cache)


def test_any_integers_and_strides() -> None:
    c = drawn()
    want = run(c, "cpu")[0]
    parents = c.parents()
    assert parents is not None
    for tree in (parents.long(), parents.to(torch.int8), parents.t().contiguous().t(), parents.repeat_interleave(2, 1)[:, ::2]):
        assert torch.equal(decode(c.q(), c.cache(), tree=tree, backend="cpu"), want), c


def test_compiled() -> None:
    c = drawn()
    cache, tree = c.cache(poison=0.0), c.parents()

    def step(q: torch.Tensor, cache: KVCache, tree: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        out = decode(q, cache, tree=tree)
        cache.accept(path, 7)
        return out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    twin = KVCache(cache.k.clone(), cache.v.clone(), cache.lengths.clone())
    path = torch.tensor([[0, 2, 5], [0, 3, -1], [-1, -1, -1]])
    assert torch.equal(compiled(c.q(), cache, tree, path), step(c.q(), twin, tree, path)), c
    for a, b in ((cache.k, twin.k), (cache.v, twin.v), (cache.lengths, twin.lengths)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("page_size", [None, 4])
def test_accepted_tokens_move_together(page_size: int | None) -> None:
    c = drawn(page_size=page_size, lengths=[40, 13, 9])
    cache = c.cache()
    cache.accept(torch.tensor([[0, 2, 5], [1, 4, -1], [-1, -1, -1]], dtype=torch.int32), 7)
    assert cache.lengths.tolist() == [36, 8, 2]
    kept = [[*range(33), 33, 35, 38], [*range(6), 7, 10], [0, 1]]
    q = torch.randn(3, 1, 4, 16, generator=torch.Generator().manual_seed(c.seed))
    for b, (k, v) in enumerate(c.sequences()):
        alone = KVCache(k[kept[b]][None], v[kept[b]][None], cache.lengths[b : b + 1])
        assert torch.equal(decode(q, cache)[b], decode(q[b : b + 1], alone)[0]), (c, b)


def test_accepting_all_and_nothing() -> None:
    c = drawn(lengths=[40, 13, 9])
    cache, before = c.cache(), c.cache()
    cache.accept(torch.arange(7).expand(3, -1), 7)
    assert torch.equal(cache.lengths, before.lengths)
    assert torch.equal(cache.k.nan_to_num(), before.k.nan_to_num())
    cache.accept(torch.empty(3, 0, dtype=torch.int64), 7)
    assert cache.lengths.tolist() == [33, 6, 2]
    for nothing in (KVCache.allocate(0, 8, 2, 16), PagedKVCache.allocate(0, 8, 2, 16)):
        nothing.accept(torch.empty(0, 2, dtype=torch.int64), 3)


@pytest.mark.parametrize(
    "path,drafted,error,words",
    [
        (None, 7, TypeError, "path must be an integer tensor"),
        ([[0]], 7, TypeError, "path must be an int32 tensor, got list"),
        (torch.zeros(2, 3, dtype=torch.int32), 7, ValueError, r"path must have shape \(batch, n\) = \(3, at most"),
        (torch.zeros(3, 8, dtype=torch.int32), 7, ValueError, "at most drafted = 7"),
        (torch.tensor([[0, 7]] * 3), 7, ValueError, r"path\[0, 1\] is 7; it takes tokens from 0 to drafted - 1 = 6"),
        (torch.tensor([[0, 1], [-1, 2], [0, 1]]), 7, ValueError, r"path\[1, 1\] is 2"),
        (torch.tensor([[0, -2]] * 3), 7, ValueError, r"path\[0, 1\] is -2"),
        (torch.tensor([[0, 1]] * 3), 14, ValueError, "drafted is 14, but a sequence of the cache holds 13 keys"),
        (torch.tensor([[0, 1]] * 3), -1, ValueError, "drafted must be at least 0"),
        (torch.tensor([[0, 1]] * 3), 1.5, TypeError, "drafted must be an int"),
    ],
)
def test_accept_refuses(path: Any, drafted: Any, error: type[Exception], words: str) -> None:
    c = drawn()
    cache = c.cache(poison=0.0)
    before = cache.k.clone(), cache.lengths.clone()
    with pytest.raises(error, match=words):
        cache.accept(path, drafted)
    assert torch.equal(cache.k, before[0]) and torch.equal(cache.lengths, before[1])
