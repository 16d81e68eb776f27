"""Any number of hidden intervals as the two that a column has, exactly or not at all."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.masks.fit import KEPT, fit, refuse
from warploom.masks.intervals import Interval, ResolvedMask, band_as_intervals, merge_by_structure, merge_by_value, pack


def united(
    mask: object,
    band: tuple[int | None, int | None],
    intervals: list[Interval],
    seqlen_q: int,
    seqlen_k: int,
    *,
    any_band: bool = False,
) -> ResolvedMask:
    """Band and intervals as a ResolvedMask, exactly, or ValueError, which names `mask`.

    With `any_band` the result may have another band, where that leaves fewer intervals.
    """
    found = merge_by_structure(intervals)
    if len(found) <= 2:
        return pack(*band, found)
    check_readable(mask, found)
    merged, needed = merge_by_value(band, found, seqlen_q, seqlen_k)
    if bool((needed > 2).any()):
        if any_band:
            hidden = found + band_as_intervals(*band, seqlen_q, seqlen_k, needed.device)
            runs, count = merge_by_value((None, None), hidden, seqlen_q, seqlen_k, KEPT)
            return fit(repr(mask), runs, count, seqlen_q, seqlen_k)
        batch, head, column = (needed > 2).nonzero()[0].tolist()
        refuse(repr(mask), column, batch, head, int(needed[batch, head, column]))
    return pack(*band, merged)


def check_readable(mask: object, intervals: list[Interval]) -> None:
    """ValueError in a place in which nothing can be read back."""
    place = None
    on_cuda = any(t.is_cuda for interval in intervals for t in interval if isinstance(t, Tensor))
    if torch.compiler.is_compiling():
        place = "a compiled region"
    elif on_cuda and torch.cuda.is_current_stream_capturing():
        place = "a captured CUDA graph"
    if place:
        raise ValueError(
            f"{mask!r} needs its values to see whether two intervals per column do, which {place} cannot: combine the masks "
            "outside, and pass ColumnMask.from_startend_row_indices(*both.to_startend_row_indices())"
        )
