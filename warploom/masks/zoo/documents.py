"""Packed documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import boolean, check_values, describe, per_batch_rows, readable, saturated, summary
from warploom.masks.base import rebuild
from warploom.masks.intersect import Mask
from warploom.masks.intervals import ResolvedMask
from warploom.masks.zoo.launched import may_launch
from warploom.masks.zoo.positions import batch_of, check_total, columns, cumulative, largest, locate, rows_of

# Tokens of a document in the mean at the least, for it to say where they start: a sequence of packed calls has tiles of its
# own, of some hundred tokens.
SHORTEST = 256

_LENGTHS = "document lengths: ints (n,), or one list or row per batch entry"


class Document(Mask):
    """Documents packed one after another: a query sees only its own, causally by default.

    Positions after the last document are padding, which sees and is seen by nothing; so does a query before
    position 0.

    Args:
        lengths: tokens of each document, (n,) or (batch, n) or ragged lists; zeros are documents without
            tokens.
        causal: keys after the query are hidden too.
    """

    _fields = ("bounds", "ids", "kind", "causal")

    def __init__(self, lengths: Any, causal: bool = True) -> None:
        rows = per_batch_rows("lengths", lengths, _LENGTHS)
        check_values("lengths", rows, minimum=0, what="document lengths of at least 0")
        self.bounds: Tensor | None = rows
        self.ids: Tensor | None = None
        self.kind = "lengths"
        self.causal = boolean("causal", causal)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any, causal: bool = True) -> Document:
        """From cumulative lengths (n + 1,) or (batch, n + 1), as flash-attn's varlen functions take; they never decrease."""
        cu = per_batch_rows("cu_seqlens", cu_seqlens, "cumulative lengths (n + 1,) or (batch, n + 1)")
        if cu.shape[1] < 1:
            raise ValueError(f"cu_seqlens holds at least its leading 0, got {describe(cu)}")
        if readable(cu):
            check_values("cu_seqlens", cu, minimum=0)
            falls = cu[:, 1:] < cu[:, :-1]
            if bool(falls.any()):
                b, j = falls.nonzero()[0].tolist()
                raise ValueError(f"cu_seqlens must not decrease, got {cu[b].tolist()[j : j + 2]} at index {j + 1}")
        return rebuild(cls, {"bounds": cu, "ids": None, "kind": "cu_seqlens", "causal": boolean("causal", causal)})

    @classmethod
    def from_segment_ids(cls, ids: Any, causal: bool = True) -> Document:
        """From one id per key, (seqlen_k,) or (batch, seqlen_k).

        A run of equal ids is a document; negative ids are padding.
        """
        rows = per_batch_rows("segment_ids", ids, "segment ids (seqlen_k,) or (batch, seqlen_k)")
        if readable(rows):
            _check_runs(rows)
        return rebuild(cls, {"bounds": None, "ids": rows, "kind": "segment_ids", "causal": boolean("causal", causal)})

    @classmethod
    def from_position_ids(cls, ids: Any, causal: bool = True) -> Document:
        """From position ids (seqlen_k,) or (batch, seqlen_k); a document begins wherever they do not rise by one."""
        rows = per_batch_rows("position_ids", ids, "position ids (seqlen_k,) or (batch, seqlen_k)")
        return rebuild(cls, {"bounds": None, "ids": rows, "kind": "position_ids", "causal": boolean("causal", causal)})

    def _extent(self) -> int | None:
        if self.ids is not None:
            return self.ids.shape[1]
        if not readable(self.bounds):
            return None
        assert self.bounds is not None
        last = self.bounds.sum(1) if self.kind == "lengths" else self.bounds[:, -1]
        return largest(last)

    def _bounds(self, seqlen_k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        self._check_fits(seqlen_k)
        if self.ids is not None:
            return _runs(self.ids.to(device), self.kind == "segment_ids")
        assert self.bounds is not None
        rows = self.bounds.to(device)
        bounds = cumulative(rows) if self.kind == "lengths" else saturated(rows)
        _, inside, start, end = locate(bounds, seqlen_k)
        return inside, start, end

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        vectors = self._launched(seqlen_q, seqlen_k, device, False)
        if vectors is not None:
            return ResolvedMask(None, 0 if self.causal else None, vectors[0], None, None, vectors[1])
        inside, start, end = self._bounds(seqlen_k, device)
        lts = rows_of(end, seqlen_q, seqlen_k).where(inside.unsqueeze(1), 0)
        if self.causal:
            return ResolvedMask(None, 0, lts, None, None, None)
        ute = rows_of(start, seqlen_q, seqlen_k).where(inside.unsqueeze(1), seqlen_q)
        return ResolvedMask(None, None, lts, None, None, ute)

    def _resolve_with_starts(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> tuple[ResolvedMask, Tensor | None]:
        if self._documents(seqlen_q, seqlen_k) is None:
            return self._resolve(seqlen_q, seqlen_k, device), None
        vectors = self._launched(seqlen_q, seqlen_k, device, True)
        if vectors is None:
            return self._resolve(seqlen_q, seqlen_k, device), None
        return ResolvedMask(None, 0 if self.causal else None, vectors[0], None, None, vectors[1]), vectors[2]

    def _documents(self, seqlen_q: int, seqlen_k: int) -> int | None:
        """Of one batch entry, in number as packed calls have them. Where the first one starts is not read from a device."""
        rows = self.bounds
        if rows is None or rows.shape[0] != 1 or seqlen_q != seqlen_k:
            return None
        count = rows.shape[1] - int(self.kind == "cu_seqlens")
        if not 0 < count * SHORTEST <= seqlen_k:
            return None
        if self.kind == "cu_seqlens" and not (rows.device.type == "cpu" and readable(rows) and int(rows[0, 0]) == 0):
            return None
        return count

    def _launched(self, seqlen_q: int, seqlen_k: int, device: torch.device, starts: bool) -> tuple[Tensor | None, ...] | None:
        """lts, ute and, if asked for, where documents start, by one kernel, or None."""
        rows = self.bounds if self.ids is None else self.ids
        assert rows is not None
        if not may_launch(device, rows):
            return None
        if self.ids is not None or readable(rows):
            self._check_fits(seqlen_k)
        rows = rows if rows.device == device else rows.to(device)
        if self.ids is None:
            return _by_kernel()[0](rows, self.kind == "cu_seqlens", self.causal, seqlen_q, seqlen_k, starts)
        return _by_kernel()[1](rows, self.kind == "segment_ids", self.causal, seqlen_q, seqlen_k)

    def _check_fits(self, seqlen_k: int) -> None:
        """ValueError if ids are not those of the keys, or documents end past them, where contents may be read."""
        if self.ids is not None:
            self._check_length(self.kind, self.ids.shape[1], seqlen_k)
            return
        assert self.bounds is not None
        if self.kind == "lengths":
            check_total("lengths", self.bounds, seqlen_k)
        elif readable(self.bounds) and largest(self.bounds[:, -1]) > seqlen_k:
            raise ValueError(f"cu_seqlens ends at {largest(self.bounds[:, -1])}, but there are only {seqlen_k} keys")

    def __repr__(self) -> str:
        tail = "" if self.causal else ", causal=False"
        if self.kind == "lengths":
            return f"Document({summary(self.bounds)}{tail})"
        return f"Document.from_{self.kind}({summary(self.bounds if self.ids is None else self.ids)}{tail})"


class PrefixDocument(Mask):
    """Packed documents, each with a prefix that all of its tokens see.

    Key j is visible to a query at p of the same document when j <= p, or when j lies in the document's prefix.

    Args:
        lengths: tokens of each document, as for `Document`.
        prefixes: prefix tokens of each document, of the same shape.
    """

    _fields = ("lengths", "prefixes")

    def __init__(self, lengths: Any, prefixes: Any) -> None:
        self.lengths = per_batch_rows("lengths", lengths, _LENGTHS)
        self.prefixes = per_batch_rows("prefixes", prefixes, "prefix lengths of the same shape as lengths")
        if self.lengths.shape[1] != self.prefixes.shape[1]:
            raise ValueError(f"prefixes holds {self.prefixes.shape[1]} values a row, but lengths {self.lengths.shape[1]}")
        check_values("lengths", self.lengths, minimum=0)
        check_values("prefixes", self.prefixes, minimum=0)

    def _extent(self) -> int | None:
        return largest(self.lengths.sum(1)) if readable(self.lengths) else None

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        check_total("lengths", self.lengths, seqlen_k)
        if may_launch(device, self.lengths, self.prefixes):
            from warploom.masks.zoo.document_kernel import part_vectors

            rows, wanted = self.lengths.to(device), (True, True, False)
            vectors = part_vectors("prefixes", rows, wanted, seqlen_q, seqlen_k, self.prefixes.to(device))
            if vectors is not None:
                return ResolvedMask(None, None, vectors[0], None, None, vectors[1])
        lengths, prefixes = saturated(self.lengths.to(device)), saturated(self.prefixes.to(device)).clamp(max=seqlen_k)
        batch = batch_of(lengths, prefixes)
        lengths, prefixes = lengths.expand(batch, -1), prefixes.expand(batch, -1)
        index, inside, start, end = locate(cumulative(lengths), seqlen_k)
        padded = torch.cat([prefixes, prefixes.new_zeros(batch, 1)], dim=1)
        column = columns(seqlen_k, device)
        first = torch.where(column < start + padded.gather(1, index), start, column)
        inside = inside.unsqueeze(1)
        lts = rows_of(end, seqlen_q, seqlen_k).where(inside, 0)
        ute = rows_of(first, seqlen_q, seqlen_k).where(inside, seqlen_q)
        return ResolvedMask(None, None, lts, None, None, ute)


@cache
def _by_kernel() -> tuple[Callable[..., tuple[Tensor | None, ...] | None], Callable[..., tuple[Tensor | None, ...] | None]]:
    """What launches a kernel on lengths and on ids. Kept: an import takes a microsecond though its module is loaded."""
    from warploom.masks.zoo.document_kernel import document_vectors
    from warploom.masks.zoo.run_kernel import run_vectors

    return document_vectors, run_vectors


def _check_runs(ids: Tensor) -> None:
    """ValueError where an id comes back after another: what its tokens share is not a run of columns."""
    for b, row in enumerate(ids.tolist()):
        seen: set[int] = set()
        previous: int | None = None
        for j, value in enumerate(row):
            if value != previous and value >= 0:
                if value in seen:
                    raise ValueError(
                        f"segment_ids: id {value} comes back at key {j} of batch entry {b}; the keys "
                        "of a document must be adjacent"
                    )
                seen.add(value)
            previous = value


def _runs(ids: Tensor, segments: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(inside, start, end), each (batch, seqlen_k), of the documents that per-key ids describe."""
    batch, length = ids.shape
    ids = ids if ids.dtype == torch.int64 else ids.to(torch.int32)  # ids may be hashes of 64 bits
    here, following = ids[:, :-1], ids[:, 1:]
    # The largest id of a dtype has no next one, though adding 1 gives the smallest.
    goes_on = following == here if segments else (following == here + 1) & (following > here)
    edge = goes_on.new_zeros(batch, min(length, 1))
    column = columns(length, ids.device)
    start = torch.where(torch.cat([edge, goes_on], dim=1), 0, column)
    end = torch.where(torch.cat([goes_on, edge], dim=1), length, column + 1)
    if length:
        start = start.cummax(1).values
        end = end.flip(1).cummin(1).values.flip(1)
    inside = ids >= 0 if segments else torch.ones_like(ids, dtype=torch.bool)
    return inside, start, end
