"""Triton attention with a bias on a CUDA device: all kinds, many tiles, what -inf hides, bits, graphs, offsets past 32 bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.biased import KINDS, check, leaf_of
from tests.attention.harness import Call
from warploom import masks
from warploom.attention.judge import judge

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Its buckets are a tensor of the CPU.
ON_DEVICE = [kind for kind in KINDS if kind != "relative, buckets"]
WAYS = ["full", "of heads", "of rows", "keys", "alibi of batches", "relative"]  # each sums its gradient elsewhere
RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias")
NAN, INF = float("nan"), float("inf")


def seed() -> int:
    return random.randrange(2**31)


def run(tensors: list[Tensor], kind: str, backend: str = "triton", **options: Any) -> list[Tensor]:
    """RESULTS."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    bias = KINDS[kind].build(leaves[3])
    out, lse = warploom.attention(*leaves[:3], bias=bias, return_lse=True, backend=backend, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def drawn(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, head_dim: int = 64) -> list[Tensor]:
    batch, heads, seqlen_q, seqlen_k = shape
    call = Call(seed(), batch, seqlen_q, seqlen_k, heads, heads // 2, head_dim, dtype=dtype, device="cuda")
    return [*[t for t in call.tensors()[:3] if t is not None], leaf_of(kind, shape, call.seed, torch.float32).cuda()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ON_DEVICE)
def test_kind(kind: str, dtype: torch.dtype) -> None:
    check(Call(seed(), dtype=dtype, device="cuda"), kind, "triton", torch.float32)


@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["full", "of heads", "keys"])
def test_a_tensor_of_any_dtype(kind: str, bias_dtype: torch.dtype) -> None:
    check(Call(seed(), dtype=torch.bfloat16, device="cuda"), kind, "triton", bias_dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 30), "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("kind", WAYS)
def test_many_tiles(kind: str, options: dict[str, Any], head_dim: int) -> None:
    """Lengths whose rows of a bias are 16-byte aligned, and lengths whose are not."""
    for seqlen_k in (320, 333):
        call = Call(seed(), 2, 300, seqlen_k, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda", keywords=options)
        check(call, kind, "triton", torch.bfloat16 if KINDS[kind].build is KINDS["full"].build else torch.float32)


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0, "causal": True}], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("batch", [2, 3, 4, 7])
def test_batch_entries_that_share_a_matrix(batch: int, head_dim: int, options: dict[str, Any], bias_dtype: torch.dtype) -> None:
    """One launch, two, or a pass of its own."""
    call = Call(seed(), batch, 300, 336, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda", keywords=options)
    check(call, "of heads", "triton", bias_dtype)


@pytest.mark.parametrize("batch", [1, 4, 7])
def test_what_minus_infinity_hides_changes_no_bit(batch: int) -> None:
    """Keys are walked by once more where NaN came of the first time."""
    for head_dim in (64, 128):
        q, k, v, bias = drawn("of heads", (batch, 4, 300, 336), torch.bfloat16, head_dim)
        shown = torch.ones(bias.shape, dtype=torch.bool, device="cuda")
        shown[..., 100:180] = shown[:, 1, 17] = False
        bias = bias.masked_fill(~shown, -INF).bfloat16()
        poisoned = [t.clone() for t in (q, k, v)]
        poisoned[0][0, 17, 1] = NAN
        poisoned[1][-1, 100:150] = NAN
        poisoned[2][0, 130:180] = INF
        want = run([q, k, v, bias], "of heads")
        for a, b in zip(run([*poisoned, bias], "of heads"), want, strict=True):
            assert torch.equal(a, b) and not a.isnan().any()
        assert not want[5].masked_select(~shown).any()


@pytest.mark.parametrize("kind", WAYS)
def test_columns_dropout_sink_and_softcap(kind: str) -> None:
    tensors = drawn(kind, (2, 4, 200, 270), torch.float32)
    vectors = torch.randint(0, 200, (2, 2, 4, 270), dtype=torch.int32, device="cuda")
    options = {
        "mask": masks.ColumnMask(vectors[0], vectors[1]), "window": (150, 30), "softcap": 3.0, "dropout_p": 0.3,
        "dropout_seed": seed(), "sink": torch.randn(4, device="cuda"),
    }  # fmt: skip
    for a, b in zip(run(tensors, kind, **options), run(tensors, kind, "reference", **options), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", WAYS)
def test_packed(kind: str) -> None:
    q, k, v, leaf = drawn(kind, (5, 4, 150, 190), torch.float32)
    starts_q, starts_k = [0, 100, 100, 250, 260, 277], [0, 190, 200, 200, 290, 307]
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32, device="cuda") for t in (starts_q, starts_k))
    found = []
    for backend in ("triton", "reference"):
        leaves = [t.flatten(0, 1)[:n].detach().requires_grad_() for t, n in ((q, 290), (k, 320), (v, 320))]
        leaves.append(leaf.detach().requires_grad_())
        bias = KINDS[kind].build(leaves[3])
        out = warploom.attention_varlen(*leaves[:3], cu_q, cu_k, 150, 190, bias=bias, causal=True, backend=backend)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_minus_infinity_hides_nan_behind_it(causal: bool, head_dim: int) -> None:
    *clean, bias = drawn("full", (2, 4, 300, 320), torch.bfloat16, head_dim)
    bias[0, :, :, 130:200] = bias[1, :, 40] = bias[1, :, :, :2] = -INF
    poisoned = [t.clone() for t in clean]
    poisoned[0][1, 40] = NAN
    for t, first in zip(poisoned[1:], (130, 160), strict=True):
        t[0, first : first + 40] = INF
        t[0, first : first + 40, :, ::3] = t[1, :2] = NAN
    for a, b in zip(run([*poisoned, bias], "full", causal=causal), run([*clean, bias], "full", causal=causal), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", WAYS)
def test_equal_bits_in_every_run(kind: str) -> None:
    tensors = drawn(kind, (3, 4, 500, 520), torch.bfloat16)
    first = run(tensors, kind, causal=True)
    for _ in range(20):
        for a, b in zip(run(tensors, kind, causal=True), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", WAYS)
def test_graphs(kind: str) -> None:
    """Captured with both passes, replayed on other contents."""
    tensors = drawn(kind, (2, 4, 200, 256), torch.bfloat16)
    leaves = [t.clone().requires_grad_() for t in tensors]
    bias = KINDS[kind].build(leaves[3])

    def step() -> list[Tensor]:
        out = warploom.attention(*leaves[:3], bias=bias, backend="triton")
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in leaves:
            t.mul_(0.5)
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shift", [1, 4, 8])
def test_addresses_and_strides_of_any_alignment(shift: int) -> None:
    """As close to the truth as where all are aligned; not the same bits, as rows are summed in the order of what was loaded."""
    *tensors, bias = drawn("full", (2, 4, 200, 256), torch.bfloat16)
    aligned = run([*tensors, bias.bfloat16()], "full")
    truth = run([t.double() for t in (*tensors, bias.bfloat16())], "full", "reference")
    moved = torch.empty(bias.numel() + shift, dtype=torch.bfloat16, device="cuda")[shift:].view(bias.shape).copy_(bias)
    wide = torch.empty(*bias.shape[:-1], 256 + shift, dtype=torch.bfloat16, device="cuda")[..., :256].copy_(bias)
    turned = bias.bfloat16().permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    for other in (moved, wide, turned):
        for name, a, want, near in zip(RESULTS, run([*tensors, other], "full"), truth, aligned, strict=True):
            verdict = judge(name, a, want, near, torch.bfloat16)
            assert verdict.passed, verdict


def test_offsets_past_32_bits() -> None:
    """The last rows of a bias of 2.2e9 elements, and their gradient."""
    seqlen = 47_000
    q, k, v = (torch.randn(1, n, 1, 64, dtype=torch.bfloat16, device="cuda") for n in (seqlen, seqlen, seqlen))
    bias = torch.zeros(1, 1, seqlen, seqlen, dtype=torch.bfloat16, device="cuda")
    bias[..., -200:, :] = torch.randn(200, seqlen, device="cuda")
    bias.requires_grad_()
    out = warploom.attention(q, k, v, bias=bias, backend="triton")
    (dbias,) = torch.autograd.grad(out[:, -200:].square().sum(), bias)
    last = bias[..., -200:, :].detach().clone().requires_grad_()
    want = warploom.attention(q[:, -200:], k, v, bias=last, backend="triton")
    (dlast,) = torch.autograd.grad(want.square().sum(), last)
    torch.testing.assert_close(out[:, -200:], want)
    torch.testing.assert_close(dbias[..., -200:, :], dlast)
    assert not dbias[..., :-200, :].any()


def test_a_table_has_no_matrix() -> None:
    """Peak memory of both passes is linear in the lengths."""
    q = torch.randn(1, 8192, 8, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    table = torch.randn(8, 257, device="cuda", requires_grad=True)
    peaks = []
    for bias in (None, warploom.bias.Relative(table)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        warploom.attention(q, q, q, bias=bias, causal=True, backend="triton").sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0] + 32 * 8 * 8192 * 2
