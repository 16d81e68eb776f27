"""When a kernel of a builder's may stand for torch's operations."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.runtime.likeness import like
from warploom.runtime.op import plain

if TYPE_CHECKING:
    from warploom.runtime.triton_launch import Launch

_HAS_TRITON = find_spec("triton") is not None
_DTYPES = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


def may_launch(device: torch.device, *tensors: Tensor) -> bool:
    """Whether Triton runs on the device and nothing would have to see torch's operations on these tensors."""
    if device.type != "cuda" or not _HAS_TRITON or torch.compiler.is_compiling():
        return False
    for t in tensors:
        if t.dtype not in _DTYPES:
            return False
    return plain(*tensors)


def empty_vector(batch: int, seqlen_k: int, device: torch.device) -> Tensor:
    """A vector for a kernel to write, int32 (batch, 1, seqlen_k)."""
    return torch.empty_like(_like_vector(batch, seqlen_k, device))


@lru_cache(256)
def _like_vector(batch: int, seqlen_k: int, device: torch.device) -> Tensor:
    return like((batch, 1, seqlen_k), torch.int32, device)


def loads(t: Tensor, launch: Launch) -> bool:
    """Whether a kernel can be launched now on the tensor's device: a capturing stream cannot load it."""
    return not t.is_cuda or not torch.cuda.is_current_stream_capturing() or launch.raw() is not None
