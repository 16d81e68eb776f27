"""Chunks of longer sequences on a CUDA device: Triton's cases; graphs, compile and no synchronisation of each backend."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.attention.chunked import CHUNKED, chunked
from tests.attention.gpu_chunks import BACKENDS, MASKED, SEQLEN, inputs, masked, offsets, results
from warploom.attention.chunks import attention_chunks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CHUNKED)
def test_case(name: str, dtype: torch.dtype) -> None:
    chunked(name, random.randrange(2**31), dtype=dtype, device="cuda").check("triton")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "four vectors", "four vectors and dropout"])
def test_case_in_every_tiling(name: str, head_dim: int) -> None:
    chunked(name, random.randrange(2**31), dtype=torch.bfloat16, device="cuda", head_dim=head_dim).check("triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKED)
def test_a_graph_follows_its_offsets(name: str, backend: str) -> None:
    given, at, options = inputs(), offsets(0, 700), {"backend": backend, **masked(name)}
    results(*given, at, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(*given, at, **options)
    for rows in ((300, 10), (1699, 0)):
        at.copy_(offsets(*rows))
        graph.replay()
        for a, b in zip(captured, results(*given, at.clone(), **options), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKED)
def test_no_synchronisation(name: str, backend: str) -> None:
    given, at, options = inputs(), offsets(0, 700), {"backend": backend, **masked(name)}
    results(*given, at, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(*given, at, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKED)
def test_compiles_whole(name: str, backend: str) -> None:
    given, at, options = inputs(), offsets(0, 700), {"backend": backend, **masked(name)}

    def call(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return attention_chunks(q, k, v, at, seqlen_q=SEQLEN, **options)[0]

    assert torch.equal(torch.compile(call, fullgraph=True)(*given, at), call(*given, at))


def test_dispatch_takes_them() -> None:
    """In float32 the first backend that knows of offsets, in training too."""
    q, k, v = (t.float().requires_grad_() for t in inputs(64))
    out, _ = attention_chunks(q, k, v, offsets(0, 700), seqlen_q=SEQLEN, causal=True)
    want, _ = attention_chunks(q, k, v, offsets(0, 700), seqlen_q=SEQLEN, causal=True, backend="triton")
    assert torch.equal(out, want)
