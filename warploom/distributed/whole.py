"""The mask of all queries and all keys, on the host: what every rank sees of it is worked out from this, in O(seqlen)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from warploom.attention.arguments import PACKED_MASKS, resolve
from warploom.distributed.layout import Layout
from warploom.distributed.work import ByBand, ByRow, Runs, Work, digest
from warploom.masks import Mask
from warploom.masks.intervals import (
    Interval,
    ResolvedMask,
    band_as_intervals,
    band_rows,
    clip,
    finish,
    intervals_of,
    merge_by_structure,
    merge_by_value,
    pack,
)
from warploom.runtime.arguments import Window

_HOST = torch.empty(0)


def resolved(
    mask: Mask | None, causal: bool, window: Window | None, seqlen_q: int, seqlen_k: int, packed: bool
) -> ResolvedMask:
    """The mask of a call, as `warploom.attention` resolves it; vectors of builders on the host.

    A mask that has not changed gives the same tensors again.
    """
    if packed and isinstance(mask, Mask) and not isinstance(mask, PACKED_MASKS):
        raise ValueError(
            "with cu_seqlens mask takes a band (Full, Causal, SlidingWindow) or a ColumnMask with packed columns, "
            f"got {type(mask).__name__}; leave cu_seqlens out, or build the columns of each sequence"
        )
    return resolve(mask, causal, window, seqlen_q, seqlen_k, _HOST)


@dataclass(frozen=True)
class Whole:
    """Band and column vectors over the whole call, whose rows are numbered through.

    Attributes:
        seqlen_q, seqlen_k: of the whole.
        mask: vectors on the CPU; of packed sequences their rows count from the first token of all.
        starts: of packed sequences, with the end of the last behind them; None without.
    """

    seqlen_q: int
    seqlen_k: int
    mask: ResolvedMask
    starts: tuple[int, ...] | None = None

    @classmethod
    def of(cls, mask: ResolvedMask, seqlen_q: int, seqlen_k: int, starts: tuple[int, ...] | None) -> Whole:
        """From a mask as a call has it, whose vectors count each packed sequence's rows from 0."""
        vectors = [None if t is None else t.cpu() for t in mask.vectors]
        if starts is not None and any([t is not None for t in vectors]):
            first, end = _bounds(starts, seqlen_k)
            length = end - first
            vectors = [None if t is None else first + torch.minimum(t.clamp(min=0), length) for t in vectors]
        return cls(seqlen_q, seqlen_k, finish(ResolvedMask(mask.left, mask.right, *vectors)), starts)

    @cached_property
    def hidden(self) -> list[Interval]:
        """Rows that columns hide, packed sequences from each other too; without the band."""
        found = intervals_of(self.mask)
        if self.starts is not None:
            first, end = _bounds(self.starts, self.seqlen_k)
            found = [*found, (end, None), (None, first)]
        return merge_by_structure(found)

    @cached_property
    def as_columns(self) -> ResolvedMask | None:
        """All of it as column vectors without a band, or None where a column would need more than two intervals."""
        band = band_as_intervals(self.mask.left, self.mask.right, self.seqlen_q, self.seqlen_k, "cpu")
        found = merge_by_structure([*self.hidden, *band])
        return finish(pack(None, None, found)) if len(found) <= 2 else None

    @cached_property
    def documents(self) -> tuple[int, ...] | None:
        """Where documents in a row start, with the end of the last, of a mask of nothing else, causal or not; else None."""
        left, right, lts, lte, uts, ute = self.mask
        if self.seqlen_q != self.seqlen_k or left is not None or right not in (None, 0):
            return None
        if self.starts is not None:
            apart = all([t is None for t in self.mask.vectors]) and self.starts[-1] == self.seqlen_k
            return self.starts if apart else None
        if lts is None or lts.numel() != self.seqlen_k or not (lte is uts is None) or (ute is None) != (right == 0):
            return None
        ends, lengths = torch.unique_consecutive(lts.view(-1).long(), return_counts=True)
        if not torch.equal(lengths.cumsum(0), ends):
            return None
        if ute is not None and not torch.equal(torch.repeat_interleave(ends - lengths, lengths), ute.view(-1).long()):
            return None
        return (0, *ends.tolist())

    @cached_property
    def shown(self) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Of each column the rows [first, end) that it shows, but for those of the intervals, which are apart."""
        columns = torch.arange(self.seqlen_k, dtype=torch.int32).view(1, 1, -1)
        band = self.mask.left, self.mask.right
        first, end = band_rows(*band, self.seqlen_q, self.seqlen_k, columns)
        if all([a is None or b is None for a, b in self.hidden]):  # before or after what is shown
            for a, b in self.hidden:
                first = first if b is None else torch.maximum(first, b)
                end = end if a is None else torch.minimum(end, a)
            first, end = torch.broadcast_tensors(first.clamp(0, self.seqlen_q), end.clamp(0, self.seqlen_q))
            return first, torch.maximum(first, end), []
        apart, _ = merge_by_value(band, self.hidden, self.seqlen_q, self.seqlen_k, most=4)
        found = []
        for interval in apart:
            a, b = clip(interval, first, end)
            found.append((a, torch.maximum(a, b)))
        first, end = torch.broadcast_tensors(first, end)
        return first, end, found

    @cached_property
    def runs(self) -> Runs | None:
        """Of the mask's vectors, or None where going through all columns is better."""
        sequences = None if self.starts is None else torch.tensor([*self.starts, self.seqlen_k])
        return Runs.of(self.mask, self.seqlen_q, self.seqlen_k, sequences)

    def work(self) -> Work:
        """What the mask shows, by chunks of rows."""
        if self.starts is None and all([t is None for t in self.mask.vectors]):
            return ByBand(self.mask.left, self.mask.right, self.seqlen_q, self.seqlen_k)
        return ByRow(self.work_of_rows()) if self.runs is None else self.runs.work()

    def work_of_rows(self) -> Tensor:
        """Visible keys of each query, summed over what batch entries and heads the mask has: int64 (seqlen_q,)."""
        first, end, hidden = self.shown
        own = first.shape[0] * first.shape[1]
        several = max([own] + [a.shape[0] * a.shape[1] for a, _ in hidden])
        change = (self._count(first) - self._count(end)) * (several // own)
        for a, b in hidden:
            change = change - self._count(a) + self._count(b)
        return change[:-1].cumsum(0)

    def _count(self, rows: Tensor) -> Tensor:
        return torch.bincount(rows.flatten(), minlength=self.seqlen_q + 1)

    def seen_by(self, layout: Layout, rank: int) -> Tensor:
        """Which keys some query of a rank sees, in any batch entry and head: bool (seqlen_k,)."""
        before = layout.before(rank)
        first, end, hidden = self.shown
        count = before[end.long()] - before[first.long()]
        for a, b in hidden:
            count = count - (before[b.long()] - before[a.long()])
        return (count > 0).any(0).any(0)

    def of_rows(self, layout: Layout, rank: int) -> ResolvedMask | None:
        """The mask of one rank's queries and all keys, by its own rows, or None where vectors cannot say it.

        A rank holds its rows in order, so that of the rows which an interval hides it holds an interval too: vectors go
        through a table.
        """
        found = self.as_columns
        if found is None:
            return None
        before = layout.before(rank)
        vectors = [None if t is None else before[t.clamp(0, self.seqlen_q).long()] for t in found.vectors]
        return finish(ResolvedMask(None, None, *vectors))

    def digest(self) -> str:
        """Equal where lengths are, and bands and vectors that show the same."""
        shapes = [None if t is None else tuple(t.shape) for t in self.mask.vectors]
        words = repr((self.seqlen_q, self.seqlen_k, self.mask.left, self.mask.right, self.starts, shapes))
        vectors = [t for t in self.mask.vectors if t is not None]
        if vectors and self.runs is not None:
            vectors = [self.runs.starts, self.runs.ends]
        return digest(words, vectors)


def _bounds(starts: tuple[int, ...], total: int) -> tuple[Tensor, Tensor]:
    """First row and end of the sequence of each packed token, int32 (1, 1, total); behind the last sequence both are total."""
    edges = torch.tensor([*starts, total], dtype=torch.int32)
    lengths = edges.diff()
    first, end = edges[:-1].clone(), edges[1:].clone()
    first[-1] = end[-1] = total
    return tuple(torch.repeat_interleave(t, lengths).view(1, 1, -1) for t in (first, end))  # type: ignore[return-value]
