"""What kept launchers allocate with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warploom.runtime.device import current
from warploom.runtime.likeness import allocation

SHAPES = [(0,), (3,), (2, 0, 4), (2, 3, 1, 5)]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_new_tensors_are_contiguous_and_lie_apart(shape: tuple[int, ...]) -> None:
    new = allocation(shape, torch.bfloat16, CPU)
    one, other = new(), new()
    for t in (one, other):
        assert t.shape == shape and t.dtype == torch.bfloat16 and t.is_contiguous() and not t.requires_grad
    assert not one.numel() or one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_gpu_sizes_and_strides_are_those_of_a_new_tensor(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    guards = torch._C._dynamo.guards
    monkeypatch.setattr(guards, "_empty_strided_cuda", lambda *given: asked.append(given), raising=False)
    allocation(shape, torch.float32, GPU)()
    assert asked == [(shape, torch.empty(shape).stride(), torch.float32)]


def test_a_torch_without_it_allocates_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
    made: list[Any] = []

    def empty(*given: Any, device: torch.device, **named: Any) -> torch.Tensor:
        made.append(device)
        return real(*given, **named)

    real: Callable[..., torch.Tensor] = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    assert allocation((4, 5), torch.int16, GPU)().shape == (4, 5) and made == [GPU]


def test_a_cpu_is_always_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    assert current(CPU)() == CPU.index
    assert current(GPU)() == 0 != GPU.index
