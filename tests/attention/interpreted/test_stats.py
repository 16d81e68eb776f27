"""The Triton kernels of stats in the interpreter, outputs poisoned: every kind of call by formula, hidden NaN, boundaries."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.harness import Call
from tests.attention.interpreted.test_edges import Guards, guards, surrounded
from tests.attention.measured import BOTH, check_packed, check_stats
from warploom import masks
from warploom.attention.arguments import dense_args
from warploom.attention.problem import AttentionProblem
from warploom.attention.stats import FAMILY, stats_backend
from warploom.attention.triton import BACKEND, stats
from warploom.attention.triton.config import Tiling
from warploom.runtime import dispatch

HALF = torch.float16  # the interpreter multiplies bfloat16 as integers
INF, NAN = float("inf"), float("nan")
ONE = {"batch": 1, "heads_q": 2, "heads_kv": 1}

__all__ = ["guards"]


@pytest.fixture
def seed() -> int:
    found = random.randrange(2**31)
    print("seed", found)
    return found


@pytest.fixture(params=[(32, 16), (16, 64)], ids=str)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n = request.param
    monkeypatch.setattr(stats, "stats_tiling", lambda *found: Tiling(m, n, 4, 1))


def of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return warploom.attention(q, k, v, return_stats=BOTH, backend="triton", **options)[-1]


CASES: dict[str, dict[str, Any]] = {
    "full": {"batch": 2},
    "causal, queries that see nothing": {"seqlen_q": 130, "seqlen_k": 70, "keywords": {"causal": True}},
    "window, softcap, sink": {"sink": True, "keywords": {"window": (20, 3), "softcap": 2.0}},
    "group of 7, negative scale": {"heads_q": 7, "keywords": {"scale": -0.3, "window": (None, -5)}},
    "one key, strided": {"seqlen_k": 1, "strided": True, "head_dim_v": 24},
    "wide": {"head_dim": 136, "seqlen_q": 20},
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, seed: int) -> None:
    check_stats(Call(seed, dtype=HALF, **{**ONE, **CASES[name]}), "triton")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["of heads", "alibi", "relative"])
def test_everything_at_once_in_small_tiles(kind: str, seed: int) -> None:
    """Column vectors, a band, a softcap and a bias, in fp32."""
    vectors = torch.randint(0, 40, (2, 1, 2, 70), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    options = {"mask": masks.ColumnMask(vectors[0], vectors[1]), "window": (60, 9), "softcap": 3.0}
    check_stats(Call(seed, seqlen_q=40, seqlen_k=70, **ONE, keywords=options), "triton", kind)


@pytest.mark.usefixtures("small")
def test_bands_in_small_tiles(seed: int) -> None:
    """Tiles that lie whole within a band, that its left edge cuts and that its right edge cuts."""
    for window in ((40, 5), (None, -5), (50, None)):
        check_stats(Call(seed, 1, 100, 90, 1, 1, dtype=HALF, keywords={"window": window}), "triton")


@pytest.mark.usefixtures("small")
def test_keys_past_the_end_have_no_logit() -> None:
    """Loaded as zeros, whose logit would be the largest here."""
    q, k = torch.ones(1, 64, 1, 16), -torch.ones(1, 53, 1, 16)
    assert of(q, k, k).max_logits.item() == -4.0
    cu, used = torch.tensor([0, 64], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    packed = (q[0], k[0], k[0], cu, torch.tensor([0, 53], dtype=torch.int32))
    _, found = warploom.attention_varlen(*packed, seqused_k=used, return_stats=BOTH, backend="triton")
    assert found.max_logits.item() == -4.0 and not found.column_sums[:, 40:].any()


@pytest.mark.parametrize("mask", [masks.Document([100, 37, 63]), masks.GlobalWindow(5, 40, 30)], ids=str)
def test_bounds_of_blocks(mask: masks.Mask, seed: int) -> None:
    """Of a tile as wide as two blocks."""
    call = Call(seed, 1, 200, 200, heads_q=1, heads_kv=1, dtype=HALF, keywords={"mask": mask})
    check_stats(call, "triton")


STARTS_Q, STARTS_K = [0, 5, 5, 44, 60], [0, 9, 13, 63, 93]  # a sequence without queries, and tokens past the last one


@pytest.mark.parametrize("used,tile", [(None, (32, 16)), ([7, 0, 45, 0], (16, 64))])
def test_packed(used: list[int] | None, tile: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "stats_tiling", lambda *found: Tiling(*tile, 4, 1))
    call = Call(seed, 1, 63, 95, 2, 1, 16, keywords={"window": (30, 2), "softcap": 3.0})
    check_packed(call, STARTS_Q, STARTS_K, "triton", "alibi of batches", used)
    vectors = [torch.randint(0, 45, (1, 2, 95), generator=torch.Generator().manual_seed(seed), dtype=torch.int32) for _ in "ab"]
    call.keywords = {"mask": masks.ColumnMask(*vectors)}
    check_packed(call, STARTS_Q, STARTS_K, "triton", "full", used)


def test_either_alone(seed: int) -> None:
    q, k, v, _ = Call(seed, **ONE, dtype=HALF).tensors()
    both = of(q, k, v)
    for name, other in (BOTH, BOTH[::-1]):
        _, _, found = warploom.attention(q, k, v, return_lse=True, return_stats=(name,), backend="triton")
        assert torch.equal(getattr(found, name), getattr(both, name)) and getattr(found, other) is None


def test_hidden_nan_leaks_nowhere(seed: int) -> None:
    """In a key that no query sees, and in a query that sees no key; by a mask, a band, and -inf of a bias."""
    clean = [t for t in Call(seed, seqlen_q=60, seqlen_k=50, dtype=HALF, **ONE).tensors()[:3] if t is not None]
    bias = torch.randn(60, 50)
    bias[:, 30:33] = bias[40] = -INF
    for options, rows, keys in (
        ({"mask": masks.Padding(torch.tensor([30]))}, [], [30, 49]),
        ({"causal": True}, [0, 9], []),
        ({"bias": bias}, [40], [30, 32]),
    ):
        q, k, v = (t.clone() for t in clean)
        q[:, rows], k[:, keys], v[:, keys] = NAN, NAN, NAN
        for a, b in zip(of(q, k, v, **options), of(*clean, **options), strict=True):
            assert b.isfinite().all() and torch.equal(a, b)


def test_a_visible_nan_stays_one(seed: int) -> None:
    q, k, v, _ = Call(seed, dtype=HALF, **ONE).tensors()
    q[0, 30, 1, 3] = NAN
    found = of(q, k, v, causal=True)
    sees = 30 + 53 - 37 + 1
    assert found.max_logits.isnan().tolist() == [[False, True]]
    assert found.column_sums[0, 1, :sees].isnan().all() and not found.column_sums[0, 1, sees:].isnan().any()
    assert not found.column_sums[0, 0].isnan().any()


def test_huge_scores(seed: int) -> None:
    """Probabilities are at most 1, though an lse of 1e6 is rounded by a sixteenth."""
    q, k, v, _ = Call(seed, **ONE).tensors()
    assert (of(q * 1000, k * 1000, v).column_sums <= 37).all()


def test_empty_sequences_and_calls() -> None:
    q, cu = torch.randn(3, 2, 16), torch.zeros(1, dtype=torch.int32)
    found = warploom.attention_varlen(q, q, q, cu, return_stats=BOTH, backend="triton")[-1]
    assert found.max_logits.shape == (0, 2) and not found.column_sums.any()
    found = warploom.attention_varlen(q, q, q, torch.zeros(3, dtype=torch.int32), return_stats=BOTH, backend="triton")[-1]
    assert (found.max_logits == -INF).all() and found.max_logits.shape == (2, 2) and not found.column_sums.any()
    assert not of(q[None, :0], q[None], q[None]).column_sums.any()


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": masks.Document([50, 19])}], ids=str)
def test_nothing_outside_of_a_buffer_is_read_or_written(
    options: dict[str, Any], guards: Guards, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 69, heads, 40, generator=generator).to(HALF) for heads in (2, 1))
    found = of(surrounded(q), surrounded(k), surrounded(k), **options)
    assert len(guards.buffers) >= 3 and guards.intact()
    monkeypatch.undo()
    for a, b in zip(found, of(q, k, k, **options), strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


def test_an_implementation_without_stats_leaves_them_to_triton(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the lse of a call that it ran, as on hopper and ampere."""
    q, k, v, _ = Call(seed, dtype=HALF, **ONE).tensors()
    on_device = replace(AttentionProblem.from_args(dense_args(q, k, v), True), device="cuda")
    assert [stats_backend(on_device, name) for name in ("hopper", "ampere", "reference")] == ["triton", "triton", "reference"]

    class Other(type(BACKEND)):  # type: ignore[misc]
        name = "other"

    monkeypatch.setattr(dispatch, "_families", dict(dispatch._families))
    dispatch.register("attention", Other())
    dispatch.register(FAMILY, BACKEND)
    for with_sink in (False, True):
        check_stats(Call(seed, dtype=HALF, sink=with_sink, **ONE), "other")
