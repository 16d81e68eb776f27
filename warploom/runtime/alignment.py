"""Tensors that TMA and 16-byte copies can read: where they start, and by what they step."""

from __future__ import annotations

import torch
from torch import Tensor


def aligned(t: Tensor) -> Tensor:
    """``t``, or a copy where it cannot be read by 16 bytes: rows of contiguous elements, every one from a 16-byte boundary."""
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def is_aligned(t: Tensor) -> bool:
    """Whether ``t`` can be read and written by 16 bytes as it lies."""
    return stepped(t) and not t.data_ptr() & 15


def stepped(t: Tensor) -> bool:
    """Whether every row of ``t`` starts by a multiple of 16 bytes after its first and holds contiguous elements."""
    stride = t.stride()
    return not (stride[0] | stride[1] | stride[-2]) & 7 and stride[-1] == 1
