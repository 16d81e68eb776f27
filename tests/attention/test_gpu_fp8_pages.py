"""attention_varlen() over FP8 pages on a CUDA device: every case, needles in 64k keys, graphs, compile, bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.fp8_pages import CASES, Fp8Pages
from tests.attention.test_fp8_pages import haystack
from warploom import PagedKVCache, attention, attention_varlen, decode, explain
from warploom.attention import hopper
from warploom.fp8 import quantize
from warploom.kernels.e4m3 import E4M3, rotate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def cache_of(k: Tensor, v: Tensor, granularity: Any = "token", page_size: int = 16) -> PagedKVCache:
    """A cache of FP8 that k and v (batch, keys, heads, dim) were appended to."""
    options: dict[str, Any] = {"dtype": E4M3, "granularity": granularity, "device": k.device, "head_dim_v": v.shape[3]}
    cache = PagedKVCache.allocate(*k.shape, page_size=page_size, **options)
    if granularity != "token":
        assert cache.k_scale is not None and cache.v_scale is not None
        cache.k_scale.fill_(k.float().norm(dim=-1).max().item() / 448)  # no rotated number is larger than a key's norm
        cache.v_scale.fill_(v.float().abs().max().item() / 448)
    cache.append(k, v)
    return cache


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (72, 40)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, dims: tuple[int, int]) -> None:
    drawing = random.randrange(2**31)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        case = {**CASES[name], "head_dim": dims[0], "head_dim_v": dims[1], "dtype": dtype, "device": "cuda"}
        Fp8Pages(drawing, **case).check("triton")


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("granularity", ["token", "head", "tensor"])
def test_chunks_are_what_decode_gives(granularity: str, page_size: int) -> None:
    k, v, q = drawn(3, 700, 2, 128), drawn(3, 700, 2, 128), drawn(3, 70, 8, 128)
    cache = cache_of(k, v, granularity, page_size)
    out = attention_varlen(q.flatten(0, 1), cache, cu_seqlens_q=ints(0, 70, 140, 210), causal=True).unflatten(0, (3, 70))
    want = decode(q[:, -16:], cache)
    torch.testing.assert_close(out[:, -16:].float(), want.float(), atol=4e-3, rtol=2e-2)


@pytest.mark.parametrize("granularity", ["token", "head", "tensor"])
def test_needles_in_65536_keys_are_found_over_fp8_pages(granularity: str) -> None:
    drawing = random.randrange(2**31)
    q, k, v, kinds = (t.cuda() for t in haystack(drawing, 65536, needles=16, dim=128))
    q, k, v = (t.bfloat16() for t in (q[:, None], k[None, :, None], v[None, :, None]))
    half = PagedKVCache.allocate(1, 65536, 1, 128, head_dim_v=16, device="cuda")
    half.append(k, v)
    for cache in (cache_of(k, v, granularity), half):
        out = attention_varlen(q, cache, cu_seqlens_q=ints(0, len(q)), backend="triton")
        assert torch.equal(out[:, 0].argmax(-1), kinds), drawing


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
def test_needles_in_65536_keys_are_found_by_quantised_calls(granularity: Any) -> None:
    """By Hopper's FP8 kernel where there is one."""
    drawing = random.randrange(2**31)
    q, k, v, kinds = (t.cuda() for t in haystack(drawing, 65536, needles=64, dim=128))
    given = [t[None, :, None].bfloat16() for t in (q, k, v)]
    for out in (attention(*quantize(*given, granularity=granularity)), attention(*given)):
        assert torch.equal(out[0, :, 0].argmax(-1), kinds), drawing


@pytest.mark.parametrize("backend", [None, "triton"])
def test_bits_are_equal_and_graphs_follow_the_lengths(backend: str | None) -> None:
    """Written anew in each replay, where they are written in 16 bits."""
    k, v, q, starts = drawn(2, 600, 2, 128), drawn(2, 600, 2, 128), drawn(100, 8, 128), ints(0, 40, 100)
    cache = cache_of(k, v)

    def call() -> Tensor:
        return attention_varlen(q, cache, cu_seqlens_q=starts, causal=True, max_seqlen_q=60, max_seqlen_k=600, backend=backend)

    assert torch.equal(call(), call())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for lengths in ((600, 600), (600, 77)):
        cache.lengths.copy_(ints(*lengths))
        graph.replay()
        assert torch.equal(captured, call())


def test_compiled_chunks() -> None:
    caches = [PagedKVCache.allocate(2, 128, 2, 64, dtype=E4M3, device="cuda") for _ in range(2)]
    starts = ints(0, 32, 64)

    def step(q: Tensor, k: Tensor, cache: PagedKVCache) -> Tensor:
        cache.append(k, 2 * k)
        return attention_varlen(q, cache, cu_seqlens_q=starts, causal=True)

    compiled = torch.compile(step, fullgraph=True)
    for _ in range(2):
        q, k = drawn(64, 4, 64), drawn(2, 32, 2, 64)
        torch.testing.assert_close(compiled(q, k, caches[0]), step(q, k, caches[1]))


def test_who_reads_them() -> None:
    cache = cache_of(drawn(1, 64, 2, 64), drawn(1, 64, 2, 64))
    plan = explain(drawn(8, 4, 64), cache, cu_seqlens_q=ints(0, 8), causal=True)
    assert "pages in FP8" in plan.call
    if hopper.BACKEND.available() is None:
        assert plan.implementation == "hopper" and "written as bfloat16 first" in str(plan)
    else:
        assert plan.implementation == "triton"
    plan = explain(drawn(8, 4, 64), cache, cu_seqlens_q=ints(0, 8), causal=True, batch_invariant=True)
    assert plan.implementation == "triton"


@pytest.mark.skipif(hopper.BACKEND.available() is not None, reason="needs the Hopper kernels")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (72, 40)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case_written_in_16_bits(name: str, dims: tuple[int, int]) -> None:
    """By the Hopper kernels, over pages of 16 bits that hold the same numbers."""
    drawing = random.randrange(2**31)
    for dtype in (torch.bfloat16, torch.float16):
        case = {**CASES[name], "head_dim": dims[0], "head_dim_v": dims[1], "dtype": dtype, "device": "cuda"}
        Fp8Pages(drawing, **case).check("hopper")


@pytest.mark.skipif(hopper.BACKEND.available() is not None, reason="needs the Hopper kernels")
@pytest.mark.parametrize("granularity", ["token", "head", "tensor"])
def test_both_ways_are_as_near_to_the_numbers(granularity: str) -> None:
    """Scales of any value: rounding what they give to 16 bits adds little to the rounding of the weights."""
    k, v, q = drawn(3, 3000, 2, 128), drawn(3, 3000, 2, 128), drawn(600, 8, 128)
    cache, starts = cache_of(k, v, granularity), ints(0, 300, 301, 600)
    with_scales = [t.float() * s[..., None] for t, s in ((cache.k_pages, cache.k_scale), (cache.v_pages, cache.v_scale))]
    numbers = PagedKVCache(*with_scales, cache.block_table, cache.lengths)
    assert cache.hadamard_seed is not None
    turned = rotate(q, cache.hadamard_seed)
    want = attention_varlen(turned, numbers, cu_seqlens_q=starts, causal=True, backend="triton")
    errors = {}
    for backend in ("hopper", "triton"):
        out = attention_varlen(q, cache, cu_seqlens_q=starts, causal=True, backend=backend)
        errors[backend] = float((out.float() - want).norm() / want.norm())
    assert errors["hopper"] < 4e-3 and errors["hopper"] < 1.5 * errors["triton"] + 1e-3, errors
