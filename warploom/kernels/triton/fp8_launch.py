"""Launching the kernel that makes FP8 numbers of q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from warploom.kernels.e4m3 import AGAIN_FROM, AGAIN_TO, COLUMNS, hadamard_norm, slice_matrices, slices
from warploom.kernels.triton.fp8 import BLOCK, quantize_kernel
from warploom.kernels.triton.fp8_dense import quantize_dense_kernel
from warploom.kernels.triton.widths import power_of_two
from warploom.runtime.device import capability, on_device
from warploom.runtime.qkv import last_contiguous
from warploom.runtime.triton_launch import Launch

_ROWS = BLOCK.value
# The loop over dense bf16 tiles by head_dim: warps, registers a thread or None, programs on a multiprocessor. On an H200, 16k
# tokens of 2048 channels: 0.114 ms at 128 (0.119 with one program of all registers), 0.084 at 256; 64, where nothing spills so,
# was not timed.
_DENSE: dict[int, tuple[int, int | None, int]] = {64: (8, 128, 2), 128: (8, 128, 2), 256: (8, None, 1)}
_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # of 8 bits each, which hold a number of that dtype


def quantize(
    out: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: int | None,
    granularity: str,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    used_q: Tensor | None,
    used_k: Tensor | None,
) -> None:
    """Fill ``out``: data and scale of q, of k and of v, whose data is (…, heads, head_dim, rows up to a multiple of 16)."""
    q, k, v = (last_contiguous(t) for t in (q, k, v))
    packed = cu_seqlens_q is not None
    (rows_q, heads_q, dim), (rows_k, heads_kv, dim_v) = q.shape[-3:], v.shape[-3:]
    sequences = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    padded = out[4].shape[-1]
    if packed:
        slots = [-(-n // _ROWS) + max(sequences, 1) for n in (rows_q, rows_k, padded)]
    else:
        slots = [-(-n // _ROWS) * sequences for n in (rows_q, rows_k, rows_k)]
    programs = [n * h for n, h in zip(slots, (heads_q, heads_kv, heads_kv), strict=True)]
    strides = [s for t in (q, k, v) for s in (((0,) if packed else ()) + t.stride()[:-1])]
    unit = 16 // q.element_size()
    if any(s % unit for s in strides):
        unit = 1
    aligned = all(t.data_ptr() % 16 == 0 for t in (q, k, v))
    strides = [s // unit for s in strides]
    each = {"block": 0, "head": heads_q + 2 * heads_kv, "tensor": 3}[granularity]
    with on_device(q):
        matrix = None if seed is None else _matrices(dim, seed, q.device)
        tops = torch.zeros(each, dtype=torch.int32, device=q.device) if each else None
        given = [None if t is None else t.contiguous() for t in (cu_seqlens_q, cu_seqlens_k, used_q, used_k)]
        if _loops(q, dim_v, granularity, seed, given) and unit > 1 and aligned:
            launch = _dense_launch(dim, q.device.index)
            launch(
                (min(sum(programs), _at_once(dim, q.device)), 1),
                *(q, k, v, *(t.view(torch.uint8) for t in out[::2]), *out[1::2], matrix, *strides),
                *(rows_q, rows_k, padded // 16, heads_q, heads_kv, *programs[:2]),
            )
            return
        for first in (True, False) if each else (False,):
            launch = _launch(
                dim, dim_v, q.dtype, seed is not None, granularity, first, unit, aligned, tuple(t is not None for t in given),
                q.device.index,
            )  # fmt: skip
            launch(
                (sum(programs), 1),
                *(q, k, v, *(t.view(torch.uint8) for t in out[::2]), *out[1::2], tops, matrix, *given, *strides),
                *(rows_q, rows_k, padded // 16, heads_q, heads_kv, sequences, *programs[:2]),
            )


@lru_cache(maxsize=1024)
def _launch(
    dim: int,
    dim_v: int,
    dtype: torch.dtype,
    rotated: bool,
    granularity: str,
    tops: bool,
    unit: int,
    aligned: bool,
    given: tuple[bool, ...],
    device: int | None,
) -> Launch:
    """The launch of one variant. ``given`` and ``device`` only tell apart calls that need binaries of their own."""
    count = slices(dim) or 1  # where it cannot be cut, nothing is rotated
    constants = {
        "DIM": dim,
        "DIM_V": dim_v,
        "COLUMNS": power_of_two(dim),
        "COLUMNS_V": power_of_two(dim_v),
        "SLICES": count,
        "WIDTH": COLUMNS,
        "PARTS": _PARTS[dtype],
        "MATRIX_PARTS": 3 if dim & (dim - 1) else 1,
        "NORM": hadamard_norm(dim),
        "AGAIN": rotated and AGAIN_FROM <= dim <= AGAIN_TO,
        "BY": granularity,
        "TOPS": tops,
        "UNIT": unit,
        "num_warps": 8,
    }
    return Launch(quantize_kernel, constants, direct=aligned)


def _loops(q: Tensor, dim_v: int, granularity: str, seed: int | None, given: Sequence[Tensor | None]) -> bool:
    """Whether a call is one for the loop over dense tiles; ``given``: starts and lengths of sequences."""
    plain = granularity == "block" and seed is not None and all(t is None for t in given)
    dims = q.shape[-1] == dim_v and dim_v in _DENSE
    return plain and dims and q.dtype == torch.bfloat16 and capability(q.device) == 90


@lru_cache(maxsize=64)
def _dense_launch(dim: int, device: int | None) -> Launch:
    """The launch of the loop; ``device`` as in ``_launch``."""
    warps, registers, _ = _DENSE[dim]
    constants = {
        "SLICES": dim // COLUMNS,
        "NORM": hadamard_norm(dim),
        "AGAIN": AGAIN_FROM <= dim <= AGAIN_TO,
        "WARPS": warps,
        "num_warps": warps,
    }
    if registers is not None:
        constants["maxnreg"] = registers
    return Launch(quantize_dense_kernel, constants, direct=True)


def _at_once(dim: int, device: torch.device) -> int:
    """Programs of the loop that a GPU runs at once; of the interpreter fewer than tests have tiles."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * _DENSE[dim][2]


def _matrices(head_dim: int, seed: int, device: torch.device) -> Tensor:
    found = _kept.get((head_dim, seed, device))
    if found is not None:
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # which cannot wait for a copy
        return _made_matrices(head_dim, seed, device)
    # Made on the CPU: the copy is waited for, so that any stream may read what is kept.
    made = _made_matrices(head_dim, seed, torch.device("cpu")).to(device)
    if len(_kept) < 64:  # for good, as captured calls read them
        _kept[head_dim, seed, device] = made
    return made


_kept: dict[tuple[int, int, torch.device], Tensor] = {}


def _made_matrices(head_dim: int, seed: int, device: torch.device) -> Tensor:
    count = slices(head_dim)
    assert count is not None
    return slice_matrices(head_dim, count, seed, device)
