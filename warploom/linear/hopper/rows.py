"""Launching what surrounds the walks: maps, denominators, and their part of the gradients of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from warploom.kernels.triton.feature_maps import MAPS
from warploom.linear.hopper.rows_kernels import dq_kernel, logs_kernel, norm_kernel, sums_kernel, through_kernel
from warploom.runtime.likeness import like
from warploom.runtime.triton_launch import Launch

SEGMENT = 256
_HEADS = 8  # whose logs a program sums: 4 × 32 × 8192 tokens 11.3 us on an H200, 16 heads of two warps 11.8
_UNIT = 8  # elements that strides count in
# Rows at a time and warps, without and with a map: 4 × 8 heads of 4096 tokens, head_dim 256, us. Products of more than 32 rows
# would be wgmma, of whose operands Triton 3.6 may keep a buffer too few.
TILES = {
    "sums": ((32, 4), (16, 8)),  # 37 and 60; the other way round 43 and 90
    "norm": ((32, 4), (32, 4)),  # 65; of eight warps 77, of 16 rows 173
    "dq": ((32, 8), (32, 8)),  # 157 and 164; of four warps 155 and 193, of 16 rows 191
    "through": ((16, 8), (16, 8)),  # 77, as fast as memory allows
}


def mapped(x: Tensor, name: str) -> Tensor:
    """phi(x) of x (batch, seqlen, heads, E), whose strides are multiples of 16 bytes; without a map x itself."""
    return x if name == "identity" else _pass(x, name, False)[0]


def mapped_and_sums(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The same, and its sum over each segment, (batch, heads, segments, E) in fp32."""
    found, sums = _pass(x, name, True)
    assert sums is not None
    return found, sums


def denominators(q: Tensor, k: Tensor, sums: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """scale · q_i · z_i + eps, z_i the sum of k over rows up to i, and its reciprocals: (batch, heads, seqlen) in fp32."""
    shape = q.shape[0], q.shape[2], q.shape[1]
    norm, weights = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    _run("norm", None, (q, k, sums, norm, weights), (q, k), scale, eps)
    return norm, weights


def queries_gradient(
    q: Tensor, k: Tensor, sums: Tensor, x: Tensor, weights: Tensor, scale: float, name: str
) -> tuple[Tensor, Tensor]:
    """dq of mapped q and k from the walk's fp32 sums x, and dO_i · out_i, (batch, heads, seqlen) in fp32."""
    dq, bias = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(weights)
    _run("dq", name, (q, k, sums, x, weights, bias, dq), (q, k), scale)
    return dq, bias


def bind_sums(logs: Tensor, chunk: int) -> Callable[[Tensor], Tensor]:
    """What launches sums of logs of this shape and these strides up to each row within its chunk.

    It takes logs (batch, seqlen, heads) and returns their sums in log2, (batch, heads, seqlen) in fp32.
    """
    batch, seqlen, heads = logs.shape
    like_sums = like((batch, heads, seqlen), torch.float32, logs.device)
    chunks = -(-seqlen // chunk)
    grid = batch * chunks * -(-heads // _HEADS), 1
    launch = _logs_launch(chunk, max(logs.stride()) < 2**31).kept(grid, (*logs.stride(), seqlen, heads, chunks))

    def run(logs: Tensor) -> Tensor:
        sums = torch.empty_like(like_sums)
        launch(logs, sums)
        return sums

    return run


def through(gradient: Tensor, mapped: Tensor, name: str) -> Tensor:
    """The gradient of x from that of mapped = phi(x), in place."""
    if name != "identity":
        _run("through", name, (mapped, gradient), (mapped,))
    return gradient


def _pass(x: Tensor, name: str, summed: bool) -> tuple[Tensor, Tensor | None]:
    batch, seqlen, heads, e = x.shape
    found = None if name == "identity" else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = batch, heads, -(-seqlen // SEGMENT), e
    sums = torch.empty(shape, dtype=torch.float32, device=x.device) if summed else None
    _run("sums", name, (x, found, sums), (x,))
    return x if found is None else found, sums


def _run(
    kernel: str, name: str | None, tensors: tuple[Tensor | None, ...], strided: tuple[Tensor, ...], *numbers: float
) -> None:
    """Launch a program for each segment of the first tensor's heads; ``strided`` are those whose strides the kernel takes."""
    first = strided[0]
    batch, seqlen, heads, e = first.shape
    segments = -(-seqlen // SEGMENT)
    steps = [s // _UNIT for t in strided for s in t.stride()[:3]]
    present = tuple([t is not None for t in tensors])
    launch = _launch(kernel, first.dtype, e, name, present, max(steps) < 2**31)
    launch((batch * heads * segments, 1), *tensors, *steps, seqlen, heads, segments, *numbers)


_KERNELS = {"sums": sums_kernel, "norm": norm_kernel, "dq": dq_kernel, "through": through_kernel}


@cache
def _launch(kernel: str, dtype: torch.dtype, e: int, name: str | None, present: tuple[bool, ...], direct: bool) -> Launch:
    """``direct``: strides fit 32 bits, as the first launch's binary may have them."""
    rows, warps = TILES[kernel][name not in (None, "identity")]
    constants: dict[str, Any] = {"E": e, "BE": 1 << (e - 1).bit_length(), "C": rows, "SEGMENT": SEGMENT, "num_warps": warps}
    if name is not None:
        constants["MAP"] = MAPS[name]
    return Launch(_KERNELS[kernel], constants, direct=direct)


@cache
def _logs_launch(chunk: int, direct: bool) -> Launch:
    return Launch(logs_kernel, {"C": chunk, "HEADS": _HEADS, "num_warps": 4}, direct=direct)
