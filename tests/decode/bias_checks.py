"""What decode promises of biases, for every backend that a test names."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.decode import biases
from tests.decode.harness import Case, run
from tests.decode.paths import check_paths, random_trees
from warploom import KVCache, decode
from warploom.bias import ALiBi, Key, Relative

INF = float("inf")


def check_nan_behind_hidden(backend: str, device: str = "cpu") -> None:
    """Keys that Key hides from all heads, or a table from all distances past some, hold NaN; masked biases are NaN."""
    c = Case(random.randrange(2**31), [40, 9], queries=2, device=device)
    q, clean, dirty = c.q(), c.cache(0.0), c.cache()
    assert isinstance(clean, KVCache) and isinstance(dirty, KVCache)
    values = torch.randn(2, 1, 40, device=device)
    values[:, :, 3:11] = -INF
    values[1] = -INF  # of the second sequence all
    clean.k[:, 3:11] = clean.v[:, 3:11] = 0.0
    dirty.k[:, 3:11], dirty.v[:, 3:11], dirty.v[1] = torch.nan, torch.nan, torch.inf
    want = decode(q, clean, bias=Key(values), return_lse=True, backend=backend)
    values[0, :, 40:], values[1, :, 9:] = torch.nan, torch.nan
    got = decode(q, dirty, bias=Key(values), return_lse=True, backend=backend)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b), c
    assert not got[0][1].any() and bool((got[1][1] == -INF).all()) and bool(got[0][0].any()), c

    table = torch.zeros(1, 9, device=device)
    table[:, -1] = -INF  # of distances of 8 and more
    dirty = c.cache()
    dirty.k[0, :31], dirty.v[0, :31] = torch.nan, torch.nan
    got = decode(q, dirty, bias=Relative(table, bidirectional=False), return_lse=True, backend=backend)
    want = decode(q, c.cache(), window=(7, 0), return_lse=True, backend="reference")
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5), c


def check_a_visible_nan(backend: str) -> None:
    """NaN of a bias reaches the rows that see it, and those alone."""
    c = Case(random.randrange(2**31), [40, 9], queries=2)
    values = torch.zeros(2, 4, 40)
    values[0, 1, 39] = torch.nan  # which the last query alone sees
    out = decode(c.q(), c.cache(), bias=Key(values), backend=backend)
    bad = out.isnan().any(-1)
    assert bad.nonzero().tolist() == [[0, 1, 1]], (c, bad.nonzero())


def check_the_lowest_number(backend: str) -> None:
    """It is no -inf: where all keys have it, all count alike."""
    c = Case(random.randrange(2**31), [9], queries=1)
    cache = c.cache()
    assert isinstance(cache, KVCache)
    want = cache.v.mean(1, keepdim=True).repeat_interleave(2, 2)
    for dtype in (torch.float32, torch.float64):  # whose lowest one fp32 does not hold
        values = torch.full((1, 1, 9), torch.finfo(dtype).min, dtype=dtype)
        out, lse = decode(c.q(), cache, bias=Key(values), return_lse=True, backend=backend)
        assert torch.allclose(out, want, rtol=1e-5, atol=1e-6) and bool(lse.isfinite().all()), c


def check_paths_under_biases(backend: str) -> None:
    """Every token of a tree gets what plain decode of its path gives it, drafts' keys by their places."""
    c = replace(random_trees(16, (40, 0), queries=5), heads_q=2, lengths=[37, 6])
    for bias in (ALiBi(torch.tensor([0.3, -0.2])), Relative(torch.randn(2, 9)), Key(torch.randn(1, 2, 48))):
        check_paths(replace(c, keywords={"window": (40, 0), "bias": bias}), backend)


def check_bits(backend: str, length: int, shape: dict[str, Any]) -> None:
    """A sequence's bits do not depend on its neighbours, the batch or the layout."""
    seed = random.randrange(2**31)
    for kind in ("alibi of sequences", "relative", "key of heads, hides"):
        lone = _first(backend, seed, [length], kind, shape)
        for others, capacity, page_size in (([], 2 * length, None), ([5, length // 2, 0], 0, 16), ([1], 0, 1)):
            crowd = _first(backend, seed, [length, *others], kind, shape, capacity, page_size)
            for a, b in zip(lone, crowd, strict=True):
                assert torch.equal(a, b), (seed, kind, others, capacity, page_size)


def _first(
    backend: str, seed: int, lengths: list[int], kind: str, shape: dict[str, Any], capacity: int = 0,
    page_size: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out and lse of the first sequence, whose bias is the same whatever the others are."""
    c = Case(seed, lengths, capacity=capacity, page_size=page_size, **shape)
    room = -(-max(capacity, *lengths) // (page_size or 1)) * (page_size or 1)
    numbers = biases.drawn(kind, (1, c.heads_q, lengths[0]), seed, c.device)
    if kind.startswith("key"):
        numbers = torch.nn.functional.pad(numbers, (0, room - lengths[0]), value=float("nan"))
    elif kind.startswith("alibi"):
        numbers = torch.cat([numbers, numbers.new_ones(len(lengths) - 1, c.heads_q)])
    bias = biases.KINDS[kind].build(numbers.to(biases.KINDS[kind].dtype))
    out, lse = run(replace(c, keywords={"bias": bias}), backend)
    return out[0], lse[0]
