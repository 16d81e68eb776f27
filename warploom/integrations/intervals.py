"""Masks in which every key is visible to one contiguous range of queries, and their column bounds.

Causal, windowed, chunked, packed, padded and block-bidirectional masks, and their unions and intersections,
are all of this kind: each key, when anything sees it at all, is seen by the query at its own position and by
a contiguous range round it. That makes the algebra closed (`&` and `|` are exact) and free of host
synchronisation, which is what a mask function of transformers needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FAR = 2**40  # "without end": past any position, and far from int64's limits when shifted


@dataclass(frozen=True)
class Visible:
    """The queries that see each key: positions [start, end) of the sequence.

    int64 `(batch | 1, keys)`, empty where end <= start. A range that is not empty contains the key's own
    position; without that `|` would not be exact.
    """

    start: Tensor
    end: Tensor

    def __and__(self, other: Visible) -> Visible:
        return Visible(torch.maximum(self.start, other.start), torch.minimum(self.end, other.end))

    def __or__(self, other: Visible) -> Visible:
        a, b = self._without_empty(), other._without_empty()
        return Visible(torch.minimum(a.start, b.start), torch.maximum(a.end, b.end))

    def _without_empty(self) -> Visible:
        empty = self.end <= self.start
        return Visible(self.start.masked_fill(empty, FAR), self.end.masked_fill(empty, -FAR))

    def shift(self, by: Tensor) -> Visible:
        return Visible(self.start + by, self.end + by)

    def hide(self, keys: Tensor) -> Visible:
        """The same ranges, emptied for the keys where bool `keys` is True."""
        return Visible(self.start, self.end.masked_fill(keys, -FAR))

    def bounds(self, seqlen_q: int, q_offset: int | Tensor = 0, batch: int | None = None) -> Tensor:
        """Column bounds [lts, lte, uts, ute] of a call whose first query sits at position `q_offset`.

        Returns int32 `(batch, 1, keys, 4)`, rows clamped to [0, seqlen_q]. Each of the four vectors is
        contiguous by itself.
        """
        start = (self.start - q_offset).clamp(0, seqlen_q).to(torch.int32)
        end = (self.end - q_offset).clamp(0, seqlen_q).to(torch.int32)
        start, end = torch.broadcast_tensors(start, end)
        bounds = torch.stack([end, torch.full_like(end, seqlen_q), torch.zeros_like(start), start])
        bounds = bounds.unsqueeze(2).permute(1, 2, 3, 0)
        return bounds if batch is None else bounds.expand(batch, -1, -1, -1)


def everything(columns: Tensor) -> Visible:
    """No key is hidden. `columns`, int64 `(batch | 1, keys)`, are the keys' positions, here and below."""
    return Visible(torch.full_like(columns, -FAR), torch.full_like(columns, FAR))


def causal(columns: Tensor) -> Visible:
    """Key c is visible to queries c and later."""
    return Visible(columns, torch.full_like(columns, FAR))


def window(columns: Tensor, left: int | None, right: int | None) -> Visible:
    """Key c is visible to queries c - right ... c + left; None is without limit."""
    start = torch.full_like(columns, -FAR) if right is None else columns - right
    end = torch.full_like(columns, FAR) if left is None else columns + (left + 1)
    return Visible(start, end)


def chunked(columns: Tensor, size: int, origin: Tensor) -> Visible:
    """Chunks of `size` positions, counted from `origin` (batch,)."""
    origin = origin.to(device=columns.device, dtype=columns.dtype).reshape(-1, 1)
    start = origin + torch.div(columns - origin, size, rounding_mode="floor") * size
    return Visible(start, start + size)


def only(real: Tensor) -> Visible:
    """Padding, the keys where bool `real` `(batch, keys)` is False, is hidden from every query."""
    zeros = torch.zeros(real.shape, dtype=torch.int64, device=real.device)
    return everything(zeros).hide(~real)


def runs(ids: Tensor) -> Visible:
    """Equal neighbours in integer `ids` `(batch, keys)` see each other: packed documents, image blocks.

    The same id in two separate places is two runs here; `contiguous` tells whether that happens.
    """
    length = ids.shape[-1]
    index = torch.arange(length, device=ids.device).expand(ids.shape)
    differs = ids[..., 1:] != ids[..., :-1]
    edge = torch.ones_like(ids[..., :1], dtype=torch.bool)
    opens, closes = torch.cat([edge, differs], -1), torch.cat([differs, edge], -1)
    start = index.masked_fill(~opens, 0).cummax(-1).values
    end = (index + 1).masked_fill(~closes, length).flip(-1).cummin(-1).values.flip(-1)
    return Visible(start, end)


def contiguous(ids: Tensor) -> bool:
    """Whether every id >= 0 of `(batch, keys)` occurs in one run only. Reads the tensor."""
    if ids.numel() == 0:
        return True
    edge = torch.ones_like(ids[..., :1], dtype=torch.bool)

    def count(x: Tensor) -> Tensor:
        return (torch.cat([edge, x[..., 1:] != x[..., :-1]], -1) & (x >= 0)).sum(-1)

    return bool((count(ids) == count(ids.sort(-1).values)).all())
