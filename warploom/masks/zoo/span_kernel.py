"""The column vector of spans in a causal text in one launch, from their starts and lengths on a GPU."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from warploom.masks.zoo.launched import empty_vector, loads
from warploom.masks.zoo.positions import batch_of
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch

COLUMNS, SPANS = 256, 32  # of a program, and that it compares them with at once
_FAR = tl.constexpr(2**30)  # as good as any column past the last one

_PLAIN = [
    "starts_ptr", "start_step", "start_step_batch", "lengths_ptr", "length_step", "length_step_batch", "ute_ptr", "count",
    "blocks", "seqlen_q", "seqlen_k",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def span_kernel(
    starts_ptr, start_step_batch: tl.int64, start_step: tl.int64, lengths_ptr, length_step_batch: tl.int64,
    length_step: tl.int64, ute_ptr, count, blocks, seqlen_q, seqlen_k, COLUMNS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """The first row that sees each column of a block of one batch entry: its span's own first, or the column's."""
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    cols = pid % blocks * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.full([COLUMNS], -1, tl.int32)
    for first in range(0, count, SPANS):
        at = first + tl.arange(0, SPANS)
        start = _held(tl.load(starts_ptr + batch * start_step_batch + at * start_step, mask=at < count, other=-1))
        length = _held(tl.load(lengths_ptr + batch * length_step_batch + at * length_step, mask=at < count, other=0))
        start = tl.where(length > 0, start, -1)
        covers = (start[None, :] <= cols[:, None]) & (cols[:, None] < (start + length)[None, :])
        begin = tl.maximum(begin, tl.max(tl.where(covers, start[None, :], -1), 1))
    row = tl.where(begin < 0, cols, begin) - (seqlen_k - seqlen_q)
    row = tl.minimum(tl.maximum(row, 0), seqlen_q)
    tl.store(ute_ptr + batch * seqlen_k + cols, row, mask=cols < seqlen_k)


@triton.jit
def _held(x):
    """Of 32 bits, far from their ends: two of them may be added."""
    return tl.minimum(tl.maximum(x.to(tl.int64), -_FAR), _FAR - 1).to(tl.int32)


def span_vector(starts: Tensor, lengths: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """ute, int32 (batch, 1, seqlen_k); None where it cannot be launched now.

    Args:
        starts, lengths: integers (batch|1, n) of any strides; spans that do not overlap.
    """
    launch = _launch(starts.dtype, lengths.dtype)
    if not loads(starts, launch):
        return None
    batch = batch_of(starts, lengths)
    ute = empty_vector(batch, seqlen_k, starts.device)
    blocks = -(-seqlen_k // COLUMNS)
    if ute.numel():
        steps = [(t.stride(0) if t.shape[0] > 1 else 0, t.stride(1)) for t in (starts, lengths)]
        with on_device(starts):
            launch(
                (batch * blocks, 1),
                *(starts, *steps[0], lengths, *steps[1], ute, starts.shape[1], blocks, seqlen_q, seqlen_k),
            )
    return ute


@cache
def _launch(of_starts: torch.dtype, of_lengths: torch.dtype) -> Launch:
    return Launch(span_kernel, {"COLUMNS": COLUMNS, "SPANS": SPANS, "num_warps": 8}, direct=True)
