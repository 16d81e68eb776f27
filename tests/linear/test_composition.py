"""linear_attention under torch's machinery: the ops' contracts, compile, autocast, transforms, layouts and poison."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.linear.harness import Case, check, run, upstream
from warploom import LinearState, linear_attention, linear_attention_step
from warploom.linear.arguments import linear_call
from warploom.linear.ops import flat, step_args

DEFAULTS: dict[str, Any] = {
    **{"causal": True, "feature_map": "elu+1", "normalize": True, "eps": 1e-6, "scale": 1.0},
    **{"state": None, "lengths": None, "cu_seqlens": None, "decay": None},
}


def small(**changes: Any) -> Case:
    return Case(random.randrange(2**31), seqlen_q=20, dim=4, dim_v=6, **changes)


@pytest.mark.parametrize(
    "case",
    [
        small(state=True, lengths=[20, 3]),
        small(keywords={"normalize": False}),
        small(batch=1, starts=[0, 5, 5, 17], state=True),
        small(seqlen_k=0),
        small(decay="token", lengths=[20, 3]),
        small(decay="head", batch=1, starts=[0, 5, 5, 17]),
    ],
    ids=["state and lengths", "no normalizer", "packed", "no keys", "decay of a token", "decay of a head"],
)
@pytest.mark.parametrize("return_state", [True, False])
def test_opcheck(case: Case, return_state: bool) -> None:
    call = linear_call(**{**DEFAULTS, **case.draw()})
    torch.library.opcheck(torch.ops.warploom.linear_attention.default, flat(call, "cpu", return_state))


def test_opcheck_of_the_backward_and_of_the_step() -> None:
    case = small(state=True, decay="token")
    call = linear_call(**{**DEFAULTS, **case.draw()})
    arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in flat(call, "cpu", True))
    out, norm, s, z = torch.ops.warploom.linear_attention(*arguments)
    for dout, ds, dz in ((out, None, None), (None, s, z), (out, s, None)):
        torch.library.opcheck(torch.ops.warploom.linear_attention_backward.default, (dout, ds, dz, norm, *arguments))
    one = linear_call(**{**DEFAULTS, **Case(case.seed, seqlen_q=1, state=True, decay="token").draw()})
    torch.library.opcheck(
        torch.ops.warploom.linear_attention_step.default,
        tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in step_args(one, "cpu")),
    )


def test_compiled_without_a_graph_break() -> None:
    case = small(state=True, lengths=[20, 11], decay="token")
    arguments = case.draw()
    leaves = [arguments[n] for n in (*"qkv", "decay")] + list(arguments["state"])

    def call(q: Any, k: Any, v: Any, decay: Any, s: Any, z: Any) -> Any:
        options = {"state": LinearState(s, z), "lengths": arguments["lengths"], "return_state": True}
        out, last = linear_attention(q, k, v, decay=decay * 2.0, feature_map=(torch.exp, "elu+1"), **options)
        return out.sin().sum() + last.s.sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(call(*leaves), leaves), strict=True
    ):
        assert torch.equal(got, want), case


def test_compiled_steps() -> None:
    seed = random.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    compiled = torch.compile(linear_attention_step, fullgraph=True, backend="aot_eager")
    states = [LinearState.zeros(2, 2, 8, 8)] * 2
    for n in range(3):
        q, k, v = (torch.randn(2, 2, 8, generator=generator) for _ in range(3))
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            got, states[0] = compiled(q, k, v, states[0])
        want, states[1] = linear_attention_step(q, k, v, states[1])
        assert torch.equal(got, want) and torch.equal(states[0].s, states[1].s), seed


@pytest.mark.parametrize("decay", ["", "head", "token"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradcheck_with_both_states(backend: str, decay: str) -> None:
    sizes = {"batch": 1, "seqlen_q": 5, "heads_q": 2, "heads_kv": 1, "dim": 3}
    case = Case(random.randrange(2**31), **sizes, dtype=torch.float64, state=True, decay=decay)
    arguments = case.draw()
    logs = [arguments["decay"]] if decay else []

    def call(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options = {"decay": leaves[5]} if decay else {}
        out, last = linear_attention(
            *leaves[:3], state=LinearState(*leaves[3:5]), return_state=True, backend=backend, **options
        )
        return out, *last

    leaves = [arguments[n] for n in "qkv"] + list(arguments["state"]) + logs
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True), case


def test_checkpointing_and_func_grad() -> None:
    case = small()
    q, k, v = (case.draw()[n] for n in "qkv")

    def loss(q: torch.Tensor) -> torch.Tensor:
        return linear_attention(q, k, v).square().sum()

    (want,) = torch.autograd.grad(loss(q), q)
    (got,) = torch.autograd.grad(checkpoint(loss, q, use_reentrant=False), q)
    assert torch.equal(got, want) and torch.equal(torch.func.grad(loss)(q.detach()), want), case


def test_what_is_not_supported_says_so_and_the_reference_does_it() -> None:
    case = Case(random.randrange(2**31), seqlen_q=4, dim=3, dtype=torch.float64)
    q, k, v = (case.draw()[n] for n in "qkv")
    with (
        pytest.raises(NotImplementedError, match=r"forward-mode AD.*backend='reference'"),
        torch.autograd.forward_ad.dual_level(),
    ):
        linear_attention(torch.autograd.forward_ad.make_dual(q, q), k, v)
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        torch.func.jvp(lambda q: linear_attention(q, k, v), (q,), (q,))
    with pytest.raises(NotImplementedError, match=r"torch\.vmap.*backend='reference'"):
        torch.vmap(lambda q: linear_attention(q, k, v))(q[None])
    (first,) = torch.autograd.grad(linear_attention(q, k, v).sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"double backward.*backend='reference'"):
        torch.autograd.grad(first.sum(), q)

    def reference(q: torch.Tensor) -> torch.Tensor:
        return linear_attention(q, k, v, backend="reference")

    assert torch.autograd.gradgradcheck(reference, q), case
    _, tangent = torch.func.jvp(reference, (q,), (q,))
    batched = torch.vmap(reference)(torch.stack([q, 2 * q]))
    assert tangent.shape == q.shape and torch.allclose(batched[1], reference(2 * q)), case


def test_autocast_casts_the_inputs_and_not_the_sums() -> None:
    ones = torch.ones(1, 600, 1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = linear_attention(ones, ones, ones, feature_map="identity", normalize=False, return_state=True)
    assert out.dtype == torch.bfloat16 and state.s.dtype == torch.float32 and (state.s == 600).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_strided_inputs_and_upstream(backend: str) -> None:
    case = Case(random.randrange(2**31), seqlen_q=45, heads_q=3, dtype=torch.float64)
    q, k, v = (case.draw()[n].detach() for n in "qkv")
    wanted = run_with(q, k, v, torch.ones_like(v), backend)
    turned = [t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for t in (q, k, v)]
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    expanded = torch.ones(1, dtype=torch.float64).expand_as(v)
    for inputs in (turned, heads_first):
        for got, want in zip(run_with(*inputs, expanded, backend), wanted, strict=True):
            assert torch.allclose(got, want, rtol=1e-10, atol=1e-10), case


def run_with(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, backend: str) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = linear_attention(*leaves, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def test_keys_expanded_over_heads() -> None:
    case = Case(random.randrange(2**31), heads_q=4, heads_kv=1, dtype=torch.float64)
    q, k, v = (case.draw()[n].detach() for n in "qkv")
    expanded = linear_attention(q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1))
    assert torch.allclose(linear_attention(q, k, v), expanded, rtol=1e-10, atol=1e-10), case


@pytest.mark.parametrize("leaf", ["q", "k", "v", "s", "z", "decay"])
def test_gradients_of_one_input_alone(leaf: str) -> None:
    case = small(state=True, decay="token")
    whole = run(case, "cpu").gradients[leaf]
    arguments = case.draw()
    state = dict(zip(("s", "z"), arguments["state"], strict=True))
    for name, t in {**{n: arguments[n] for n in (*"qkv", "decay")}, **state}.items():
        t.requires_grad_(name == leaf)
    out, last = linear_attention(**arguments, return_state=True)
    results = [t for t in (out, *last) if t.requires_grad]
    grads = [g for g, t in zip(upstream(case, (out, *last)), (out, *last), strict=True) if t.requires_grad]
    (got,) = torch.autograd.grad(results, [{**arguments, **state}[leaf]], grads)
    assert torch.equal(got, whole), case


def test_a_state_alone_has_gradients() -> None:
    """The loss reads the last state only."""
    case = small(state=True)
    arguments = case.draw()
    _, last = linear_attention(**arguments, return_state=True)
    dk, dq = torch.autograd.grad(last.z.sum(), [arguments["k"], arguments["q"]], materialize_grads=True)
    assert not dq.any() and torch.allclose(dk, arguments["k"].exp().clamp(max=1.0), rtol=1e-5, atol=1e-6), case


def test_nan_that_counts_for_nothing_stays_out_of_a_maps_parameters() -> None:
    case = small(lengths=[20, 7], poison=float("nan"))
    arguments = case.draw()
    weight = torch.ones(4, requires_grad=True)
    out = linear_attention(**{**arguments, "feature_map": lambda x: (x * weight).exp()})
    assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), weight)[0].isfinite().all(), case


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)])
def test_empty(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape, requires_grad=True)
    k = torch.zeros(shape[0], shape[1], max(shape[2], 1), 8, requires_grad=True)
    out, state = linear_attention(q, k, k, return_state=True)
    assert out.shape == shape and not state.s.any()
    for t in torch.autograd.grad(out.sum() + state.s.sum(), (q, k), materialize_grads=True):
        assert not t.any()


def test_no_sequences_in_a_packed_call() -> None:
    q = torch.randn(6, 2, 8)
    starts = torch.zeros(1, dtype=torch.int32)
    out, state = linear_attention(q, q, q, cu_seqlens=starts, return_state=True)
    assert out.shape == q.shape and not out.any() and state.s.shape == (0, 2, 8, 8)


def test_packed_takes_three_or_four_dimensions() -> None:
    q = torch.randn(9, 2, 8)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    out = linear_attention(q, q, q, cu_seqlens=starts)
    assert out.shape == q.shape and torch.equal(out[None], linear_attention(q[None], q[None], q[None], cu_seqlens=starts))


def test_a_long_sequence_keeps_its_precision() -> None:
    check(Case(7, batch=1, seqlen_q=5000, heads_q=1, dim=8), "cpu")


def test_dispatch_modes_see_the_ops() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.zeros(1, 1, 2, 8)
    with Record():
        linear_attention(x, x, x)
        linear_attention_step(x, x, x, LinearState.zeros(1, 2, 8, 8))
    assert {"warploom.linear_attention.default", "warploom.linear_attention_step.default"} <= set(seen)


def test_transforms_of_a_decay() -> None:
    """torch.func.grad asks for its gradient too; the reference alone takes vmap and forward AD."""
    case = small(decay="token", dtype=torch.float64)
    arguments = case.draw()
    decay = arguments.pop("decay")
    tensors = {name: t.detach() for name, t in arguments.items()}

    def loss(decay: torch.Tensor, backend: str | None = None) -> torch.Tensor:
        return linear_attention(**tensors, decay=decay, backend=backend).square().sum()

    (want,) = torch.autograd.grad(loss(decay), decay)
    assert torch.allclose(torch.func.grad(loss)(decay.detach()), want, rtol=1e-12), case
    assert torch.allclose(torch.func.grad(loss)(decay.detach(), "reference"), want, rtol=1e-9), case
    _, tangent = torch.func.jvp(lambda t: loss(t, "reference"), (decay.detach(),), (decay.detach(),))
    assert torch.allclose(tangent, (want * decay).sum(), rtol=1e-9), case
    both = torch.vmap(lambda t: loss(t, "reference"))(torch.stack([decay, 2 * decay]))
    assert torch.allclose(both[1], loss(2 * decay, "reference"), rtol=1e-12), case
    with pytest.raises(NotImplementedError, match=r"torch\.vmap.*backend='reference'"):
        torch.vmap(loss)(decay[None])
