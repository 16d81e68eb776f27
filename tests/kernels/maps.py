"""Feature maps and other functions of one number at the places where copies of them have disagreed."""

from __future__ import annotations

from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from warploom.kernels.triton.feature_maps import MAPS, phi, phi_pairs, through_map
from warploom.kernels.triton.numerics import tanh
from warploom.linear.feature_maps import NAMED

# No fp32 number below it is asked for: the GPU's exponential gives 0 there.
TINY = 2.0**-126
# An exponent of up to 150 in log2 units is rounded to 24 bits before the power is taken.
RELATIVE = 2.0**-16

_SIZES = (0.0, 1e-40, 1e-30, 1e-3, 0.5, 0.625, 1.0, 12.0, 20.0, 50.0, 80.0, 88.8, 104.0, 1e10, 1e38, float("inf"))


def numbers(device: str = "cpu") -> Tensor:
    """fp32 (64,): zeros of both signs, subnormal, usual and very large numbers, infinities, NaN."""
    found = [sign * x for sign, x in product((1.0, -1.0), _SIZES)] + [float("nan")]
    return torch.tensor(found + [0.25] * (64 - len(found)), device=device)


def expected(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The map of x and its slope by autograd, both fp64."""
    wide = x.double().requires_grad_()
    mapped = NAMED[name](wide)
    (slope,) = torch.autograd.grad(mapped.sum(), wide)
    return mapped.detach(), slope


def agree(found: Tensor, want: Tensor) -> None:
    """Equal as fp32 numbers near enough, in NaN, infinities and the sign of what is not tiny."""
    torch.testing.assert_close(found.double(), want.double(), rtol=RELATIVE, atol=TINY, equal_nan=True)


@triton.jit
def _map_kernel(x_ptr, mapped_ptr, slope_ptr, MAP: tl.constexpr):
    at = tl.arange(0, 64)
    mapped = phi(tl.load(x_ptr + at), MAP)
    tl.store(mapped_ptr + at, mapped)
    tl.store(slope_ptr + at, through_map(tl.full([64], 1.0, tl.float32), mapped, MAP))


@triton.jit
def _pairs_kernel(x_ptr, mapped_ptr):
    at = tl.arange(0, 64)
    tl.store(mapped_ptr + at, phi_pairs(tl.load(x_ptr + at)))


@triton.jit
def _tanh_kernel(x_ptr, out_ptr):
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, tanh(tl.load(x_ptr + at)))


def by_triton(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Triton's map and slope."""
    mapped, slope = torch.empty_like(x), torch.empty_like(x)
    _map_kernel[(1,)](x, mapped, slope, MAP=MAPS[name])
    return mapped, slope


def pairs_by_triton(x: Tensor) -> Tensor:
    """elu + 1 of bf16 numbers by Triton's inline assembly: on a GPU."""
    mapped = torch.empty_like(x)
    _pairs_kernel[(1,)](x, mapped, num_warps=1)
    return mapped


def tanh_by_triton(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _tanh_kernel[(1,)](x, out)
    return out
