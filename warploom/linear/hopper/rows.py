"""Launching what surrounds the walks: maps, denominators, and their part of the gradients of queries and keys."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from warploom.linear.hopper.rows_kernels import dk_kernel, dq_kernel, out_kernel, sums_kernel
from warploom.runtime.triton_launch import Launch

SEGMENT = 256
MAPS = {"identity": 0, "elu+1": 1, "relu": 2}  # as rows_kernels.py numbers them
_UNIT = 8  # elements that strides count in
_SUMS = {"C": 16, "num_warps": 4}
_TILES = {"C": 32, "num_warps": 8}


def mapped(x: Tensor, name: str) -> Tensor:
    """phi(x) of x (batch, seqlen, heads, E), whose strides are multiples of 16 bytes; without a map x itself."""
    if name == "identity":
        return x
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _sums(x, None, found, None, name)
    return found


def mapped_and_sums(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The same, and its sum over each segment, (batch, heads, segments, E) in fp32."""
    found = x if name == "identity" else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums = _room(x)
    _sums(x, None, None if found is x else found, sums, name)
    return found, sums


def divide(q: Tensor, k: Tensor, sums: Tensor, out: Tensor, scale: float, eps: float) -> Tensor:
    """Divide numerators by scale · q_i · z_i + eps, in place; those denominators, (batch, heads, seqlen) in fp32."""
    batch, seqlen, heads, m = out.shape
    norm = torch.empty((batch, heads, seqlen), dtype=torch.float32, device=out.device)
    widths = {"E": q.shape[3], "BE": _padded(q.shape[3]), "M": m, "BM": _padded(m)}
    _launch("out", q.dtype, tuple(widths.items()))(
        (batch * heads * sums.shape[2], 1),
        *(q, k, sums, out, norm, *_steps(q), *_steps(k), seqlen, heads, sums.shape[2], scale, eps),
    )
    return norm


def queries_gradient(
    q: Tensor, k: Tensor, sums: Tensor, x: Tensor, norm: Tensor, scale: float, name: str
) -> tuple[Tensor, Tensor]:
    """dq from the walk's fp32 sums x, and delta_i = scale · dO_i·out_i / norm_i, (batch, heads, seqlen)."""
    batch, seqlen, heads, e = q.shape
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(norm)
    _launch("dq", q.dtype, _widths(e), MAPS[name])(
        (batch * heads * sums.shape[2], 1),
        *(q, k, sums, x, norm, delta, dq, *_steps(q), *_steps(k), seqlen, heads, sums.shape[2], scale),
    )
    return dq, delta


def keys_gradient(q: Tensor, k: Tensor, delta: Tensor | None, dk: Tensor, name: str) -> None:
    """Take the sum of delta_j q_j over later rows off what a walk left in dk, in place, and go behind the map of k."""
    batch, seqlen, heads, e = q.shape
    sums = _room(q)
    _sums(q, delta, None, sums, "identity")
    _launch("dk", q.dtype, _widths(e), MAPS[name])(
        (batch * heads * sums.shape[2], 1),
        *(q, k, sums, delta, dk, *_steps(q), *_steps(k), seqlen, heads, sums.shape[2]),
    )


def _sums(x: Tensor, weights: Tensor | None, mapped: Tensor | None, sums: Tensor | None, name: str) -> None:
    batch, seqlen, heads, e = x.shape
    segments = -(-seqlen // SEGMENT)
    present = tuple(t is not None for t in (weights, mapped, sums))
    _launch("sums", x.dtype, _widths(e), MAPS[name], present)(
        (batch * heads * segments, 1),
        *(x, weights, mapped, sums, *_steps(x), seqlen, heads, segments),
    )


def _room(x: Tensor) -> Tensor:
    batch, seqlen, heads, e = x.shape
    return torch.empty((batch, heads, -(-seqlen // SEGMENT), e), dtype=torch.float32, device=x.device)


def _steps(t: Tensor) -> tuple[int, ...]:
    return tuple(s // _UNIT for s in t.stride()[:3])


def _widths(e: int) -> tuple[tuple[str, int], ...]:
    return ("E", e), ("BE", _padded(e))


def _padded(dim: int) -> int:
    return 1 << (dim - 1).bit_length()


_KERNELS = {"sums": sums_kernel, "out": out_kernel, "dq": dq_kernel, "dk": dk_kernel}


@cache
def _launch(
    kernel: str,
    dtype: torch.dtype,
    widths: tuple[tuple[str, int], ...],
    name: int | None = None,
    present: tuple[bool, ...] = (),
) -> Launch:
    constants: dict[str, Any] = {**dict(widths), "SEGMENT": SEGMENT, **(_SUMS if kernel == "sums" else _TILES)}
    if name is not None:
        constants["MAP"] = name
    return Launch(_KERNELS[kernel], constants, direct=True)
