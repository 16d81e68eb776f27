"""Launching what surrounds the walks: maps, denominators, and their part of the gradients of queries and keys."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from warploom.linear.hopper.rows_kernels import dq_kernel, norm_kernel, sums_kernel, through_kernel
from warploom.runtime.triton_launch import Launch

SEGMENT = 256
MAPS = {"identity": 0, "elu+1": 1, "relu": 2}  # as rows_kernels.py numbers them
_UNIT = 8  # elements that strides count in
# Rows at a time and warps, without and with a map: 4 × 8 heads of 4096 tokens, head_dim 256, us. Products of more than 32 rows
# would be wgmma, of whose operands Triton 3.6 may keep a buffer too few.
TILES = {
    "sums": ((32, 4), (16, 8)),  # 37 and 60; the other way round 43 and 90
    "norm": ((32, 4), (32, 8)),  # 65; of eight warps 77, of 16 rows 173
    "dq": ((32, 8), (32, 8)),  # 157 and 164; of four warps 155 and 193, of 16 rows 191
    "through": ((16, 8), (16, 8)),  # 77, as fast as memory allows
}


def key_sums(k: Tensor, name: str) -> Tensor:
    """The sum of phi(k) over each segment, (batch, heads, segments, E) in fp32, of k (batch, seqlen, heads, E).

    Here and below strides are multiples of 16 bytes.
    """
    return _sums(k, None, name)


def mapped_keys(k: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """phi(k), which without a map is k, and the same sums."""
    found = _room(k, name)
    return k if found is None else found, _sums(k, found, name)


def denominators(
    q: Tensor, k: Tensor, sums: Tensor, scale: float, eps: float, names: tuple[str, str]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """phi(q), phi(k), scale · phi(q_i) · z_i + eps with z_i the sum of phi(k) over rows up to i, and its reciprocals.

    The last two are (batch, heads, seqlen) in fp32.
    """
    batch, seqlen, heads, e = q.shape
    norm, weights = (torch.empty((batch, heads, seqlen), dtype=torch.float32, device=q.device) for _ in range(2))
    rooms = _room(q, names[0]), _room(k, names[1])
    _launch("norm", q.dtype, e, names)(
        (batch * heads * sums.shape[2], 1),
        *(q, k, sums, *rooms, norm, weights, *_steps(q), *_steps(k), seqlen, heads, sums.shape[2], scale, eps),
    )
    return q if rooms[0] is None else rooms[0], k if rooms[1] is None else rooms[1], norm, weights


def queries_gradient(
    q: Tensor, k: Tensor, sums: Tensor, x: Tensor, weights: Tensor, scale: float, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q), dq, and dO_i · out_i, (batch, heads, seqlen) in fp32, from mapped k and the walk's fp32 sums x."""
    batch, seqlen, heads, e = q.shape
    dq, bias = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(weights)
    room = _room(q, name)
    _launch("dq", q.dtype, e, (name,))(
        (batch * heads * sums.shape[2], 1),
        *(q, k, sums, x, weights, room, bias, dq, *_steps(q), *_steps(k), seqlen, heads, sums.shape[2], scale),
    )
    return q if room is None else room, dq, bias


def through(gradient: Tensor, mapped: Tensor, name: str) -> Tensor:
    """The gradient of x from that of mapped = phi(x), in place."""
    if name == "identity":
        return gradient
    batch, seqlen, heads, e = gradient.shape
    segments = -(-seqlen // SEGMENT)
    _launch("through", gradient.dtype, e, (name,))(
        (batch * heads * segments, 1), *(mapped, gradient, *_steps(mapped), seqlen, heads, segments)
    )
    return gradient


def _sums(x: Tensor, mapped: Tensor | None, name: str) -> Tensor:
    batch, seqlen, heads, e = x.shape
    segments = -(-seqlen // SEGMENT)
    sums = torch.empty((batch, heads, segments, e), dtype=torch.float32, device=x.device)
    _launch("sums", x.dtype, e, (name,), mapped is not None)(
        (batch * heads * segments, 1), *(x, mapped, sums, *_steps(x), seqlen, heads, segments)
    )
    return sums


def _room(x: Tensor, name: str) -> Tensor | None:
    """For phi(x)."""
    return None if name == "identity" else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _steps(t: Tensor) -> tuple[int, ...]:
    return tuple(s // _UNIT for s in t.stride()[:3])


_KERNELS = {"sums": sums_kernel, "norm": norm_kernel, "dq": dq_kernel, "through": through_kernel}


@cache
def _launch(kernel: str, dtype: torch.dtype, e: int, names: tuple[str, ...], written: bool = True) -> Launch:
    """A pass under its maps; ``written``: what they map is written."""
    rows, warps = TILES[kernel][names != ("identity",) * len(names)]
    constants: dict[str, Any] = {"E": e, "BE": 1 << (e - 1).bit_length(), "C": rows, "SEGMENT": SEGMENT, "num_warps": warps}
    numbers = zip(("MAP",) if len(names) == 1 else ("MAP_Q", "MAP_K"), (MAPS[name] for name in names), strict=True)
    return Launch(_KERNELS[kernel], {**constants, **dict(numbers)}, direct=True)
