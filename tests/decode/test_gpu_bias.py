"""Biases of decode on a CUDA device: many splits, FP8, what -inf hides, bits, graphs. Small cases are those of test_gpu.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.decode import bias_checks
from tests.decode.fp8_case import Fp8Case, check_fp8
from tests.decode.harness import Case, check
from warploom import KVCache, decode
from warploom.bias import ALiBi, Key, Relative

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

KINDS = pytest.mark.parametrize("bias", ["alibi", "relative, one side, hides", "key of heads, hides"])
SHAPE: dict[str, Any] = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}


@KINDS
@pytest.mark.parametrize("queries,group", [(1, 1), (1, 8), (3, 7), (16, 4)])
@pytest.mark.parametrize("page_size", [None, 16])
def test_rows(queries: int, group: int, page_size: int | None, bias: str) -> None:
    shape: dict[str, Any] = {"heads_q": 2 * group, "heads_kv": 2, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    c = Case(random.randrange(2**31), [3000, 1200, 3], queries=queries, page_size=page_size, bias=bias, sink=True, **shape)
    check(c, "triton")


@KINDS
@pytest.mark.parametrize("dtype,dim", [(torch.float32, 64), (torch.float16, 256), (torch.float32, 256)], ids=str)
def test_wide_tiles(dtype: torch.dtype, dim: int, bias: str) -> None:
    shape: dict[str, Any] = {"heads_q": 8, "heads_kv": 2, "head_dim": dim, "dtype": dtype, "device": "cuda"}
    check(Case(random.randrange(2**31), [1300, 77], queries=2, bias=bias, **shape), "triton")


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs e4m3 in hardware")
@KINDS
def test_fp8_caches(bias: str) -> None:
    shape: dict[str, Any] = {"head_dim": 128, "page_size": 16, "heads_q": 6, "heads_kv": 2, "device": "cuda"}
    for dtype in (torch.bfloat16, torch.float32):
        check_fp8(Fp8Case(random.randrange(2**31), [1296, 77], queries=3, bias=bias, dtype=dtype, **shape), "triton")


def test_nan_behind_hidden_keys_changes_nothing() -> None:
    bias_checks.check_nan_behind_hidden("triton", "cuda")


@pytest.mark.parametrize("length", [500, 9000])
def test_bits_do_not_depend_on_neighbours_or_layout(length: int) -> None:
    bias_checks.check_bits("triton", length, SHAPE)


@pytest.mark.parametrize("kind", ["alibi", "t5", "key"])
def test_a_graph_follows_lengths_and_biases(kind: str) -> None:
    """One captured step, replayed, has the bits of eager steps; nothing waits for the device."""
    c = Case(random.randrange(2**31), [600, 40], capacity=640, **SHAPE)
    q, cache = c.q(), c.cache(0.0)
    assert isinstance(cache, KVCache)
    shape = {"alibi": (32,), "t5": (32, 16), "key": (2, 32, 640)}[kind]
    numbers = torch.rand(shape, device="cuda")

    def step() -> torch.Tensor:
        bias = {"alibi": ALiBi, "t5": lambda t: Relative(t, buckets="t5", bidirectional=False), "key": Key}[kind](numbers)
        return decode(q, cache, bias=bias)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([601, 41], [1, 640]):
        cache.lengths.copy_(torch.tensor(lengths))
        numbers.uniform_()
        graph.replay()
        assert torch.equal(out, step()), lengths
