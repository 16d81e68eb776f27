"""The device of a launch: which it is, and what it can do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from warploom.runtime import machine


def on_device(t: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, to which launches go; does nothing where it is already, and on a CPU."""
    if t.is_cuda and t.device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(t.device)
    return _HERE


def current(device: torch.device) -> Callable[[], int | None]:
    """What says which device is the current one, to compare with the index of ``device``; on a CPU always that."""
    index = device.index
    return torch._C._cuda_getDevice if device.type == "cuda" else lambda: index


_HERE = nullcontext()  # which may be entered any number of times


@machine.examined
def capability(device: torch.device) -> int:
    """Ten times the major compute capability and the minor; of Triton's interpreter on the CPU that of Hopper."""
    if device.type != "cuda":
        return 90
    assumed = machine.assumed
    major, minor = torch.cuda.get_device_capability(device) if assumed is None else assumed.capability
    return 10 * major + minor
