"""When a kernel of a builder's may stand for torch's operations."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.runtime.op import plain

if TYPE_CHECKING:
    from warploom.runtime.triton_launch import Launch

_HAS_TRITON = find_spec("triton") is not None
_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def may_launch(device: torch.device, *tensors: Tensor) -> bool:
    """Whether Triton runs on the device and nothing would have to see torch's operations on these tensors."""
    return (
        device.type == "cuda"
        and _HAS_TRITON
        and not torch.compiler.is_compiling()
        and all([t.dtype in _DTYPES for t in tensors])
        and plain(*tensors)
    )


def loads(t: Tensor, launch: Launch) -> bool:
    """Whether a kernel can be launched now on the tensor's device: a capturing stream cannot load it."""
    return not t.is_cuda or not torch.cuda.is_current_stream_capturing() or launch.raw() is not None
