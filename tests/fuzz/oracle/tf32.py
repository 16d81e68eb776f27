"""Products of fp32 as a GPU's tensor cores make them: three of TF32, whose sums are cut and not rounded."""

from __future__ import annotations

import torch
from torch import Tensor

# Terms that a tensor core adds at once, in more bits than fp32 has, before it cuts the sum.
_TERMS = 8


def product(a: Tensor, b: Tensor, rounded: torch.dtype | None) -> Tensor:
    """a @ b. Where a model of fp32 runs on a GPU, in the arithmetic that kernels may have there.

    An operand is the sum of two TF32 numbers of 11 bits; low·high + high·low + high·high is what a kernel computes of it.
    """
    if rounded is not torch.float32 or a.dtype != torch.float32 or not a.is_cuda or 0 in (*a.shape, *b.shape):
        return a @ b
    high_a, high_b = _tf32(a), _tf32(b)
    low_a, low_b = _tf32(a - high_a), _tf32(b - high_b)
    total = torch.zeros((), dtype=torch.float32, device=a.device)
    for x, y in ((low_a, high_b), (high_a, low_b), (high_a, high_b)):
        x, y = x.double(), y.double()
        for first in range(0, a.shape[-1], _TERMS):
            terms = slice(first, first + _TERMS)
            total = _cut(total + x[..., terms] @ y[..., terms, :])
    return total


def _tf32(t: Tensor) -> Tensor:
    """The nearest number of 11 significant bits."""
    bits = t.contiguous().view(torch.int32)
    return torch.where(torch.isfinite(t), ((bits + 0x1000) & ~0x1FFF).view(torch.float32), t)


def _cut(t: Tensor) -> Tensor:
    """fp32 from fp64, towards zero."""
    nearest = t.float()
    return torch.where(nearest.double().abs() > t.abs(), torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
