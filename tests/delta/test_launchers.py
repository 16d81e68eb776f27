"""Kept launchers of the gated delta rule: what they are given, when there is none, and who sees the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.test_direct import MODES, Mode, Sub
from tests.standin import StandIn, install
from warploom.delta import cpu, triton
from warploom.delta.ops import delta_op
from warploom.runtime import dispatch

NAMES = ("q", "k", "v", "beta", "decay", "state", "lengths", "cu_seqlens")
TWICE = ["checked", "checked"]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn(cpu.BACKEND, NAMES, NAMES[:5], ("q", "k", "v", "beta", "state", "decay"))
    install(found, triton.BACKEND, monkeypatch)
    return found


def drawn(*shape: int, **changes: Any) -> dict[str, Any]:
    """Arguments of a call with tokens (batch, seqlen) or (total_tokens,); three value heads to a key's."""
    shape = shape or (2, 5)
    q, k = torch.randn(*shape, 1, 4), torch.nn.functional.normalize(torch.randn(*shape, 1, 4), dim=-1)
    found = {"q": q, "k": k, "v": torch.randn(*shape, 3, 6), "beta": torch.rand(*shape, 3), "decay": -torch.rand(*shape, 3)}
    return {**found, **changes}


def call(given: dict[str, Any], **keywords: Any) -> Any:
    return warploom.gated_delta_rule(**{"backend": "triton", **given, **keywords})


def step(given: dict[str, Any], **keywords: Any) -> Any:
    return warploom.gated_delta_step(**{"backend": "triton", **given, **keywords})


def wanted(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    return function(**{**given, "backend": "reference"})


def same(found: Any, want: Any) -> None:
    """Values, halves within a step of theirs; shapes, dtypes and strides too."""
    if not isinstance(found, Tensor):
        for one, other in zip(found, want, strict=True):
            same(one, other)
        return
    step = 2.0 * torch.finfo(found.dtype).eps if found.element_size() == 2 else 0.0
    torch.testing.assert_close(found, want, rtol=max(1e-4, step), atol=1e-5, check_stride=True)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": drawn,
    "no decay": lambda: drawn(decay=None),
    "options": lambda: drawn(scale=0.5, normalize_qk=True, eps=1e-3),
    "a state": lambda: drawn(state=torch.randn(2, 3, 4, 6), return_state=True),
    "lengths": lambda: drawn(lengths=torch.tensor([3, 5], dtype=torch.int32), return_state=True),
    "packed": lambda: drawn(7, cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32)),
    "packed, with a state": lambda: drawn(
        7, cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32), state=torch.randn(2, 3, 4, 6), return_state=True
    ),
    "packed in a batch of 1": lambda: drawn(1, 7, cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32)),
    "halves beside": lambda: drawn(beta=torch.rand(2, 5, 3).half(), decay=-torch.rand(2, 5, 3).bfloat16()),
    "packed halves beside": lambda: drawn(
        7, beta=torch.rand(7, 3).half(), decay=None, cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32)
    ),
    "odd strides": lambda: drawn(v=torch.randn(2, 3, 5, 6).transpose(1, 2), beta=torch.rand(2, 3, 5).mT),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_third_call_of_a_kind_only_launches(name: str, kernel: StandIn) -> None:
    for way in ("checked", "checked", "bound", "bound"):
        given = KINDS[name]()
        same(call(given), wanted(warploom.gated_delta_rule, given))
        assert kernel.ways() == [way]


def gradients(function: Callable[..., Any], given: dict[str, Any]) -> list[Tensor]:
    """The results, and of a function of them the gradients in every tensor of numbers."""
    leaves = {n: t.detach().requires_grad_() for n, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()}
    results = function(**{**given, **leaves})
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((t.double().sin().sum() for t in results), torch.zeros((), dtype=torch.float64))
    return [*(t.detach() for t in results), *torch.autograd.grad(loss, list(leaves.values()))]


@pytest.mark.parametrize("name", KINDS)
def test_so_do_both_passes_of_a_call_with_gradients(name: str, kernel: StandIn) -> None:
    for way in ("checked", "checked", "bound", "bound"):
        given = KINDS[name]()
        want = gradients(warploom.gated_delta_rule, {**given, "backend": "reference"})
        same(gradients(warploom.gated_delta_rule, {**given, "backend": "triton"}), want)
        assert kernel.ways() == [way, f"{way} backward"]


@pytest.mark.parametrize("name", ["halves beside", "packed halves beside"])
def test_a_backend_that_reads_halves_is_given_them_forward(name: str, kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are recorded what it reads is converted, and gradients are halves."""
    seen: list[torch.dtype] = []

    def bind(binds: Callable[..., Any]) -> Callable[..., Any]:
        def found(*arguments: Any) -> Callable[..., Any]:
            bound = binds(*arguments)

            def launch(*tensors: Tensor) -> Any:
                seen.append(tensors[3 if len(tensors) == len(NAMES) else 5].dtype)
                return bound(*tensors)

            return launch

        return found

    monkeypatch.setattr(triton.BACKEND, "reads", lambda dtype: dtype.itemsize == 2)
    for method in ("bind", "bind_backward"):
        monkeypatch.setattr(triton.BACKEND, method, bind(getattr(kernel, method)))
    for _ in range(4):
        given = KINDS[name]()
        same(call(given), wanted(warploom.gated_delta_rule, given))
        want = gradients(warploom.gated_delta_rule, {**given, "backend": "reference"})
        same(gradients(warploom.gated_delta_rule, {**given, "backend": "triton"}), want)
    assert seen == [torch.float16, torch.float32, torch.float32] * 2
    kernel.takes = False
    given = KINDS[name]()
    same(call(given), wanted(warploom.gated_delta_rule, given))


STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: drawn(2, state=torch.randn(2, 3, 4, 6)),
    "rows of one token": lambda: drawn(2, 1, state=torch.randn(2, 3, 4, 6)),
    "halves beside": lambda: drawn(2, state=torch.randn(2, 3, 4, 6), beta=torch.rand(2, 3).half(), decay=None),
    "options": lambda: drawn(2, state=torch.randn(2, 3, 4, 6), scale=2.0, normalize_qk=True),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_the_third_step_of_a_kind_only_launches(name: str, inplace: bool, kernel: StandIn) -> None:
    for way in ("checked", "checked", "bound", "bound"):
        given = STEPS[name]()
        want = wanted(warploom.gated_delta_step, given)
        state, version = given["state"], given["state"]._version
        before = state.clone()
        found = step(given, inplace=inplace)
        assert kernel.ways() == [way]
        same(found, want)
        assert (found[1] is state and state._version > version) if inplace else torch.equal(state, before)


def test_steps_of_gradients_are_refused_or_differentiated_as_before(kernel: StandIn) -> None:
    given = STEPS["plain"]()
    for inplace in (False, True):
        for _ in range(3):
            step(given, inplace=inplace)
    given["q"].requires_grad_()
    with pytest.raises(ValueError, match="inplace=True writes over"):
        step(given, inplace=True)
    assert step(given)[0].requires_grad
    with torch.no_grad():
        kernel.ways()
        assert not step(given)[0].requires_grad and kernel.ways() == ["bound"]


def test_a_launcher_that_does_not_take_an_address_leaves_it_to_the_checked_way(kernel: StandIn) -> None:
    given, one = KINDS["packed, with a state"](), STEPS["rows of one token"]()
    for _ in range(3):
        call(given), gradients(call_by_keywords, given), step(one)
    kernel.ways()
    kernel.takes = False
    same(call(given), wanted(warploom.gated_delta_rule, given))
    same(step(one), wanted(warploom.gated_delta_step, one))
    same(gradients(call_by_keywords, given), gradients(warploom.gated_delta_rule, {**given, "backend": "reference"}))
    assert kernel.ways() == ["checked"] * 3 + ["checked backward"]


def call_by_keywords(**given: Any) -> Any:
    return call(given)


DIFFERENT: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no decay": lambda g: {"decay": None},
    "scale": lambda g: {"scale": 0.5},
    "normalize_qk": lambda g: {"normalize_qk": True},
    "eps": lambda g: {"eps": 0.5},
    "state": lambda g: {"state": torch.zeros(2, 3, 4, 6)},
    "return_state": lambda g: {"return_state": True},
    "lengths": lambda g: {"lengths": torch.tensor([3, 5], dtype=torch.int32)},
    "strides": lambda g: {"k": g["k"].transpose(1, 2).contiguous().transpose(1, 2).expand(2, 5, 1, 4).clone(), "v": g["v"][:1]
                          .expand(2, 5, 3, 6)},
    "dtype": lambda g: {"beta": g["beta"].double()},
    "heads": lambda g: {"q": g["q"].expand(2, 5, 3, 4).clone(), "k": g["k"].expand(2, 5, 3, 4).clone()},
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_checked_and_planned_for_itself(name: str, kernel: StandIn) -> None:
    given = drawn()
    for _ in range(2):
        call(given)
    assert kernel.ways() == TWICE
    other = {**given, **DIFFERENT[name](given)}
    for way in ("checked", "checked", "bound"):
        same(call(other), wanted(warploom.gated_delta_rule, other))
        assert kernel.ways() == [way]
    call(given)
    assert kernel.ways() == ["bound"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"normalize_qk": 1}, "normalize_qk"),
    ({"return_state": 0}, "return_state"),
    ({"scale": "large"}, "scale"),
    ({"eps": True}, "eps"),
    ({"backend": 3}, "backend"),
    ({"q": None}, "q must be a torch.Tensor"),
    ({"beta": torch.ones(2, 5, 3, dtype=torch.int64)}, "beta must be a floating point tensor"),
    ({"decay": torch.zeros(2, 4, 3)}, "decay must have shape"),
    ({"state": 7}, "state must be a torch.Tensor"),
    ({"lengths": torch.ones(3, dtype=torch.int32)}, "lengths has 3 entries"),
    ({"v": torch.randn(2, 5, 3, 6).to_sparse()}, "v has layout"),
]


@pytest.mark.parametrize("wrong,words", WRONG, ids=[words for _, words in WRONG])
def test_wrong_arguments_are_named_as_before(wrong: dict[str, Any], words: str, kernel: StandIn) -> None:
    given = drawn(scale=1.0, eps=1.0, return_state=False, normalize_qk=True)
    for _ in range(3):
        call(given)
    with pytest.raises((TypeError, ValueError), match=words):
        call({**given, **wrong})


def test_what_makes_copies_is_checked_every_time(kernel: StandIn) -> None:
    """A launcher would read the caller's memory as if it were the copies'."""
    for change in (
        {"v": torch.randn(2, 6, 3, 5).transpose(1, 3)},
        {"lengths": torch.tensor([3, 5])},
        {"state": torch.randn(2, 3, 6, 4).mT},
    ):
        for _ in range(4):
            given = drawn(**change)
            same(call(given), wanted(warploom.gated_delta_rule, given))
        assert kernel.ways() == ["checked"] * 4


@pytest.mark.parametrize("name", MODES)
def test_whoever_watches_sees_the_op(name: str, kernel: StandIn) -> None:
    given = drawn()
    for _ in range(2):
        call(given)
    with MODES[name]():
        call(given)
    call({**given, "q": given["q"].as_subclass(Sub)})
    call({**given, "decay": given["decay"].as_subclass(Sub)})
    with torch.autocast("cpu", torch.bfloat16):
        call(given)
    assert kernel.ways() == ["checked"] * 6
    with torch.inference_mode():
        call(given)
    assert kernel.ways() == ["bound"]


def test_checked_contents_are_looked_at_every_time(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn()
    for _ in range(3):
        call(given)
    monkeypatch.setenv("WARPLOOM_CHECK", "1")
    with pytest.raises(ValueError, match="decay must be at most 0"):
        call({**given, "decay": given["decay"] + 2})


def test_who_asks_for_gradients_is_part_of_the_kind(kernel: StandIn) -> None:
    given = drawn()
    for _ in range(2):
        call(given)
    given["beta"].requires_grad_()
    out = call(given)
    assert kernel.ways() == ["checked"] * 3 and out.grad_fn.name() == "_GatedDeltaRuleBackward"
    call(given)
    out = call(given)
    assert kernel.ways() == ["checked", "bound"] and out.grad_fn.name() == "_GatedDeltaRuleBackward"
    with torch.no_grad():
        assert not call(given).requires_grad and kernel.ways() == ["bound"]


def test_a_watched_backward_pass_of_a_kept_launcher_runs_the_op(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    op = delta_op.backward_op

    def noted(*arguments: Any) -> Any:
        seen.add("op")
        return op(*arguments)

    monkeypatch.setattr(delta_op, "backward_op", noted)
    given = drawn()
    given["q"].requires_grad_()
    outs = [call(given) for _ in range(4)]
    want = torch.autograd.grad(wanted(warploom.gated_delta_rule, given).sum(), given["q"])
    with Mode():
        same(torch.autograd.grad(outs[3].sum(), given["q"]), want)
    assert kernel.ways() == ["checked"] * 2 + ["bound"] * 2 + ["checked backward"]
    assert seen == {"op"}
    (first,) = torch.autograd.grad(call(given).sum(), given["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(first.sum(), given["q"])


def test_gradients_that_nobody_gives(kernel: StandIn) -> None:
    """Of out alone, of the state alone, of neither."""
    given = {**KINDS["a state"](), "q": torch.randn(2, 5, 1, 4, requires_grad=True)}
    for _ in range(2):
        call(given)
    for part in (0, 1):
        found = torch.autograd.grad(call(given)[part].sum(), given["q"], allow_unused=True)
        want = wanted(warploom.gated_delta_rule, given)[part].sum()
        same(found, torch.autograd.grad(want, given["q"], materialize_grads=True))
    out = call({**given, "return_state": False, "q": given["q"] * 1})
    assert out.requires_grad


def test_saved_tensors_may_come_back_with_other_strides(kernel: StandIn) -> None:
    given = drawn()
    given["q"].requires_grad_()
    for _ in range(3):
        call(given)

    def unpack(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 4 else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = call(given)
        found = torch.autograd.grad(out.sin().sum(), given["q"])
    same(found, torch.autograd.grad(wanted(warploom.gated_delta_rule, given).sin().sum(), given["q"]))


def test_what_a_backward_pass_needs_may_not_change(kernel: StandIn) -> None:
    given = drawn()
    given["q"].requires_grad_()
    for _ in range(3):
        out = call(given)
    given["v"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpointing_runs_a_kept_launcher_again(kernel: StandIn) -> None:
    given = drawn()
    q = given["q"].requires_grad_()
    for _ in range(2):
        call(given)
    out = torch.utils.checkpoint.checkpoint(lambda q: call({**given, "q": q}), q, use_reentrant=False)
    found = torch.autograd.grad(out.sin().sum(), q)
    same(found, torch.autograd.grad(wanted(warploom.gated_delta_rule, given).sin().sum(), q))
    assert kernel.ways() == ["checked"] * 2 + ["bound", "bound", "bound backward"]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_checkpointed_layers_of_a_first_step_are_run_again_by_the_launcher_that_they_left(
    name: str, reads: bool, kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the checked way keeps for a backward pass has to come back in its order and dtypes."""
    monkeypatch.setattr(triton.BACKEND, "reads", lambda dtype: reads)
    given = KINDS[name]()
    q = given["q"].requires_grad_()

    def layer(q: Tensor) -> Tensor:
        found = call({**given, "q": q})
        return found[0] if isinstance(found, tuple) else found

    outs = [torch.utils.checkpoint.checkpoint(layer, q, use_reentrant=False) for _ in range(3)]
    found = torch.autograd.grad(torch.stack(outs).sin().sum(), q)
    want = wanted(warploom.gated_delta_rule, given)
    want = want[0] if isinstance(want, tuple) else want
    same([t / 3 for t in found], list(torch.autograd.grad(want.sin().sum(), q)))
    assert kernel.ways()[:4] == ["checked"] * 2 + ["bound"] * 2


def test_what_changes_the_choice_forgets_the_launchers(kernel: StandIn) -> None:
    given = drawn()
    for forget in (lambda: dispatch.strict(False), lambda: dispatch.register("delta", *dispatch.implementations("delta"))):
        for _ in range(2):
            call(given)
        forget()
    call(given)
    assert kernel.ways() == ["checked"] * 5


def test_launchers_are_not_kept_without_end(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_KEPT", 3)
    for tokens in range(1, 9):
        for _ in range(2):
            call(drawn(1, tokens))
        assert len(dispatch._bound) <= 4
