"""Column vectors of packed documents in one launch, from segment or position ids on a GPU."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from warploom.masks.zoo.launched import empty_vector, loads
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch

# Columns of a program, and that it passes at once on its way back to a document's first one: 4096 spilled at 64 bits.
COLUMNS, CHUNK = 1024, 2048
_NOWHERE = tl.constexpr(2**31 - 1)  # no document ends there


@triton.jit(do_not_specialize=["ids_ptr", "step_batch", "step", "lts_ptr", "ute_ptr", "blocks", "seqlen_q", "seqlen_k"])
def run_kernel(
    ids_ptr, step_batch: tl.int64, step: tl.int64, lts_ptr, ute_ptr, blocks, seqlen_q, seqlen_k,
    SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The documents of one batch entry whose last columns are in one block: all of their columns, in earlier blocks too.

    So every column is read and written a few times, however long documents are, but all of a document by one program, 2048
    columns at once: a document of a million takes 512 steps one after another, about half a millisecond by estimate.

    SEGMENTS: a run of equal ids is a document and negative ids are none; else a document begins wherever ids do not rise by
    one. `ute_ptr` is None where only the first row after each column's document is asked for, not the document's own first row.
    """
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    top = pid % blocks * COLUMNS
    ids, out = ids_ptr + batch * step_batch, batch * seqlen_k
    shift = seqlen_k - seqlen_q
    cols = top + tl.arange(0, COLUMNS)
    start = tl.where(_begins(ids, step, cols, seqlen_k, SEGMENTS), cols, -1)
    start = tl.associative_scan(start, 0, _later)
    end = tl.where(_begins(ids, step, cols + 1, seqlen_k, SEGMENTS), cols + 1, _NOWHERE)
    end = tl.associative_scan(end, 0, _sooner, reverse=True)
    first, stop = tl.min(start, 0), tl.min(end, 0)
    if (first < 0) & (stop != _NOWHERE):  # the first document that ends here begins in an earlier block
        below = top
        while first < 0:
            below -= CHUNK
            near = below + tl.arange(0, CHUNK)
            begins = _begins(ids, step, near, seqlen_k, SEGMENTS) & (near >= 0)
            first = tl.max(tl.where(begins, near, -1), 0)
            _store(lts_ptr + out, near, stop - shift, 0, near >= tl.maximum(first, 0), ids, step, seqlen_q, SEGMENTS)
        if ute_ptr is not None:
            for again in range(first, top, CHUNK):
                inner = again + tl.arange(0, CHUNK)
                _store(ute_ptr + out, inner, first - shift, seqlen_q, inner < top, ids, step, seqlen_q, SEGMENTS)
        start = tl.where(start < 0, first, start)
    held = (end != _NOWHERE) & (cols < seqlen_k)
    _store(lts_ptr + out, cols, end - shift, 0, held, ids, step, seqlen_q, SEGMENTS)
    if ute_ptr is not None:
        _store(ute_ptr + out, cols, start - shift, seqlen_q, held, ids, step, seqlen_q, SEGMENTS)


@triton.jit
def _begins(ids, step, cols, seqlen_k, SEGMENTS: tl.constexpr):
    """Whether a document begins at each of `cols`; at the first column and past the last one it does."""
    inner = (cols > 0) & (cols < seqlen_k)
    here = _ids(ids, step, cols, inner)
    before = _ids(ids, step, cols - 1, inner)
    # The largest id has no next one.
    goes_on = here == before if SEGMENTS else (here == before + 1) & (here > before)
    return ~(inner & goes_on)


@triton.jit
def _ids(ids, step, cols, held):
    """Of 32 bits, or of 64 where they have them: ids may be hashes."""
    found = tl.load(ids + cols * step, mask=held, other=0)
    if found.dtype != tl.int64:
        found = found.to(tl.int32)
    return found


@triton.jit
def _store(vector, cols, row, hidden, held, ids, step, seqlen_q, SEGMENTS: tl.constexpr):
    """`row` within [0, seqlen_q], and `hidden` at columns of no document."""
    row = tl.minimum(tl.maximum(row, 0), seqlen_q) + tl.zeros_like(cols)
    if SEGMENTS:
        row = tl.where(_ids(ids, step, cols, held) >= 0, row, hidden)
    tl.store(vector + cols, row, mask=held)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _sooner(a, b):
    return tl.minimum(a, b)


def run_vectors(ids: Tensor, segments: bool, causal: bool, seqlen_q: int, seqlen_k: int) -> tuple[Tensor | None, ...] | None:
    """lts and, of documents that are not causal, ute: int32 (batch, 1, seqlen_k); None where it cannot be launched now.

    Args:
        ids: integers (batch, seqlen_k) of any strides.
        segments: they are segment ids, not position ids.
    """
    launch, batch = run_launch(ids.dtype, segments, causal), ids.shape[0]
    if not loads(ids, launch):
        return None
    lts = empty_vector(batch, seqlen_k, ids.device)
    ute = None if causal else torch.empty_like(lts)
    blocks = -(-seqlen_k // COLUMNS)
    if lts.numel():
        with on_device(ids):
            launch((batch * blocks, 1), ids, *ids.stride(), lts, ute, blocks, seqlen_q, seqlen_k)
    return lts, ute


@cache
def run_launch(dtype: torch.dtype, segments: bool, causal: bool) -> Launch:
    constants = {"SEGMENTS": segments, "COLUMNS": COLUMNS, "CHUNK": CHUNK, "num_warps": 8}
    return Launch(run_kernel, constants, direct=True)
