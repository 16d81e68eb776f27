"""batch_invariant on a GPU: ten thousand batches on each implementation, and rows of prompts, chunks and decode."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.invariance import LAYOUTS, check, differs, same
from warploom.runtime import dispatch, invariance

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

MODELS, EACH = 10, 250  # of each model so many sequences, in four layouts
HALVES = (torch.float16, torch.bfloat16)


def skip_without(backend: str) -> None:
    refused = dispatch.find(backend).available()
    if refused is not None:
        pytest.skip(refused)


def options(backend: str) -> dict[str, Any]:
    found = {"device": "cuda", "longest": 700, "head_dims": (64, 128, 256), "layouts": LAYOUTS, "each": EACH}
    return found if backend == "triton" else found | {"page_sizes": (16, 48, 64, 256), "paged_windows": False}


@pytest.mark.parametrize("model", range(MODELS))
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_ten_thousand_batches(backend: str, model: int) -> None:
    skip_without(backend)
    first = random.randrange(2**20) * EACH
    check(range(first, first + EACH), backend, dtype=HALVES[model % 2], **options(backend))


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_these_batches_tell_whether_the_switch_is_heeded(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(backend)
    monkeypatch.setattr(invariance, "asked", lambda value: False)
    found = [differs(range(i * EACH, i * EACH + 10), backend, dtype=torch.bfloat16, **options(backend)) for i in range(8)]
    assert sum(found)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("keywords", [{}, {"window": (300, 0), "softcap": 30.0}], ids=["causal", "window"])
def test_rows_of_a_prompt_of_its_chunks_and_of_decode(keywords: dict[str, Any], head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(random.randrange(2**31))
    seqlen, sequences = 1500, 3
    q = torch.randn(sequences, seqlen, 8, head_dim, device="cuda").to(dtype)
    k, v = (torch.randn(sequences, seqlen, 2, head_dim, device="cuda").to(dtype) for _ in range(2))
    keywords = {"return_lse": True, "backend": "triton", **keywords}
    with warploom.batch_invariant():
        out, lse = warploom.attention(q, k, v, causal=True, **keywords)
        for first, end in ((0, 512), (512, 1401), (1401, 1402)):
            chunk = warploom.attention(q[:, first:end], k[:, :end], v[:, :end], causal=True, **keywords)
            assert same(chunk[0], out[:, first:end]) and same(chunk[1], lse[..., first:end])
        for length in (1, 64, 77, 1024, 1500):
            cache = warploom.PagedKVCache.allocate(sequences, 2048, 2, head_dim, dtype=dtype, device="cuda", page_size=16)
            cache.append(k[:, :length], v[:, :length])
            lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
            for each in (cache, warploom.KVCache(k, v, lengths)):
                last = warploom.decode(q[:, length - 1 : length], each, **keywords)
                assert same(last[0], out[:, length - 1 : length]) and same(last[1], lse[..., length - 1 : length])


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_captured_calls_keep_what_held(backend: str) -> None:
    skip_without(backend)
    q, k, v = (torch.randn(2, 600, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    want = warploom.attention(q, k, v, causal=True, backend=backend, batch_invariant=True)
    graph = torch.cuda.CUDAGraph()
    with warploom.batch_invariant():
        warploom.attention(q, k, v, causal=True, backend=backend)
        with torch.cuda.graph(graph):
            out = warploom.attention(q, k, v, causal=True, backend=backend)
    out.zero_()
    graph.replay()
    assert same(out, want)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_gradients_are_deterministic(backend: str) -> None:
    skip_without(backend)
    leaves = [torch.randn(2, 900, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2)]
    found = [
        torch.autograd.grad(
            warploom.attention(*leaves, causal=True, backend=backend, batch_invariant=True).float().square().sum(), leaves
        )
        for _ in range(3)
    ]
    assert all(same(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["fp8", "alibi", "relative", "key"])
def test_a_token_over_fp8_pages_or_with_a_bias_is_a_row_of_its_prompt(kind: str, dtype: torch.dtype) -> None:
    """And of the prompt's chunks over the same pages."""
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton reads FP8 pages on GPUs of compute capability 8.9 and up")
    torch.manual_seed(random.randrange(2**31))
    length, device = 1500, torch.device("cuda")
    values = torch.randn(1, 8, 1504, device=device)
    bias = {
        "alibi": warploom.bias.ALiBi(torch.rand(8, device=device)),
        "relative": warploom.bias.Relative(torch.randn(8, 401, device=device)),
        "key": warploom.bias.Key(values.masked_fill(torch.rand_like(values) < 0.3, float("-inf"))),
    }.get(kind)
    pages = torch.float8_e4m3fn if kind == "fp8" else dtype
    cache = warploom.PagedKVCache.allocate(1, 1504, 2, 128, dtype=pages, device=device)
    q, k, v = (torch.randn(1, length, heads, 128, device=device).to(dtype) for heads in (8, 2, 2))
    options: dict[str, Any] = {"bias": bias, "return_lse": True, "backend": "triton"}
    cache.append(k, v)

    def chunk(first: int, end: int) -> tuple[Tensor, Tensor]:
        cache.lengths.fill_(end)
        starts = torch.tensor([0, end - first], dtype=torch.int32, device=device)
        return warploom.attention_varlen(q[0, first:end], cache, cu_seqlens_q=starts, causal=True, **options)

    with warploom.batch_invariant():
        out, lse = chunk(0, length)
        for first, end in ((0, 512), (512, 1401)):
            part = chunk(first, end)
            assert same(part[0], out[first:end]) and same(part[1], lse[:, first:end])
        for end in (1, 77, 1401, length):
            cache.lengths.fill_(end)
            token = warploom.decode(q[:, end - 1 : end], cache, **options)
            assert same(token[0][0], out[end - 1 : end]) and same(token[1][0], lse[:, end - 1 : end])
