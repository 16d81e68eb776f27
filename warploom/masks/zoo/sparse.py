"""Sparse patterns: global tokens, dropped keys, eviction, block diffusion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import (
    check_values,
    describe,
    integer,
    per_batch_rows,
    per_batch_value,
    readable,
    saturated,
    strided,
    with_values,
)
from warploom.masks.base import LONGEST
from warploom.masks.intersect import Mask
from warploom.masks.intervals import ResolvedMask
from warploom.masks.zoo.launched import may_launch
from warploom.masks.zoo.positions import columns, rows_of, scalar_or_column
from warploom.runtime.arguments import INTEGERS


class GlobalWindow(Mask):
    """Global tokens and a window: key j is visible to row i when j < g, or i < g, or -right <= p - j <= left.

    With right = 0 the mask is causal besides: j <= p.

    Args:
        global_tokens: g, one int, or one per batch entry.
        left, right: the window as for `SlidingWindow`; None: unlimited.
    """

    _fields = ("global_tokens", "left", "right")

    def __init__(self, global_tokens: Any, left: int | None, right: int | None = 0) -> None:
        self.global_tokens = per_batch_value("global_tokens", global_tokens)
        self.left, self.right = integer("left", left, optional=True), integer("right", right, optional=True)

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        below, above = self.left is not None, self.right not in (None, 0)
        given = [self.global_tokens] if isinstance(self.global_tokens, Tensor) else []
        if (below or above) and may_launch(device, *given):
            from warploom.masks.zoo.position_kernel import position_vectors

            limits = [
                0 if x is None else max(min(x, seqlen_q + seqlen_k), -seqlen_q - seqlen_k) for x in (self.left, self.right)
            ]
            wanted = below, False, above, above
            vectors = position_vectors("global", self.global_tokens, wanted, seqlen_q, seqlen_k, device, *limits)
            if vectors is not None:
                return ResolvedMask(None, 0 if self.right == 0 else None, *vectors)
        tokens = scalar_or_column(self.global_tokens, device)
        column = columns(seqlen_k, device)
        ordinary = (column >= tokens).unsqueeze(1)
        first_row = torch.zeros_like(ordinary, dtype=torch.int32) + (
            tokens.unsqueeze(1) if isinstance(tokens, Tensor) else min(tokens, seqlen_q)
        )
        first_row = first_row.clamp(0, seqlen_q)
        reach = seqlen_q + seqlen_k  # a longer window changes nothing
        lts = ute = None
        if self.left is not None:
            after = rows_of(column + (max(min(self.left, reach), -reach) + 1), seqlen_q, seqlen_k)
            lts = torch.maximum(after, first_row).where(ordinary, seqlen_q)
        if self.right == 0:
            return ResolvedMask(None, 0, lts, None, None, None)
        if self.right is not None:
            before = rows_of(column - max(min(self.right, reach), -reach), seqlen_q, seqlen_k)
            ute = before.where(ordinary, 0)
        return ResolvedMask(None, None, lts, None, None if ute is None else first_row, ute)


class QKSparse(Mask):
    """Causal attention with dropped spans of tokens: a dropped key is hidden from its own position to its span's end.

    A span is a run of adjacent dropped keys. Its own queries see nothing of it, later ones do, as in FlashMask's
    QK-sparse mask.

    Args:
        dropped: bool (seqlen_k,) or (batch, seqlen_k), True = dropped; or the dropped positions, ints (n,) or
            (batch, n) or ragged lists, negative ones unused.
    """

    _fields = ("dropped",)

    def __init__(self, dropped: Any) -> None:
        takes = "a bool mask (batch, seqlen_k), or dropped positions (n,), or one row per batch entry"
        self.dropped = per_batch_rows("dropped", dropped, takes, pad=-1, allow_bool=True)

    def _extent(self) -> int | None:
        return self.dropped.shape[1] if self.dropped.dtype == torch.bool else None

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        dropped = self.dropped.to(device)
        if dropped.dtype == torch.bool:
            self._check_length("dropped", dropped.shape[1], seqlen_k)
        else:
            if readable(self.dropped) and self.dropped.numel() and int(self.dropped.max()) >= seqlen_k:
                raise ValueError(f"dropped names position {int(self.dropped.max())}, but there are only {seqlen_k} keys")
            at = dropped.long()
            at = torch.where((at < 0) | (at >= seqlen_k), seqlen_k, at)
            flags = torch.zeros(dropped.shape[0], seqlen_k + 1, dtype=torch.bool, device=device)
            dropped = flags.scatter(1, at, True)[:, :seqlen_k]
        column = columns(seqlen_k, device)
        end = torch.where(dropped, seqlen_k, column)
        if seqlen_k:
            end = end.flip(1).cummin(1).values.flip(1)
        start = torch.where(dropped, column, seqlen_k)
        end = torch.where(dropped, end, seqlen_k)
        return ResolvedMask(None, 0, rows_of(start, seqlen_q, seqlen_k), rows_of(end, seqlen_q, seqlen_k), None, None)


class RandomEviction(Mask):
    """Causal attention to a cache that evicts: key j is hidden from row rows[j] on.

    Args:
        rows: rows of this call, (seqlen_k,) or (batch, seqlen_k) or (batch, heads, seqlen_k); seqlen_q or
            more: never evicted.
    """

    _fields = ("rows",)

    def __init__(self, rows: Any) -> None:
        if isinstance(rows, Tensor) and rows.ndim == 3:
            if rows.dtype not in INTEGERS:
                raise TypeError(f"rows takes integers (batch, heads, seqlen_k), got {describe(rows)}")
            self.rows = with_values("rows", strided("rows", rows))
        else:
            takes = "rows (seqlen_k,), (batch, seqlen_k) or (batch, heads, seqlen_k)"
            self.rows = per_batch_rows("rows", rows, takes).unsqueeze(1)
        check_values("rows", self.rows, minimum=0)

    def _extent(self) -> int | None:
        return self.rows.shape[2]

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        self._check_length("rows", self.rows.shape[2], seqlen_k)
        return ResolvedMask(None, 0, saturated(self.rows.to(device)).clamp(0, seqlen_q), None, None, None)


class BlockDiffusion(Mask):
    """Block diffusion training (BD3-LM, arXiv 2503.09573): noisy tokens, then the same tokens clean.

    There are 2 * length keys. A noisy block sees itself, in both directions, and the clean blocks before it. A clean
    block sees the clean blocks before it and itself.

    Args:
        length: tokens of the sequence; seqlen_k is 2 * length.
        block: tokens per block; the last block may be shorter.
    """

    _fields = ("length", "block")

    def __init__(self, length: int, block: int) -> None:
        self.length, self.block = integer("length", length, minimum=0), integer("block", block, minimum=1)

    def _extent(self) -> int | None:
        return 2 * self.length

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        self._check_length("noisy and clean half together", 2 * self.length, seqlen_k)
        block = min(self.block, LONGEST)  # one block either way
        if may_launch(device):
            from warploom.masks.zoo.position_kernel import position_vectors

            wanted = True, True, False, True
            vectors = position_vectors("diffusion", self.length, wanted, seqlen_q, seqlen_k, device, block)
            if vectors is not None:
                return ResolvedMask(None, None, *vectors)
        column = columns(seqlen_k, device)
        noisy = column < self.length
        start = torch.where(noisy, column, column - self.length) // block * block
        end = (start + block).clamp(max=self.length)
        # Noisy: hidden before and after its own block. Clean: hidden from noisy blocks up to its own, then
        # from the clean ones before.
        ute = torch.where(noisy, start, end)
        lts = torch.where(noisy, end, self.length)
        lte = torch.where(noisy, seqlen_k, start + self.length)
        ute, lts, lte = (rows_of(v, seqlen_q, seqlen_k) for v in (ute, lts, lte))
        return ResolvedMask(None, None, lts, lte, None, ute)
