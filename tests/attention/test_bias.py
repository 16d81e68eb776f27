"""Additive biases: every kind against a softmax written out, on the reference and the CPU, with all gradients."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import warploom
from tests.attention.biased import KINDS, biased_results, check, leaf_of, matrix_of
from tests.attention.harness import Call
from warploom import bias as biases
from warploom import masks
from warploom.attention import cpu
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.chunks import attention_chunks, chunk_args
from warploom.attention.problem import AttentionProblem
from warploom.bias import ALiBi, Bias, Key, Relative, t5_buckets
from warploom.demo.memory import PeakMemory
from warploom.runtime import dispatch

INF = float("inf")
BACKENDS = ("reference", "cpu")
WIDE = {"reference": torch.float64, "cpu": torch.float32}
SEED = 11
SHAPE = (2, 4, 9, 14)  # batch, heads_q, seqlen_q, seqlen_k of `inputs`


@pytest.fixture
def seed() -> int:
    found = random.randrange(2**31)
    print("seed", found)
    return found


def inputs(seed: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> list[Tensor]:
    return [t.requires_grad_(requires_grad) for t in Call(seed, 2, 9, 14, 4, 2, 8, dtype=dtype).tensors()[:3] if t is not None]


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), leaves)


def near(a: Tensor, b: Tensor) -> None:
    """Equal but for another order of sums: another element of a bias is off by tenths."""
    exact = 1e-9 if a.dtype == torch.float64 else 5e-4
    torch.testing.assert_close(a, b, rtol=exact, atol=exact)


def written_out(call: Call, matrix: Tensor, leaf: Tensor) -> dict[str, Tensor]:
    """out, lse and gradients of softmax(softcap(scale q kᵀ) + bias) v in fp64 by torch's autograd."""
    q, k, v, _ = call.tensors()
    q, k, v = (t.double().detach().requires_grad_() for t in (q, k, v))
    group = call.heads_q // call.heads_kv
    scores = q.transpose(1, 2) @ k.repeat_interleave(group, 2).permute(0, 2, 3, 1) / call.head_dim**0.5
    cap = call.keywords.get("softcap", 0.0)
    scores = (cap * torch.tanh(scores / cap) if cap else scores) + matrix
    if call.keywords.get("causal"):
        rows, cols = torch.arange(call.seqlen_q)[:, None], torch.arange(call.seqlen_k)
        scores = scores.masked_fill(cols > rows + call.seqlen_k - call.seqlen_q, -INF)
    out = (scores.softmax(-1) @ v.repeat_interleave(group, 2).transpose(1, 2)).transpose(1, 2)
    lse = scores.logsumexp(-1)
    dout, dlse = call.upstream(out, lse.float())
    total = (out * dout).sum() + (lse * dlse).sum()
    names = ("dq", "dk", "dv", "dbias")
    return {"out": out, "lse": lse, **dict(zip(names, torch.autograd.grad(total, (q, k, v, leaf)), strict=True))}


@pytest.mark.parametrize("keywords", [{}, {"causal": True, "softcap": 3.0}], ids=["plain", "causal with a softcap"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_a_softmax_written_out(kind: str, keywords: dict[str, Any], seed: int) -> None:
    call = Call(seed, *SHAPE[:1], *SHAPE[2:], 4, 2, 8, dtype=torch.float64, lse_gradient=True, keywords=keywords)
    leaf = leaf_of(kind, SHAPE, seed).requires_grad_()
    want = written_out(call, matrix_of(kind, leaf, 9, 14), leaf)
    got = biased_results(call, kind, leaf, "reference", torch.float64)
    assert len(got) == 6
    for name, value in got.items():
        exact = 1e-6 if name == "lse" else 1e-11  # lse is fp32
        torch.testing.assert_close(value.double(), want[name], rtol=exact, atol=exact, msg=name)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, group of 7": {"heads_q": 7, "heads_kv": 1, "keywords": {"causal": True}},
    "window, softcap, sink, lse": {"sink": True, "lse_gradient": True, "keywords": {"window": (9, 3), "softcap": 2.0}},
    "columns, strided, unequal dims": {
        "strided": True, "head_dim_v": 24, "keywords": {"mask": masks.Document([[20, 33], [7, 46]], causal=False)},
    },
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_is_judged(kind: str, feature: str) -> None:
    """Of one seed: samples as small as this have outliers. The fuzzer draws others, and has several models of a kernel."""
    dtype = (torch.float32, torch.bfloat16, torch.float16)[(len(kind) + len(feature)) % 3]
    check(Call(SEED, dtype=dtype, **FEATURES[feature]), kind, "cpu", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["of heads", "keys", "alibi", "t5"])
def test_a_bias_of_any_dtype(kind: str, dtype: torch.dtype) -> None:
    call = Call(SEED, dtype=torch.bfloat16)
    check(call, kind, "cpu", dtype)
    leaf = leaf_of(kind, (2, 4, 37, 53), SEED, dtype)
    assert biased_results(call, kind, leaf, "cpu")["dbias"].dtype == dtype


def test_several_tiles_and_column_steps() -> None:
    call = Call(SEED, batch=1, seqlen_q=140, seqlen_k=700, keywords={"causal": True})
    for kind in ("of heads", "alibi", "relative"):
        check(call, kind, "cpu", torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend: str, seed: int) -> None:
    q, k, v = inputs(seed)
    plain = leaf_of("full", SHAPE, seed, torch.float32)
    turned = plain.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    every_other = torch.stack([plain, plain.neg()], -1).flatten(-2)[..., ::2]
    want = warploom.attention(q, k, v, bias=plain, backend=backend)
    for bias in (turned, every_other):
        assert bias.stride(-1) != 1
        assert torch.equal(warploom.attention(q, k, v, bias=bias, backend=backend), want)
    shared = plain[:1].expand(SHAPE)
    assert torch.equal(
        warploom.attention(q, k, v, bias=shared, backend=backend), warploom.attention(q, k, v, bias=plain[:1], backend=backend)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_minus_infinity_hides_as_a_mask_does(backend: str, causal: bool, seed: int) -> None:
    """NaN behind it included: in a key that no query sees, and in a query that sees no key."""
    q, k, v = inputs(seed, requires_grad=False)
    shown = torch.ones(2, 1, 9, 14, dtype=torch.bool)
    shown[0, :, :, 11:] = shown[1, :, 4] = shown[1, :, :, :2] = False
    shown[:, :, 2:5, 3] = False
    numbers = leaf_of("full", SHAPE, seed, torch.float32)
    cleaned, poisoned = [t.clone() for t in (q, k, v)], [t.clone() for t in (q, k, v)]
    for n, (a, b) in enumerate(zip(cleaned, poisoned, strict=True)):
        for at in [(1, 4)] if n == 0 else [(0, slice(11, None)), (1, slice(0, 2))]:
            a[at], b[at] = 0.0, float("nan")

    def run(tensors: list[Tensor], bias: Tensor, **options: Any) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        leaves = [t.detach().requires_grad_() for t in (*tensors, bias)]
        out, lse = warploom.attention(
            *leaves[:3], bias=leaves[3], causal=causal, return_lse=True, backend=backend, **options
        )
        return out, lse, gradients(out, leaves)

    mask = masks.ColumnMask.from_dense(shown) if not causal else None
    bias = numbers.masked_fill(~shown, -INF)
    out, lse, found = run(poisoned, bias)
    assert not any(bool(t.isnan().any()) for t in (out, lse, *found))
    assert torch.equal(found[3] == 0, (found[3] == 0) | ~shown.expand_as(numbers))
    assert bool((lse[1, :, 4] == -INF).all()) and not out[1, 4].any() and not found[0][1, 4].any()
    want_out, want_lse, want = run(cleaned, numbers if mask is not None else bias, mask=mask)
    for a, b in zip((out, lse, *found), (want_out, want_lse, *want), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_hidden_element_of_the_bias_holds_changes_nothing(backend: str, seed: int) -> None:
    tensors = inputs(seed)
    numbers = leaf_of("full", SHAPE, seed, torch.float32)
    hidden = torch.arange(14) > torch.arange(9)[:, None] + 5
    results = []
    for fill in (0.0, float("nan"), INF):
        bias = numbers.masked_fill(hidden, fill).requires_grad_()
        out = warploom.attention(*tensors, bias=bias, causal=True, backend=backend)
        results.append((out, *gradients(out, [*tensors, bias])))
    assert not results[0][4].masked_select(hidden).any()
    assert all(torch.equal(a, b) for a, b in zip(*results[1:], strict=True))
    for a, b in zip(*results[:2], strict=True):
        near(a, b)


@pytest.mark.parametrize("kind", ["full", "keys", "relative"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_low_number_of_a_wider_dtype_hides_nothing(backend: str, kind: str, seed: int) -> None:
    """Below all that fp32 holds it would be -inf there."""
    tensors = inputs(seed, requires_grad=False)
    low, lowest = (torch.full(KINDS[kind].shape(SHAPE), x, dtype=torch.float64) for x in (-1e300, -3e38))
    low[..., -1:] = lowest[..., -1:] = 0.0
    out, want = (warploom.attention(*tensors, bias=KINDS[kind].build(t), backend=backend) for t in (low, lowest))
    assert bool(out.isfinite().all()) and torch.equal(out, want)
    everywhere = KINDS[kind].build(torch.full_like(low, -1e300))
    out = warploom.attention(*tensors, bias=everywhere, backend=backend)
    assert bool(out.isfinite().all()) and bool(out.any(-1).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_visible_nan_stays_one(backend: str, seed: int) -> None:
    q, k, v = inputs(seed, requires_grad=False)
    bias = torch.zeros(1, 1, 9, 14)
    bias[..., 3, 5] = float("nan")
    out = warploom.attention(q, k, v, bias=bias, backend=backend)
    assert bool(out[:, 3].isnan().all()) and not bool(out[:, [0, 1, 2, 4, 5, 6, 7, 8]].isnan().any())


STARTS_Q, STARTS_K = [0, 5, 5, 14, 20], [0, 9, 13, 13, 33]  # no queries, no keys, and tokens past the last sequence


@pytest.mark.parametrize("used", [None, [7, 0, 0, 18]], ids=["all keys", "seqused_k"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_indexed_within_each(kind: str, backend: str, used: list[int] | None, seed: int) -> None:
    dtype = WIDE[backend]
    q, k, v = (t[0].detach() for t in Call(seed, 1, 22, 35, 4, 2, 8, dtype=dtype).tensors()[:3] if t is not None)
    leaf = leaf_of(kind, (4, 4, 9, 20), seed, dtype).requires_grad_()
    tensors = [t.requires_grad_() for t in (q, k, v)]
    cu_q, cu_k = (torch.tensor(starts, dtype=torch.int32) for starts in (STARTS_Q, STARTS_K))
    lengths = None if used is None else torch.tensor(used, dtype=torch.int32)
    options: dict[str, Any] = {"causal": seed % 2 == 0, "softcap": 4.0, "backend": backend}
    out = warploom.attention_varlen(
        *tensors, cu_q, cu_k, 9, 20, seqused_k=lengths, bias=KINDS[kind].build(leaf), **options
    )
    parts = []
    for n in range(4):
        rows = slice(STARTS_Q[n], STARTS_Q[n + 1])
        first, end = STARTS_K[n], STARTS_K[n + 1] if used is None else STARTS_K[n] + used[n]
        own = leaf
        if kind in ("full", "of batches", "keys", "keys of all heads", "alibi of batches"):
            own = leaf[n : n + 1]
        own = KINDS[kind].build(own)
        if isinstance(own, Key):
            own = Key(own.values[..., : end - first])
        elif isinstance(own, Tensor):
            own = own[..., : rows.stop - rows.start, : end - first]
        call = tensors[0][None, rows], tensors[1][None, first:end], tensors[2][None, first:end]
        parts.append(warploom.attention(*call, bias=own, **options)[0])
    want = torch.cat([*parts, torch.zeros(2, 4, 8, dtype=dtype)])
    near(out, want)
    for a, b in zip(gradients(out, [*tensors, leaf]), gradients(want, [*tensors, leaf]), strict=True):
        near(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages(backend: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, pages = torch.randn(6, 4, 8, generator=generator), torch.randn(5, 4, 2, 8, generator=generator)
    table, lengths = torch.tensor([[3, 1, 0], [2, 4, 0]], dtype=torch.int32), torch.tensor([10, 7], dtype=torch.int32)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    for kind in ("full", "alibi of batches", "t5"):
        leaf = leaf_of(kind, (2, 4, 4, 12), seed, torch.float32)
        out = warploom.attention_varlen(
            q, pages, pages, cu, max_seqlen_q=4, seqused_k=lengths, block_table=table, bias=KINDS[kind].build(leaf),
            causal=True, backend=backend,
        )  # fmt: skip
        for n, (first, end) in enumerate(((0, 2), (2, 6))):
            keys = pages[table[n].long()].flatten(0, 1)[None, : lengths[n]]
            own = leaf if kind == "t5" else leaf[n : n + 1]
            own = own[:, :, : end - first, : lengths[n]] if kind == "full" else own
            want = warploom.attention(q[None, first:end], keys, keys, bias=KINDS[kind].build(own), causal=True, backend=backend)
            torch.testing.assert_close(out[first:end], want[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_read_the_rows_of_the_whole(kind: str, backend: str, seed: int) -> None:
    dtype = WIDE[backend]
    q, k, v = (t.detach() for t in Call(seed, 1, 12, 17, 4, 2, 8, dtype=dtype).tensors()[:3] if t is not None)
    tensors = [t.requires_grad_() for t in (q, k, v)]
    leaf = leaf_of(kind, (1, 4, 12, 17), seed, dtype).requires_grad_()
    options: dict[str, Any] = {"causal": True, "bias": KINDS[kind].build(leaf), "backend": backend}
    want = warploom.attention(*tensors, **options)
    keys = [t.expand(3, -1, -1, -1) for t in tensors[1:]]
    at = torch.tensor([8, 0, 4], dtype=torch.int32)
    out, _ = attention_chunks(torch.cat([tensors[0][:, r : r + 4] for r in (8, 0, 4)]), *keys, at, seqlen_q=12, **options)
    out = out[[1, 2, 0]].reshape(want.shape)
    near(out, want)
    for a, b in zip(gradients(out, [*tensors, leaf]), gradients(want, [*tensors, leaf]), strict=True):
        near(a, b)


def test_rows_past_the_end_of_a_chunked_sequence_read_its_last_row(seed: int) -> None:
    q, k, v = (t.detach() for t in Call(seed, 1, 6, 17, 4, 2, 8).tensors()[:3] if t is not None)
    found = []
    for backend in BACKENDS:
        leaf = leaf_of("full", (1, 4, 12, 17), seed, torch.float32).requires_grad_()
        at = torch.tensor([8], dtype=torch.int32)
        out, _ = attention_chunks(q, k, v, at, seqlen_q=12, bias=leaf, backend=backend)
        found.append((out, *gradients(out, [leaf])))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert not found[0][1][:, :, :8].any() and found[0][1][:, :, 8:].all()


def test_standard_slopes_are_the_papers() -> None:
    assert ALiBi.standard(8).slopes.tolist() == [2.0**-n for n in range(1, 9)]
    torch.testing.assert_close(ALiBi.standard(12).slopes[8:], torch.tensor([2.0**-n for n in (0.5, 1.5, 2.5, 3.5)]))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_buckets_are_those_of_transformers(bidirectional: bool) -> None:
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    relative = torch.arange(-300, 301)
    want = modeling.T5Attention._relative_position_bucket(relative, bidirectional, 32, 128)
    assert torch.equal(t5_buckets(-relative, 32, 128, bidirectional), want)


class Operations(TorchDispatchMode):
    """The names of those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_t5_buckets_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each form, in no inference tensor; a very long table's are not kept."""
    monkeypatch.setattr(biases, "_t5_indices", {})
    table = torch.randn(4, 32, requires_grad=True)
    counts = []
    for _ in range(2):
        with torch.inference_mode(), Operations() as operations:
            Relative(table, 100, buckets="t5").resolve(4, torch.float32)
        counts.append(len(operations.names))
    assert counts[0] > 15 and counts[1] < 10 and len(biases._t5_indices) == 1
    values, _, origin = Relative(table, 100, buckets="t5").resolve(4, torch.float32)
    distance = torch.arange(-origin, origin + 1)
    assert torch.equal(values, table[:, t5_buckets(distance, 32, 100, True)])
    values.sum().backward()
    one_side = Relative(table, 100, buckets="t5", bidirectional=False).resolve(4, torch.float32).values
    assert torch.equal(one_side, table[:, t5_buckets(torch.arange(one_side.shape[1]), 32, 100, False)])
    Relative(table, biases.KEPT_DISTANCE + 1, buckets="t5").resolve(4, torch.float32)
    with FakeTensorMode() as mode:
        Relative(mode.from_tensor(table), 100, buckets="t5").resolve(4, torch.float32)
    assert len(biases._t5_indices) == 2
    with FakeTensorMode(allow_non_fake_inputs=True):  # whose tensors are not kept beside a table that is none of its own
        Relative(table, 90, buckets="t5").resolve(4, torch.float32)
    assert len(biases._t5_indices) == 2


def test_relative_tables_have_no_matrix(seed: int) -> None:
    leaf = leaf_of("t5", (1, 4, 1, 1), seed, torch.float32).requires_grad_()
    values, kind, origin = KINDS["t5"].build(leaf).resolve(4, torch.float32)
    assert (tuple(values.shape), kind, origin) == ((4, 17), "distance", 8)
    assert values.is_contiguous() and values.requires_grad


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("buckets", [4, 5, 8, 32, 77])
@pytest.mark.parametrize("max_distance", [40, 128, 1000])
def test_t5_tables_end_with_their_last_bucket(max_distance: int, buckets: int, bidirectional: bool) -> None:
    """What lies past it, to max_distance and beyond, is in that bucket too."""
    bias = Relative(torch.arange(float(buckets))[None], max_distance, buckets="t5", bidirectional=bidirectional)
    values, _, origin = bias.resolve(1, torch.float32)
    distance = torch.arange(-max_distance - 9, max_distance + 10)
    found = values[0, (distance + origin).clamp(0, values.shape[1] - 1)]
    assert torch.equal(found, t5_buckets(distance, buckets, max_distance, bidirectional).float())
    assert values.shape[1] - 1 - origin <= max_distance
    assert (max_distance, buckets) != (128, 32) or values.shape[1] == (185 if bidirectional else 115)


def test_a_frozen_bias_costs_no_gradient_pass(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(cpu, "add_gradient", fail)
    tensors, leaf = inputs(seed), leaf_of("of heads", SHAPE, seed, torch.float32)
    warploom.attention(*tensors, bias=leaf).sum().backward()
    assert all(t.grad is not None for t in tensors)
    with torch.no_grad():
        warploom.attention(*tensors, bias=leaf.requires_grad_())
    with pytest.raises(AssertionError):
        warploom.attention(*tensors, bias=leaf).sum().backward()


def test_only_the_bias_asks_for_a_gradient(seed: int) -> None:
    leaf = leaf_of("of heads", SHAPE, seed, torch.float32).requires_grad_()
    found = [
        gradients(warploom.attention(*inputs(seed, requires_grad=False), bias=leaf, backend=backend), [leaf])[0]
        for backend in BACKENDS
    ]
    assert bool(found[0].any())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_of_the_reference(kind: str, seed: int) -> None:
    q, k, v = (torch.randn(1, n, heads, 3, dtype=torch.float64) for n, heads in ((4, 2), (5, 1), (5, 1)))
    leaf = leaf_of(kind, (1, 2, 4, 5), seed)

    def run(q: Tensor, k: Tensor, v: Tensor, leaf: Tensor) -> Tensor:
        return warploom.attention(q, k, v, bias=KINDS[kind].build(leaf), causal=True, softcap=2.0, backend="reference")

    leaves = [t.requires_grad_() for t in (q, k, v, leaf)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["of heads", "keys", "alibi", "t5"])
def test_func_grad(kind: str, backend: str, seed: int) -> None:
    q, k, v = inputs(seed, requires_grad=False)
    leaf = leaf_of(kind, SHAPE, seed, torch.float32)

    def loss(q: Tensor, leaf: Tensor) -> Tensor:
        return warploom.attention(q, k, v, bias=KINDS[kind].build(leaf), backend=backend).square().sum()

    got = torch.func.grad(loss, argnums=(0, 1))(q, leaf)
    leaves = [t.clone().requires_grad_() for t in (q, leaf)]
    for a, b in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.func.grad(loss)(q, leaf), got[0])


@pytest.mark.parametrize("kind", ["of heads", "keys", "alibi", "t5"])
def test_the_reference_takes_every_transform_and_kernels_refuse_in_words(kind: str, seed: int) -> None:
    q, k, v = inputs(seed, requires_grad=False)
    leaf = leaf_of(kind, SHAPE, seed, torch.float32)

    def run(leaf: Tensor, backend: str | None = "reference") -> Tensor:
        return warploom.attention(q, k, v, bias=KINDS[kind].build(leaf), backend=backend)

    leaves = torch.stack([leaf, 2 * leaf])
    for a, b in zip(torch.func.vmap(run)(leaves), (run(leaf), run(2 * leaf)), strict=True):
        torch.testing.assert_close(a, b)
    tangent = torch.ones_like(leaf)
    _, slope = torch.func.jvp(run, (leaf,), (tangent,))
    (dleaf,) = torch.autograd.grad(run(leaf.requires_grad_()).sum(), leaf)
    torch.testing.assert_close(slope.sum(), (dleaf * tangent).sum(), rtol=1e-3, atol=1e-3)
    for transform in (
        lambda: torch.func.jvp(lambda t: run(t, None), (leaf.detach(),), (tangent,)),
        lambda: torch.func.vmap(lambda t: run(t, None))(leaves),
    ):
        with pytest.raises(NotImplementedError, match="backend='reference' supports it"):
            transform()


def test_compiles_whole_without_recompiling_for_new_shapes(seed: int) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def loss(q: Tensor, matrix: Tensor, table: Tensor) -> Tensor:
        first = warploom.attention(q, q, q, bias=Relative(table, 20, buckets="t5"), causal=True)
        return warploom.attention(first, q, q, bias=matrix).square().sum()

    compiled, first = torch.compile(loss, fullgraph=True, dynamic=True, backend=counting), 0
    table = torch.randn(4, 8, requires_grad=True)
    for seqlen in (16, 24):
        q, matrix = torch.randn(2, seqlen, 4, 8, requires_grad=True), torch.randn(1, 4, seqlen, seqlen, requires_grad=True)
        leaves = (q, matrix, table)
        got, want = compiled(*leaves), loss(*leaves)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
            torch.testing.assert_close(a, b)
        first = first or len(graphs)
    assert len(graphs) == first


def test_a_bias_made_outside_goes_into_a_compiled_function(seed: int) -> None:
    q, k, v = inputs(seed)
    bias = ALiBi(leaf_of("alibi", SHAPE, seed, torch.float32).requires_grad_())

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        return warploom.attention(q, k, v, bias=bias)

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v, bias)
    torch.testing.assert_close(got, run(q, k, v, bias))


def test_checkpointing_and_autocast(seed: int) -> None:
    tensors, leaf = inputs(seed), leaf_of("of heads", SHAPE, seed, torch.float32).requires_grad_()

    def layer(*leaves: Tensor) -> Tensor:
        return warploom.attention(*leaves[:3], bias=leaves[3], dropout_p=0.5)

    leaves = [*tensors, leaf]
    for context in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            torch.manual_seed(3)
            want = gradients(layer(*leaves), leaves)
            torch.manual_seed(3)
            out = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
            assert out.dtype == torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        assert all(torch.equal(a, b) for a, b in zip(gradients(out, leaves), want, strict=True))
        assert want[3].dtype == torch.float32


@pytest.mark.parametrize("kind", ["of heads", "keys", "alibi", "t5"])
def test_opcheck(kind: str, seed: int) -> None:
    bias = KINDS[kind].build(leaf_of(kind, SHAPE, seed, torch.float32).requires_grad_())
    args = dense_args(*inputs(seed), bias=bias)
    if args.bias is not None and not args.bias.is_leaf:
        args = args._replace(bias=args.bias.detach().requires_grad_())
    torch.library.opcheck(torch.ops.warploom.attention.default, tuple(args._replace(backend="cpu")))


def test_export_keeps_the_bias(seed: int) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(4, 8))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return warploom.attention(q, k, v, bias=Relative(self.table, 20, buckets="t5"))

    tensors, layer = inputs(seed, requires_grad=False), Layer()
    program = torch.export.export(layer, tuple(tensors))
    assert [n.target for n in program.graph.nodes].count(torch.ops.warploom.attention.default) == 1
    torch.testing.assert_close(program.module()(*tensors), layer(*tensors))


@pytest.mark.parametrize("kind", ["keys", "alibi", "relative, buckets", "t5, one side"])
def test_a_bias_is_a_pytree_that_moves(kind: str, seed: int) -> None:
    bias = KINDS[kind].build(leaf_of(kind, SHAPE, seed, torch.float32))
    leaves, spec = _pytree.tree_flatten(bias)
    assert leaves and all(isinstance(leaf, Tensor) for leaf in leaves)
    again = _pytree.tree_unflatten(leaves, _pytree.treespec_loads(_pytree.treespec_dumps(spec)))
    tensors = inputs(seed, requires_grad=False)
    want = warploom.attention(*tensors, bias=bias)
    for other in (again, bias.to("cpu")):
        assert type(other) is type(bias) and repr(other) == repr(bias)
        assert torch.equal(warploom.attention(*tensors, bias=other), want)


@pytest.mark.parametrize("kind", ["alibi", "t5", "keys"])
def test_memory_is_linear_in_the_sequence(kind: str, seed: int) -> None:
    """A matrix of this call would take 4 GiB, in both passes."""
    seqlen = 32768
    q, k, v = (torch.randn(1, seqlen, 1, 16, requires_grad=True) for _ in range(3))
    leaf = leaf_of(kind, (1, 1, 1, seqlen), seed, torch.float32).requires_grad_()
    memory = PeakMemory("cpu")
    memory.start()
    warploom.attention(q, k, v, bias=KINDS[kind].build(leaf), window=(200, 0)).sum().backward()
    peak = memory.stop()
    assert peak is not None and peak < 200 * 2**20, f"took {peak} bytes"


def test_small_integers_are_exact() -> None:
    """Equal scores but for a bias of log 3: weights are 3/4 and 1/4."""
    q, v = torch.zeros(1, 1, 1, 8), torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
    bias = torch.tensor([3.0, 1.0]).log()
    out = warploom.attention(q, torch.ones(1, 2, 1, 8), v, bias=bias)
    torch.testing.assert_close(out.flatten(), torch.tensor([5.0]))


def test_a_gradient_sums_to_zero_in_each_row(seed: int) -> None:
    tensors, leaf = inputs(seed), leaf_of("full", SHAPE, seed, torch.float32).requires_grad_()
    (dbias,) = gradients(warploom.attention(*tensors, bias=leaf), [leaf])
    assert float(dbias.abs().max()) > 1e-3
    assert float(dbias.sum(-1).abs().max()) < 1e-6


def test_no_key_or_no_query_gives_a_gradient_of_zeros() -> None:
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 0, 4, 8)
    slopes = torch.rand(4, requires_grad=True)
    for out in (warploom.attention(q, k, k, bias=ALiBi(slopes)), warploom.attention(k, q, q, bias=ALiBi(slopes))):
        (found,) = torch.autograd.grad(out.sum(), slopes)
        assert torch.equal(found, torch.zeros(4))


def test_kernels_without_biases_refuse_in_words(seed: int) -> None:
    plan = warploom.explain(*inputs(seed), bias=ALiBi(torch.rand(4, requires_grad=True)))
    assert plan.implementation == "cpu" and "bias (ALiBi, with a gradient)" in plan.call
    problem = AttentionProblem.from_args(dense_args(*inputs(seed, torch.float16), bias=ALiBi(torch.rand(4))), False)
    for name, words in (("hopper", "takes a bias of calls in bfloat16 alone"), ("ampere", "has no bias")):
        refused = dispatch.find(name).supports(replace(problem, device="cuda", head_dim=64, head_dim_v=64))
        assert refused is not None and words in refused


def call_with(**keywords: Any) -> None:
    q, k = torch.zeros(2, 9, 4, 8), torch.zeros(2, 14, 4, 8)
    dense_args(q, k, k, **keywords)


def packed_with(bias: Any) -> None:
    q, cu = torch.zeros(20, 4, 8), torch.tensor([0, 5, 20], dtype=torch.int32)
    varlen_args(q, q, q, cu, max_seqlen_q=15, max_seqlen_k=15, bias=bias)


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (lambda: call_with(bias=1.0), TypeError, r"bias must be a floating point tensor or a .*, got float 1\.0"),
    "integers": (lambda: call_with(bias=torch.zeros(14, dtype=torch.int32)), TypeError, r"got a torch\.int32 tensor"),
    "a mask": (lambda: call_with(bias=torch.ones(9, 14) > 0), TypeError, r"a boolean mask is no bias: give it as mask"),
    "five dimensions": (lambda: call_with(bias=torch.zeros(1, 2, 4, 9, 14)), ValueError, r"bias must broadcast to .*\(1, 2, 4"),
    "another length": (lambda: call_with(bias=torch.zeros(9, 13)), ValueError, r"= \(2, 4, 9, 14\), got shape \(1, 1, 9, 13\)"),
    "another batch": (lambda: call_with(bias=torch.zeros(3, 1, 1, 14)), ValueError, r"bias must broadcast to"),
    "another device": (lambda: call_with(bias=torch.zeros(14, device="meta")), ValueError, r"bias is on meta but q is on cpu"),
    "slopes of other heads": (lambda: call_with(bias=ALiBi(torch.zeros(3))), ValueError, r"slopes of 3 heads.*q has 4 heads"),
    "slopes of another batch": (lambda: call_with(bias=ALiBi(torch.zeros(3, 4))), ValueError, r"batch 3, but .* has batch 2"),
    "a table of other heads": (lambda: call_with(bias=Relative(torch.zeros(3, 5))), ValueError, r"a table of 3 heads"),
    "slopes of three dimensions": (lambda: ALiBi(torch.zeros(1, 2, 3)), ValueError, r"slopes must have shape \(heads,\)"),
    "slopes of integers": (lambda: ALiBi(torch.zeros(3, dtype=torch.int64)), TypeError, r"slopes must be a floating"),
    "no heads": (lambda: ALiBi.standard(0), ValueError, r"heads must be at least 1"),
    "no device": (lambda: ALiBi.standard(4, "quux"), ValueError, r"device must be a device such as 'cpu' .*, got str 'quux'"),
    "a vector for a table": (lambda: Relative(torch.zeros(3)), ValueError, r"table must have shape \(heads, entries\)"),
    "an even table": (lambda: Relative(torch.zeros(3, 4)), ValueError, r"4 distances; with max_distance 1 it takes .* 3"),
    "another max_distance": (lambda: Relative(torch.zeros(3, 5), 3), ValueError, r"table has 5 distances; .*max_distance 3"),
    "unknown buckets": (lambda: Relative(torch.zeros(3, 5), buckets="swin"), ValueError, r"buckets must be None, 't5' or"),
    "buckets of floats": (lambda: Relative(torch.zeros(3, 5), buckets=torch.zeros(3)), TypeError, r"buckets must be"),
    "a bucket too many": (
        lambda: Relative(torch.zeros(3, 5), buckets=torch.tensor([0, 5, 1])), ValueError, r"buckets must be from 0 to 4",
    ),
    "too few T5 buckets": (lambda: Relative(torch.zeros(3, 3), buckets="t5"), ValueError, r"must be at least 4"),
    "a matrix of keys": (lambda: Key(torch.zeros(3, 5)), ValueError, r"values must have shape \(batch, heads, keys\)"),
    "packed rows too few": (lambda: packed_with(torch.zeros(14, 15)), ValueError, r"at least max_seqlen_q = 15 in dimension 2"),
    "packed keys too few": (lambda: packed_with(Key(torch.zeros(2, 4, 6))), ValueError, r"at least max_seqlen_k = 15"),
    "packed sequences": (lambda: packed_with(torch.zeros(3, 1, 15, 15)), ValueError, r"with 2 and 4, got .*\(3, 1, 15, 15\)"),
    "packed slopes": (lambda: packed_with(ALiBi(torch.zeros(3, 4))), ValueError, r"the call describes 2 sequences"),
    "a chunk's rows": (
        lambda: chunk_args(
            torch.zeros(1, 4, 2, 8), *[torch.zeros(1, 9, 2, 8)] * 2, torch.zeros(1, dtype=torch.int32), seqlen_q=8,
            bias=torch.zeros(4, 9),
        ),
        ValueError, r"= \(1, 2, 8, 9\), got shape \(1, 1, 4, 9\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    make, kind, words = ERRORS[name]
    with pytest.raises(kind, match=words):
        make()
