"""Failures that attention libraries have shipped, each as a test here; names say what went wrong elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import warploom
from tests.attention.harness import Call, check
from warploom import masks

BACKENDS = ["cpu", "reference"]
NAN, INF = float("nan"), float("inf")


def qkv(seqlen_q: int = 40, seqlen_k: int = 40, heads: int = 4, heads_kv: int = 2, dim: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, s, h, dim, requires_grad=True)
        for s, h in ((seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqlens", [(40, 40), (40, 7), (7, 40)])
def test_fully_masked_rows_are_zero_not_nan_forward_and_backward(backend: str, seqlens: tuple[int, int]) -> None:
    q, k, v = qkv(*seqlens)
    lts = torch.zeros(2, 1, seqlens[1], dtype=torch.int32)
    lte = torch.full_like(lts, seqlens[0] // 2)
    mask = masks.ColumnMask(lts, lte)
    out, lse = warploom.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    half = seqlens[0] // 2
    assert not out[:, :half].any() and (lse[..., :half] == -INF).all() and torch.isfinite(lse[..., half:]).all()
    gradients = torch.autograd.grad(out.sum() + lse[..., half:].sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in gradients) and not gradients[0][:, :half].any()
    everything = masks.ColumnMask(lts, torch.full_like(lts, seqlens[0]))
    out = warploom.attention(q, k, v, mask=everything, backend=backend)
    assert not out.any() and not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_every_query_hides_reaches_neither_output_nor_gradient(backend: str, poison: float) -> None:
    """Padding scattered among visible keys, in one batch entry at the end and in the other anywhere."""
    visible = torch.ones(2, 300, dtype=torch.bool)
    visible[0, 250:], visible[1, ::7] = False, False
    q, k, v = qkv(300, 300)
    mask = masks.Padding(visible)
    weight = torch.randn(2, 300, 4, 16)

    def run() -> list[torch.Tensor]:
        out, lse = warploom.attention(q, k, v, mask=mask, causal=True, return_lse=True, backend=backend)
        # Row 0 of entry 1 sees nothing: its lse is -inf by contract.
        seen = torch.isfinite(lse)
        return [out, lse, *torch.autograd.grad((out * weight).sum() + lse[seen].sum(), (q, k, v))]

    clean = run()
    with torch.no_grad():
        k[~visible], v[~visible] = poison, poison
    for a, b in zip(run(), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_may_hold_nan(backend: str) -> None:
    """And so may the gradient that arrives at it."""
    q, k, v = qkv(40, 30)
    out = warploom.attention(q, k, v, causal=True, backend=backend)
    dout = torch.ones_like(out)
    clean = torch.autograd.grad(out, (q, k, v), dout)
    dout[:, :10] = NAN
    with torch.no_grad():
        q[:, :10] = NAN
    out = warploom.attention(q, k, v, causal=True, backend=backend)
    assert torch.isfinite(out).all()
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", [-1e5, -6e4, 6e4])
def test_large_logits_are_not_taken_for_masked(backend: str, level: float) -> None:
    q, k, v = qkv()
    with torch.no_grad():
        q.fill_(1.0)
        k.fill_(level / 4.0)
    out, lse = warploom.attention(q, k, v, scale=0.25, causal=True, return_lse=True, backend=backend)
    torch.testing.assert_close(
        out, v.cumsum(1).repeat_interleave(2, 2) / torch.arange(1, 41)[:, None, None], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(lse[0, 0], level + torch.arange(1.0, 41).log(), rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize("group", [1, 3, 7, 8])
@pytest.mark.parametrize("seqlen_k", [65, 129])
def test_group_sizes_and_one_key_past_a_block(group: int, seqlen_k: int) -> None:
    call = Call(seed=group, heads_q=2 * group, heads_kv=2, seqlen_q=66, seqlen_k=seqlen_k, lse_gradient=True)
    check(call, "cpu")
    call.keywords["causal"] = True
    check(call, "cpu")


@pytest.mark.parametrize("head_dim", [72, 104, 200])
@pytest.mark.parametrize("head_dim_v", [None, 64])
def test_odd_head_dims_and_unequal_ones(head_dim: int, head_dim_v: int | None) -> None:
    check(Call(seed=5, head_dim=head_dim, head_dim_v=head_dim_v, dtype=torch.bfloat16, seqlen_q=64, seqlen_k=64), "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_are_read(backend: str) -> None:
    """Packed projections, heads first, stride-0 keys, a strided last dimension."""
    torch.manual_seed(0)
    fused = torch.randn(2, 30, 3, 4, 16)
    views = {
        "packed qkv": fused.unbind(2),
        "heads first": [torch.randn(2, 4, 30, 16).transpose(1, 2) for _ in range(3)],
        "expanded": [torch.randn(2, 30, 4, 16), *(torch.randn(1, 30, 1, 16).expand(2, 30, 4, 16) for _ in range(2))],
        "last dim": [torch.randn(2, 30, 16, 4).transpose(2, 3) for _ in range(3)],
        "offset": [torch.randn(2, 31, 4, 17)[:, 1:, :, 1:] for _ in range(3)],
    }
    for name, (q, k, v) in views.items():
        leaves = [t.detach().contiguous().clone().requires_grad_() for t in (q, k, v)]
        strided = [t.detach().requires_grad_() if name != "expanded" else t.detach() for t in (q, k, v)]
        dout = torch.randn(2, 4, 30, 16).transpose(1, 2)
        want = warploom.attention(*leaves, causal=True, backend=backend)
        got = warploom.attention(*strided, causal=True, backend=backend)
        torch.testing.assert_close(got, want, msg=name)
        if name != "expanded":
            for a, b in zip(
                torch.autograd.grad(got, strided, dout),
                torch.autograd.grad(want, leaves, dout.contiguous()),
                strict=True,
            ):
                torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_upstream_gradient(backend: str) -> None:
    """out.sum() hands the backward a gradient of stride 0 in every dimension."""
    q, k, v = qkv()
    out = warploom.attention(q, k, v, backend=backend)
    for a, b in zip(
        torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True),
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_empty_inputs(backend: str, shape: tuple[int, int, int], with_sink: bool) -> None:
    batch, seqlen_q, seqlen_k = shape
    q = torch.randn(batch, seqlen_q, 4, 16, requires_grad=True)
    k, v = (torch.randn(batch, seqlen_k, 2, 16, requires_grad=True) for _ in range(2))
    sink = torch.randn(4, requires_grad=True) if with_sink else None
    out, lse = warploom.attention(q, k, v, sink=sink, causal=True, return_lse=True, backend=backend)
    assert out.shape == q.shape and not out.any() and lse.shape == (batch, 4, seqlen_q)
    empty = torch.full_like(lse, -INF) if sink is None else sink[None, :, None].expand_as(lse)
    assert torch.equal(lse, empty)
    leaves = [q, k, v] + ([] if sink is None else [sink])
    gradients = torch.autograd.grad(out.sum() + (0.0 if sink is None else lse.sum()), leaves, allow_unused=True)
    for leaf, gradient in zip(leaves[:3], gradients, strict=False):
        assert gradient is None or (gradient.shape == leaf.shape and not gradient.any())
    if sink is not None:
        torch.testing.assert_close(gradients[3], torch.full((4,), float(batch * seqlen_q)))


def test_no_tensor_describes_no_sequences() -> None:
    out = warploom.attention_varlen(*(torch.randn(0, 2, 8) for _ in range(3)), torch.zeros(1, dtype=torch.int32))
    assert out.shape == (0, 2, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_and_a_band_both_apply(backend: str) -> None:
    q, k, v = qkv()
    document = masks.Document([15, 25], causal=False)
    both = (document.dense(40, 40) & masks.SlidingWindow(6).dense(40, 40))[0, 0]
    want = warploom.attention(q, k, v, mask=masks.ColumnMask.from_dense(both), backend="reference")
    torch.testing.assert_close(warploom.attention(q, k, v, mask=document, causal=True, window=(6, None), backend=backend), want)


def test_the_window_also_bounds_the_backward() -> None:
    q, k, v = qkv(300, 300)
    out = warploom.attention(q, k, v, window=(10, 0))
    dk = torch.autograd.grad(out[:, 200:].sum(), k)[0]
    assert not dk[:, :190].any() and dk[:, 190:].any()


def test_gradients_of_scores_sum_to_zero() -> None:
    """Rows of dS sum to 0, so keys shifted by one vector move dq not at all: Σ_j dS_ij (k_j + c) = Σ_j dS_ij k_j."""
    q, k, v = qkv(150, 150)
    shifted = (k.detach() + 3.0).requires_grad_()
    weight = torch.randn(2, 150, 4, 16)
    first = torch.autograd.grad((warploom.attention(q, k, v, causal=True) * weight).sum(), q)[0]
    second = torch.autograd.grad((warploom.attention(q, shifted, v, causal=True) * weight).sum(), q)[0]
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


def test_dropout_and_softcap_together_have_the_softcaps_slope() -> None:
    keywords = {"softcap": 0.7, "dropout_p": 0.4, "dropout_seed": 2**62 + 1}
    check(Call(seed=3, seqlen_q=90, seqlen_k=130, sink=True, lse_gradient=True, keywords=keywords), "cpu")


def test_results_do_not_depend_on_what_the_allocator_hands_back() -> None:
    """The same call with every fresh buffer filled with NaN (torch's own deterministic-fill switch)."""
    code = """
import torch, warploom
from warploom import masks
torch.use_deterministic_algorithms(True)
def run():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, 4, 16, requires_grad=True) for _ in range(3))
    out, lse = warploom.attention(q, k, v, mask=masks.Document([[50, 70, 30], [1, 100, 99]]), return_lse=True)
    loss = out.square().sum() + lse[torch.isfinite(lse)].sum()
    return [out, lse, *torch.autograd.grad(loss, (q, k, v))]
torch.utils.deterministic.fill_uninitialized_memory = False
plain = run()
torch.utils.deterministic.fill_uninitialized_memory = True
assert torch.empty(3).isnan().all()
assert all(torch.equal(a, b) for a, b in zip(run(), plain, strict=True))
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
