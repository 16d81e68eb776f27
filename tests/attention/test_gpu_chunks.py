"""Triton attention on a CUDA device on chunks of longer sequences: every case, graphs, compile, no synchronisation."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.chunked import CHUNKED, chunked
from warploom import masks
from warploom.attention.chunks import attention_chunks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

SEQLEN, ROWS = 1000, 300


def offsets(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def drawn() -> list[Tensor]:
    return [torch.randn(2, n, h, 64, device="cuda", dtype=torch.bfloat16) for n, h in ((ROWS, 4), (SEQLEN, 2), (SEQLEN, 2))]


def results(q: Tensor, k: Tensor, v: Tensor, at: Tensor, **options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = attention_chunks(*leaves, at, seqlen_q=SEQLEN, backend="triton", **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


MASKED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "documents": {"mask": masks.Document([300, 20, 180, 500])},
}


def of(name: str) -> dict[str, Any]:
    return {n: x.to("cuda") if isinstance(x, masks.Mask) else x for n, x in MASKED[name].items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CHUNKED)
def test_case(name: str, dtype: torch.dtype) -> None:
    chunked(name, random.randrange(2**31), dtype=dtype, device="cuda").check("triton")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "four vectors", "four vectors and dropout"])
def test_case_in_every_tiling(name: str, head_dim: int) -> None:
    chunked(name, random.randrange(2**31), dtype=torch.bfloat16, device="cuda", head_dim=head_dim).check("triton")


@pytest.mark.parametrize("name", MASKED)
def test_a_graph_follows_its_offsets(name: str) -> None:
    inputs, at, options = drawn(), offsets(0, 700), of(name)
    results(*inputs, at, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(*inputs, at, **options)
    for rows in ((300, 10), (699, 0)):
        at.copy_(offsets(*rows))
        graph.replay()
        for a, b in zip(captured, results(*inputs, at.clone(), **options), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", MASKED)
def test_no_synchronisation(name: str) -> None:
    inputs, at, options = drawn(), offsets(0, 700), of(name)
    results(*inputs, at, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(*inputs, at, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", MASKED)
def test_compiles_whole(name: str) -> None:
    inputs, at, options = drawn(), offsets(0, 700), of(name)

    def call(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return attention_chunks(q, k, v, at, seqlen_q=SEQLEN, backend="triton", **options)[0]

    assert torch.equal(torch.compile(call, fullgraph=True)(*inputs, at), call(*inputs, at))


def test_dispatch_takes_them() -> None:
    """In float32 the first backend that knows of offsets, in training too."""
    q, k, v = (t.float().requires_grad_() for t in drawn())
    out, _ = attention_chunks(q, k, v, offsets(0, 700), seqlen_q=SEQLEN, causal=True)
    want, _ = attention_chunks(q, k, v, offsets(0, 700), seqlen_q=SEQLEN, causal=True, backend="triton")
    assert torch.equal(out, want)
