"""Roundings of a kernel's operands, for low-precision models."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(t: Tensor, narrow: torch.dtype) -> Tensor:
    """t as an operand of tensor cores: in the narrow dtype, fp16's range a power of two apart, fp32 as two TF32 numbers."""
    if narrow == torch.float32:
        high = _tf32(t)
        return high + _tf32(t - high)
    if narrow != torch.float16 or not t.numel():
        return t.to(narrow).to(t.dtype)
    top = t.abs().nan_to_num(0.0, 0.0).amax((-2, -1), keepdim=True).clamp_min(1e-30)
    factor = torch.exp2(torch.floor(torch.log2(top)))
    return (t / factor).to(narrow).to(t.dtype) * factor


def jittered(t: Tensor, dtype: torch.dtype, turn: int) -> Tensor:
    """Off by up to half an ulp of the dtype, by numbers that look random."""
    place = torch.arange(t.numel(), device=t.device, dtype=torch.float64).view(t.shape)
    noise = torch.sin(torch.frac(place * 0.618 + 0.37 * turn) * 12345.678)
    return t * (1 + torch.finfo(dtype).eps / 2 * noise).to(t.dtype)


def _tf32(t: Tensor) -> Tensor:
    """The upper ten bits of fp32's mantissa."""
    return (t.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)
