"""The Triton kernels in the interpreter on calls with a bias: every kind with all gradients, and what -inf hides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.biased import KINDS, check, leaf_of
from tests.attention.harness import Call
from tests.attention.interpreted.test_edges import TILINGS, Guards, guards, surrounded
from warploom import masks
from warploom.attention.arguments import varlen_args
from warploom.attention.chunks import attention_chunks
from warploom.attention.triton import BACKEND, bias_sums, call, run

HALF = torch.float16  # the interpreter multiplies bfloat16 as integers
INF, NAN = float("inf"), float("nan")
SHAPE = (2, 2, 40, 70)  # batch, heads_q, seqlen_q, seqlen_k of `inputs`

__all__ = ["guards"]


@pytest.fixture
def seed() -> int:
    found = random.randrange(2**31)
    print("seed", found)
    return found


def inputs(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    batch, heads, seqlen_q, seqlen_k = SHAPE
    return [t.detach() for t in Call(seed, batch, seqlen_q, seqlen_k, heads, 1, 16, dtype=dtype).tensors()[:3] if t is not None]


def passes(function: Callable[..., Any], tensors: list[Tensor], upstream: int = 1) -> list[Tensor]:
    """out, lse and all gradients of `function`, which returns out and lse."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out, lse = function(*leaves)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(upstream)).to(out)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def dense(backend: str, kind: str = "full", **options: Any) -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, v: Tensor, leaf: Tensor) -> Any:
        bias = KINDS[kind].build(leaf)
        return warploom.attention(q, k, v, bias=bias, return_lse=True, backend=backend, **options)

    return run


def same(found: list[Tensor], want: list[Tensor]) -> None:
    """Equal but for another order of sums in fp32."""
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str, seed: int) -> None:
    check(Call(seed, dtype=HALF), kind, "triton", torch.float32)


FEATURES: dict[str, dict[str, Any]] = {
    "causal, group of 7": {"heads_q": 7, "heads_kv": 1, "keywords": {"causal": True}},
    "window, softcap, sink, lse": {"sink": True, "lse_gradient": True, "keywords": {"window": (9, 3), "softcap": 2.0}},
    "columns, strided, unequal dims": {
        "strided": True, "head_dim_v": 24, "keywords": {"mask": masks.Document([[20, 33], [7, 46]], causal=False)},
    },
}  # fmt: skip


FEATURED = [
    ("of heads", "causal, group of 7"), ("keys", "causal, group of 7"), ("full", "window, softcap, sink, lse"),
    ("alibi of batches", "window, softcap, sink, lse"), ("of batches", "columns, strided, unequal dims"),
    ("relative", "columns, strided, unequal dims"),
]  # fmt: skip


@pytest.mark.parametrize("kind,feature", FEATURED)
def test_features(kind: str, feature: str, seed: int) -> None:
    check(Call(seed, dtype=HALF, **FEATURES[feature]), kind, "triton", torch.float32)


@pytest.mark.parametrize("kind", ["full", "of heads", "keys", "alibi", "relative"])
def test_everything_at_once_in_small_tiles(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout, column vectors, a band, a softcap and a sink, in fp32 against the reference."""
    monkeypatch.setattr(call, "config", lambda *_: TILINGS["small" if seed % 2 else "wide"])
    shape = (1, 2, 24, 40)
    vectors = torch.randint(0, 24, (2, 1, 2, 40), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    options = {
        "mask": masks.ColumnMask(vectors[0], vectors[1]), "window": (30, 9), "softcap": 3.0, "dropout_p": 0.3,
        "dropout_seed": seed, "sink": torch.randn(2), "scale": -0.4 if seed % 3 == 0 else 0.3,
    }  # fmt: skip
    tensors = [t.detach() for t in Call(seed, 1, 24, 40, 2, 1, 16).tensors()[:3] if t is not None]
    tensors.append(leaf_of(kind, shape, seed, torch.float32))
    same(passes(dense("triton", kind, **options), tensors), passes(dense("reference", kind, **options), tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_tensor_of_any_dtype(dtype: torch.dtype, seed: int) -> None:
    """But bfloat16, to which the interpreter rounds towards zero."""
    for kind in ("full", "of heads", "keys"):
        check(Call(seed, dtype=HALF), kind, "triton", dtype)


def test_a_low_number_of_a_wider_dtype_hides_nothing(seed: int) -> None:
    """Below all that fp32 holds it would be -inf there."""
    q, k, v = inputs(seed)
    found = []
    for low in (-1e300, -3e38):
        bias = torch.full((q.shape[1], k.shape[1]), low, dtype=torch.float64)
        bias[3, 5] = -torch.inf
        found.append(warploom.attention(q, k, v, bias=bias, return_lse=True, backend="triton"))
    for a, b in zip(*found, strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a, b)


def test_any_strides(seed: int) -> None:
    tensors = inputs(seed)
    plain = leaf_of("full", SHAPE, seed, torch.float32)
    turned = plain.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    every_other = torch.stack([plain, plain.neg()], -1).flatten(-2)[..., ::2]
    want = passes(dense("triton"), [*tensors, plain])
    for bias in (turned, every_other):
        assert bias.stride(-1) != 1
        for a, b in zip(passes(dense("triton"), [*tensors, bias]), want, strict=True):
            assert torch.equal(a, b)
    one = plain[:1, :, :, :1]
    expanded = passes(dense("triton"), [*tensors, one.expand(SHAPE)])
    shared = passes(dense("triton"), [*tensors, one])
    same([*expanded[:5], expanded[5].sum((0, 3), keepdim=True)[:1]], shared)


TOGETHER: dict[str, tuple[int, int, torch.dtype, dict[str, Any], list[tuple[int, bool]]]] = {
    "one launch": (4, 16, HALF, {"causal": True}, [(4, False)]),
    "two launches": (5, 16, HALF, {"softcap": 2.0}, [(3, False), (2, True)]),
    "wide heads": (3, 72, HALF, {"scale": -0.2}, [(2, False), (1, True)]),
    "fp32": (3, 40, torch.float32, {"causal": True}, [(3, False)]),
    "too many": (9, 16, HALF, {}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", TOGETHER)
def test_batch_entries_that_share_a_matrix(case: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """dQ and the gradient by one walk, of some entries a launch."""
    batch, head_dim, dtype, options, want = TOGETHER[case]
    launches, make = [], run._shared_launch

    def shared_launch(*arguments: Any) -> Any:
        launches.append(arguments[-2:])
        return make(*arguments)

    monkeypatch.setattr(run, "_shared_launch", shared_launch)
    check(Call(seed, batch, 40, 72, 4, 2, head_dim, dtype=HALF, keywords=options), "of heads", "triton", dtype)
    assert launches == want


@pytest.mark.parametrize("batch", [2, 6])  # one launch, and two
def test_minus_infinity_hides_from_batch_entries_that_share_a_matrix(batch: int, seed: int) -> None:
    clean = [t.detach() for t in Call(seed, batch, 40, 72, 2, 1, 16, dtype=HALF).tensors()[:3] if t is not None]
    shown = torch.ones(1, 2, 40, 72, dtype=torch.bool)
    shown[..., 33:47] = shown[:, :, 4] = False
    bias = leaf_of("of heads", (batch, 2, 40, 72), seed, torch.float32).masked_fill(~shown, -INF).to(HALF)
    poisoned = [t.clone() for t in clean]
    poisoned[0][1, 4] = NAN
    for t, first in zip(poisoned[1:], (33, 38), strict=True):
        t[batch - 1, first : first + 9] = INF
        t[0, first : first + 9, :, ::3] = NAN
    want = passes(dense("triton"), [*clean, bias])
    found = passes(dense("triton"), [*poisoned, bias])
    assert not found[2][1, 4].any() and not found[5].masked_select(~shown).any()
    for a, b in zip(found, want, strict=True):
        assert a.isfinite().all() or a is found[1]
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_minus_infinity_hides_as_a_mask_does(causal: bool, seed: int) -> None:
    """NaN behind it included: in a key that no query sees, and in a query that sees no key."""
    clean = inputs(seed, HALF)
    shown = torch.ones(2, 1, 40, 70, dtype=torch.bool)
    shown[0, :, :, 33:47] = shown[1, :, 4] = shown[1, :, :, :2] = False
    shown[:, :, 2:5, 50] = False
    bias = leaf_of("full", SHAPE, seed, torch.float32).masked_fill(~shown, -INF)
    poisoned = [t.clone() for t in clean]
    poisoned[0][1, 4] = NAN
    for t, first in zip(poisoned[1:], (33, 38), strict=True):  # of keys alone, of both and of values alone
        t[0, first : first + 9] = INF
        t[0, first : first + 9, :, ::3] = t[1, :2] = NAN
    options = {"causal": causal, "softcap": 3.0}
    want = passes(dense("triton", **options), [*clean, bias])
    found = passes(dense("triton", **options), [*poisoned, bias])
    assert (found[1][1, :, 4] == -INF).all() and not found[0][1, 4].any() and not found[2][1, 4].any()
    assert not found[5].masked_select(~shown).any()
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
    mask = None if causal else masks.ColumnMask.from_dense(shown)
    if mask is not None:
        numbers = torch.where(shown, bias, 0.0)
        for a, b in zip(found, passes(dense("triton", mask=mask, softcap=3.0), [*clean, numbers]), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_nan_in_a_key_that_mask_and_bias_hide_together_reached_dk(seed: int) -> None:
    """Found by the fuzzer: the mask's zero probabilities were multiplied by NaN, of a value that no query saw."""
    clean = inputs(seed, HALF)
    bias = leaf_of("full", SHAPE, seed, torch.float32)
    bias[:, :, :20, 33:47] = -INF
    vectors = torch.full((1, 1, 70), 40, dtype=torch.int32)
    vectors[..., 33:47] = 20
    options = {"mask": masks.ColumnMask(vectors)}
    poisoned = [clean[0], *[t.clone() for t in clean[1:]]]
    for t in poisoned[1:]:
        t[:, 33:47] = NAN
    want = passes(dense("triton", **options), [*clean, bias])
    for a, b in zip(passes(dense("triton", **options), [*poisoned, bias]), want, strict=True):
        assert torch.equal(a, b)


def test_a_distance_of_minus_infinity_is_a_window(seed: int) -> None:
    tensors = inputs(seed)
    table = torch.tensor([[-INF, *[0.0] * 11, -INF]]).expand(2, -1)  # 5 to either side

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return warploom.attention(q, k, v, window=(5, 5), return_lse=True, backend="triton")

    found = passes(dense("triton", "relative"), [*tensors, table])
    same(found[:5], passes(windowed, tensors))
    assert not found[5][:, [0, -1]].any() and found[5][:, 1:-1].any()
    poisoned = [tensors[0], *[t.clone() for t in tensors[1:]]]
    for t in poisoned[1:]:
        t[:, :20] = NAN  # 25 keys and more before every query's window
    for a, b in zip(passes(dense("triton", "relative"), [*poisoned, table]), found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fill", [NAN, -INF])
def test_what_a_hidden_element_of_the_bias_holds_changes_nothing(fill: float, seed: int) -> None:
    tensors, plain = inputs(seed), leaf_of("full", SHAPE, seed, torch.float32)
    hidden = torch.arange(70) > torch.arange(40)[:, None] + 30
    vectors = torch.full((1, 1, 70), 40, dtype=torch.int32)
    vectors[..., 10:30] = 5
    hidden = hidden | (torch.arange(40)[:, None] >= vectors[0, 0])
    options = {"causal": True, "mask": masks.ColumnMask(vectors)}
    found = passes(dense("triton", **options), [*tensors, plain.masked_fill(hidden, fill)])
    for a, b in zip(found, passes(dense("triton", **options), [*tensors, plain]), strict=True):
        assert torch.equal(a, b)
    assert not found[5].masked_select(hidden).any()


def test_a_visible_nan_stays_one(seed: int) -> None:
    bias = torch.zeros(1, 1, 40, 70)
    bias[..., 3, 5] = NAN
    out, lse, dq, *_, dbias = passes(dense("triton"), [*inputs(seed), bias])
    others = [i for i in range(40) if i != 3]
    assert out[:, 3].isnan().all() and lse[:, :, 3].isnan().all() and dq[:, 3].isnan().all() and dbias[..., 3, :].isnan().all()
    assert not out[:, others].isnan().any() and not dbias[:, :, others].isnan().any()


def test_the_lowest_number_hides_nothing(seed: int) -> None:
    """A row of nothing else weighs all keys alike, and no gradient is infinite or NaN."""
    bias = leaf_of("of heads", SHAPE, seed, torch.float32)
    bias[:, :, 7] = torch.finfo(torch.float32).min
    bias[:, :, 9, :60] = torch.finfo(torch.float32).min
    tensors = [*inputs(seed), bias]
    found, want = (passes(dense(backend), tensors) for backend in ("triton", "reference"))
    torch.testing.assert_close(found[0], want[0], rtol=1e-4, atol=1e-4)
    assert all(t.isfinite().all() for t in found)
    torch.testing.assert_close(found[2][:, 9], want[2][:, 9], rtol=1e-3, atol=1e-3)


STARTS_Q, STARTS_K = [0, 5, 5, 44, 60], [0, 9, 13, 13, 93]  # no queries, no keys, and tokens past the last sequence


PACKED = ["full", "of heads", "of rows", "keys of all heads", "alibi of batches", "relative"]


@pytest.mark.parametrize("kind", PACKED)
def test_packed(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used = [7, 0, 0, 58] if seed % 5 < 3 else None
    if seed % 2:
        monkeypatch.setattr(call, "config", lambda *_: TILINGS["tall"])
    tensors = [t[0] for t in Call(seed, 1, 63, 95, 2, 1, 16).tensors()[:3] if t is not None]
    leaf = leaf_of(kind, (4, 2, 39, 80), seed, torch.float32)
    cu_q, cu_k = (torch.tensor(starts, dtype=torch.int32) for starts in (STARTS_Q, STARTS_K))
    lengths = None if used is None else torch.tensor(used, dtype=torch.int32)

    def run(backend: str) -> Callable[..., Any]:
        return lambda q, k, v, leaf: warploom.attention_varlen(
            q, k, v, cu_q, cu_k, 39, 80, seqused_k=lengths, bias=KINDS[kind].build(leaf), causal=seed % 3 == 0, softcap=4.0,
            return_lse=True, backend=backend,
        )  # fmt: skip

    same(passes(run("triton"), [*tensors, leaf]), passes(run("reference"), [*tensors, leaf]))


@pytest.mark.parametrize("kind", ["full", "alibi of batches", "t5"])
def test_pages(kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, pages = torch.randn(6, 4, 16, generator=generator), torch.randn(5, 4, 2, 16, generator=generator)
    table, lengths = torch.tensor([[3, 1, 0], [2, 4, 0]], dtype=torch.int32), torch.tensor([10, 7], dtype=torch.int32)
    options: dict[str, Any] = {
        "max_seqlen_q": 4, "seqused_k": lengths, "block_table": table, "causal": True,
        "bias": KINDS[kind].build(leaf_of(kind, (2, 4, 4, 12), seed, torch.float32)),
    }  # fmt: skip
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    found, want = (warploom.attention_varlen(q, pages, pages, cu, backend=b, **options) for b in ("triton", "reference"))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["full", "of rows", "a matrix", "alibi", "relative"])
def test_chunks_read_the_rows_of_the_whole(kind: str, seed: int) -> None:
    tensors = [t.detach() for t in Call(seed, 1, 36, 57, 2, 1, 16).tensors()[:3] if t is not None]
    leaf = leaf_of(kind, (1, 2, 36, 57), seed, torch.float32)
    at = (24, 0, 12)

    def chunks(q: Tensor, k: Tensor, v: Tensor, leaf: Tensor) -> Any:
        parts = torch.cat([q[:, r : r + 12] for r in at])
        keys = [t.expand(3, -1, -1, -1) for t in (k, v)]
        options: dict[str, Any] = {"causal": True, "bias": KINDS[kind].build(leaf), "backend": "triton"}
        out, lse = attention_chunks(parts, *keys, torch.tensor(at, dtype=torch.int32), seqlen_q=36, **options)
        order = [1, 2, 0]
        return out[order].reshape(1, 36, 2, 16), lse[order].transpose(0, 1).reshape(1, 2, 36)

    same(passes(chunks, [*tensors, leaf]), passes(dense("triton", kind, causal=True), [*tensors, leaf]))


def test_one_query_and_one_key(seed: int) -> None:
    for seqlen_q, seqlen_k in ((1, 70), (40, 1), (1, 1)):
        for kind in ("of heads", "of rows", "keys", "relative"):
            tensors = [t.detach() for t in Call(seed, 1, seqlen_q, seqlen_k, 2, 1, 16).tensors()[:3] if t is not None]
            leaf = leaf_of(kind, (1, 2, seqlen_q, seqlen_k), seed, torch.float32)
            same(passes(dense("triton", kind), [*tensors, leaf]), passes(dense("reference", kind), [*tensors, leaf]))


@pytest.mark.parametrize("kind", ["full", "of heads", "keys", "alibi of batches", "relative"])
def test_nothing_outside_of_a_buffer_is_read_or_written(kind: str, guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [*inputs(1), leaf_of(kind, SHAPE, 1, torch.float32)]
    dout = torch.randn(2, 40, 2, 16, generator=torch.Generator().manual_seed(2))

    def run(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out, _ = dense("triton", kind, causal=True)(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    found = run([surrounded(t) for t in tensors])
    assert len(guards.buffers) >= 8 and guards.intact()
    monkeypatch.undo()
    for a, b in zip(found, run(tensors), strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


def test_lengths_beyond_a_packed_bias_read_and_write_nothing_else(seed: int) -> None:
    """On a device nobody looks at the contents of cu_seqlens: what they say beyond the bias counts as 0 there."""
    tensors = [t[0] for t in Call(seed, 1, 60, 60, 4, 2, 16).tensors()[:3] if t is not None]
    cu = torch.tensor([0, 20, 60], dtype=torch.int32)
    memory = torch.full((3 * 2 * 4 * 20 * 20,), NAN)
    bias = memory[2 * 4 * 400 : 4 * 4 * 400].view(2, 4, 20, 20).copy_(torch.zeros(2, 4, 20, 20))
    args = varlen_args(*tensors, cu, cu)._replace(bias=bias, bias_kind="tensor", bias_grad=True)
    out, lse = BACKEND.forward(args)
    dq, dk, dv, _, dbias = BACKEND.backward(args, torch.ones_like(out), None, out, lse)
    assert dbias.shape == bias.shape
    assert all(t.isfinite().all() for t in (out, lse, dq, dk, dv, dbias))


def test_a_frozen_bias_costs_no_gradient_pass(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    for launch in ("_sums_launch", "_gradient_launch", "_distance_launch"):
        monkeypatch.setattr(bias_sums, launch, fail)
    monkeypatch.setattr(run, "_shared_launch", fail)
    for kind in ("of heads", "alibi", "relative"):
        leaves = [t.requires_grad_() for t in inputs(seed)]
        leaf = leaf_of(kind, SHAPE, seed, torch.float32)
        dense("triton", kind)(*leaves, leaf)[0].sum().backward()
        assert all(t.grad is not None for t in leaves)
        with pytest.raises(AssertionError):
            dense("triton", kind)(*leaves, leaf.requires_grad_())[0].sum().backward()
