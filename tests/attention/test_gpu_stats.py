"""return_stats on a CUDA device: kinds of calls by formula, many tiles, bits, graphs, memory, and forward passes of others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.cases import case, masked
from tests.attention.harness import Call
from tests.attention.measured import BOTH, check_packed, check_stats
from warploom import masks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NAN, INF = float("nan"), float("inf")


def seed() -> int:
    return random.randrange(2**31)


def of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return warploom.attention(q, k, v, return_stats=BOTH, **options)[-1]


def drawn(batch: int, seqlen: int, heads: int, head_dim: int) -> list[Tensor]:
    sizes = (heads, heads // 2, heads // 2)
    return [torch.randn(batch, seqlen, n, head_dim, dtype=torch.bfloat16, device="cuda") for n in sizes]


CASES = [
    "full", "causal", "causal, queries that see nothing", "one query", "one key", "window behind", "window of nothing",
    "head_dim 72", "head_dim 192 and 128", "group of 7", "softcap, sink and lse", "negative scale", "scale 0", "strided",
    "dropout",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, dtype: torch.dtype) -> None:
    check_stats(case(name, seed(), dtype=dtype, device="cuda"), "triton")


MASKS = ["Padding anywhere", "Document", "Tree", "lts and lte, per head", "four vectors, per head, causal"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str, dtype: torch.dtype) -> None:
    check_stats(masked(name, seed(), "cuda", dtype=dtype), "triton")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 30), "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("kind", [None, "full", "alibi", "relative"])
def test_many_tiles(kind: str | None, options: dict[str, Any], head_dim: int) -> None:
    for seqlen_k, dtype in ((640, torch.bfloat16), (333, torch.float32)):
        call = Call(seed(), 2, 500, seqlen_k, 4, 2, head_dim, dtype=dtype, device="cuda", keywords=options)
        check_stats(call, "triton", kind)


@pytest.mark.parametrize("kind", [None, "full", "alibi of batches"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed(dtype: torch.dtype, kind: str | None) -> None:
    starts_q, starts_k = [0, 100, 100, 250, 260, 277], [0, 190, 200, 200, 290, 307]
    call = Call(seed(), 1, 290, 320, 4, 2, 64, dtype=dtype, device="cuda", keywords={"causal": True, "softcap": 3.0})
    check_packed(call, starts_q, starts_k, "triton", kind)
    check_packed(call, starts_q, starts_k, "triton", kind, [100, 0, 0, 90, 1])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hidden_nan_leaks_nowhere(head_dim: int) -> None:
    clean = drawn(2, 500, 4, head_dim)
    bias = torch.randn(500, 500, device="cuda")
    bias[:, 130:200] = bias[40] = -INF
    for options, rows, keys in (
        ({"mask": masks.Padding(torch.tensor([130, 130])).to("cuda")}, slice(0, 0), slice(130, 500)),
        ({"window": (-400, 500)}, slice(100, 500), slice(0, 400)),
        ({"bias": bias}, slice(40, 41), slice(130, 200)),
    ):
        q, k, v = (t.clone() for t in clean)
        q[:, rows], k[:, keys], v[:, keys] = NAN, NAN, NAN
        for a, b in zip(of(q, k, v, backend="triton", **options), of(*clean, backend="triton", **options), strict=True):
            assert b.isfinite().all() and torch.equal(a, b)


def test_a_visible_nan_stays_one() -> None:
    q, k, v = drawn(1, 500, 4, 64)
    q[0, 300, 1, 3] = NAN
    found = of(q, k, v, causal=True, backend="triton")
    assert found.max_logits.isnan().tolist() == [[False, True, False, False]]
    assert found.column_sums[0, 1, :301].isnan().all() and not found.column_sums[0, 1, 301:].isnan().any()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sink": "drawn", "causal": True}], ids=str)
def test_whoever_runs_the_forward_pass(options: dict[str, Any]) -> None:
    """On hopper and ampere too, where they are: the same out, and stats as close as Triton's own."""
    q, k, v = drawn(2, 700, 8, 128)
    if "sink" in options:
        options = {**options, "sink": torch.randn(8, device="cuda")}
    out = warploom.attention(q, k, v, **options)
    same, found = warploom.attention(q, k, v, return_stats=BOTH, **options)
    assert torch.equal(out, same)
    assert warploom.explain(q, k, v, return_stats=BOTH, **options).stats_implementation == "triton"
    for a, b in zip(found, of(q, k, v, backend="triton", **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_equal_bits_in_every_run() -> None:
    q, k, v = drawn(3, 1000, 4, 128)
    first = of(q, k, v, causal=True)
    for _ in range(20):
        for a, b in zip(of(q, k, v, causal=True), first, strict=True):
            assert torch.equal(a, b)


def test_graphs() -> None:
    """Captured with a column mask and a sink, replayed on other contents."""
    q, k, v = drawn(2, 500, 4, 64)
    lts = torch.where(torch.arange(500, device="cuda") < 300, 300, 500).int()
    options = {"mask": masks.ColumnMask(lts[None, None], causal=True), "sink": torch.zeros(4, device="cuda")}

    def step() -> list[Tensor]:
        out, found = warploom.attention(q, k, v, return_stats=BOTH, backend="triton", **options)
        return [out, *found]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    q.mul_(0.5)
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_memory_is_linear() -> None:
    q, k, v = drawn(1, 16384, 4, 64)
    of(q, k, v)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    of(q, k, v)
    assert torch.cuda.max_memory_allocated() - before < 4 * q.numel() * q.element_size()


def test_offsets_past_32_bits() -> None:
    """The last rows and keys of tensors of 2.2e9 elements."""
    seqlen, tail = 17_000, 300
    q, k = (torch.zeros(1, seqlen, 1024, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for t in (q, k):
        t[:, -tail:, -2:] = torch.randn(1, tail, 2, 128, device="cuda")
    found = of(q[:, -tail:, -2:], k[:, :, -2:], k[:, :, -2:], window=(tail - 1, 0), backend="triton")
    want = of(*(t[:, -tail:, -2:].contiguous() for t in (q, k, k)), window=(tail - 1, 0), backend="triton")
    torch.testing.assert_close(found.max_logits, torch.maximum(want.max_logits, torch.zeros_like(want.max_logits)))
    torch.testing.assert_close(found.column_sums[..., -1], want.column_sums[..., -1], rtol=1e-4, atol=1e-4)
