"""The Ampere forward, here on whatever GPU runs it (Hopper too): the criterion over the grid, bits, views, graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.cases import CASES, case
from tests.attention.harness import Call, check
from warploom.attention.ampere import BACKEND

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_gpu_memory"),
    pytest.mark.skipif(BACKEND.available() is not None, reason=f"the ampere backend cannot run: {BACKEND.available()}"),
]

HALVES = [torch.float16, torch.bfloat16]
NAN = float("nan")
DENSE = [name for name in CASES if "dropout" not in name and CASES[name].get("head_dim", 16) <= 128]
BANDS = {"full": {}, "causal": {"causal": True}, "window": {"window": (70, 30)}}


def seed() -> int:
    return random.randrange(2**31)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_case(name: str, dtype: torch.dtype) -> None:
    check(case(name, seed(), dtype=dtype, device="cuda"), "ampere")


@pytest.mark.parametrize("seqlen", [1, 17, 113, 127, 129, 1023])
@pytest.mark.parametrize("band", BANDS)
def test_odd_lengths(seqlen: int, band: str) -> None:
    for seqlen_k in (seqlen, 300):
        shape = {"seqlen_q": seqlen, "seqlen_k": seqlen_k, "head_dim": 128, "batch": 1}
        check(Call(seed(), device="cuda", dtype=torch.bfloat16, keywords=BANDS[band], **shape), "ampere")


@pytest.mark.parametrize("dims", [(24, 24), (64, 64), (88, 88), (104, 40), (128, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(dims: tuple[int, int], causal: bool) -> None:
    shape = {"seqlen_q": 333, "seqlen_k": 417, "head_dim": dims[0], "head_dim_v": dims[1], "dtype": torch.bfloat16}
    check(Call(seed(), device="cuda", keywords={"causal": causal}, **shape), "ampere")


def drawn(batch: int, seqlen: int, heads: int, kv: int, dim: int) -> list[Tensor]:
    return [torch.randn(batch, seqlen, h, dim, device="cuda", dtype=torch.bfloat16) for h in (heads, kv, kv)]


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return warploom.attention(q, k, v, return_lse=True, backend="ampere", **options)  # type: ignore[return-value]


@pytest.mark.parametrize("band", BANDS)
def test_large_scores(band: str) -> None:
    """Rows that one key dominates, whose maxima grow late."""
    q, k, v = drawn(1, 2000, 4, 2, 128)
    q, k = 4 * q, k * torch.linspace(0.1, 2, 2000, device="cuda", dtype=k.dtype)[:, None, None]
    out, lse = attend(q, k, v, **BANDS[band])
    tensors = (t.double() for t in (q, k, v))
    want, want_lse = warploom.attention(*tensors, return_lse=True, backend="reference", **BANDS[band])
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse.double(), rtol=1e-3, atol=1e-3)


def test_views_are_read_in_place() -> None:
    """Transposed, packed QKV, expanded heads and batch, and what 16-byte copies cannot read, which is cloned."""
    q, k, v = drawn(2, 300, 4, 4, 128)
    want = attend(q, k, v, causal=True)
    packed = torch.stack([q, k, v], dim=2).unbind(2)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    odd = [torch.cat([t[..., :1], t], dim=-1)[..., 1:] for t in (q, k, v)]
    for views in (packed, heads_first, odd):
        for a, b in zip(attend(*views, causal=True), want, strict=True):
            assert torch.equal(a, b)
    expanded = [t[:1, :, :1].expand(2, 300, 4, 128) for t in (k, v)]
    for a, b in zip(attend(q, *expanded), attend(q, *(t.contiguous() for t in expanded)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("window", [(10, 0), (10, -5), (None, 0)])
def test_hidden_nan_changes_nothing(window: tuple[int | None, int]) -> None:
    """NaN in keys and values that no query sees, beside ones that some do."""
    q, k, v = drawn(1, 400, 2, 2, 128)
    q = q[:, :100]
    left, right = window
    first = 0 if left is None else 300 - left
    want = attend(q, k, v, window=window)
    for t in (k, v):
        t[:, :first] = NAN
        t[:, 400 + right :] = NAN
    for a, b in zip(attend(q, k, v, window=window), want, strict=True):
        assert torch.equal(a, b)


def test_the_same_bits_every_time_and_in_a_graph() -> None:
    q, k, v = drawn(2, 1500, 8, 2, 128)
    want = attend(q, k, v, causal=True)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(attend(q, k, v, causal=True), want, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, v, causal=True)
    for t in captured:
        t.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))


def test_offsets_past_32_bits() -> None:
    """The last head of keys and values that take more than 2^31 elements."""
    q = torch.randn(1, 130, 1, 128, device="cuda", dtype=torch.bfloat16)
    wide = torch.empty(1, 300, 1, 1 << 23, device="cuda", dtype=torch.bfloat16)
    k, v = (wide[..., start : start + 128] for start in (0, 1024))
    for t in (k, v):
        t.copy_(torch.randn(k.shape, device="cuda"))
    for a, b in zip(attend(q, k, v), attend(q, k.contiguous(), v.contiguous()), strict=True):
        assert torch.equal(a, b)
