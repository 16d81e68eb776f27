"""flash-attn's documented behaviours: signatures, masks, windows, the cache it updates, what it returns."""

from __future__ import annotations

import inspect
import math
import random
from typing import Any

import pytest
import torch

from warploom.integrations import flash_attn

DENSE = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
DENSE += "deterministic=False, return_attn_probs=False"
PACKED = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {DENSE}",
    "flash_attn_kvpacked_func": f"q, kv, {DENSE}",
    "flash_attn_qkvpacked_func": f"qkv, {DENSE}",
    "flash_attn_varlen_func": f"q, k, v, {PACKED}, {DENSE}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {PACKED}, {DENSE}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {DENSE}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
    "softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}


@pytest.fixture
def seed() -> int:
    chosen = random.randrange(2**31)
    torch.manual_seed(chosen)
    print(f"seed {chosen}")
    return chosen


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None = None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse in fp64 of (seqlen, heads, head_dim) tensors; ``visible`` bool (seqlen_q, seqlen_k)."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v), scores.logsumexp(-1)


def near(a: torch.Tensor, b: torch.Tensor, seed: int) -> None:
    assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5), seed


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    signature = inspect.signature(getattr(flash_attn, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"


# Seen keys of seqlen_q x seqlen_k, as flash-attn documents causal=True.
CAUSAL = {(2, 5): ["11110", "11111"], (5, 2): ["00", "00", "00", "10", "11"]}


@pytest.mark.parametrize("sizes", CAUSAL)
def test_causal_is_aligned_bottom_right(sizes: tuple[int, int], seed: int) -> None:
    q, k, v = (torch.randn(1, n, h, 16) for n, h in zip((sizes[0], sizes[1], sizes[1]), (6, 2, 2), strict=True))
    visible = torch.tensor([[c == "1" for c in row] for row in CAUSAL[sizes]])
    want, want_lse = naive(q[0], k[0], v[0], visible)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    near(out[0], want, seed)
    near(lse[0], want_lse, seed)
    assert probabilities is None and not out[0, ~visible.any(1)].any()
    by_cache = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True)
    near(by_cache, out, seed)


@pytest.mark.parametrize("window", [(0, 0), (2, 0), (1, 1), (-1, 1), (3, -1), (100, 100), (-1, -1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(6, 6), (3, 9), (1, 7)])
def test_windows_are_inclusive(window: tuple[int, int], causal: bool, sizes: tuple[int, int], seed: int) -> None:
    seqlen_q, seqlen_k = sizes
    q, k, v = torch.randn(1, seqlen_q, 4, 16), torch.randn(1, seqlen_k, 2, 16), torch.randn(1, seqlen_k, 2, 16)
    i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if window[0] >= 0:
        visible &= j >= i - window[0]
    if window[1] >= 0:
        visible &= j <= i + window[1]
    if causal:
        visible &= j <= i
    want, _ = naive(q[0], k[0], v[0], visible)
    options = {"causal": causal, "window_size": window}
    near(flash_attn.flash_attn_func(q, k, v, **options)[0], want, seed)
    near(flash_attn.flash_attn_with_kvcache(q, k, v, **options)[0], want, seed)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in sizes)
    packed = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, seqlen_q, seqlen_k, **options)
    near(packed, want, seed)


def test_heads_of_a_group_share_keys(seed: int) -> None:
    """Six query heads on two key heads: 0-2 use head 0, 3-5 head 1."""
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 4, 2, 16), torch.randn(1, 4, 2, 16)
    out = flash_attn.flash_attn_func(q, k, v)
    for head in range(6):
        alone = flash_attn.flash_attn_func(q[:, :, head : head + 1], k[:, :, [head // 3]], v[:, :, [head // 3]])
        near(out[:, :, head : head + 1], alone, seed)


def test_scale_softcap_and_gradients(seed: int) -> None:
    q, k, v = (torch.randn(2, 8, 2, 16, requires_grad=True) for _ in range(3))
    plain = flash_attn.flash_attn_func(q, k, v, softmax_scale=0.3)
    near(plain[0], naive(q[0], k[0], v[0], scale=0.3)[0], seed)
    near(flash_attn.flash_attn_func(q, k, v, softmax_scale=0.3, softcap=-1.0), plain, seed)
    capped = flash_attn.flash_attn_func(q, k, v, softcap=0.5, deterministic=True)
    assert not torch.allclose(capped, flash_attn.flash_attn_func(q, k, v))
    capped.square().sum().backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in (q, k, v))


def test_dropout_is_seeded_by_torch(seed: int) -> None:
    q = torch.randn(1, 32, 2, 16)
    torch.manual_seed(0)
    first = flash_attn.flash_attn_func(q, q, q, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, flash_attn.flash_attn_func(q, q, q, dropout_p=0.5))
    assert not torch.equal(first, flash_attn.flash_attn_func(q, q, q, dropout_p=0.5))


def test_packed_forms_agree(seed: int) -> None:
    qkv = torch.randn(2, 8, 3, 4, 16)
    want = flash_attn.flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), want)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True), want)
    cu = torch.tensor([0, 8, 16], dtype=torch.int32)
    flat = qkv.flatten(0, 1)
    near(flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, 8, causal=True), want.flatten(0, 1), seed)
    out, lse, _ = flash_attn.flash_attn_varlen_kvpacked_func(
        flat[:, 0], flat[:, 1:], cu, cu, 8, 8, causal=True, return_attn_probs=True
    )
    near(out, want.flatten(0, 1), seed)
    assert lse.shape == (4, 16)


def test_varlen_with_pages(seed: int) -> None:
    pages_k, pages_v = torch.randn(8, 4, 2, 16), torch.randn(8, 4, 2, 16)
    table = torch.tensor([[5, 0, 3], [7, 2, 1]], dtype=torch.int32)
    q, cu_q = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    cu_k = torch.tensor([0, 10, 15], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 4, 10, causal=True, block_table=table)
    for b, (rows, length) in enumerate(((slice(0, 3), 10), (slice(3, 7), 5))):
        k, v = (t[table[b].long()].flatten(0, 1)[:length] for t in (pages_k, pages_v))
        want = flash_attn.flash_attn_func(q[None, rows], k[None], v[None], causal=True)
        near(out[rows], want[0], seed)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [1, 3, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_cache_is_updated_in_place(paged: bool, new: int, causal: bool, seed: int) -> None:
    lengths = torch.tensor([5, 0, 30], dtype=torch.int32)
    table = torch.randperm(39)[:39].view(3, 13).int() if paged else None
    shape = (39, 4, 2, 16) if paged else (3, 52, 2, 16)
    k_cache, v_cache = torch.randn(shape), torch.randn(shape)
    flat = (lambda t, b: t[table[b].long()].flatten(0, 1)) if paged else (lambda t, b: t[b])
    before = [[flat(t, b).clone() for b in range(3)] for t in (k_cache, v_cache)]
    q, k, v = torch.randn(3, new, 4, 16), torch.randn(3, new, 2, 16), torch.randn(3, new, 2, 16)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=causal, return_softmax_lse=True
    )
    assert lengths.tolist() == [5, 0, 30] and out.shape == q.shape and lse.shape == (3, 4, new)
    for b, length in enumerate(lengths.tolist()):
        for held, drawn, old in ((k_cache, k, before[0][b]), (v_cache, v, before[1][b])):
            now = flat(held, b)
            assert torch.equal(now[length : length + new], drawn[b]) and torch.equal(now[:length], old[:length])
            assert torch.equal(now[length + new :], old[length + new :])
        keys, values = flat(k_cache, b)[: length + new], flat(v_cache, b)[: length + new]
        visible = torch.ones(new, length + new, dtype=torch.bool).tril(length) if causal else None
        want, want_lse = naive(q[b], keys, values, visible)
        near(out[b], want, seed)
        near(lse[b], want_lse, seed)


def test_cache_lengths_as_an_int_or_left_out(seed: int) -> None:
    q, k_cache, v_cache = torch.randn(2, 1, 4, 16), torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 16)
    whole = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache)
    near(whole, flash_attn.flash_attn_func(q, k_cache, v_cache), seed)
    part = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7, num_splits=3)
    near(part, flash_attn.flash_attn_func(q, k_cache[:, :7], v_cache[:, :7]), seed)


def test_cache_batch_idx_picks_rows(seed: int) -> None:
    q, k_cache, v_cache = torch.randn(2, 1, 4, 16), torch.randn(5, 12, 2, 16), torch.randn(5, 12, 2, 16)
    rows, lengths = torch.tensor([4, 1], dtype=torch.int32), torch.tensor([7, 11], dtype=torch.int32)
    k, v = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=rows)
    for b in range(2):
        row, end = int(rows[b]), int(lengths[b]) + 1
        assert torch.equal(k_cache[row, end - 1], k[b, 0]) and torch.equal(v_cache[row, end - 1], v[b, 0])
        near(out[b], naive(q[b], k_cache[row, :end], v_cache[row, :end])[0], seed)
    many = torch.randn(2, 20, 4, 16)
    out = flash_attn.flash_attn_with_kvcache(many, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=rows)
    near(out[1], naive(many[1], k_cache[1, :11], v_cache[1, :11])[0], seed)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(interleaved: bool, causal: bool, seed: int) -> None:
    """k turns at its positions; q too when causal, else every query at cache_seqlens. A turn of angle p · f, in pairs."""
    angles = torch.arange(16)[:, None] * torch.tensor([1.0, 0.3, 0.1])

    def turn(x: torch.Tensor, positions: list[int]) -> torch.Tensor:
        x = x.clone()
        for t, p in enumerate(positions):
            for n in range(3):
                a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + 3)
                c, s = angles[p, n].cos(), angles[p, n].sin()
                x[t, :, a], x[t, :, b] = x[t, :, a] * c - x[t, :, b] * s, x[t, :, a] * s + x[t, :, b] * c
        return x

    q, k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    k_cache, v_cache = torch.randn(1, 12, 2, 8), torch.randn(1, 12, 2, 8)
    out = flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        cache_seqlens=torch.tensor([5], dtype=torch.int32),
        causal=causal,
        rotary_interleaved=interleaved,
    )
    near(k_cache[0, 5:8], turn(k[0], [5, 6, 7]), seed)
    visible = torch.ones(3, 8, dtype=torch.bool).tril(5) if causal else None
    turned = turn(q[0], [5, 6, 7] if causal else [5, 5, 5])
    near(out[0], naive(turned, k_cache[0, :8], v_cache[0, :8], visible)[0], seed)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(causal: bool, batched: bool) -> None:
    """-slope · |i + seqlen_k - seqlen_q - j| added to the scores, of (heads,) or (batch, heads)."""
    seed = random.randrange(2**31)
    print("seed", seed)
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    slopes = torch.rand((2, 4) if batched else (4,), requires_grad=True)
    distance = torch.arange(5)[:, None] + 4 - torch.arange(9)
    scores = q.transpose(1, 2) @ k.repeat_interleave(2, 2).permute(0, 2, 3, 1) * 0.5
    scores = scores - (slopes if batched else slopes[None])[..., None, None] * distance.abs()
    if causal:
        scores = scores.masked_fill(distance < 0, float("-inf"))
    want = (scores.softmax(-1) @ v.repeat_interleave(2, 2).transpose(1, 2)).transpose(1, 2)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 9))
    options: dict[str, Any] = {"softmax_scale": 0.5, "causal": causal, "alibi_slopes": slopes}
    packed = flash_attn.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), cu_q, cu_k, 5, 9, **options)
    for got in (
        flash_attn.flash_attn_func(q, k, v, **options),
        flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options),
        packed.view(2, 5, 4, 8),
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        a, b = (torch.autograd.grad(t.sin().sum(), slopes, retain_graph=True)[0] for t in (got, want))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("queries,causal", [(1, False), (3, True), (20, True), (3, False)])
@pytest.mark.parametrize("page_size", [None, 8])
def test_alibi_beside_a_cache(page_size: int | None, queries: int, causal: bool) -> None:
    """Few causal queries go to decode and others to packed attention."""
    seed = random.randrange(2**31)
    print("seed", seed)
    torch.manual_seed(seed)
    q, k, v, slopes = torch.randn(2, queries, 4, 8), torch.randn(2, 32, 2, 8), torch.randn(2, 32, 2, 8), torch.rand(2, 4)
    lengths, table, caches = torch.tensor([30, 21], dtype=torch.int32), None, [k, v]
    if page_size is not None:
        table = torch.randperm(8, dtype=torch.int32).view(2, 4)
        caches = [torch.empty(8, 8, 2, 8) for _ in range(2)]
        for pages, rows in zip(caches, (k, v), strict=True):
            pages[table.long()] = rows.unflatten(1, (4, 8))
    got = flash_attn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, block_table=table, causal=causal, alibi_slopes=slopes
    )
    for b, n in enumerate(lengths.tolist()):
        rows = q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n]
        want = flash_attn.flash_attn_func(*rows, causal=causal, alibi_slopes=slopes[b])
        torch.testing.assert_close(got[b : b + 1], want, rtol=1e-4, atol=1e-5)


def test_refusals() -> None:
    q, slopes = torch.zeros(1, 4, 2, 16), torch.zeros(2)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    cache = torch.ones(1, 8, 2, 16)
    for wrong in (torch.zeros(3), torch.zeros(2, 2), torch.zeros(2, device="meta")):
        with pytest.raises(ValueError, match=r"\(heads,\) = \(2,\) or \(batch, heads\) = \(1, 2\) on cpu, got"):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=0, alibi_slopes=wrong)
    assert bool((cache == 1).all())
    for wrong in (slopes[None, None], slopes.int(), 0.5):
        with pytest.raises(TypeError, match=r"alibi_slopes must be a floating point tensor \(heads,\) or \(batch, heads\)"):
            flash_attn.flash_attn_func(q, q, q, alibi_slopes=wrong)
    with pytest.raises(ValueError, match="slopes of 3 heads"):
        flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, alibi_slopes=torch.zeros(3))
    leftpad, idx = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for words, options in (
        ("cache_leftpad is not supported", {"cache_leftpad": leftpad}),
        ("cache_batch_idx and block_table", {"cache_batch_idx": idx, "block_table": idx[:, None]}),
        ("k and v must be given together", {"k": q}),
        ("cache_seqlens must be given", {"k": q, "v": q}),
        ("apply only where k and v are given", {"rotary_cos": q[0, :, 0], "rotary_sin": q[0, :, 0]}),
    ):
        with pytest.raises(ValueError, match=words):
            flash_attn.flash_attn_with_kvcache(q, q, q, **options)
    with pytest.raises(ValueError, match="give cache_batch_idx"):
        flash_attn.flash_attn_with_kvcache(q, q.expand(3, -1, -1, -1), q.expand(3, -1, -1, -1))
    with pytest.raises(ValueError, match="qkv must have 5 dimensions with 3"):
        flash_attn.flash_attn_qkvpacked_func(q)
