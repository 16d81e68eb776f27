"""What two masks both hide, which is what their union hides, as the two intervals that a column has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warploom.masks.fit import KEPT, fit
from warploom.masks.intervals import (
    Interval,
    ResolvedMask,
    band_as_intervals,
    intervals_of,
    merge_by_value,
    over_heads,
)
from warploom.masks.united import check_readable


def overlap(mask: object, a: ResolvedMask, b: ResolvedMask, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
    """The union of what a and b show, exactly, or ValueError, which names `mask`.

    Args:
        mask: its repr is its name.
        a, b: the masks for these lengths, with heads and batch entries that broadcast.
        seqlen_q, seqlen_k: lengths.
        device: where the vectors are.
    """
    both = _by_structure(a, b)
    if both is not None:
        return both
    first, second = (intervals_of(m) + band_as_intervals(m.left, m.right, seqlen_q, seqlen_k, device) for m in (a, b))
    check_readable(mask, first + second)
    spread = over_heads(first + second)
    first, second = spread[: len(first)], spread[len(first) :]
    common: list[Interval] = [_common(x, y, seqlen_q) for x in first for y in second]
    runs, count = merge_by_value((None, None), common, seqlen_q, seqlen_k, KEPT)
    return fit(repr(mask), runs, count, seqlen_q, seqlen_k)


def _by_structure(a: ResolvedMask, b: ResolvedMask) -> ResolvedMask | None:
    """The union where no value decides: one hides nothing, or both have one band and one kind of interval."""
    for each in (a, b):
        if all([value is None for value in each]):
            return each
    if (a.left, a.right) != (b.left, b.right):
        return None
    kinds = [[t is not None for t in m.vectors] for m in (a, b)]
    if [False] * 4 in kinds:
        return a if kinds[0] == [False] * 4 else b
    if kinds == [[True, False, False, False]] * 2:
        ((x, _), (y, _)) = over_heads([(a.lts, None), (b.lts, None)])
        assert x is not None and y is not None
        return ResolvedMask(a.left, a.right, torch.maximum(x, y), None, None, None)
    if kinds == [[False, False, False, True]] * 2:
        ((_, x), (_, y)) = over_heads([(None, a.ute), (None, b.ute)])
        assert x is not None and y is not None
        return ResolvedMask(a.left, a.right, None, None, None, torch.minimum(x, y))
    return None


def _common(x: Interval, y: Interval, seqlen_q: int) -> tuple[Tensor, Tensor]:
    """Rows in both intervals."""
    start = _extreme(torch.maximum, x[0], y[0])
    end = _extreme(torch.minimum, x[1], y[1])
    either = next(t for t in (start, end) if t is not None)
    return (
        torch.zeros_like(either) if start is None else start,
        torch.full_like(either, seqlen_q) if end is None else end,
    )


def _extreme(pick: Callable[[Tensor, Tensor], Tensor], x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else pick(x, y)
