"""Kept launchers on a CUDA device: the bits of the checked way, on new contents and addresses, in graphs, on other streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import warploom
from warploom.runtime import dispatch, kept

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

Draw = Callable[[], dict[str, Any]]


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def delta(*tokens: int, **changes: Any) -> dict[str, Any]:
    """Arguments of gated_delta_rule(), or of a step; two value heads to a key's."""
    k = torch.nn.functional.normalize(rand(*tokens, 2, 64, dtype=torch.float32), dim=-1).bfloat16()
    beside = (*tokens, 4)
    logs = -torch.rand(beside, device="cuda")
    found = {"q": rand(*tokens, 2, 64), "k": k, "v": rand(*tokens, 4, 64), "beta": torch.rand(beside, device="cuda")}
    return {**found, "decay": logs, **changes}


def linear(*tokens: int, **changes: Any) -> dict[str, Any]:
    return {"q": rand(*tokens, 4, 64), "k": rand(*tokens, 2, 64), "v": rand(*tokens, 2, 64), **changes}


def walked(*tokens: int, **changes: Any) -> dict[str, Any]:
    """A call that Hopper's walks take."""
    found = {name: rand(*tokens, 16, 128) for name in ("q", "k", "v")}
    return {**found, "feature_map": "identity", "normalize": False, **changes}


def sums(count: int) -> tuple[Tensor, Tensor]:
    return rand(count, 2, 64, 64, dtype=torch.float32), torch.rand(count, 2, 64, device="cuda")


def starts() -> Tensor:
    return torch.tensor([0, 20, 20, 130], dtype=torch.int32, device="cuda")


def logs(*shape: int) -> Tensor:
    return -torch.rand(shape, device="cuda")


def state(count: int) -> Tensor:
    return rand(count, 4, 64, 64, dtype=torch.float32)


CALLS: dict[str, tuple[Callable[..., Any], Draw]] = {
    "delta": (warploom.gated_delta_rule, lambda: delta(2, 70)),
    "delta with a state": (
        warploom.gated_delta_rule,
        lambda: delta(2, 70, state=state(2), return_state=True, normalize_qk=True),
    ),
    "delta packed": (
        warploom.gated_delta_rule,
        lambda: delta(140, cu_seqlens=starts(), state=state(3), return_state=True, beta=logs(140, 4).exp().half()),
    ),
    "linear": (warploom.linear_attention, lambda: linear(2, 70)),
    "linear in segments": (warploom.linear_attention, lambda: linear(1, 9000, decay=logs(1, 9000, 2))),
    "linear that looks back": (warploom.linear_attention, lambda: {**linear(1, 9000), "q": rand(1, 9000, 2, 64)}),
    "linear on Hopper": (warploom.linear_attention, lambda: walked(2, 70)),
    "linear on Hopper, decay": (warploom.linear_attention, lambda: walked(2, 70, decay=logs(2, 70, 16))),
    "linear packed": (
        warploom.linear_attention,
        lambda: linear(140, cu_seqlens=starts(), state=sums(3), return_state=True, decay=logs(140, 2)),
    ),
    "linear, all keys": (warploom.linear_attention, lambda: linear(2, 70, causal=False, state=sums(2), return_state=True)),
}
STEPS: dict[str, tuple[Callable[..., Any], Draw]] = {
    "delta step": (warploom.gated_delta_step, lambda: delta(3, state=state(3))),
    "delta step of rows": (warploom.gated_delta_step, lambda: delta(3, 1, state=state(3), normalize_qk=True)),
    "linear step": (warploom.linear_attention_step, lambda: linear(3, state=sums(3), decay=logs(3, 2))),
}
ALL = CALLS | STEPS


def flat(value: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]


def checked(function: Callable[..., Any], given: dict[str, Any]) -> list[Tensor]:
    """What the call returns that looks for no launcher."""
    with patch.object(kept, "find", lambda *_: kept.NOTHING):
        return flat(function(**given))


def same(found: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def run(function: Callable[..., Any], draw: Draw, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> int:
    """Calls on new tensors each; how many of them a launcher ran."""
    found: list[Any] = []
    find = kept.find

    def noted(*arguments: Any) -> kept.Found:
        found.append(find(*arguments))
        return found[-1]

    for _ in range(6):
        given = draw()
        want = checked(function, given)
        with patch.object(kept, "find", noted), around():
            same(flat(function(**given)), want)
    return sum(launch is not None for _, launch, _ in found)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    dispatch.strict(False)


@pytest.mark.parametrize("name", ALL)
def test_the_bits_of_the_checked_way(name: str) -> None:
    assert run(*ALL[name]) == 4


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function's results, and the gradients of all tensors of numbers for drawn ones of the results."""

    def call(**given: Any) -> list[Tensor]:
        leaves: list[Tensor] = []

        def leaf(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(leaf, value))
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            leaves.append(value.detach().requires_grad_())
            return leaves[-1]

        results = flat(function(**{name: leaf(value) for name, value in given.items()}))
        torch.manual_seed(1)
        found = torch.autograd.grad(results, leaves, [torch.randn_like(t) for t in results])
        return [*(t.detach() for t in results), *found]

    return call


@pytest.mark.parametrize("name", CALLS)
def test_gradients_too(name: str) -> None:
    function, draw = CALLS[name]
    assert run(gradients(function), draw) == 4


@pytest.mark.parametrize("name", ["delta", "linear", *STEPS])
def test_addresses_that_do_not_align(name: str) -> None:
    function, draw = ALL[name]
    places = iter([0, 0, 1, 2, 0, 4])

    def moved() -> dict[str, Any]:
        given = draw()
        at, q = next(places), given["q"]
        room = torch.empty(q.numel() + 8, dtype=q.dtype, device="cuda")
        return {**given, "q": room[at : at + q.numel()].view(q.shape).copy_(q)}

    assert run(function, moved) == 4


@pytest.mark.parametrize("name", ["delta", "linear in segments", "linear step"])
def test_other_streams(name: str) -> None:
    def around() -> AbstractContextManager[Any]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    assert run(*ALL[name], around) == 4
    torch.cuda.synchronize()


def test_who_asks_triton_for_launches_sees_them() -> None:
    from triton import knobs

    seen: list[Any] = []
    function, draw = partial(warploom.gated_delta_rule, backend="triton"), CALLS["delta"][1]
    assert run(function, draw) == 4
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        same(flat(function(**(given := draw()))), flat(function(**given)))
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 4


@pytest.mark.parametrize("name", ["delta with a state", "linear packed", "linear that looks back", *STEPS])
def test_a_graph_of_a_kept_call(name: str) -> None:
    function, draw = ALL[name]
    held = draw()
    for _ in range(4):
        function(**held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flat(function(**held))
    for _ in range(2):
        given = draw()
        for a, b in zip(flat(held), flat(given), strict=True):
            a.copy_(b)
        graph.replay()
        same(found, checked(function, given))


def test_a_step_in_place() -> None:
    for n in range(5):
        given = delta(3, state=state(3))
        want = checked(warploom.gated_delta_step, given)
        before = given["state"]._version
        out, new = warploom.gated_delta_step(**given, inplace=True)
        same([out, new], want)
        assert new is given["state"] and new._version > before, n


@pytest.mark.parametrize("name", ["delta packed", "linear packed"])
def test_checkpointed_layers_of_a_first_step(name: str) -> None:
    """A launcher that the first two layers left runs them again."""
    function, draw = CALLS[name]
    given = draw()
    q = given["q"].requires_grad_()

    def layer(q: Tensor) -> Tensor:
        return flat(function(**{**given, "q": q}))[0].sum()

    (want,) = torch.autograd.grad(layer(q), q)
    dispatch.strict(False)
    for out in [torch.utils.checkpoint.checkpoint(layer, q, use_reentrant=False) for _ in range(4)]:
        assert torch.equal(torch.autograd.grad(out, q)[0], want)
