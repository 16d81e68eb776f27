"""Column vectors of masks made of parts in a row, in one launch, from lengths or cumulative lengths on a GPU."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from warploom.masks.zoo.launched import empty_vector, loads
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch

# Columns of a program, and parts that it compares them with at once: 64 and four warps spilled 3.8 KB a thread.
COLUMNS, DOCUMENTS = 256, 32
_NOWHERE = tl.constexpr(2**31 - 1)  # no part ends there
_FAR = tl.constexpr(2**30)  # as good as any row or column past the last one

_PLAIN = [
    "rows_ptr", "row_step", "row_step_batch", "others_ptr", "other_step", "other_step_batch", "first_ptr", "second_ptr",
    "third_ptr", "count", "question", "blocks", "seqlen_q", "seqlen_k",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def document_kernel(
    rows_ptr, row_step_batch: tl.int64, row_step: tl.int64, others_ptr, other_step_batch: tl.int64, other_step: tl.int64,
    first_ptr, second_ptr, third_ptr, count, question, blocks, seqlen_q, seqlen_k,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Vectors of one block of columns of one batch entry. Columns of no part are hidden from every row.

    Rows hold `count` lengths of parts. By KIND, a vector whose pointer is None being left out:

    - "lengths": the first row after each column's document (first), and the document's first row (second). "cu_seqlens": the
      same of documents whose starts, and the last one's end, the rows hold: one number more. Of one batch entry also where
      each starts, and the last one's end, within the keys (third).
    - "prefixes": the same, but past a document's prefix, whose length others hold, the second is the column's own row.
    - "answers": a question of `question` tokens, or as many as others hold, and answers: the first row after each answer, and
      after all for the question.
    - "blocks": the first row after all blocks (first); of columns before the last block with tokens the first row after their
      own block (second) and that of the last one (third), of others the row after all keys twice.
    """
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    top = pid % blocks * COLUMNS
    cols = top + tl.arange(0, COLUMNS)
    rows = rows_ptr + batch * row_step_batch
    origin = tl.zeros([], tl.int64)
    if KIND == "cu_seqlens":
        origin = _held(tl.load(rows).to(tl.int64))
        rows += row_step
    if KIND == "answers":
        if others_ptr is None:
            origin += question
        else:
            origin = _held(tl.load(others_ptr + batch * other_step_batch).to(tl.int64))
    start = tl.zeros([COLUMNS], tl.int32) + origin.to(tl.int32)
    end = tl.full([COLUMNS], _NOWHERE, tl.int32)
    prefix = tl.zeros([COLUMNS], tl.int32)
    total = origin
    newest = tl.zeros([], tl.int64)  # where the last part with tokens begins
    if (KIND == "lengths" or KIND == "cu_seqlens") and third_ptr is not None:
        tl.store(third_ptr, 0, mask=pid == 0)
    for first in range(0, count, DOCUMENTS):
        at = first + tl.arange(0, DOCUMENTS)
        inside = at < count
        values = _held(tl.load(rows + at * row_step, mask=inside, other=0).to(tl.int64))
        ends = tl.where(inside, values, total) if KIND == "cu_seqlens" else total + tl.cumsum(values, 0)
        last = tl.max(ends, 0)
        if (KIND == "lengths" or KIND == "cu_seqlens") and third_ptr is not None:
            within = tl.minimum(tl.maximum(ends, 0), seqlen_k).to(tl.int32)
            tl.store(third_ptr + 1 + at, within, mask=inside & (pid == 0))
        if KIND == "blocks":
            newest = tl.maximum(newest, tl.max(tl.where(values > 0, ends - values, 0), 0))
        if last <= top:
            start = tl.maximum(start, _held(last).to(tl.int32))
        elif total < top + COLUMNS:  # else earlier parts hold all columns
            near = _held(ends).to(tl.int32)[None, :]
            before = near <= cols[:, None]
            start = tl.maximum(start, tl.max(tl.where(before, near, -_FAR), 1))
            end = tl.minimum(end, tl.min(tl.where(before | ~inside[None, :], _NOWHERE, near), 1))
            if KIND == "prefixes":
                own = ~before & (_held(ends - values).to(tl.int32)[None, :] <= cols[:, None])
                others = others_ptr + batch * other_step_batch + at * other_step
                lengths = _held(tl.load(others, mask=inside, other=0).to(tl.int64)).to(tl.int32)
                prefix += tl.sum(tl.where(own, lengths[None, :], 0), 1)
        total = last
    owned = (end != _NOWHERE) & (cols >= origin)
    if KIND == "answers":
        asked = cols < origin
        owned = owned | asked
        end = tl.where(asked, _held(total).to(tl.int32), end)
    out = batch * seqlen_k + cols
    shift = seqlen_k - seqlen_q
    held = cols < seqlen_k
    if KIND == "blocks":
        behind = _held(total).to(tl.int32)
        newest = _held(newest).to(tl.int32)
        hides = owned & (start < newest)
        if first_ptr is not None:
            tl.store(first_ptr + out, tl.where(owned, _row(behind, shift, seqlen_q), 0), mask=held)
        tl.store(second_ptr + out, _row(tl.where(hides, end, seqlen_k), shift, seqlen_q), mask=held)
        tl.store(third_ptr + out, _row(tl.where(hides, newest, seqlen_k), shift, seqlen_q), mask=held)
    else:
        tl.store(first_ptr + out, tl.where(owned, _row(end, shift, seqlen_q), 0), mask=held)
        if second_ptr is not None:
            if KIND == "prefixes":
                start = tl.where(cols < start + prefix, start, cols)
            tl.store(second_ptr + out, tl.where(owned, _row(start, shift, seqlen_q), seqlen_q), mask=held)


@triton.jit
def _held(x):
    """Within 31 bits and the sign, far from their ends."""
    return tl.minimum(tl.maximum(x, -_FAR), _FAR)


@triton.jit
def _row(position, shift, seqlen_q):
    """The row of the query at a position."""
    return tl.minimum(tl.maximum(position - shift, 0), seqlen_q)


def part_vectors(
    kind: str,
    rows: Tensor,
    wanted: tuple[bool, bool, bool],
    seqlen_q: int,
    seqlen_k: int,
    others: Tensor | None = None,
    question: int = 0,
) -> tuple[Tensor | None, ...] | None:
    """The kernel's three vectors, int32 (batch, 1, seqlen_k) or None where not wanted; None where it cannot be launched now.

    Args:
        kind: KIND of the kernel.
        rows: integers (batch|1, n) of any strides: lengths, or (batch, n + 1) cumulative ones, which never decrease.
        wanted: which vectors; the third of "lengths" and "cu_seqlens", of one batch entry, is (n + 1,).
        others: integers (batch|1, n) of prefixes, or (batch|1, 1) of questions.
        question: the question's length where others do not say it.
    """
    launch = _launch(kind, rows.dtype, None if others is None else others.dtype, wanted)
    if not loads(rows, launch):
        return None
    batch, count = rows.shape
    step_batch, step = rows.stride()
    other_batch, other_step = 0, 0
    if others is not None:
        other_batch, other_step = others.stride()
        if others.shape[0] == 1:
            other_batch = 0
        elif batch == 1:
            batch, step_batch = others.shape[0], 0
    count -= kind == "cu_seqlens"
    starts = wanted[2] and kind in ("lengths", "cu_seqlens")
    found = [empty_vector(batch, seqlen_k, rows.device) if want else None for want in (*wanted[:2], wanted[2] and not starts)]
    if starts:
        found[2] = torch.empty(count + 1, dtype=torch.int32, device=rows.device)
    blocks = -(-seqlen_k // COLUMNS)
    if batch and blocks:
        with on_device(rows):
            launch(
                (batch * blocks, 1), rows, step_batch, step, others, other_batch, other_step, *found,
                count, min(question, 2**30), blocks, seqlen_q, seqlen_k,
            )  # fmt: skip
    return tuple(found)


def document_vectors(
    rows: Tensor, cumulative: bool, causal: bool, seqlen_q: int, seqlen_k: int, starts: bool = False
) -> tuple[Tensor | None, ...] | None:
    """lts, ute of documents that are not causal, and where they start, if asked for, as ``part_vectors`` has them."""
    return part_vectors("cu_seqlens" if cumulative else "lengths", rows, (True, not causal, starts), seqlen_q, seqlen_k)


@cache
def _launch(kind: str, dtype: torch.dtype, of_others: torch.dtype | None, wanted: tuple[bool, ...]) -> Launch:
    constants = {"KIND": kind, "COLUMNS": COLUMNS, "DOCUMENTS": DOCUMENTS, "num_warps": 8}
    return Launch(document_kernel, constants, direct=True)
