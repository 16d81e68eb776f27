"""return_stats on the CPU: both stats by formula, whoever runs the call, and everything around them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import warploom
from tests.attention.cases import case, masked
from tests.attention.harness import Call
from tests.attention.measured import BOTH, check_packed, check_stats
from tests.sizes import Sizes
from warploom import AttentionStats, masks
from warploom.attention import reference, stats
from warploom.attention.arguments import dense_args
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.attention.stats import FAMILY, Beside, stats_args, stats_backend
from warploom.runtime import dispatch

INF, NAN = float("inf"), float("nan")
BACKENDS = ("cpu", "reference")


@pytest.fixture
def seed() -> int:
    found = random.randrange(2**31)
    print("seed", found)
    return found


def inputs(seed: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, _ = Call(seed, **options).tensors()
    return q, k, v


def of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionStats:
    found: AttentionStats = warploom.attention(q, k, v, return_stats=BOTH, **options)[-1]
    return found


OF_CASES = [
    "full", "causal", "causal, queries that see nothing", "one query", "one key", "window behind", "window of nothing",
    "head_dim 192 and 128", "group of 7", "softcap, sink and lse", "sink of queries that see nothing", "negative scale",
    "scale 0", "strided", "expanded",
]  # fmt: skip
OF_MASKS = [
    "Padding anywhere", "Document", "PrefixLM", "GlobalWindow", "Tree", "lts and lte, per head", "ute, per kv head",
    "four vectors, per head, causal", "hides all",
]  # fmt: skip


@pytest.mark.parametrize("name", OF_CASES)
def test_case(name: str, seed: int) -> None:
    check_stats(case(name, seed, dtype=torch.float32), "cpu")


@pytest.mark.parametrize("name", OF_MASKS)
def test_mask(name: str, seed: int) -> None:
    check_stats(masked(name, seed, dtype=torch.float32), "cpu")


@pytest.mark.parametrize("name", ["causal, queries that see nothing", "group of 7", "softcap, sink and lse"])
def test_case_of_the_reference(name: str, seed: int) -> None:
    check_stats(case(name, seed, dtype=torch.float32), "reference")


@pytest.mark.parametrize("name", ["Document", "four vectors, per head, causal"])
def test_mask_of_the_reference(name: str, seed: int) -> None:
    check_stats(masked(name, seed, dtype=torch.float32), "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, backend: str, seed: int) -> None:
    check_stats(case("causal", seed, dtype=dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["full", "of heads", "keys", "alibi of batches", "t5"])
def test_bias(kind: str, backend: str, seed: int) -> None:
    check_stats(Call(seed, heads_q=7, heads_kv=1, keywords={"causal": True, "softcap": 3.0}), backend, kind)


STARTS_Q, STARTS_K = [0, 5, 5, 44, 60], [0, 9, 13, 13, 93]  # no queries, no keys, and tokens past the last sequence


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind,used", [(None, None), ("full", [7, 0, 0, 58]), ("alibi of batches", None)])
def test_packed(kind: str | None, used: list[int] | None, backend: str, seed: int) -> None:
    call = Call(seed, 1, 63, 95, 2, 1, 16, keywords={"window": (30, 2), "softcap": 3.0})
    check_packed(call, STARTS_Q, STARTS_K, backend, kind, used)
    vectors = [torch.randint(0, 45, (1, 2, 95), generator=torch.Generator().manual_seed(seed), dtype=torch.int32) for _ in "ab"]
    call.keywords = {"mask": masks.ColumnMask(*vectors)}
    check_packed(call, STARTS_Q, STARTS_K, backend, kind, used)


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_choose_what_comes_back(backend: str, seed: int) -> None:
    q, k, v = inputs(seed)
    out, lse = warploom.attention(q, k, v, return_lse=True, backend=backend)
    full = warploom.attention(q, k, v, return_lse=True, return_stats=BOTH, backend=backend)
    assert len(full) == 3 and torch.equal(full[0], out) and torch.equal(full[1], lse) and isinstance(full[2], AttentionStats)
    assert (full[2].max_logits.shape, full[2].column_sums.shape) == ((2, 4), (2, 4, 53))
    for name, other in (BOTH, BOTH[::-1]):
        same, found = warploom.attention(q, k, v, return_stats=[name], backend=backend)
        assert torch.equal(same, out) and getattr(found, other) is None
        assert torch.equal(getattr(found, name), getattr(full[2], name))
    assert isinstance(warploom.attention(q, k, v, return_stats=[], backend=backend), Tensor)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sink_and_dropout_change_nothing(backend: str, seed: int) -> None:
    """A sink that outweighs all keys too: subtracted from the lse it would leave no digit of theirs."""
    q, k, v = inputs(seed)
    want = of(q, k, v, causal=True, backend=backend)
    sink = torch.tensor([0.0, 5.0, 40.0, 200.0])
    for found in (
        of(q, k, v, causal=True, backend=backend, sink=sink),
        of(q, k, v, causal=True, backend=backend, dropout_p=0.5, dropout_seed=seed),
    ):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_all_keys_are_the_queries_that_see_one(backend: str, seed: int) -> None:
    q, k, v = inputs(seed, seqlen_q=70, seqlen_k=50)
    found = of(q, k, v, causal=True, backend=backend)
    torch.testing.assert_close(found.column_sums.sum(-1), torch.full((2, 4), 50.0), rtol=1e-5, atol=0)
    hidden = of(q, k, v, mask=masks.Padding(torch.tensor([20, 0])), backend=backend)
    assert not hidden.column_sums[0, :, 20:].any() and not hidden.column_sums[1].any()
    assert (hidden.max_logits[1] == -INF).all() and hidden.max_logits[0].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_nan_leaks_nowhere(backend: str, seed: int) -> None:
    """In a key that no query sees, and in a query that sees no key; by a mask, a band, and -inf of a bias."""
    clean = inputs(seed, seqlen_q=60, seqlen_k=50)
    bias = torch.randn(60, 50)
    bias[:, 30:33] = bias[40] = -INF
    for options, rows, keys in (
        ({"mask": masks.Padding(torch.tensor([30, 30]))}, [], [30, 49]),
        ({"causal": True}, [0, 9], []),
        ({"bias": bias}, [40], [30, 32]),
    ):
        q, k, v = (t.clone() for t in clean)
        q[:, rows], k[:, keys], v[:, keys] = NAN, NAN, NAN
        for a, b in zip(of(q, k, v, backend=backend, **options), of(*clean, backend=backend, **options), strict=True):
            assert b.isfinite().all() and torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_visible_nan_stays_one(backend: str, seed: int) -> None:
    q, k, v = inputs(seed, heads_q=2)
    q[1, 30, 1, 3] = NAN
    found = of(q, k, v, causal=True, backend=backend)
    sees = 30 + 53 - 37 + 1
    assert found.max_logits.isnan().tolist() == [[False, False], [False, True]]
    assert found.column_sums[1, 1, :sees].isnan().all() and not found.column_sums[1, 1, sees:].isnan().any()
    assert not found.column_sums[0].isnan().any() and not found.column_sums[1, 0].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_scores(backend: str, seed: int) -> None:
    """Probabilities are at most 1, though an lse of 1e6 is rounded by a sixteenth."""
    q, k, v = inputs(seed)
    found = of(q * 1000, k * 1000, v, backend=backend)
    assert (found.column_sums <= 37).all()
    torch.testing.assert_close(found.column_sums.sum(-1), torch.full((2, 4), 37.0), rtol=0.05, atol=0)


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty_calls(shape: tuple[int, int, int]) -> None:
    batch, seqlen_q, seqlen_k = shape
    q, k = torch.randn(batch, seqlen_q, 2, 16), torch.randn(batch, seqlen_k, 2, 16)
    for backend in BACKENDS:
        found = of(q, k, k, backend=backend)
        assert found.max_logits.shape == (batch, 2) and (found.max_logits == -INF).all()
        assert found.column_sums.shape == (batch, 2, seqlen_k) and not found.column_sums.any()


def test_no_sequence() -> None:
    q, cu = torch.randn(3, 2, 16), torch.zeros(1, dtype=torch.int32)
    for backend in BACKENDS:
        found = warploom.attention_varlen(q, q, q, cu, return_stats=BOTH, backend=backend)[-1]
        assert found.max_logits.shape == (0, 2) and found.column_sums.shape == (2, 3) and not found.column_sums.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_without_stats(backend: str, seed: int) -> None:
    found = []
    for names in ((), BOTH):
        q, k, v = (t.requires_grad_() for t in inputs(seed))
        bias = torch.linspace(-1, 1, 53, requires_grad=True)
        out, lse, *rest = warploom.attention(q, k, v, bias=bias, return_lse=True, return_stats=names, backend=backend)
        assert all(not t.requires_grad for stats_ in rest for t in stats_)
        found.append(torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v, bias)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_reference_in_double_precision(seed: int) -> None:
    """The reference measures in fp64; a call returns fp32 all the same."""
    q, k, v = (t.double() for t in inputs(seed))
    exact = reference.BACKEND.stats(stats.stats_args(dense_args(q, k, v)), None, True, True)
    for a, b in zip(of(q, k, v), exact, strict=True):
        assert b is not None and b.dtype == torch.float64
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


def test_memory_is_linear(seed: int) -> None:
    """No matrix of all scores on the cpu: a step of columns at most."""
    q, k, v = inputs(seed, batch=1, seqlen_q=2048, seqlen_k=2048, heads_q=1, heads_kv=1, head_dim=8)
    with Sizes() as sizes:
        of(q, k, v, backend="cpu")
    assert sizes.largest <= 512 * 2048


def test_equal_bits_again(seed: int) -> None:
    q, k, v = inputs(seed, batch=1, seqlen_q=200, seqlen_k=700)
    first = of(q, k, v, causal=True)
    for a, b in zip(of(q, k, v, causal=True), first, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend: str, seed: int) -> None:
    """Casts q, k and v, and nothing within."""
    q, k, v = inputs(seed)
    with torch.autocast("cpu", torch.bfloat16):
        found = of(q, k, v, sink=torch.zeros(4), backend=backend)
    for a, b in zip(found, of(*(t.bfloat16() for t in (q, k, v)), sink=torch.zeros(4), backend=backend), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend: str, seed: int) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(seed))

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, found = warploom.attention(q, k, v, causal=True, return_stats=BOTH, backend=backend)
        return out.square().sum(), found.max_logits, found.column_sums

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got, want = compiled(q, k, v), step(q, k, v)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(*(torch.autograd.grad(t[0], (q, k, v)) for t in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transforms(backend: str, seed: int) -> None:
    q, k, v = inputs(seed)

    def loss(q: Tensor) -> tuple[Tensor, AttentionStats]:
        out, found = warploom.attention(q, k, v, return_stats=BOTH, backend=backend)
        return out.square().sum(), found

    gradient, found = torch.func.grad(loss, has_aux=True)(q)
    assert gradient.any()
    for a, b in zip(found, of(q, k, v, backend=backend), strict=True):
        torch.testing.assert_close(a, b)
    if backend == "reference":
        each = torch.func.vmap(lambda q: of(q, k, v, backend=backend))(torch.stack([q, 2 * q]))
        for a, b in zip(each, of(2 * q, k, v, backend=backend), strict=True):
            torch.testing.assert_close(a[1], b)


def test_checkpointing(seed: int) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(seed))

    def layer(q: Tensor) -> tuple[Tensor, AttentionStats]:
        found: tuple[Tensor, AttentionStats] = warploom.attention(q, k, v, return_stats=BOTH)
        return found

    out, found = torch.utils.checkpoint.checkpoint(layer, q, use_reentrant=False)
    out.sum().backward()
    assert q.grad is not None and torch.equal(found.column_sums, of(q, k, v).column_sums)


def test_fake_tensors_and_flops(seed: int) -> None:
    q, k, v = inputs(seed)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        found = of(*fakes, backend="cpu")
        assert (found.max_logits.shape, found.column_sums.shape) == ((2, 4), (2, 4, 53))
    counts = []
    for options in ({}, {"return_stats": BOTH}, {"return_stats": BOTH, "sink": torch.zeros(4)}):
        with FlopCounterMode(display=False) as counter:
            warploom.attention(q, k, v, backend="cpu", **options)
        counts.append(counter.get_total_flops())
    product = 2 * 2 * 4 * 37 * 53 * 16
    assert counts == [2 * product, 3 * product, 5 * product]


def test_explain_names_who_measures(seed: int) -> None:
    q, k, v = inputs(seed)
    plan = warploom.explain(q, k, v, return_stats=("column_sums",))
    assert plan.stats == ("column_sums",) and plan.stats_implementation == "cpu" and "column_sums by cpu" in str(plan)
    assert plan.to_dict()["stats"] == ["column_sums"]
    assert warploom.prepare(q, k, v, return_stats=BOTH, backend="reference").stats_implementation == "reference"
    assert "stats " not in str(warploom.explain(q, k, v))


def test_an_implementation_without_stats_leaves_them_to_another(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(seed, head_dim_v=24)
    problem = AttentionProblem.from_args(dense_args(q, k, v, dropout_p=0.5, dropout_seed=1, sink=torch.zeros(4)), True)
    asked = []

    class Other(type(dispatch.find("cpu"))):  # type: ignore[misc]
        name = "other"

        def supports(self, problem: AttentionProblem) -> str | None:
            asked.append(problem)
            return "refuses"

    monkeypatch.setattr(dispatch, "_families", dict(dispatch._families))
    dispatch.register(FAMILY, Other(), *dispatch.implementations(FAMILY))
    assert stats_backend(problem, "hopper") == "cpu"
    (seen,) = asked
    assert (seen.head_dim_v, seen.sink, seen.dropout, seen.backward) == (16, False, False, False)
    assert stats_backend(problem, "reference") == "reference"


def test_errors() -> None:
    q, cu = torch.randn(1, 4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"a tuple of names, out of \('max_logits', 'column_sums'\), got str 'max_logits'"):
        warploom.attention(q, q, q, return_stats="max_logits")
    with pytest.raises(TypeError, match="return_stats must be a tuple of names"):
        warploom.attention(q, q, q, return_stats=True)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="return_stats takes 'max_logits' and 'column_sums', got 'entropy'"):
        warploom.attention(q, q, q, return_stats=("max_logits", "entropy"))
    with pytest.raises(ValueError, match="return_stats takes"):
        warploom.explain(q, q, q, return_stats=("entropy",))
    pages, table = torch.randn(2, 4, 2, 16), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="return_stats does not take paged keys: leave block_table out"):
        warploom.attention_varlen(
            q[0], pages, pages, cu, seqused_k=torch.tensor([4]), block_table=table, return_stats=("max_logits",)
        )


def test_a_forward_pass_that_finds_max_logits_beside(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Gradients go through out and lse as ever; column sums still take a pass of their own."""
    backend = dispatch.find("cpu")

    class Finds(type(backend), Beside):  # type: ignore[misc]
        def max_logits_refusal(self, args: AttentionArgs) -> str | None:
            return "finds none" if args.softcap else None

        def forward_with_max_logits(self, args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor]:
            asked.append(args)
            return *self.forward(args), self.stats(stats_args(args), None, True, False)[0]

    asked: list[AttentionArgs] = []
    tensors = [t.requires_grad_() for t in inputs(seed)]
    want = warploom.attention(*tensors, return_lse=True, return_stats=["max_logits"], backend="cpu")
    monkeypatch.setattr(backend, "__class__", Finds)
    found = warploom.attention(*tensors, return_lse=True, return_stats=["max_logits"], backend="cpu")
    assert len(asked) == 1 and not found[2].max_logits.requires_grad and found[2].column_sums is None
    for a, b in zip((*found[:2], found[2].max_logits), (*want[:2], want[2].max_logits), strict=True):
        assert torch.equal(a, b)
    gradients = [torch.autograd.grad(x[0].square().sum() + x[1].sum(), tensors) for x in (found, want)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    none = tensors[0][:, :0].detach()
    empty = warploom.attention(none, *tensors[1:], return_stats=["max_logits"], backend="cpu")[1]
    assert empty.max_logits.shape == (2, 4) and (empty.max_logits == -INF).all()
    for options in ({"return_stats": BOTH}, {"return_stats": ["max_logits"], "softcap": 3.0}):
        warploom.attention(*tensors, backend="cpu", **options)
    assert len(asked) == 1
