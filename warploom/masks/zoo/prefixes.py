"""Causal masks with parts that see ahead."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import check_values, per_batch_rows, per_batch_value, readable, saturated
from warploom.masks.intersect import Mask
from warploom.masks.intervals import ResolvedMask
from warploom.masks.zoo.launched import may_launch
from warploom.masks.zoo.positions import batch_of, columns, rows_of, scalar_or_column


class PrefixLM(Mask):
    """Key j is visible when j <= p, or when j lies in the prefix: every query sees all of the prefix.

    Args:
        prefix: prefix tokens, one int, or one per batch entry (list or tensor (batch,)).
    """

    _fields = ("prefix",)

    def __init__(self, prefix: Any) -> None:
        self.prefix = per_batch_value("prefix", prefix)

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        if may_launch(device, *([self.prefix] if isinstance(self.prefix, Tensor) else [])):
            from warploom.masks.zoo.position_kernel import position_vectors

            vectors = position_vectors("prefix", self.prefix, (False, False, False, True), seqlen_q, seqlen_k, device)
            if vectors is not None:
                return ResolvedMask(None, None, *vectors)
        column = columns(seqlen_k, device)
        in_prefix = column < scalar_or_column(self.prefix, device)
        ute = rows_of(column, seqlen_q, seqlen_k).masked_fill(in_prefix.unsqueeze(1), 0)
        return ResolvedMask(None, None, None, None, None, ute)


class BidirectionalSpans(Mask):
    """Causal text with spans (image tokens, say) whose tokens see all of their own span.

    Args:
        starts: first position of each span, (n,) or (batch, n) or ragged lists.
        lengths: tokens of each span, same shape; a span of length 0 is none. Spans do not overlap.
    """

    _fields = ("starts", "lengths")

    def __init__(self, starts: Any, lengths: Any) -> None:
        self.starts = per_batch_rows("starts", starts, "span starts (n,), or one row per batch entry")
        self.lengths = per_batch_rows("lengths", lengths, "span lengths of the same shape as starts")
        if self.starts.shape[1] != self.lengths.shape[1]:
            raise ValueError(f"lengths holds {self.lengths.shape[1]} values a row, but starts {self.starts.shape[1]}")
        check_values("starts", self.starts, minimum=0)
        check_values("lengths", self.lengths, minimum=0)
        if readable(self.starts) and readable(self.lengths):
            _check_apart(self.starts, self.lengths)

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        if readable(self.starts) and readable(self.lengths):
            _check_within(self.starts, self.lengths, seqlen_k)
        if may_launch(device, self.starts, self.lengths):
            from warploom.masks.zoo.span_kernel import span_vector

            ute = span_vector(self.starts.to(device), self.lengths.to(device), seqlen_q, seqlen_k)
            if ute is not None:
                return ResolvedMask(None, None, None, None, None, ute)
        batch = batch_of(self.starts, self.lengths)
        start = saturated(self.starts.to(device)).expand(batch, -1)
        length = saturated(self.lengths.to(device)).clamp(max=seqlen_k).expand(batch, -1)
        used = (length > 0) & (start >= 0) & (start < seqlen_k)
        at = torch.where(used, start, seqlen_k).long()  # unused ones land behind the last column
        begin = start.new_full((batch, seqlen_k + 1), -1).scatter(1, at, start)[:, :seqlen_k]
        stop = start.new_zeros(batch, seqlen_k + 1).scatter(1, at, start + length)
        if seqlen_k:
            begin = begin.cummax(1).values
        column = columns(seqlen_k, device)
        inside = (begin >= 0) & (column < stop.gather(1, begin.clamp(min=0).long()))
        return ResolvedMask(None, None, None, None, None, rows_of(torch.where(inside, begin, column), seqlen_q, seqlen_k))


def _check_within(starts: Tensor, lengths: Tensor, seqlen_k: int) -> None:
    if not starts.numel() or not lengths.numel():
        return
    ends = torch.where(lengths > 0, saturated(starts).long() + saturated(lengths), 0)
    if int(ends.max()) > seqlen_k:
        raise ValueError(f"BidirectionalSpans: a span ends at {int(ends.max())}, but there are only {seqlen_k} keys")


def _check_apart(starts: Tensor, lengths: Tensor) -> None:
    starts, lengths = torch.broadcast_tensors(starts, lengths)
    for b, (row, sizes) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        spans = sorted((s, s + n) for s, n in zip(row, sizes, strict=True) if n)
        for (s0, e0), (s1, e1) in pairwise(spans):
            if s1 < e0:
                raise ValueError(f"spans must not overlap, got [{s0}, {e0}) and [{s1}, {e1}) in batch entry {b}")
