"""The short way of a decode call, with the CPU's implementation in the place of a GPU's: which calls go by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from warploom.decode import api, cpu, triton
from warploom.decode.api import decode
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.decode.prefix import SharedPrefix
from warploom.decode.problem import DecodeArgs
from warploom.kernels import rotation
from warploom.kernels.e4m3 import E4M3
from warploom.runtime import dispatch

Short = list[tuple[int, ...]]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Short:
    """Shapes of q of calls that went by it."""
    found: Short = []

    def bind(args: DecodeArgs) -> Any:
        def run(q: Tensor, sink: Tensor | None, return_lse: bool, prefix: Tensor | None = None) -> tuple[Tensor, Tensor]:
            found.append(tuple(q.shape))
            return cpu.BACKEND.forward(args._replace(q=q, sink=sink, prefix=prefix))

        return run

    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    for name, value in {"refusal": lambda *_, **__: None, "forward": cpu.BACKEND.forward, "bind": bind}.items():
        monkeypatch.setattr(triton.BACKEND, name, value)
    dispatch.strict(False)
    return found


def drawn() -> tuple[Tensor, KVCache]:
    cache = KVCache.allocate(2, 16, 2, 8, dtype=torch.float32)
    cache.append(torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8))
    return torch.randn(2, 1, 4, 8), cache


def test_the_second_call_of_a_kind_goes_by_it(short: Short) -> None:
    q, cache = drawn()
    want = decode(q, cache, backend="reference")
    for count in range(3):
        torch.testing.assert_close(decode(q, cache, backend="triton"), want)
        assert len(short) == count


def test_calls_with_a_prefix_go_by_it_too(short: Short) -> None:
    """What was found may be another object in every step; a number is one of the call's own."""
    q, cache = drawn()
    pages = PagedKVCache(cache.k, cache.v, torch.tensor([[0], [0]], dtype=torch.int32), torch.tensor([5, 9], dtype=torch.int32))
    want = decode(q, pages, backend="reference")
    for count in range(3):
        torch.testing.assert_close(decode(q, pages, backend="triton", prefix=pages.shared_prefix()), want)
        assert len(short) == count
    short.clear()
    for number in (3, 4):
        for count in range(2):
            torch.testing.assert_close(decode(q, pages, backend="triton", prefix=number), want)
            assert len(short) == (number - 3) + count
    with pytest.raises(ValueError, match="prefix was found in a batch of 3"):
        decode(q, pages, backend="triton", prefix=SharedPrefix(torch.zeros(4, dtype=torch.int32)))
    wide = SharedPrefix(torch.zeros(6, dtype=torch.int32)[::2])
    short.clear()
    for _ in range(3):  # of a copy no launcher is kept
        torch.testing.assert_close(decode(q, pages, backend="triton", prefix=wide), want)
    assert not short


@pytest.mark.parametrize("granularity", ["token", "head"])
@pytest.mark.parametrize("seed", [3, None])
def test_calls_over_fp8_go_by_it_too(short: Short, granularity: Any, seed: int | None) -> None:
    """Each query is rotated, and scales are read, at the call."""
    cache = KVCache.allocate(2, 16, 2, 8, dtype=E4M3, granularity=granularity, hadamard_seed=seed)
    cache.append(torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8))
    assert cache.v_scale is not None
    for count in range(4):
        q = torch.randn(2, 1, 4, 8)
        want = decode(q, replace(cache), backend="cpu")
        assert torch.equal(decode(q, cache, backend="triton"), want)
        assert len(short) == count
        cache.v_scale.mul_(2)
    other = replace(cache, v_scale=cache.v_scale / 2)
    assert torch.equal(decode(q, other, backend="triton"), want) and len(short) == 3
    assert torch.equal(decode(q.half(), cache, backend="triton"), decode(q.half(), cache, backend="cpu")) and len(short) == 3
    turned = torch.randn(2, 1, 8, 4).mT
    for _ in range(3):  # of a copy no launcher is kept
        assert torch.equal(decode(turned, cache, backend="triton"), decode(turned, replace(cache), backend="cpu"))
    assert len(short) == 3


def test_a_query_that_is_not_rotated_so_takes_the_long_way(short: Short, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at an odd address, say; and none goes the short way where nothing quicker rotates."""
    fits: list[bool] = []

    def bound(x: Tensor, seed: int) -> Any:
        return lambda x: rotation.rotated_like(x, seed) if fits.pop() else None

    monkeypatch.setattr(rotation, "bound", bound)
    cache = KVCache.allocate(2, 16, 2, 8, dtype=E4M3)
    cache.append(torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8))
    q = torch.randn(2, 1, 4, 8)
    want = decode(q, replace(cache), backend="cpu")
    for fit, count in ((None, 0), (True, 1), (False, 1), (True, 2)):
        fits[:] = [] if fit is None else [fit]
        assert torch.equal(decode(q, cache, backend="triton"), want) and len(short) == count
    monkeypatch.setattr(rotation, "bound", lambda x, seed: None)
    other = replace(cache)
    for _ in range(3):
        assert torch.equal(decode(q, other, backend="triton"), want)
    assert len(short) == 2 and not other.ready


def test_a_query_elsewhere_is_refused_as_before(short: Short) -> None:
    """Of the same shape: its address would be read on the cache's device."""
    q, cache = drawn()
    for _ in range(2):
        decode(q, cache, backend="triton")
    with pytest.raises(ValueError, match="q is on"):
        decode(q.to("meta"), cache, backend="triton")
    assert len(short) == 1


def test_checked_contents_are_looked_at_every_time(short: Short, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = drawn()
    for _ in range(2):
        decode(q, cache, backend="triton")
    cache.lengths.fill_(17)
    monkeypatch.setenv("WARPLOOM_CHECK", "1")
    with pytest.raises(ValueError, match="lengths must be from 0 to the 16 keys"):
        decode(q, cache, backend="triton")


def test_numbers_that_never_come_again_do_not_pile_up(short: Short) -> None:
    """A scale that a program draws anew for every call, say."""
    q, cache = drawn()
    for n in range(3 * api.MOST_READY):
        decode(q, cache, scale=1.0 + n, backend="triton")
    assert len(cache.ready) <= api.MOST_READY and not short
