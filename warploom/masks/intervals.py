"""Row intervals hidden per key column: the arithmetic behind column masks.

A mask for one (seqlen_q, seqlen_k) is a band, a range of p - j with p = i + seqlen_k - seqlen_q, and up to two hidden
row intervals per key column j. An interval is `(start, end)`, int32 tensors of shape (batch|1, heads|1, seqlen_k). A
start of None means row 0, an end of None means seqlen_q. Which ends are None is known without reading a tensor, so masks
on a device combine without synchronising wherever that alone decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from warploom.masks.arguments import near, saturated

Interval = tuple[Tensor | None, Tensor | None]


class ResolvedMask(NamedTuple):
    """What kernels take, for one (seqlen_q, seqlen_k).

    Attributes:
        left, right: the band; key j is visible to query i when -right <= p - j <= left, with
            p = i + seqlen_k - seqlen_q. None is unlimited.
        lts, lte: column j hides rows [lts_j, lte_j). lts None: no such interval; lte None: up to seqlen_q.
        uts, ute: column j hides rows [uts_j, ute_j) too. ute None: no such interval; uts None: from row 0.

    Vectors are int32, contiguous and all of one shape (batch|1, heads|1, seqlen_k). Comparing a row with them
    is all a kernel needs: no value, however bad, leads outside the rows.
    """

    left: int | None
    right: int | None
    lts: Tensor | None
    lte: Tensor | None
    uts: Tensor | None
    ute: Tensor | None

    @property
    def vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        return self.lts, self.lte, self.uts, self.ute


class Resolvable(Protocol):
    """A mask, as far as functions below it need to know one; its repr is its name in titles and errors."""

    @property
    def device(self) -> torch.device: ...

    def resolve(self, seqlen_q: int, seqlen_k: int) -> ResolvedMask: ...


def finish(mask: ResolvedMask) -> ResolvedMask:
    """The band within 64 bits; vectors as kernels take them: int32, contiguous, one shape."""
    left, right, *vectors = mask
    shape: Any = None
    for t in vectors:
        if t is None:
            continue
        if shape is None:
            shape = t.shape
        if t.shape != shape or t.dtype != torch.int32 or not t.is_contiguous():
            shape = torch.broadcast_shapes(*[t.shape for t in vectors if t is not None])
            vectors = [None if t is None else saturated(t).expand(shape).contiguous() for t in vectors]
            break
    return ResolvedMask(near(left), near(right), *vectors)


def intervals_of(mask: ResolvedMask) -> list[Interval]:
    """The hidden intervals, at most two."""
    found: list[Interval] = []
    if mask.lts is not None:
        found.append((mask.lts, mask.lte))
    if mask.ute is not None:
        found.append((mask.uts, mask.ute))
    return found


def intersect_bands(a: tuple[int | None, int | None], b: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The band visible in both; each is (left, right), None unlimited."""

    def tighter(x: int | None, y: int | None) -> int | None:
        return y if x is None else x if y is None else min(x, y)

    return tighter(a[0], b[0]), tighter(a[1], b[1])


def unite_bands(
    a: tuple[int | None, int | None], b: tuple[int | None, int | None]
) -> tuple[int | None, int | None] | None:
    """The band visible in either, or None where that is two bands apart."""
    # Distances p - j from -right to left, None unlimited.
    for (left, right), other in ((a, b), (b, a)):
        if left is not None and right is not None and -right > left:
            return other  # it shows nothing
    for (left, _), (_, right) in ((a, b), (b, a)):
        if left is not None and right is not None and -right > left + 1:
            return None
    lefts, rights = (a[0], b[0]), (a[1], b[1])
    return None if None in lefts else max(lefts), None if None in rights else max(rights)  # type: ignore[type-var]


def merge_by_structure(intervals: list[Interval]) -> list[Interval]:
    """Unites intervals that unite whatever their values: those that start at row 0, and those that end at seqlen_q.

    Vectors of key heads are repeated for the query heads of each.
    """
    to_end: Tensor | None = None
    from_zero: Tensor | None = None
    others: list[Interval] = []
    for start, end in over_heads(intervals):
        if end is None and start is not None:
            to_end = start if to_end is None else torch.minimum(to_end, start)
        elif start is None and end is not None:
            from_zero = end if from_zero is None else torch.maximum(from_zero, end)
        else:
            others.append((start, end))
    merged: list[Interval] = [] if to_end is None else [(to_end, None)]
    merged.extend(others)
    return merged if from_zero is None else [*merged, (None, from_zero)]


def over_heads(intervals: list[Interval]) -> list[Interval]:
    """Vectors of key heads repeated for the query heads of each, where both kinds are there."""
    heads = {t.shape[1] for interval in intervals for t in interval if t is not None} - {1}
    if len(heads) < 2:
        return intervals
    most = max(heads)

    def spread(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[1] == 1 else t.repeat_interleave(most // t.shape[1], dim=1)

    return [(spread(start), spread(end)) for start, end in intervals]


def pack(left: int | None, right: int | None, intervals: list[Interval]) -> ResolvedMask:
    """At most two intervals, not both to the end or both from zero, in the slots of a ResolvedMask."""
    lower: Interval = (None, None)
    upper: Interval = (None, None)
    if len(intervals) == 2:
        first, second = intervals
        lower, upper = (second, first) if first[0] is None or second[1] is None else (first, second)
    elif len(intervals) == 1:
        (interval,) = intervals
        if interval[0] is None:
            upper = interval
        else:
            lower = interval
    return ResolvedMask(left, right, lower[0], lower[1], upper[0], upper[1])


def band_rows(left: int | None, right: int | None, seqlen_q: int, seqlen_k: int, columns: Tensor) -> tuple[Tensor, Tensor]:
    """First and past-the-last row that the band shows to each of `columns`: int32, 0 <= first <= end <= seqlen_q."""
    reach = seqlen_q + seqlen_k  # beyond it a limit changes nothing, and int32 arithmetic stays in range
    diagonal = columns - (seqlen_k - seqlen_q)
    start = torch.zeros_like(columns)
    end = torch.full_like(columns, seqlen_q)
    if right is not None:
        start = (diagonal - max(min(right, reach), -reach)).clamp(0, seqlen_q)
    if left is not None:
        end = (diagonal + (max(min(left, reach), -reach) + 1)).clamp(0, seqlen_q)
    return start, torch.maximum(start, end)


def band_as_intervals(left: int | None, right: int | None, seqlen_q: int, seqlen_k: int, device) -> list[Interval]:
    """What the band hides, as intervals of shape (1, 1, seqlen_k)."""
    columns = torch.arange(seqlen_k, dtype=torch.int32, device=device).view(1, 1, -1)
    start, end = band_rows(left, right, seqlen_q, seqlen_k, columns)
    hidden: list[Interval] = []
    if left is not None:
        hidden.append((end, None))
    if right is not None:
        hidden.append((None, start))
    return hidden


def clip(interval: Interval, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """An interval cut to rows [start, end) of each column; where nothing is left, its end is at most its start."""
    a = start if interval[0] is None else torch.maximum(interval[0], start)
    b = end if interval[1] is None else torch.minimum(interval[1], end)
    return torch.broadcast_tensors(a, b)


def merge_by_value(
    mask_band: tuple[int | None, int | None], intervals: list[Interval], seqlen_q: int, seqlen_k: int, most: int = 2
) -> tuple[list[Interval], Tensor]:
    """The same rows as `most` intervals per column, ascending and apart, and how many each column needs, int64.

    Where fewer are needed the last ones are empty; where more are, they are left out. Rows that the band hides do not
    count: intervals are cut to what the band shows first.
    """
    device = next(t for pair in intervals for t in pair if t is not None).device
    columns = torch.arange(seqlen_k, dtype=torch.int32, device=device).view(1, 1, -1)
    first, last = band_rows(*mask_band, seqlen_q, seqlen_k, columns)
    clipped = [clip(interval, first, last) for interval in intervals]
    start = torch.stack(torch.broadcast_tensors(*[a for a, _ in clipped]), dim=-1)
    end = torch.stack(torch.broadcast_tensors(*[b for _, b in clipped]), dim=-1)
    empty = end <= start
    start = torch.where(empty, seqlen_q, start)
    end = torch.where(empty, -1, end)
    start, order = start.sort(dim=-1)
    end = end.gather(-1, order)
    reached = end.cummax(dim=-1).values
    begins = end > start
    begins[..., 1:] &= start[..., 1:] > reached[..., :-1]
    component = begins.cumsum(-1)
    merged: list[Interval] = []
    for number in range(1, most + 1):
        member = (component == number) & (end > start)
        merged.append((torch.where(member, start, seqlen_q).amin(-1), torch.where(member, end, 0).amax(-1)))
    return merged, component[..., -1]


def visible_per_column(mask: ResolvedMask, seqlen_q: int, seqlen_k: int, device) -> Tensor:
    """Visible rows of each column, int64 (batch|1, heads|1, seqlen_k), in closed form."""
    columns = torch.arange(seqlen_k, dtype=torch.int32, device=device).view(1, 1, -1)
    first, last = band_rows(mask.left, mask.right, seqlen_q, seqlen_k, columns)
    shown = (last - first).long()
    cut = [clip(interval, first, last) for interval in intervals_of(mask)]
    for a, b in cut:
        shown = shown - (b - a).clamp(min=0)
    if len(cut) == 2:  # rows hidden twice were taken away twice
        (a0, b0), (a1, b1) = cut
        shown = shown + (torch.minimum(b0, b1) - torch.maximum(a0, a1)).clamp(min=0)
    return shown
