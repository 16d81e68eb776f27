"""gated_delta_rule under torch's machinery: the ops' contracts, compile, autocast, transforms, layouts and poison."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.delta.cases import Case
from tests.delta.harness import TENSORS, detached, drawn, gradients, leaves
from warploom import gated_delta_rule, gated_delta_step
from warploom.delta.arguments import delta_call
from warploom.delta.ops import flat, step_args


def small(**changes: Any) -> Case:
    return Case(random.randrange(2**31), **{"tokens": 20, "e": 4, "m": 6, **changes})


@pytest.mark.parametrize(
    "case",
    [
        small(batch=2, state=True, lengths=(20, 3)),
        small(decay=None, group=2),
        small(sequences=(5, 0, 12), state=True),
        small(tokens=0, state=True),
    ],
    ids=["state and lengths", "no decay", "packed", "no tokens"],
)
@pytest.mark.parametrize("return_state", [True, False])
def test_opcheck(case: Case, return_state: bool) -> None:
    call = delta_call(**drawn(case))
    torch.library.opcheck(torch.ops.warploom.gated_delta_rule.default, flat(call, "cpu", return_state))


def test_opcheck_of_the_backward_and_of_the_steps() -> None:
    case = small(state=True)
    arguments = flat(delta_call(**detached(drawn(case))), "cpu", True)
    out, state = torch.ops.warploom.gated_delta_rule(*arguments)
    for upstream in ((out, None), (None, state), (out, state)):
        torch.library.opcheck(torch.ops.warploom.gated_delta_rule_backward.default, (*upstream, *arguments))
    one = step_args(delta_call(**detached(drawn(replace(case, tokens=1)))), "cpu")
    torch.library.opcheck(torch.ops.warploom.gated_delta_step.default, tuple(one))
    torch.library.opcheck(torch.ops.warploom.gated_delta_step_inplace.default, tuple(one))


def test_compiled_without_a_graph_break() -> None:
    arguments = drawn(small(batch=2, state=True, lengths=(20, 11), group=2))

    def call(*tensors: Tensor) -> Tensor:
        given = {**arguments, **dict(zip(TENSORS, tensors, strict=True))}
        out, last = gated_delta_rule(**given, return_state=True)
        return out.sin().sum() + last.sum()

    compiled, given = torch.compile(call, fullgraph=True, backend="aot_eager"), leaves(arguments)
    for got, want in zip(torch.autograd.grad(compiled(*given), given), torch.autograd.grad(call(*given), given), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_steps(inplace: bool) -> None:
    compiled = torch.compile(gated_delta_step, fullgraph=True, backend="aot_eager")
    states = [torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8, 8)]
    for n in range(3):
        q, k, v = (torch.randn(2, 2, 8) for _ in range(3))
        beta, decay = torch.rand(2, 2), -torch.rand(2, 2)
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            got, states[0] = compiled(q, k, v, beta, states[0], decay, normalize_qk=True, inplace=inplace)
        want, states[1] = gated_delta_step(q, k, v, beta, states[1], decay, normalize_qk=True, inplace=inplace)
        assert torch.equal(got, want) and torch.equal(states[0], states[1])


def test_checkpointing_and_func_grad() -> None:
    given = drawn(small())
    v = given["v"]

    def loss(v: Tensor) -> Tensor:
        return gated_delta_rule(**{**given, "v": v}).square().sum()

    (want,) = torch.autograd.grad(loss(v), v)
    (got,) = torch.autograd.grad(checkpoint(loss, v, use_reentrant=False), v)
    assert torch.equal(got, want) and torch.equal(torch.func.grad(loss)(v.detach()), want)


def test_what_is_not_supported_says_so_and_the_reference_does_it() -> None:
    given = drawn(small(tokens=4, e=3, m=3, dtype=torch.float64))
    v = given["v"]

    def call(v: Tensor, backend: str | None = None) -> Tensor:
        return gated_delta_rule(**{**given, "v": v}, backend=backend)

    with (
        pytest.raises(NotImplementedError, match=r"forward-mode AD.*backend='reference'"),
        torch.autograd.forward_ad.dual_level(),
    ):
        call(torch.autograd.forward_ad.make_dual(v, v))
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        torch.func.jvp(call, (v,), (v,))
    with pytest.raises(NotImplementedError, match=r"torch\.vmap.*backend='reference'"):
        torch.vmap(call)(v[None])
    (first,) = torch.autograd.grad(call(v).sin().sum(), v, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"double backward.*backend='reference'"):
        torch.autograd.grad(first.sum(), v)

    def reference(v: Tensor) -> Tensor:
        return call(v, "reference")

    assert torch.autograd.gradgradcheck(reference, v)
    _, tangent = torch.func.jvp(reference, (v,), (v,))
    torch.testing.assert_close(tangent, reference(v))  # linear in v
    torch.testing.assert_close(torch.vmap(reference)(torch.stack([v, 2 * v]))[1], 2 * reference(v))


def test_autocast_casts_the_inputs_and_not_the_states() -> None:
    given = detached(drawn(small(state=True)))
    with torch.autocast("cpu", torch.bfloat16):
        out, state = gated_delta_rule(**given, return_state=True)
    lower = {n: given[n].bfloat16() for n in "qkv"}
    want, last = gated_delta_rule(**{**given, **lower}, return_state=True)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(out, want) and torch.equal(state, last)


def test_beta_and_decay_of_any_dtype_have_gradients_in_it() -> None:
    given = drawn(small(dtype=torch.bfloat16))
    for name in ("beta", "decay"):
        given[name] = given[name].detach().bfloat16().requires_grad_()
    out, state = gated_delta_rule(**given, return_state=True)
    found = gradients(out, state, given)
    assert [t.dtype for t in found] == [torch.bfloat16] * 5 and state.dtype == torch.float32


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_strided_inputs_and_upstream(backend: str) -> None:
    given = drawn(Case(random.randrange(2**31), tokens=70, heads=3, state=True, dtype=torch.float64))
    out, state = gated_delta_rule(**given, return_state=True, backend=backend)
    wanted = [out, state, *gradients(out, state, given)]
    for turn in (lambda t: t.permute(*reversed(range(t.ndim))), lambda t: t.transpose(1, 2)):
        turned = {n: turn(turn(given[n]).contiguous()).detach().requires_grad_() for n in TENSORS}
        assert any(not t.is_contiguous() for t in turned.values())
        out, state = gated_delta_rule(**{**given, **turned}, return_state=True, backend=backend)
        for got, want in zip([out, state, *gradients(out, state, turned)], wanted, strict=True):
            torch.testing.assert_close(got, want)
    one = torch.ones((), dtype=torch.float64).expand(given["beta"].shape)
    results = [gated_delta_rule(**{**given, "beta": beta}, backend=backend) for beta in (one, one.contiguous())]
    found = [torch.autograd.grad(out.sum(), given["v"])[0] for out in results]  # of an upstream that is expanded too
    assert torch.equal(*results) and torch.equal(*found)


@pytest.mark.parametrize("leaf", TENSORS)
def test_gradients_of_one_input_alone(leaf: str) -> None:
    given = drawn(small(state=True))
    out, state = gated_delta_rule(**given, return_state=True)
    whole = dict(zip(TENSORS, gradients(out, state, given), strict=True))[leaf]
    alone = {**detached(given), leaf: given[leaf]}
    out, state = gated_delta_rule(**alone, return_state=True)
    loss = out.double().sin().sum() + state.double().cos().sum()
    assert torch.equal(torch.autograd.grad(loss, given[leaf])[0], whole)


def test_a_state_alone_has_gradients() -> None:
    """The loss reads the last state only."""
    given = drawn(small(state=True))
    _, last = gated_delta_rule(**given, return_state=True)
    dq, dv = torch.autograd.grad(last.sum(), [given["q"], given["v"]], materialize_grads=True)
    assert not dq.any() and dv.any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kind", [{"batch": 3, "lengths": (20, 7, 0)}, {"sequences": (4, 0, 9)}], ids=["padded", "packed"])
def test_tokens_that_count_for_nothing_may_hold_anything(kind: dict[str, Any], backend: str) -> None:
    case = small(state=True, group=2, **kind)
    results = []
    for hidden in (0.0, float("nan"), float("inf")):
        given = drawn(replace(case, hidden=hidden))
        out, state = gated_delta_rule(**given, return_state=True, backend=backend)
        results.append([out, state, *gradients(out, state, given)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert b.isfinite().all() and torch.equal(a, b), case
    call, _, _ = case.call()
    end = int(call.cu_seqlens[-1]) if call.cu_seqlens is not None else 7
    row = 0 if call.cu_seqlens is not None else 1
    for t in (results[0][0], *results[0][2:7]):
        assert not t[row, end:].any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)])
def test_empty(shape: tuple[int, ...], backend: str) -> None:
    q, v = torch.zeros(shape, requires_grad=True), torch.zeros(*shape[:2], 2 * shape[2], 6, requires_grad=True)
    beta = torch.zeros(v.shape[:3], requires_grad=True)
    held = torch.ones(shape[0], 2 * shape[2], 8, 6, requires_grad=True)
    out, state = gated_delta_rule(q, q, v, beta, beta, state=held, return_state=True, backend=backend)
    assert out.shape == v.shape
    if not shape[1]:
        assert torch.equal(state, held)
    *others, dstate = torch.autograd.grad(out.sum() + state.sum(), (q, v, beta, held), materialize_grads=True)
    assert not any(t.any() for t in others) and (dstate == 1).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_no_packed_sequence_has_gradients_of_zero(tokens: int, backend: str) -> None:
    q, k, v = (torch.randn(tokens, 2, 8, requires_grad=True) for _ in range(3))
    beta = torch.rand(tokens, 2)
    starts = torch.zeros(1, dtype=torch.int32)
    out, state = gated_delta_rule(q, k, v, beta, cu_seqlens=starts, return_state=True, backend=backend)
    assert not out.any() and state.shape == (0, 2, 8, 8)
    for result in (out, state):
        for t in torch.autograd.grad(result.sum(), (q, k, v), retain_graph=True, materialize_grads=True):
            assert t.shape == (tokens, 2, 8) and not t.any()


def test_packed_takes_three_or_four_dimensions() -> None:
    given = detached(drawn(small(sequences=(8, 12))))
    flat_given = {n: t[0] if n in TENSORS and t is not None else t for n, t in given.items()}
    out, state = gated_delta_rule(**flat_given, return_state=True)
    want, last = gated_delta_rule(**given, return_state=True)
    assert out.shape == given["v"].shape[1:] and torch.equal(out, want[0]) and torch.equal(state, last)


def test_equal_bits_run_to_run_and_beside_other_sequences() -> None:
    given = drawn(Case(random.randrange(2**31), tokens=150, sequences=(80, 70), heads=2, state=True))
    runs = []
    for _ in range(2):
        out, state = gated_delta_rule(**given, return_state=True)
        runs.append([out, state, *gradients(out, state, given)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    alone = {n: t[:, 80:] if n in ("q", "k", "v", "beta", "decay") else t for n, t in detached(given).items()}
    alone |= {"cu_seqlens": None, "state": given["state"].detach()[1:]}
    assert torch.equal(gated_delta_rule(**alone), runs[0][0][:, 80:])


def test_dispatch_modes_see_the_ops() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, state = torch.zeros(1, 1, 2, 8), torch.zeros(1, 2, 8, 8)
    with Record():
        gated_delta_rule(x, x, x, x[..., 0])
        for inplace in (False, True):
            gated_delta_step(x, x, x, x[..., 0], state, inplace=inplace)
    names = ("gated_delta_rule", "gated_delta_step", "gated_delta_step_inplace")
    assert {f"warploom.{name}.default" for name in names} <= set(seen)
