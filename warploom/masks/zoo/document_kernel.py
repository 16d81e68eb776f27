"""Column vectors of packed documents in one launch, from their lengths or cumulative lengths on a GPU."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch

COLUMNS, DOCUMENTS = 256, 64  # of a program, and that it compares them with at once
_NOWHERE = tl.constexpr(2**31 - 1)  # no document ends there
_FAR = tl.constexpr(2**30)  # as good as any row or column past the last one


@triton.jit(do_not_specialize=["rows_ptr", "lts_ptr", "ute_ptr", "count", "blocks", "seqlen_q", "seqlen_k"])
def document_kernel(
    rows_ptr, lts_ptr, ute_ptr, count, blocks, seqlen_q, seqlen_k,
    CUMULATIVE: tl.constexpr, COLUMNS: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A block of columns of one batch entry: the first row after each column's document, and the document's first row.

    Columns of no document are hidden from every row. `ute_ptr` is None where only the first is asked for. Rows hold `count`
    lengths or, CUMULATIVE, one number more.
    """
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    top = pid % blocks * COLUMNS
    cols = top + tl.arange(0, COLUMNS)
    rows = rows_ptr + batch * (count + CUMULATIVE)
    origin = tl.zeros([], tl.int64)
    if CUMULATIVE:
        origin = _held(tl.load(rows).to(tl.int64))
        rows += 1
    start = tl.zeros([COLUMNS], tl.int32) + origin.to(tl.int32)
    end = tl.full([COLUMNS], _NOWHERE, tl.int32)
    total = origin
    for first in range(0, count, DOCUMENTS):
        at = first + tl.arange(0, DOCUMENTS)
        inside = at < count
        values = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
        if CUMULATIVE:
            ends = tl.where(inside, _held(values), total)
            last = tl.max(ends, 0)
        else:
            ends = total + tl.cumsum(_held(values), 0)
            last = tl.max(ends, 0)
        if last <= top:
            start = tl.maximum(start, _held(last).to(tl.int32))
        else:
            near = _held(ends).to(tl.int32)[None, :]
            before = near <= cols[:, None]
            start = tl.maximum(start, tl.max(tl.where(before, near, -_FAR), 1))
            end = tl.minimum(end, tl.min(tl.where(before | ~inside[None, :], _NOWHERE, near), 1))
        total = last
    owned = (end != _NOWHERE) & (cols >= origin)
    shift = seqlen_k - seqlen_q
    out = batch * seqlen_k + cols
    held = cols < seqlen_k
    lts = tl.minimum(tl.maximum(end - shift, 0), seqlen_q)
    tl.store(lts_ptr + out, tl.where(owned, lts, 0), mask=held)
    if ute_ptr is not None:
        ute = tl.minimum(tl.maximum(start - shift, 0), seqlen_q)
        tl.store(ute_ptr + out, tl.where(owned, ute, seqlen_q), mask=held)


@triton.jit
def _held(x):
    """Within 31 bits and the sign, far from their ends."""
    return tl.minimum(tl.maximum(x, -_FAR), _FAR)


def document_vectors(
    rows: Tensor, cumulative: bool, causal: bool, seqlen_q: int, seqlen_k: int
) -> tuple[Tensor, Tensor | None]:
    """lts and, of documents that are not causal, ute: int32 (batch, 1, seqlen_k).

    Args:
        rows: int32 or int64 (batch, n) lengths, or (batch, n + 1) cumulative ones, which never decrease.
    """
    rows = rows.contiguous()
    batch, count = rows.shape
    lts = rows.new_empty((batch, 1, seqlen_k), dtype=torch.int32)
    ute = None if causal else torch.empty_like(lts)
    blocks = -(-seqlen_k // COLUMNS)
    if lts.numel():
        with on_device(rows):
            document_launch(rows.dtype, cumulative, causal)(
                (batch * blocks, 1), rows, lts, ute, count - cumulative, blocks, seqlen_q, seqlen_k
            )
    return lts, ute


@cache
def document_launch(dtype: torch.dtype, cumulative: bool, causal: bool) -> Launch:
    constants = {"CUMULATIVE": cumulative, "COLUMNS": COLUMNS, "DOCUMENTS": DOCUMENTS, "num_warps": 4}
    return Launch(document_kernel, constants, direct=True)
