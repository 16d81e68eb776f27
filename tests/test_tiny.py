"""The specification in one file: what attention() promises, each promise in a few lines against plain torch.

Layout (batch, seqlen, heads, head_dim). Run it on any backend with WARPLOOM_BACKEND=reference, cpu, …
"""

from __future__ import annotations

import os

import pytest
import torch

import warploom
from warploom import masks

BACKEND = os.environ.get("WARPLOOM_BACKEND") or None
INF = float("inf")


def attention(*args, **kwargs):
    return warploom.attention(*args, backend=BACKEND, **kwargs)


def qkv(seqlen_q: int = 5, seqlen_k: int = 7, heads: int = 4, heads_kv: int = 2, dim: int = 16):
    torch.manual_seed(0)
    q = torch.randn(2, seqlen_q, heads, dim)
    return q, torch.randn(2, seqlen_k, heads_kv, dim), torch.randn(2, seqlen_k, heads_kv, dim)


def plain(q, k, v, visible, scale=None):
    """softmax(scale · q kᵀ over visible keys) v and its log-sum-exp, written out."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -INF)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_full_attention_with_grouped_heads():
    q, k, v = qkv()
    out, lse = attention(q, k, v, return_lse=True)
    want, want_lse = plain(q, k, v, torch.ones(5, 7, dtype=torch.bool))
    same(out, want)
    same(lse, want_lse)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


def test_causal_is_bottom_right_aligned():
    """Query i sits at key position p = i + seqlen_k - seqlen_q."""
    q, k, v = qkv(5, 7)
    p, j = torch.arange(5)[:, None] + 2, torch.arange(7)
    same(attention(q, k, v, causal=True), plain(q, k, v, j <= p)[0])


def test_window_counts_keys_left_and_right_of_the_position():
    q, k, v = qkv(7, 7)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    same(attention(q, k, v, window=(2, 1)), plain(q, k, v, (distance <= 2) & (distance >= -1))[0])
    same(attention(q, k, v, window=(None, -1))[:, 1:], plain(q, k, v, distance >= 1)[0][:, 1:])


def test_scale_softcap_and_sink():
    q, k, v = qkv(heads_kv=4)
    sink = torch.tensor([0.0, 1.0, -INF, 2.0])
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.3
    capped = 5.0 * torch.tanh(scores / 5.0)
    joint = torch.cat([capped, sink[None, :, None, None].expand(2, 4, 5, 1)], -1)
    out, lse = attention(q, k, v, scale=0.3, softcap=5.0, sink=sink, return_lse=True)
    same(out, torch.einsum("bhij,bjhd->bihd", joint.softmax(-1)[..., :-1], v))
    same(lse, joint.logsumexp(-1))


def test_a_query_that_sees_no_key_is_zero_not_nan():
    q, k, v = (t.requires_grad_() for t in qkv(5, 3))  # bottom-right: queries 0 and 1 lie before the first key
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert not out[:, :2].any() and (lse[:, :, :2] == -INF).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert not dq[:, :2].any() and all(torch.isfinite(g).all() for g in (dq, dk, dv))


def test_with_a_sink_such_a_query_is_zero_and_its_lse_the_sink():
    q, k, v = qkv(5, 3)
    out, lse = attention(q, k, v, causal=True, sink=torch.tensor([0.5, -1.0, 2.0, 0.0]), return_lse=True)
    assert not out[:, :2].any()
    same(lse[:, :, 0], torch.tensor([0.5, -1.0, 2.0, 0.0]).expand(2, 4))


def test_column_mask_hides_row_intervals():
    q, k, v = qkv(6, 6)
    lts = torch.tensor([2, 6, 3, 6, 6, 6], dtype=torch.int32)[None, None]
    lte = torch.tensor([4, 6, 6, 6, 6, 6], dtype=torch.int32)[None, None]
    i, j = torch.arange(6)[:, None], torch.arange(6)
    hidden = (i >= lts[0, 0]) & (i < lte[0, 0])
    mask = masks.ColumnMask(lts, lte, causal=True)
    same(attention(q, k, v, mask=mask), plain(q, k, v, (j <= i) & ~hidden)[0])
    assert torch.equal(mask.dense(6, 6)[0, 0], (j <= i) & ~hidden)


def test_masks_and_flags_intersect():
    q, k, v = qkv(8, 8)
    both = attention(q, k, v, mask=masks.Document([3, 5], causal=False), causal=True)
    same(both, attention(q, k, v, mask=masks.Document([3, 5], causal=False) & masks.Causal()))


def test_packed_documents_equal_separate_calls():
    q, k, v = qkv(8, 8)
    together = attention(q, k, v, mask=masks.Document([3, 5]))
    same(together[:, :3], attention(q[:, :3], k[:, :3], v[:, :3], causal=True))
    same(together[:, 3:], attention(q[:, 3:], k[:, 3:], v[:, 3:], causal=True))


def test_nan_in_keys_hidden_from_every_query_changes_nothing():
    q, k, v = qkv(5, 7)
    mask = masks.Padding(torch.tensor([4, 6]))
    want = attention(q, k, v, mask=mask)
    k[0, 4:], v[0, 4:], k[1, 6:], v[1, 6:] = float("nan"), INF, INF, float("nan")
    assert torch.equal(attention(q, k, v, mask=mask), want)


def test_a_visible_nan_is_never_turned_into_a_number():
    q, k, v = qkv(5, 7)
    v[:, 2] = float("nan")
    assert attention(q, k, v).isnan().all()


def test_gradients_through_out_and_lse():
    q, k, v = (t.requires_grad_() for t in qkv())
    out, lse = attention(q, k, v, return_lse=True)
    want, want_lse = plain(q, k, v, torch.ones(5, 7, dtype=torch.bool))
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum() + lse.square().sum(), (q, k, v))
    for a, b in zip(got, torch.autograd.grad((want * weight).sum() + want_lse.square().sum(), (q, k, v)), strict=True):
        same(a, b)


def test_dropout_is_a_function_of_the_seed_alone():
    q, k, v = qkv(64, 64)
    first = attention(q, k, v, dropout_p=0.5, dropout_seed=3)
    assert torch.equal(first, attention(q, k, v, dropout_p=0.5, dropout_seed=3))
    assert not torch.equal(first, attention(q, k, v, dropout_p=0.5, dropout_seed=4))
    # The same elements are dropped whatever the mask cuts the call into.
    seen = attention(q, k, v, dropout_p=0.5, dropout_seed=3, mask=masks.Padding(torch.tensor([64, 64])))
    same(seen, first)
    mean = torch.stack([attention(q, k, v, dropout_p=0.5, dropout_seed=s) for s in range(200)]).mean(0)
    assert (mean - attention(q, k, v)).abs().mean() < 0.05


def test_varlen_is_attention_sequence_by_sequence():
    q, k, v = (t[0] for t in qkv(9, 9))
    cu = torch.tensor([0, 4, 4, 7], dtype=torch.int32)  # lengths 4, 0, 3; two tokens belong to nobody
    out, lse = warploom.attention_varlen(q, k, v, cu, causal=True, return_lse=True, backend=BACKEND)
    for a, b in ((0, 4), (4, 7)):
        want, want_lse = attention(q[None, a:b], k[None, a:b], v[None, a:b], causal=True, return_lse=True)
        same(out[a:b], want[0])
        same(lse[:, a:b], want_lse[0])
    assert not out[7:].any() and (lse[:, 7:] == -INF).all() and lse.shape == (4, 9)


def test_sdpa_drop_in_is_torch_with_torch_alignment():
    q, k, v = (t.transpose(1, 2) for t in qkv(5, 7))
    same(
        warploom.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    )


def test_errors_come_in_words_before_any_work():
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"from_dense"):
        attention(q, k, v, mask=torch.ones(5, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match="multiple of the 3 heads"):
        attention(q, torch.randn(2, 7, 3, 16), torch.randn(2, 7, 3, 16))
    with pytest.raises(ValueError, match="backend must be one of"):
        warploom.attention(q, k, v, backend="magic")


def test_explain_says_what_runs_and_what_is_skipped():
    q, k, v = qkv(256, 256)
    plan = warploom.explain(q, k, v, mask=masks.Document([128, 128]))
    assert plan.implementation == "cpu" and plan.skipped == 0.5
    assert "cpu" in str(plan) and "50.0% skipped" in str(plan)


def test_linear_attention_reads_running_sums():
    """out_i = phi(q_i) s_i / (phi(q_i) z_i + eps), s_i and z_i running sums of phi(k_j) ⊗ v_j and phi(k_j), phi = elu + 1."""
    q, k, v = qkv(5, 5, heads_kv=4)
    phi_q, phi_k = (torch.where(t > 0, t + 1, t.exp()) for t in (q, k))
    s, z = torch.einsum("bjhe,bjhm->bjhem", phi_k, v).cumsum(1), phi_k.cumsum(1)
    want = torch.einsum("bihe,bihem->bihm", phi_q, s) / ((phi_q * z).sum(-1, keepdim=True) + 1e-6)
    out, state = warploom.linear_attention(q, k, v, return_state=True, backend=BACKEND)
    same(out, want)
    same(state.s, s[:, -1])
    same(state.z, z[:, -1])
    rows, state = [], warploom.LinearState.zeros(2, 4, 16, 16)
    for i in range(5):
        row, state = warploom.linear_attention_step(q[:, i], k[:, i], v[:, i], state, backend=BACKEND)
        rows.append(row)
    same(torch.stack(rows, 1), want)
