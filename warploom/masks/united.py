"""Any number of hidden intervals as the two that a column has, exactly or not at all."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.masks.intervals import Interval, ResolvedMask, merge_by_structure, merge_by_value, pack


def united(
    mask: object,
    band: tuple[int | None, int | None],
    intervals: list[Interval],
    seqlen_q: int,
    seqlen_k: int,
) -> ResolvedMask:
    """Band and intervals as a ResolvedMask, exactly, or ValueError, which names `mask`."""
    merged = merge_by_structure(intervals)
    if len(merged) <= 2:
        return pack(*band, merged)
    unreadable = _unreadable(merged)
    if unreadable:
        raise ValueError(
            f"{mask!r} needs its values to see whether two intervals per column do, which {unreadable} "
            "cannot: intersect outside, and pass ColumnMask.from_startend_row_indices(*both.to_startend_row_indices())"
        )
    merged, needed = merge_by_value(band, merged, seqlen_q, seqlen_k)
    if bool((needed > 2).any()):
        batch, head, column = (needed > 2).nonzero()[0].tolist()
        raise ValueError(
            f"{mask!r} is not a column mask: column {column} (batch {batch}, head {head}) hides "
            f"{int(needed[batch, head, column])} separate intervals of rows, and a column has two"
        )
    return pack(*band, merged)


def _unreadable(intervals: list[Interval]) -> str | None:
    """The place in which nothing can be read back, in words, or None outside of such places."""
    if torch.compiler.is_compiling():
        return "a compiled region"
    on_cuda = any(t.is_cuda for interval in intervals for t in interval if isinstance(t, Tensor))
    return "a captured CUDA graph" if on_cuda and torch.cuda.is_current_stream_capturing() else None
