"""tanh, bounds and capped scores of Triton's kernels."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tests.kernels.maps import agree, numbers, tanh_by_triton
from warploom.kernels.triton.numerics import capped, clamp


@triton.jit
def _capped_kernel(x_ptr, out_ptr, bent_ptr, scale, softcap):
    at = tl.arange(0, 64)
    out, bent = capped(tl.load(x_ptr + at), scale, softcap)
    tl.store(out_ptr + at, out)
    tl.store(bent_ptr + at, bent)


@triton.jit
def _clamp_kernel(x_ptr, out_ptr, low, high):
    at = tl.arange(0, 8)
    tl.store(out_ptr + at, clamp(tl.load(x_ptr + at), low, high))


def test_tanh_keeps_its_digits_and_a_nan() -> None:
    x = numbers()
    agree(tanh_by_triton(x), x.double().tanh())
    x = torch.linspace(-0.7, 0.7, 64)
    agree(tanh_by_triton(x), x.double().tanh())


def test_capped_scores_are_in_log2_units() -> None:
    x = numbers()
    out, bent = torch.empty_like(x), torch.empty_like(x)
    _capped_kernel[(1,)](x, out, bent, 0.125, 5.0)
    want = (x.double() * 0.125 / 5.0).tanh()
    agree(bent, want)
    agree(out, want * 5.0 * math.log2(math.e))


def test_bounds_that_cross_give_the_upper_one() -> None:
    x = torch.tensor([-(2**31), -5, -1, 0, 1, 3, 7, 2**31 - 1], dtype=torch.int32)
    out = torch.empty_like(x)
    for low, high in ((0, 3), (-1, 2**30), (4, 2)):
        _clamp_kernel[(1,)](x, out, low, high)
        assert out.tolist() == [min(max(int(n), low), high) for n in x]
