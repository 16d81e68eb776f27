"""In the place of a family's kernels on a GPU: the CPU's implementation, which says what reaches it, in which way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from warploom.runtime import dispatch


class StandIn:
    """Computes what reaches a backend, checked or by a launcher.

    Args:
        cpu: the family's backend that computes.
        names: of the call's tensors as launchers take them; those of ``rows`` have no batch of 1 where the caller's have none.
        step_names: the same of a step.
    """

    def __init__(self, cpu: Any, names: tuple[str, ...], rows: tuple[str, ...], step_names: tuple[str, ...]) -> None:
        self._cpu, self._names, self._rows, self._step_names = cpu, names, rows, step_names
        self.log: list[str] = []
        self.takes = True  # launchers take these addresses

    def ways(self) -> list[str]:
        """What was logged since it was asked last."""
        found, self.log = self.log, []
        return found

    def forward(self, call: Any, return_state: bool) -> Any:
        self.log.append("checked")
        return self._cpu.forward(call, return_state)

    def bind(self, call: Any, return_state: bool) -> Callable[..., Any]:
        def launch(*tensors: Tensor | None) -> Any:
            if not self.takes:
                return None
            self.log.append("bound")
            return self._cpu.forward(self._rebuilt(call, tensors), return_state)

        return launch

    def backward(self, call: Any, *gradients: Tensor | None) -> Any:
        self.log.append("checked backward")
        return self._cpu.backward(call, *gradients)

    def bind_backward(self, call: Any, *gradients: Tensor | None) -> Callable[..., Any]:
        count = len(gradients)

        def launch(*given: Tensor | None) -> Any:
            if not self.takes:
                return None
            self.log.append("bound backward")
            return self._cpu.backward(self._rebuilt(call, given[count:]), *given[:count])

        return launch

    def step(self, args: Any, *into: Any) -> Any:
        self.log.append("checked")
        return self._cpu.step(args, *into)

    def bind_step(self, args: Any, *into: Any) -> Callable[..., Any]:
        def launch(*tensors: Tensor | None) -> Any:
            if not self.takes:
                return None
            self.log.append("bound")
            given = dict(zip(self._step_names, tensors, strict=True))
            shaped = {
                n: t if t is None or t.shape == getattr(args, n).shape else t.reshape(getattr(args, n).shape)
                for n, t in given.items()
            }
            state = shaped.get("state")
            return self._cpu.step(args._replace(**shaped), *[None if t is None else state for t in into])

        return launch

    def _rebuilt(self, call: Any, tensors: tuple[Tensor | None, ...]) -> Any:
        given = dict(zip(self._names, tensors, strict=True))
        for name in self._rows:
            t, was = given[name], getattr(call, name)
            if t is not None and t.ndim < was.ndim:
                given[name] = t.unsqueeze(0)
        return type(call)(**vars(call) | given)


def install(standin: StandIn, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor says that it is on a GPU, and ``backend`` takes every call."""
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(backend, "available", lambda: None)
    monkeypatch.setattr(backend, "supports", lambda problem: None)
    for name in ("forward", "bind", "backward", "bind_backward", "step", "bind_step"):
        monkeypatch.setattr(backend, name, getattr(standin, name))
    dispatch.strict(False)  # forgets what was bound
