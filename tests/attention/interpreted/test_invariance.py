"""batch_invariant of the Triton kernels in the interpreter: one set of bits in any batch, and of a row in any chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from tests.attention.invariance import Batches, differs, same
from warploom import masks
from warploom.runtime import invariance

pytestmark = pytest.mark.usefixtures("products_in_order")
HALF = torch.float16  # the interpreter multiplies bfloat16 as integers


@pytest.mark.parametrize("seed", [5, 9])
def test_a_sequence_has_one_set_of_bits(seed: int) -> None:
    batches = Batches(seed, "triton", dtype=HALF, longest=140, head_dims=(16,))
    assert not batches.differences(), str(batches)


def test_these_batches_tell_whether_the_switch_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "asked", lambda value: False)
    assert differs(range(9, 10), "triton", dtype=HALF, longest=140, head_dims=(16,), layouts=("packed",))


@pytest.mark.parametrize("options", [{}, {"window": (100, 0), "softcap": 3.0}], ids=["causal", "window"])
def test_rows_of_a_prompt_of_its_chunks_and_of_decode(options: dict[str, Any]) -> None:
    torch.manual_seed(4)
    q = torch.randn(1, 190, 2, 16).to(HALF)
    k, v = (torch.randn(1, 190, 1, 16).to(HALF) for _ in range(2))
    options = {"return_lse": True, "backend": "triton", **options}
    with warploom.batch_invariant():
        out, lse = warploom.attention(q, k, v, causal=True, **options)
        for first, end in ((0, 70), (70, 190), (131, 132)):
            chunk = warploom.attention(q[:, first:end], k[:, :end], v[:, :end], causal=True, **options)
            assert same(chunk[0], out[:, first:end]) and same(chunk[1], lse[..., first:end])
        longer = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 18), value=float("nan")) for t in (k, v)]
        pages = [t.unflatten(1, (13, 16)).squeeze(0) for t in longer]
        length, table = torch.tensor([190], dtype=torch.int32), torch.arange(13, dtype=torch.int32)[None]
        for cache in (warploom.KVCache(*longer, length), warploom.PagedKVCache(*pages, table, length)):
            last = warploom.decode(q[:, -2:], cache, **options)
            assert same(last[0], out[:, -2:]) and same(last[1], lse[..., -2:])


def test_a_mask_of_columns_with_runs_of_edges_between_others() -> None:
    """Documents, of which some columns are seen by nobody: chunks of rows, whose tiles lie elsewhere, have the same bits."""
    torch.manual_seed(5)
    q = torch.randn(1, 400, 1, 16).to(HALF)
    k, v = (torch.randn(1, 400, 1, 16).to(HALF) for _ in range(2))
    lts = torch.full((1, 1, 400), 400, dtype=torch.int32)
    lts[..., 70:90], lts[..., 200:210], lts[..., 330:] = 0, 0, 350
    k[:, 70:90], v[:, 200:210] = float("nan"), float("nan")
    options: dict[str, Any] = {"return_lse": True, "backend": "triton", "batch_invariant": True}
    want = warploom.attention(q, k, v, mask=masks.ColumnMask(lts), **options)
    starts = torch.tensor([0, 400], dtype=torch.int32)
    packed = warploom.attention_varlen(q[0], k[0], v[0], starts, mask=masks.ColumnMask(lts), **options)
    assert same(packed[0], want[0][0]) and same(packed[1], want[1][0])
    exact, _ = warploom.attention(q, k, v, mask=masks.ColumnMask(lts), backend="reference", return_lse=True)
    torch.testing.assert_close(want[0], exact, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("kind", ["fp8", "alibi", "relative", "key"])
def test_a_token_over_fp8_pages_or_with_a_bias_is_a_row_of_its_prompt(kind: str) -> None:
    """And of the prompt's chunks over the same pages."""
    torch.manual_seed(6)
    length, values = 150, torch.randn(1, 2, 160)
    bias = {
        "alibi": warploom.bias.ALiBi(torch.rand(2)),
        "relative": warploom.bias.Relative(torch.randn(2, 41)),
        "key": warploom.bias.Key(values.masked_fill(torch.rand(1, 2, 160) < 0.3, float("-inf"))),
    }.get(kind)
    cache = warploom.PagedKVCache.allocate(1, 160, 1, 16, dtype=torch.float8_e4m3fn if kind == "fp8" else HALF)
    q, k, v = (torch.randn(1, length, heads, 16).to(HALF) for heads in (2, 1, 1))
    options: dict[str, Any] = {"bias": bias, "return_lse": True, "backend": "triton"}
    cache.append(k, v)

    def chunk(first: int, end: int) -> tuple[Any, Any]:
        cache.lengths.fill_(end)
        starts = torch.tensor([0, end - first], dtype=torch.int32)
        return warploom.attention_varlen(q[0, first:end], cache, cu_seqlens_q=starts, causal=True, **options)

    with warploom.batch_invariant():
        out, lse = chunk(0, length)
        for first, end in ((0, 70), (70, 131)):
            part = chunk(first, end)
            assert same(part[0], out[first:end]) and same(part[1], lse[:, first:end])
        for end in (131, length):
            cache.lengths.fill_(end)
            token = warploom.decode(q[:, end - 1 : end], cache, **options)
            assert same(token[0][0], out[end - 1 : end]) and same(token[1][0], lse[:, end - 1 : end])
    exact = warploom.decode(q[:, -1:], cache, **options | {"backend": "reference"})[0]
    torch.testing.assert_close(token[0], exact, atol=3e-3, rtol=3e-3)
