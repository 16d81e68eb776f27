"""The device of a launch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device(t: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, to which launches go; does nothing where it is already, and on a CPU."""
    if t.is_cuda and t.device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(t.device)
    return nullcontext()
