"""Kept launchers of linear attention: what they are given, when there is none, and who sees the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.test_direct import MODES, Mode, Sub
from tests.standin import StandIn, install
from warploom.linear import cpu, hopper, launcher, triton
from warploom.linear.ops import linear_op
from warploom.runtime import dispatch, modules

NAMES = ("q", "k", "v", "s", "z", "decay", "lengths", "cu_seqlens")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn(cpu.BACKEND, NAMES, ("q", "k", "v"), ("q", "k", "v", "s", "z", "decay"))
    rebuilt = found._rebuilt

    def with_decay(call: Any, tensors: tuple[Tensor | None, ...]) -> Any:
        made = rebuilt(call, tensors)
        if made.decay is not None and made.decay.ndim == 2:  # of packed tokens
            object.__setattr__(made, "decay", made.decay.unsqueeze(0))
        return made

    monkeypatch.setattr(found, "_rebuilt", with_decay)
    install(found, triton.BACKEND, monkeypatch)
    return found


def drawn(*shape: int, **changes: Any) -> dict[str, Any]:
    """Arguments of a call with tokens (batch, seqlen) or (total_tokens,); two query heads to a key's."""
    shape = shape or (2, 5)
    return {"q": torch.randn(*shape, 4, 8), "k": torch.randn(*shape, 2, 8), "v": torch.randn(*shape, 2, 6), **changes}


def state(sequences: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(sequences, 2, 8, 6), torch.rand(sequences, 2, 8)


def starts() -> Tensor:
    return torch.tensor([0, 3, 6], dtype=torch.int32)


def call(given: dict[str, Any], **keywords: Any) -> Any:
    return warploom.linear_attention(**{"backend": "triton", **given, **keywords})


def step(given: dict[str, Any], **keywords: Any) -> Any:
    return warploom.linear_attention_step(**{"backend": "triton", **given, **keywords})


def wanted(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    return function(**{**given, "backend": "reference"})


def same(found: Any, want: Any) -> None:
    """Values; shapes and dtypes too."""
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": drawn,
    "options": lambda: drawn(feature_map="relu", eps=0.5, scale=2, causal=False),
    "no denominator": lambda: drawn(feature_map="identity", normalize=False, decay=-torch.rand(2)),
    "a state": lambda: drawn(state=warploom.LinearState(*state()), return_state=True, decay=-torch.rand(2, 5, 2)),
    "a pair": lambda: drawn(state=state()),
    "lengths": lambda: drawn(lengths=torch.tensor([3, 5], dtype=torch.int32), return_state=True),
    "packed": lambda: drawn(7, cu_seqlens=starts()),
    "packed, with a state": lambda: drawn(7, cu_seqlens=starts(), state=state(), return_state=True, decay=-torch.rand(7, 2)),
    "packed, decays of heads": lambda: drawn(7, cu_seqlens=starts(), decay=-torch.rand(2)),
    "packed in a batch of 1": lambda: drawn(1, 7, cu_seqlens=starts(), decay=-torch.rand(1, 7, 2)),
    "odd strides": lambda: drawn(v=torch.randn(2, 2, 5, 6).transpose(1, 2), decay=-torch.rand(2, 2, 5).mT),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_third_call_of_a_kind_only_launches(name: str, kernel: StandIn) -> None:
    for way in ("checked", "checked", "bound", "bound"):
        given = KINDS[name]()
        found = call(given)
        same(found, wanted(warploom.linear_attention, given))
        assert kernel.ways() == [way] and type(found) in (Tensor, tuple)
        assert not isinstance(found, tuple) or type(found[1]) is warploom.LinearState


def gradients(given: dict[str, Any]) -> list[Tensor]:
    """The results, and of a function of them the gradients in every tensor of numbers."""
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(leaf, value))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.detach().requires_grad_())
        return leaves[-1]

    results = warploom.linear_attention(**{name: leaf(value) for name, value in given.items()})
    flat = [results] if isinstance(results, Tensor) else [results[0], *results[1]]
    loss = sum((t.double().sin().sum() for t in flat), torch.zeros((), dtype=torch.float64))
    return [*(t.detach() for t in flat), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("name", KINDS)
def test_so_do_both_passes_of_a_call_with_gradients(name: str, kernel: StandIn) -> None:
    for way in ("checked", "checked", "bound", "bound"):
        given = KINDS[name]()
        same(gradients({**given, "backend": "triton"}), gradients({**given, "backend": "reference"}))
        assert kernel.ways() == [way, f"{way} backward"]


def test_who_asks_for_gradients_is_part_of_the_kind(kernel: StandIn) -> None:
    """The decay's gradient takes launches of its own."""
    for asks in (("q",), ("q", "decay"), ("decay",), ("q",)):
        for _ in range(3):
            given = drawn(decay=-torch.rand(2, 5, 2))
            leaves = [given[name].requires_grad_() for name in asks]
            found = torch.autograd.grad(call(given).sin().sum(), leaves)
            same(found, torch.autograd.grad(wanted(warploom.linear_attention, given).sin().sum(), leaves))
            ways = kernel.ways()
        assert ways == ["bound", "bound backward"]
    with torch.no_grad():
        assert not call(given).requires_grad


STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: drawn(2, state=state()),
    "decays": lambda: drawn(2, state=warploom.LinearState(*state()), decay=-torch.rand(2, 2)),
    "rows of one token": lambda: drawn(2, 1, state=state(), decay=-torch.rand(2, 1, 2)),
    "decays of heads": lambda: drawn(2, 1, state=state(), decay=-torch.rand(2), normalize=False, feature_map="identity"),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_third_step_of_a_kind_only_launches(name: str, kernel: StandIn) -> None:
    for way in ("checked", "checked", "bound", "bound"):
        given = STEPS[name]()
        before = [t.clone() for t in given["state"]]
        found = step(given)
        same(found, wanted(warploom.linear_attention_step, given))
        assert kernel.ways() == [way] and type(found[1]) is warploom.LinearState
        assert all(map(torch.equal, before, given["state"]))
    given["q"].requires_grad_()
    assert step(given)[0].requires_grad


def test_a_launcher_that_does_not_take_an_address_leaves_it_to_the_checked_way(kernel: StandIn) -> None:
    given, one = KINDS["packed, with a state"](), STEPS["rows of one token"]()
    for _ in range(3):
        call(given), gradients({**given, "backend": "triton"}), step(one)
    kernel.ways()
    kernel.takes = False
    same(call(given), wanted(warploom.linear_attention, given))
    same(step(one), wanted(warploom.linear_attention_step, one))
    same(gradients({**given, "backend": "triton"}), gradients({**given, "backend": "reference"}))
    assert kernel.ways() == ["checked"] * 3 + ["checked backward"]


DIFFERENT: list[dict[str, Any]] = [
    {"causal": False},
    {"feature_map": "relu"},
    {"normalize": False},
    {"eps": 0.5},
    {"scale": 2.0},
    {"scale": 2},
    {"state": state()},
    {"return_state": True},
    {"lengths": torch.tensor([3, 5], dtype=torch.int32)},
    {"decay": -torch.rand(2)},
    {"decay": -torch.rand(2, 5, 2)},
    {"k": torch.randn(2, 2, 5, 8).transpose(1, 2)},
]


@pytest.mark.parametrize("other", DIFFERENT, ids=lambda other: next(iter(other)))
def test_what_differs_is_checked_and_planned_for_itself(other: dict[str, Any], kernel: StandIn) -> None:
    given = drawn()
    for _ in range(2):
        call(given)
    kernel.ways()
    for way in ("checked", "checked", "bound"):
        same(call(given, **other), wanted(warploom.linear_attention, {**given, **other}))
        assert kernel.ways() == [way]
    call(given)
    assert kernel.ways() == ["bound"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"causal": 1}, "causal"),
    ({"normalize": 1.0}, "normalize"),
    ({"return_state": 0}, "return_state"),
    ({"scale": True}, "scale"),
    ({"eps": 0.0}, "eps"),
    ({"feature_map": "gelu"}, "feature_map"),
    ({"k": "keys"}, "k must be a torch.Tensor"),
    ({"state": torch.zeros(2)}, "state must be a LinearState"),
    ({"state": (1, 2)}, "state must be a LinearState"),
    ({"state": ()}, "state must be a LinearState"),
    ({"decay": torch.zeros(3)}, "decay must have shape"),
    ({"cu_seqlens": torch.tensor([0, 1])}, "with cu_seqlens q is"),
]


@pytest.mark.parametrize("wrong,words", WRONG, ids=str)
def test_wrong_arguments_are_named_as_before(wrong: dict[str, Any], words: str, kernel: StandIn) -> None:
    given = drawn(scale=1.0, eps=1.0, return_state=False)
    for _ in range(3):
        call(given)
    with pytest.raises((TypeError, ValueError), match=words):
        call(given, **wrong)
    one = STEPS["plain"]()
    for _ in range(3):
        step(one)
    for bad, named in (({"state": None}, "state must be"), ({"q": one["q"][0]}, "q must have"), ({"scale": True}, "scale")):
        with pytest.raises((TypeError, ValueError), match=named):
            step(one, **bad)


def test_what_makes_copies_or_calls_a_function_is_checked_every_time(kernel: StandIn) -> None:
    for change in (
        {"v": torch.randn(2, 6, 2, 5).transpose(1, 3)},
        {"lengths": torch.tensor([3, 5])},
        {"feature_map": torch.exp},
        {"feature_map": ("relu", "relu")},
    ):
        for _ in range(4):
            given = drawn(**change)
            same(call(given), wanted(warploom.linear_attention, given))
        assert kernel.ways() == ["checked"] * 4


def test_keys_that_no_query_sees_are_left_out_every_time(kernel: StandIn) -> None:
    """Unless the state is asked for, which they reach."""
    for options, way in (({}, "checked"), ({"return_state": True}, "bound"), ({"causal": False}, "bound")):
        for _ in range(3):
            given = drawn(k=torch.randn(2, 9, 2, 8), v=torch.randn(2, 9, 2, 6), **options)
            same(call(given), wanted(warploom.linear_attention, given))
        assert kernel.ways()[-1] == way


@pytest.mark.parametrize("name", MODES)
def test_whoever_watches_sees_the_op(name: str, kernel: StandIn) -> None:
    given = drawn(decay=-torch.rand(2))
    for _ in range(2):
        call(given)
    with MODES[name]():
        call(given)
    call({**given, "v": given["v"].as_subclass(Sub)})
    call({**given, "decay": given["decay"].as_subclass(Sub)})
    with torch.autocast("cpu", torch.bfloat16):
        call(given)
    assert kernel.ways() == ["checked"] * 6
    with torch.inference_mode():
        call(given)
    assert kernel.ways() == ["bound"]


def test_a_watched_backward_pass_of_a_kept_launcher_runs_the_op(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    op = linear_op.backward_op

    def noted(*arguments: Any) -> Any:
        seen.add("op")
        return op(*arguments)

    monkeypatch.setattr(linear_op, "backward_op", noted)
    given = drawn()
    given["q"].requires_grad_()
    outs = [call(given) for _ in range(4)]
    assert outs[3].grad_fn.name() == "_LinearAttentionBackward"
    with Mode():
        found = torch.autograd.grad(outs[3].sin().sum(), given["q"])
    same(found, torch.autograd.grad(wanted(warploom.linear_attention, given).sin().sum(), given["q"]))
    assert seen == {"op"} and kernel.ways() == ["checked"] * 2 + ["bound"] * 2 + ["checked backward"]
    (first,) = torch.autograd.grad(call(given).sum(), given["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(first.sum(), given["q"])


@pytest.mark.parametrize("name", KINDS)
def test_checkpointed_layers_of_a_first_step_are_run_again_by_the_launcher_that_they_left(name: str, kernel: StandIn) -> None:
    """What the checked way keeps for a backward pass has to come back in its order."""
    given = KINDS[name]()
    q = given["q"].requires_grad_()

    def layer(q: Tensor) -> Tensor:
        found = call({**given, "q": q})
        return found[0] if isinstance(found, tuple) else found

    outs = [torch.utils.checkpoint.checkpoint(layer, q, use_reentrant=False) for _ in range(3)]
    found = torch.autograd.grad(torch.stack(outs).sin().sum(), q)
    want = wanted(warploom.linear_attention, given)
    want = want[0] if isinstance(want, tuple) else want
    same([t / 3 for t in found], list(torch.autograd.grad(want.sin().sum(), q)))
    assert kernel.ways()[:4] == ["checked"] * 2 + ["bound"] * 2


def test_checked_contents_are_looked_at_every_time(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn(decay=-torch.rand(2))
    for _ in range(3):
        call(given)
    monkeypatch.setenv("WARPLOOM_CHECK", "1")
    with pytest.raises(ValueError, match="decay must be at most 0"):
        call({**given, "decay": given["decay"] + 2})


@pytest.mark.parametrize("builds", [False, True])
def test_what_the_faster_implementation_refuses_for_good_settles_the_choice(
    builds: bool, kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it lacks a module alone, another process may build it."""
    monkeypatch.setattr(hopper.BACKEND, "available", lambda: None)
    monkeypatch.setattr(hopper, "_processors", lambda index: 1)
    monkeypatch.setattr(hopper, "_module_refusal", lambda *_: "its module is missing")
    monkeypatch.setattr(modules, "cannot_build", lambda: None if builds else "there is no compiler")
    monkeypatch.setattr(Tensor, "device", property(lambda t: torch.device("cuda", 0)))
    monkeypatch.setattr(cpu.BACKEND, "supports", lambda call: "runs on CPU tensors")
    monkeypatch.setattr(launcher, "like", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))

    def run(way: str, q: Tensor) -> tuple[Tensor, None, None, None]:
        kernel.log.append(way)
        return q, None, None, None

    monkeypatch.setattr(triton.BACKEND, "forward", lambda call, return_state: run("checked", call.q))
    monkeypatch.setattr(triton.BACKEND, "bind", lambda call, return_state: lambda q, *others: run("bound", q))

    def ways(dim: int) -> list[str]:
        for _ in range(3):
            q = torch.randn(1, 3, 2, dim, dtype=torch.bfloat16)
            with torch.no_grad():
                warploom.linear_attention(q, q, q)
        return kernel.ways()

    assert ways(64) == ["checked", "checked", "bound"]
    assert ways(256) == ["checked", "checked", "bound" if builds else "checked"]


def test_what_changes_the_choice_forgets_the_launchers(kernel: StandIn) -> None:
    given = drawn()
    for forget in (lambda: dispatch.strict(False), lambda: dispatch.register("linear", *dispatch.implementations("linear"))):
        for _ in range(2):
            call(given)
        forget()
    call(given)
    assert kernel.ways() == ["checked"] * 5
