"""Intersecting masks: bands give a band, hidden intervals unite, exactly or not at all."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.masks import intervals as iv
from warploom.masks.base import Mask
from warploom.masks.columns import ColumnMask, column_mask
from warploom.masks.intervals import ResolvedMask
from warploom.masks.zoo.bands import Band, band


class Intersection(Mask):
    """What `a & b` shows, for two masks whose columns are known once the lengths are."""

    _fields = ("a", "b")

    def __init__(self, a: Mask, b: Mask) -> None:
        self.a, self.b = a, b

    def _extent(self) -> int | None:
        extent = self.a._extent()
        return self.b._extent() if extent is None else extent

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        a, b = (m._resolve(seqlen_q, seqlen_k, device) for m in (self.a, self.b))
        band = iv.intersect_bands((a.left, a.right), (b.left, b.right))
        _check_broadcast(self, [t for r in (a, b) for t in r[2:] if t is not None])
        return united(self, band, iv.intervals_of(a) + iv.intervals_of(b), seqlen_q, seqlen_k)

    def __repr__(self) -> str:
        return f"{self.a!r} & {self.b!r}"


def intersect(a: Mask, b: Mask) -> Mask:
    """What both masks show, in the plainest form that needs no lengths; see `Mask.__and__`."""
    if isinstance(a, Band) and isinstance(b, Band):
        return band(*iv.intersect_bands((a.left, a.right), (b.left, b.right)))
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Band) and one.left is None and one.right is None:
            return other
        if isinstance(one, ColumnMask) and isinstance(other, Band):
            return column_mask(*iv.intersect_bands((one.left, one.right), (other.left, other.right)), one.hidden_intervals())
    both = Intersection(a, b)
    if not (isinstance(a, ColumnMask) and isinstance(b, ColumnMask)):
        return both
    length = a._extent()
    assert length is not None
    b._check_length("the mask", length, b._extent() or 0)
    vectors = both._tensors()
    _check_broadcast(both, vectors)
    limits = iv.intersect_bands((a.left, a.right), (b.left, b.right))
    merged = iv.merge_by_structure(a.hidden_intervals() + b.hidden_intervals())
    if len(merged) <= 2:
        return column_mask(*limits, merged)
    if (
        all(v.device.type == "cpu" and v.numel() for v in vectors)
        and not torch.compiler.is_compiling()
        and limits == (None, None)
    ):
        # Refuses now where no length can help: with more rows a column never needs fewer intervals.
        united(both, limits, merged, min(length, max(int(v.max()) for v in vectors)), length)
    return both


def united(
    mask: Mask,
    band: tuple[int | None, int | None],
    intervals: list[iv.Interval],
    seqlen_q: int,
    seqlen_k: int,
) -> ResolvedMask:
    """Band and intervals as a ResolvedMask, exactly, or ValueError."""
    merged = iv.merge_by_structure(intervals)
    if len(merged) <= 2:
        return iv.pack(*band, merged)
    unreadable = _unreadable(merged)
    if unreadable:
        raise ValueError(
            f"{mask!r} needs its values to see whether two intervals per column do, which {unreadable} "
            "cannot: intersect outside, and pass ColumnMask.from_startend_row_indices(*both.to_startend_row_indices())"
        )
    merged, needed = iv.merge_by_value(band, merged, seqlen_q, seqlen_k)
    if bool((needed > 2).any()):
        batch, head, column = (needed > 2).nonzero()[0].tolist()
        raise ValueError(
            f"{mask!r} is not a column mask: column {column} (batch {batch}, head {head}) hides "
            f"{int(needed[batch, head, column])} separate intervals of rows, and a column has two"
        )
    return iv.pack(*band, merged)


def _unreadable(intervals: list[iv.Interval]) -> str | None:
    """Where nothing can be read back, if here."""
    if torch.compiler.is_compiling():
        return "a compiled region"
    on_cuda = any(t.is_cuda for interval in intervals for t in interval if isinstance(t, Tensor))
    return "a captured CUDA graph" if on_cuda and torch.cuda.is_current_stream_capturing() else None


def _check_broadcast(mask: Intersection, vectors: list[Tensor]) -> None:
    if torch.compiler.is_compiling():
        return  # broadcasting itself will tell, and symbolic sizes stay symbolic
    for dim, what in ((0, "batch entries"), (1, "heads")):
        sizes = sorted({int(t.shape[dim]) for t in vectors} - {1})
        if len(sizes) > 1:
            raise ValueError(f"cannot intersect masks of {sizes[0]} and {sizes[1]} {what}: {mask!r}")
