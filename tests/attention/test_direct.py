"""When a call may skip the op: only where no gradient, mode, transform, trace or profiler would see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from warploom.attention.arguments import dense_args
from warploom.runtime import ops


def plain() -> Tensor:
    return torch.ones(1, 3, 2, 16)


ARGS = dense_args(plain(), plain(), plain())


def seen(q: Tensor, sink: Tensor | None = None) -> bool:
    return ops._nobody_watches(ARGS._replace(q=q, sink=sink))


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


@contextmanager
def device_mode() -> Iterator[None]:
    with torch.device("cpu"):
        yield


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "dispatch mode": Mode,
    "default device": device_mode,
    "forward AD": forward_ad.dual_level,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("name", MODES)
def test_modes(name: str) -> None:
    q = plain()
    with MODES[name]():
        assert not seen(q)
    assert seen(q)


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
