"""The rotation of queries over rotated keys, in their own dtype: one launch on a GPU, torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from warploom.kernels.e4m3 import rotate
from warploom.runtime.device import capability
from warploom.runtime.flops import nothing
from warploom.runtime.op import Op, settled_dtypes
from warploom.runtime.qkv import last_contiguous

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Looked up here: torch.compile does not trace that.
_HAS_TRITON = find_spec("triton") is not None


def in_kernels(head_dim: int) -> bool:
    """Whether kernels rotate heads of so many numbers; torch does the others."""
    return 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0


def rotated_like(x: Tensor, seed: int) -> Tensor:
    """x (…, tokens, heads, head_dim) as `e4m3.rotate` has it, rounded to its dtype."""
    if _in_one_launch(x):
        found: Tensor = rotate_op(last_contiguous(x), seed)
        return found
    return rotate(x, seed).to(x.dtype)


def bound(x: Tensor, seed: int) -> Callable[[Tensor], Tensor | None] | None:
    """What rotates later tensors of x's shape, strides, dtype and device as `rotated_like` did x, which nothing sees.

    None where there is nothing quicker; it gives None where a tensor or the current device does not fit.
    """
    if not _in_one_launch(x):
        return lambda x: rotate(x, seed).to(x.dtype)
    from warploom.kernels.triton.hadamard import bound as in_one_launch

    return in_one_launch(x, seed)


def _in_one_launch(x: Tensor) -> bool:
    """Whether a kernel rotates x."""
    taken = x.is_cuda and _HAS_TRITON and x.dtype in _DTYPES and 3 <= x.ndim <= 4 and x.numel() > 0
    return taken and in_kernels(x.shape[-1]) and capability(x.device) >= 80


class RotateOp(Op):
    """What `rotated_like` gives, of head dims that are powers of two."""

    name, public = "rotate_rows", "decode() over a rotated cache"
    without = "rotate outside of the exported part"
    signature = "(Tensor x, int seed) -> Tensor"

    def forward(self, *flat: Any) -> Tensor:
        from warploom.kernels.triton.hadamard import rotate_rows

        with settled_dtypes(flat[0]):
            return rotate_rows(*flat)

    def fake(self, *flat: Any) -> Tensor:
        x: Tensor = flat[0]
        return x.new_empty(x.shape)

    def flops(self, *flat: Any) -> int:
        return nothing()


rotate_op = RotateOp()
