"""The rotation of `warploom.kernels.e4m3.rotate` in a kernel, of head dims that are powers of two: the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.kernels.e4m3 import hadamard_norm
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch

_ROWS = 8  # of a program: more pass through shared memory more often


@triton.jit
def rotated(y, seed, STEPS: tl.constexpr, NORM: tl.constexpr):
    """Rows y (R, 2^STEPS), fp32, times the signs and the Hadamard matrix: sums and differences in `e4m3.mixed`'s order."""
    R: tl.constexpr = y.shape[0]
    D: tl.constexpr = y.shape[1]
    y *= _signs(tl.arange(0, D), seed)[None, :]
    for n in tl.static_range(STEPS):
        pairs = tl.permute(tl.reshape(y, (R, D >> (n + 1), 2, 1 << n)), (0, 1, 3, 2))
        a, b = tl.split(pairs)
        y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, D))
    return y * NORM


@triton.jit
def _signs(i, seed):
    """1 or -1 of a head's i-th numbers, as `e4m3.signs` has them."""
    z = (i.to(tl.int64) + 1) * -7046029254386353131 + seed
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return tl.where(z < 0, -1.0, 1.0)


@triton.jit(do_not_specialize=["seed", "rows", "tokens", "heads", "stride_b", "stride_t", "stride_h"])
def _rotate_kernel(
    x_ptr, out_ptr, seed: tl.int64, rows, tokens, heads, stride_b: tl.int64, stride_t: tl.int64, stride_h: tl.int64,
    DIM: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of x (batch, tokens, heads, DIM), by its strides in UNIT elements, to out, contiguous."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, DIM)
    token = row // heads
    at = (token // tokens) * stride_b + (token % tokens) * stride_t + (row % heads) * stride_h
    live = (row < rows)[:, None]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + (at * UNIT)[:, None] + d[None, :], mask=live, other=0.0).to(tl.float32)
    y = rotated(x, seed, STEPS, NORM)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * DIM + d[None, :], y.to(out_ptr.dtype.element_ty), mask=live)


def rotate_rows(x: Tensor, seed: int) -> Tensor:
    """x (…, tokens, heads, head_dim) rotated, in its own dtype, contiguous; up to four dimensions, the last one dense."""
    launch, grid, numbers = _launch_of(x, seed)
    out = x.new_empty(x.shape)
    with on_device(x):
        launch(grid, x, out, *numbers)
    return out


def bound(x: Tensor, seed: int) -> Callable[[Tensor], Tensor | None] | None:
    """What rotates later tensors of x's shape, strides, dtype and device as `rotate_rows` did x; None: nothing quicker.

    It gives None of a tensor at an odd address, or while another device is the current one.
    """
    launch, grid, numbers = _launch_of(x, seed)
    device, shape = x.device.index, x.shape
    raw = launch.raw()
    if raw is None or torch._C._cuda_getDevice() != device:
        return None
    run = raw.bound(grid, numbers)

    def rotate(x: Tensor) -> Tensor | None:
        pointer = x.data_ptr()
        if pointer % 16 or torch._C._cuda_getDevice() != device:
            return None
        out = x.new_empty(shape)
        run(pointer, out)
        return out

    return rotate


def _launch_of(x: Tensor, seed: int) -> tuple[Launch, tuple[int, int], tuple[int, ...]]:
    """The launch that rotates x, its grid, and what it takes after x and the result."""
    shape = (1,) * (4 - x.ndim) + x.shape
    strides = ((0,) * (4 - x.ndim) + x.stride())[:3]
    unit = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0
    unit = unit if aligned and not any([s % unit for s in strides]) else 1
    rows = shape[0] * shape[1] * shape[2]
    launch = _launch(shape[3], x.dtype, unit, aligned, x.device.index if x.is_cuda else None)
    return launch, (-(-rows // _ROWS), 1), (seed, rows, shape[1], shape[2], *[s // unit for s in strides])


@lru_cache(maxsize=256)
def _launch(dim: int, dtype: torch.dtype, unit: int, aligned: bool, device: int | None) -> Launch:
    """The launch of one variant; ``dtype`` only tells apart calls that need binaries of their own."""
    constants = {"DIM": dim, "R": _ROWS, "STEPS": dim.bit_length() - 1, "NORM": hadamard_norm(dim), "UNIT": unit}
    pdl = device is not None and torch.cuda.get_device_capability(device)[0] >= 9
    constants |= {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
    return Launch(_rotate_kernel, constants, direct=aligned)
