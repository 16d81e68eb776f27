"""The kernel that lays e4m3 values of packed sequences block by block, as tensor cores read them."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from warploom.kernels.triton.numerics import clamp
from warploom.kernels.triton.packed import find_tile
from warploom.kernels.triton.widths import power_of_two
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch

_BLOCK = 128


def lay_values(
    out: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, used: Tensor | None, left: int | None, right: int | None
) -> None:
    """Fill ``out``, bytes (heads, head_dim, 128 · blocks), from v (total, heads, head_dim), of any strides.

    Sequence n has blocks from cu_k[n] // 128 + n on, and zeros in the place of what no query of it sees.
    """
    (total, heads, dim), columns = v.shape, out.shape[2]
    bounds = [0 if side is None else side for side in (left, right)]
    with on_device(v):
        launch = _launch(dim, left is not None, right is not None, used is not None, v.data_ptr() % 16 == 0, v.device.index)
        given = [None if t is None else t.contiguous() for t in (cu_q, cu_k, used)]
        strides = v.stride()
        launch((columns // _BLOCK * heads, 1), v, out, *given, *strides, total, heads, columns, cu_k.shape[0] - 1, *bounds)


@cache
def _launch(dim: int, left: bool, right: bool, used: bool, aligned: bool, device: int | None) -> Launch:
    """The launch of one variant. ``used`` and ``device`` only tell apart calls that need binaries of their own."""
    constants = {"DIM": dim, "ROWS": power_of_two(dim), "BLOCK": _BLOCK, "LEFT": left, "RIGHT": right, "num_warps": 4}
    return Launch(values_kernel, constants, direct=aligned)


@triton.jit(do_not_specialize=["stride_s", "stride_h", "stride_d", "total", "heads", "columns", "sequences", "left", "right"])
def values_kernel(
    v_ptr, out_ptr, cu_q_ptr, cu_k_ptr, used_ptr, stride_s, stride_h, stride_d, total, heads, columns, sequences,
    left, right,
    DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """A block of keys of one head."""
    block, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    sequence, row, start, length = find_tile(block, cu_k_ptr, sequences, total, BLOCK)
    inside = sequence < sequences
    past = tl.where(inside, length, 0)
    first = 0
    if used_ptr is not None:
        past = clamp(tl.load(used_ptr + sequence, mask=inside, other=0), 0, past)
    if LEFT:
        begin = tl.load(cu_q_ptr + sequence, mask=inside, other=0)
        queries = tl.load(cu_q_ptr + sequence + 1, mask=inside, other=0) - begin
        first = past - queries - left
    if RIGHT:
        past += tl.minimum(right, 0)
    c, d = tl.arange(0, BLOCK)[None, :], tl.arange(0, ROWS)[:, None]
    key = row + c
    seen = (key >= first) & (key < past) & (row >= 0)
    at = (start + key).to(tl.int64) * stride_s + d.to(tl.int64) * stride_d + head.to(tl.int64) * stride_h
    values = tl.load(v_ptr + at, mask=seen & (d < DIM), other=0)
    to = (head.to(tl.int64) * DIM + d) * columns + tl.multiple_of(block * BLOCK, BLOCK) + c
    tl.store(out_ptr + to, values, mask=d < DIM)
