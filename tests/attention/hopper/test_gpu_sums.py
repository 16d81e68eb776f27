"""Column sums on an H100 or H200: the criterion under every band, NaN, huge scores, views, bits, graphs, dispatch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.harness import Call
from tests.attention.measured import formulas, seen_by
from warploom.attention import hopper
from warploom.attention.judge import judge

MISSING = hopper.STATS.available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("here", "poisoned_gpu_memory"),
    pytest.mark.skipif(MISSING is not None, reason=f"the hopper backend cannot run: {MISSING}"),
]

BANDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (170, 0)},
    "window to the left": {"window": (70, None)},
    "two-sided window": {"window": (170, 90)},
    "window behind": {"window": (200, -50)},
    "window ahead": {"window": (-50, 200)},
}
SIZES = [(1, 1), (500, 640), (333, 700), (700, 300), (64, 257), (1000, 1000), (129, 2000), (2000, 129)]
NAN = float("nan")


def seed() -> int:
    return random.randrange(2**31)


def of(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    found: Tensor = warploom.attention(q, k, k, return_stats=("column_sums",), **options)[-1].column_sums
    return found


def check(call: Call) -> None:
    """By the criterion, and exactly 0 where nobody looks."""
    q, k, _, sink = call.tensors()
    seen, scale, softcap = seen_by(q, k, **call.keywords)
    want, model = (formulas(q.to(t), k.to(t), seen, scale, softcap, None)[1] for t in (torch.float64, torch.float32))
    plan = warploom.explain(q, k, k, return_stats=("column_sums",), backend="hopper", **call.keywords)
    assert plan.stats_implementation == "hopper"
    got = of(q, k, sink=sink, backend="hopper", **call.keywords)
    assert got.dtype == torch.float32 and not got[want == 0].any()
    verdict = judge("column_sums", got, want, model, call.dtype)
    assert verdict.passed, verdict
    # A share of the exponentials are polynomials; no more of them is to be seen than of an lse in fp32.
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bands(dtype: torch.dtype, head_dim: int, band: str) -> None:
    for seqlen_q, seqlen_k in SIZES:
        check(Call(seed(), 2, seqlen_q, seqlen_k, 4, 2, head_dim, dtype=dtype, device="cuda", keywords=BANDS[band]))


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 136, 192, 256])
def test_other_head_dims(head_dim: int) -> None:
    for options in ({"causal": True}, {"window": (100, 60), "softcap": 3.0}):
        check(Call(seed(), 1, 500, 700, 6, 2, head_dim, dtype=torch.bfloat16, device="cuda", keywords=options))


def test_more_tiles_than_blocks() -> None:
    """In several turns of each block, under a causal mask back and forth; the sink is ignored."""
    for options in ({}, {"causal": True}):
        call = Call(seed(), 3, 1500, 1500, 24, 8, 64, sink=True, dtype=torch.bfloat16, device="cuda", keywords=options)
        check(call)


def test_nan_and_huge_scores() -> None:
    q, k = (torch.randn(2, 500, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
    clean = of(q, k, causal=True, backend="hopper")
    q[0, 300, 1, 3] = NAN
    found = of(q, k, causal=True, backend="hopper")
    assert found[0, 1, :301].isnan().all() and not found[0, 1, 301:].isnan().any()
    assert torch.equal(found[1], clean[1]) and torch.equal(found[0, ::2], clean[0, ::2])
    q[0, 300, 1, 3] = 1.0
    short = of(q, k[:, :300], causal=True, backend="hopper")
    q[:, :200] = NAN  # rows that see nothing
    assert short.isfinite().all() and torch.equal(of(q, k[:, :300], causal=True, backend="hopper"), short)
    huge = of(q[:, 200:] * 300, k * 300, backend="hopper")
    assert (huge <= 300.5).all()
    torch.testing.assert_close(huge.sum(-1), torch.full_like(huge[..., 0], 300.0), rtol=0.05, atol=0)


def test_views() -> None:
    """Of packed QKV with heads before tokens, and of keys that heads and batch entries share."""
    packed = torch.randn(2, 8, 700, 192, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    q, k = packed[..., :64], packed[..., 64:128]
    assert torch.equal(of(q, k, backend="hopper"), of(q.contiguous(), k.contiguous(), backend="hopper"))
    shared = k[:1, :, :1].expand(2, -1, 8, -1)
    assert torch.equal(of(q, shared, backend="hopper"), of(q, shared.contiguous(), backend="hopper"))


def test_equal_bits_and_graphs() -> None:
    q, k = (torch.randn(2, 2000, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 4))
    first = of(q, k, causal=True, backend="hopper")
    for _ in range(20):
        assert torch.equal(of(q, k, causal=True, backend="hopper"), first)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        of(q, k, causal=True, backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = of(q, k, causal=True, backend="hopper")
    q.mul_(0.5)
    graph.replay()
    assert torch.equal(captured, of(q, k, causal=True, backend="hopper"))


def test_others_are_left_to_others() -> None:
    q, k = (torch.randn(2, 300, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
    for names in (("max_logits", "column_sums"), ("column_sums", "max_logits")):
        assert warploom.explain(q, k, k, return_stats=names).stats_implementation == "triton"
    assert warploom.explain(q, k, k, return_stats=("column_sums",), backend="triton").stats_implementation == "triton"
    torch.testing.assert_close(of(q, k), of(q, k, backend="triton"), rtol=1e-4, atol=1e-5)
