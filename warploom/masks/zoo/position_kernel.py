"""Column vectors that follow from each column's position and a few numbers, in one launch on a GPU."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from warploom.masks.zoo.launched import empty_vector, loads
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch

COLUMNS = 1024
_MOST = 2**30  # as good as any number past it: no row or column is so far

_PLAIN = [
    "given_ptr", "given_step", "lts_ptr", "lte_ptr", "uts_ptr", "ute_ptr", "number", "left", "right", "blocks", "seqlen_q",
    "seqlen_k",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def position_kernel(
    given_ptr, given_step: tl.int64, lts_ptr, lte_ptr, uts_ptr, ute_ptr, number, left, right, blocks, seqlen_q, seqlen_k,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Vectors of one block of columns of one batch entry, as the builders say them; pointers are None of those not wanted.

    By KIND `number`, or what is given for the batch entry, is the "prefix" of `PrefixLM`, the size of a chunk of `Chunked`
    ("chunks"), the global tokens of `GlobalWindow` ("global"), beside its window, or the length of `BlockDiffusion`
    ("diffusion"), whose block is `left`.
    """
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    cols = pid % blocks * COLUMNS + tl.arange(0, COLUMNS)
    out, held = batch * seqlen_k + cols, cols < seqlen_k
    shift = seqlen_k - seqlen_q
    if given_ptr is not None:
        number = tl.minimum(tl.maximum(tl.load(given_ptr + batch * given_step).to(tl.int64), -MOST), MOST).to(tl.int32)
    if KIND == "prefix":
        tl.store(ute_ptr + out, tl.where(cols < number, 0, _row(cols, shift, seqlen_q)), mask=held)
    if KIND == "chunks":
        tl.store(lts_ptr + out, _row((cols // number + 1) * number, shift, seqlen_q), mask=held)
    if KIND == "global":
        first = tl.minimum(tl.maximum(number, 0), seqlen_q)
        if lts_ptr is not None:
            behind = tl.maximum(_row(cols + (left + 1), shift, seqlen_q), first)
            tl.store(lts_ptr + out, tl.where(cols >= number, behind, seqlen_q), mask=held)
        if ute_ptr is not None:
            tl.store(uts_ptr + out, first + tl.zeros_like(cols), mask=held)
            tl.store(ute_ptr + out, tl.where(cols >= number, _row(cols - right, shift, seqlen_q), 0), mask=held)
    if KIND == "diffusion":
        noisy = cols < number
        start = tl.where(noisy, cols, cols - number) // left * left
        end = tl.minimum(start + left, number)
        tl.store(ute_ptr + out, _row(tl.where(noisy, start, end), shift, seqlen_q), mask=held)
        tl.store(lts_ptr + out, _row(tl.where(noisy, end, number), shift, seqlen_q), mask=held)
        tl.store(lte_ptr + out, _row(tl.where(noisy, seqlen_k, start + number), shift, seqlen_q), mask=held)


@triton.jit
def _row(position, shift, seqlen_q):
    """The row of the query at a position."""
    return tl.minimum(tl.maximum(position - shift, 0), seqlen_q)


def position_vectors(
    kind: str,
    number: int | Tensor,
    wanted: tuple[bool, bool, bool, bool],
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device,
    left: int = 0,
    right: int = 0,
) -> tuple[Tensor | None, ...] | None:
    """lts, lte, uts and ute, int32 (batch|1, 1, seqlen_k) or None where not wanted; None where it cannot be launched now.

    Args:
        kind: KIND of the kernel.
        number: an int for all batch entries, or integers (batch, 1).
        wanted: which vectors.
        left, right: numbers of the kernel's, within [-seqlen_q - seqlen_k, 2**29].
    """
    given, batch = (number.to(device), number.shape[0]) if isinstance(number, Tensor) else (None, 1)
    launch = _launch(kind, None if given is None else given.dtype, wanted)
    empty = empty_vector(batch, seqlen_k, device)
    if not loads(empty, launch):
        return None
    some = wanted.index(True)
    found = tuple([None if not want else empty if i == some else torch.empty_like(empty) for i, want in enumerate(wanted)])
    blocks = -(-seqlen_k // COLUMNS)
    if empty.numel():
        step, number = (0, min(number, _MOST)) if given is None else (given.stride(0), 0)
        with on_device(empty):
            launch((batch * blocks, 1), given, step, *found, number, left, right, blocks, seqlen_q, seqlen_k)
    return found


@cache
def _launch(kind: str, dtype: torch.dtype | None, wanted: tuple[bool, ...]) -> Launch:
    return Launch(position_kernel, {"KIND": kind, "COLUMNS": COLUMNS, "MOST": _MOST, "num_warps": 4}, direct=True)
