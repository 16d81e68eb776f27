"""When a call may skip the op: only where no gradient, mode, transform, trace or profiler would see it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import warploom
from warploom.attention import hopper
from warploom.attention.ops import attention_op
from warploom.attention.problem import AttentionArgs
from warploom.runtime import dispatch
from warploom.runtime.op import unobserved


def plain() -> Tensor:
    return torch.ones(1, 3, 2, 16)


def seen(q: Tensor, sink: Tensor | None = None) -> bool:
    return unobserved(q, plain(), plain(), sink)


def test_plain_tensors() -> None:
    assert seen(plain()) and seen(plain(), torch.zeros(2)) and seen(torch.nn.Parameter(plain(), requires_grad=False))


def test_gradients() -> None:
    assert not seen(plain().requires_grad_())
    assert not seen(plain(), torch.zeros(2, requires_grad=True))
    with torch.no_grad():
        assert seen(plain().requires_grad_())
    with torch.inference_mode():
        assert seen(plain())


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        return function(*arguments, **(keywords or {}))


class Sub(Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        return function(*arguments, **(keywords or {}))


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "dispatch mode": Mode,
    "function mode": Functions,
    "forward AD": forward_ad.dual_level,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("name", MODES)
def test_modes(name: str) -> None:
    q = plain()
    with MODES[name]():
        assert not seen(q)
    assert seen(q)


def test_a_default_device_hides_no_short_way() -> None:
    with torch.device("cpu"):
        assert seen(plain())
        with Functions():
            assert not seen(plain())


def test_nodes_are_named_after_their_op() -> None:
    q = plain().requires_grad_()
    for out, name in (
        (warploom.attention(q, q, q), "_AttentionBackward"),
        (warploom.linear_attention(q, q, q), "_LinearAttentionBackward"),
    ):
        assert out.grad_fn.name() == name


def test_subclasses_transforms_and_traces() -> None:
    assert not seen(plain().as_subclass(Sub))
    found: list[bool] = []

    def note(q: Tensor) -> Tensor:
        found.append(seen(q))
        return q.sum()

    torch.func.grad(note)(plain())
    torch.func.vmap(note)(plain()[None])
    torch.jit.trace(note, (plain(),), check_trace=False)
    assert found == [False, False, False]


class Kernel:
    """In the place of the Hopper implementation: says what reaches it, in which way."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def forward(self, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        self.log.append("checked")
        return self.run(args.scale, args.q)

    def bind(self, args: AttentionArgs) -> Callable[..., tuple[Tensor, Tensor]]:
        scale = args.scale

        def launch(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *vectors: Tensor | None) -> tuple[Tensor, Tensor]:
            self.log.append("bound")
            return self.run(scale, q)

        return launch

    def run(self, scale: float, q: Tensor) -> tuple[Tensor, Tensor]:
        return q * scale, q.new_zeros(*q.shape[:-3], q.shape[-2], q.shape[-3])

    def ways(self) -> list[str]:
        found, self.log = self.log, []
        return found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Every tensor says that it is on a GPU, and that one implementation takes every call."""
    kernel = Kernel()
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(hopper.BACKEND, "available", lambda: None)
    monkeypatch.setattr(hopper.BACKEND, "supports", lambda problem: None)
    monkeypatch.setattr(hopper.BACKEND, "forward", kernel.forward)
    monkeypatch.setattr(hopper.BACKEND, "bind", kernel.bind)
    dispatch.strict(False)  # forgets what was bound
    return kernel


def call(q: Tensor, **keywords: Any) -> Any:
    k = keywords.pop("k", q)
    return warploom.attention(q, k, k, backend="hopper", **keywords)


def twice(q: Tensor, **keywords: Any) -> None:
    """After two calls of a kind its launcher is there."""
    for _ in range(2):
        call(q, **keywords)


def test_the_third_call_of_a_kind_only_launches(kernel: Kernel) -> None:
    q = torch.randn(2, 3, 2, 16)
    found = [call(q + i) for i in range(3)]
    assert kernel.ways() == ["checked", "checked", "bound"]
    torch.testing.assert_close(found, [(q + i) / 4 for i in range(3)])
    out, lse = call(q, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 2, 3) and kernel.ways() == ["bound"]


GOOD_AND_ITS_EQUALS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"causal": True}, [1, 1.0]),
    ({"causal": False}, [0, None, ""]),
    ({"deterministic": True}, [1]),
    ({"window": (1, 2)}, [(1.0, 2), (True, 2), {1: 0, 2: 0}]),
    ({"scale": 1.0}, [True]),
    ({"softcap": 0.0}, [False, None]),
    ({"dropout_p": 0.0}, [None, False, ""]),
    ({"return_lse": True}, [1, "yes"]),
    ({"return_lse": False}, [0, None]),
    ({"dropout_seed": None}, ["x", 2**70]),
]


@pytest.mark.parametrize("good,equals", GOOD_AND_ITS_EQUALS, ids=str)
def test_a_bad_value_does_not_find_the_launcher_of_a_good_one_that_it_equals(
    good: dict[str, Any], equals: list[Any], kernel: Kernel
) -> None:
    q = plain()
    for _ in range(3):
        call(q, **good)
    assert kernel.ways() == ["checked", "checked", "bound"]
    (name,) = good
    for bad in equals:
        with pytest.raises((TypeError, ValueError), match=name):
            call(q, **{name: bad})


def test_plain_gradients_skip_the_op(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def noted(name: str) -> Callable[..., Any]:
        op = getattr(attention_op, name)

        def run(*arguments: Any) -> Any:
            seen.add(name)
            return op(*arguments)

        return run

    def backward(args: AttentionArgs, dout: Tensor, *_: object) -> tuple[Tensor, ...]:
        return dout * args.scale, 0 * dout, 0 * dout, dout.new_empty(0)

    monkeypatch.setattr(hopper.BACKEND, "backward", backward)
    names = {"op", "backward_op"}
    for name in names:
        monkeypatch.setattr(attention_op, name, noted(name))
    q = plain().requires_grad_()

    def gradient() -> Tensor:
        return torch.autograd.grad(call(q).sum(), q)[0]

    assert torch.equal(gradient(), plain() / 4) and not seen
    with Mode():
        assert torch.equal(gradient(), plain() / 4) and seen == names
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(torch.autograd.grad(call(q).sum(), q, create_graph=True)[0].sum(), q)


DIFFERENT: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 5.0},
    "window": {"window": (1, 0)},
    "other window": {"window": (0, 1)},
    "one-sided window": {"window": (None, 1)},
    "sink": {"sink": torch.zeros(2)},
    "half a sink": {"sink": torch.zeros(2).half()},
    "deterministic": {"deterministic": True},
    "k's strides": {"k": torch.zeros(2, 2, 3, 16).transpose(1, 2)},
    "k's length": {"k": torch.zeros(2, 5, 2, 16)},
    "fewer heads of k": {"k": torch.zeros(2, 3, 1, 16)},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_checked_and_planned_for_itself(name: str, kernel: Kernel) -> None:
    q = plain().expand(2, 3, 2, 16).contiguous()
    twice(q)
    assert kernel.ways() == ["checked", "checked"]
    for way in ("checked", "checked", "bound"):
        call(q, **DIFFERENT[name])
        assert kernel.ways() == [way]
    call(q)
    assert kernel.ways() == ["bound"]


def packed(q: Tensor, lengths: Tensor | None = None, **keywords: Any) -> Any:
    lengths = torch.tensor([0, 1, 3], dtype=torch.int32) if lengths is None else lengths
    return warploom.attention_varlen(q, q, q, lengths, backend="hopper", **keywords)


def test_packed_calls_too(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    q = plain()[0]
    found = [packed(q + i, torch.tensor([0, i, 3], dtype=torch.int32)) for i in range(3)]
    assert kernel.ways() == ["checked", "checked", "bound"]
    torch.testing.assert_close(found, [(q + i) / 4 for i in range(3)])
    different: list[dict[str, Any]] = [
        {"lengths": torch.tensor([0, 3], dtype=torch.int32)},
        {"max_seqlen_q": 2},
        {"cu_seqlens_k": torch.tensor([0, 2, 3], dtype=torch.int32)},
        {"seqused_k": torch.tensor([1, 1], dtype=torch.int32)},
        {"causal": True},
        {"lengths": torch.tensor([0, 1, 3], dtype=torch.int32).as_subclass(Sub)},
    ]
    for keywords in different:
        packed(q, **keywords)
        assert kernel.ways() == ["checked"], keywords
    for _ in range(3):  # converted at every call: a kept launcher would read 64 bits as 32
        torch.testing.assert_close(packed(q, torch.tensor([0, 1, 3])), q / 4)
    assert kernel.ways() == ["checked"] * 3
    for _ in range(2):
        packed(q, max_seqlen_q=3)
    with pytest.raises(TypeError, match=r"max_seqlen_q must be an int or None, got float 3\.0"):
        packed(q, max_seqlen_q=3.0)  # equal to the 3 that a launcher is kept for
    with pytest.raises(TypeError, match="causal must be True or False, got int 0"):
        packed(q, causal=0)
    kernel.ways()
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        packed(q, torch.tensor([0.0, 1.0, 3.0]))
    monkeypatch.setenv("WARPLOOM_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        packed(q, torch.tensor([0, 5, 3], dtype=torch.int32))


def test_global_state_is_part_of_the_kind(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    twice(plain())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    call(plain())
    assert kernel.ways() == ["checked"] * 3


@pytest.mark.parametrize("name", MODES)
def test_a_bound_call_is_still_seen_by_who_watches(name: str, kernel: Kernel) -> None:
    twice(plain())
    with MODES[name]():
        call(plain())
    call(plain().requires_grad_())
    call(plain().as_subclass(Sub))
    with torch.autocast("cpu", torch.bfloat16):
        call(plain())
    assert kernel.ways() == ["checked"] * 6
    call(plain())
    assert kernel.ways() == ["bound"]


def test_wrong_arguments_are_named_as_before(kernel: Kernel) -> None:
    twice(plain(), window=(1, 0))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"window": (True, 0)}, "window's left"),
        ({"window": (1,)}, "window must be a pair"),
        ({"window": [[1], 0]}, "window's left"),
        ({"k": "keys"}, "k must be a torch.Tensor"),
    ]
    for keywords, words in wrong:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
            call(plain(), **keywords)


def test_what_changes_the_choice_forgets_the_launchers(kernel: Kernel) -> None:
    twice(plain())
    dispatch.strict(False)
    twice(plain())
    dispatch.register("attention", *dispatch.implementations("attention"))
    call(plain())
    assert kernel.ways() == ["checked"] * 5


def test_launchers_are_not_kept_without_end(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_KEPT", 3)
    for length in range(1, 9):
        twice(torch.ones(1, length, 2, 16))
        assert len(dispatch._bound) <= 4


def test_a_tensor_as_scale_is_read_every_time(kernel: Kernel) -> None:
    scale = torch.tensor(0.5)
    twice(plain(), scale=scale)
    scale.fill_(2.0)
    assert call(plain(), scale=scale)[0, 0, 0, 0] == 2.0


@pytest.mark.parametrize("name", ["q", "k", "packed q"])
def test_a_launcher_was_given_views_that_the_checks_had_copied(name: str, kernel: Kernel) -> None:
    """Found by the fuzzer: the last dimension is not contiguous, and the third call failed in the launcher's words."""
    plain_q, strided = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 32)[..., ::2]
    for _ in range(3):
        if name == "packed q":
            packed(strided[0])
        else:
            call(strided if name == "q" else plain_q, k=strided if name == "k" else plain_q)
    assert kernel.ways() == ["checked"] * 3
