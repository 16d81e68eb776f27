"""Masks around the diagonal, and key padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import check_values, describe, integer, per_batch_rows, readable, strided, summary, with_values
from warploom.masks.base import LONGEST, rebuild
from warploom.masks.intersect import Mask
from warploom.masks.intervals import ResolvedMask, intersect_bands, unite_bands
from warploom.masks.zoo.launched import may_launch
from warploom.masks.zoo.positions import columns, rows_of, scalar_or_column
from warploom.runtime.arguments import FLOATS, INTEGERS, check_not_unlimited


class Band(Mask):
    """Masks that are a band and nothing else: no vectors, no work."""

    left: int | None
    right: int | None
    _columns = False

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        return ResolvedMask(self.left, self.right, None, None, None, None)

    def _and(self, other: Mask) -> Mask | None:
        if isinstance(other, Band):
            return band(*intersect_bands((self.left, self.right), (other.left, other.right)))
        return other if self.left is None and self.right is None else None

    def _or(self, other: Mask) -> Mask | None:
        if self.left is None and self.right is None:
            return self
        if isinstance(other, Band):
            limits = unite_bands((self.left, self.right), (other.left, other.right))
            return None if limits is None else band(*limits)
        return None


class Full(Band):
    """Every query sees every key."""

    left = None
    right = None


class Causal(Band):
    """Key j is visible to query i when j <= i + seqlen_k - seqlen_q (bottom-right aligned)."""

    left = None
    right = 0


class SlidingWindow(Band):
    """Key j is visible when -right <= p - j <= left, p = i + seqlen_k - seqlen_q.

    Args:
        left: keys visible before the query; None: unlimited. SlidingWindow(w - 1) is a window of w keys with
            the query's own.
        right: keys visible after it; None: unlimited. Negative values are legal and shrink the window.

    Raises:
        ValueError: exactly (-1, -1), which means no window in flash-attn; here None does.
    """

    _fields = ("left", "right")

    def __init__(self, left: int | None, right: int | None = 0) -> None:
        self.left, self.right = integer("left", left, optional=True), integer("right", right, optional=True)
        check_not_unlimited("SlidingWindow", self.left, self.right)


def band(left: int | None, right: int | None) -> Band:
    """The plainest mask with this band."""
    if left is None and right in (None, 0):
        return Full() if right is None else Causal()
    return rebuild(SlidingWindow, {"left": left, "right": right})


class Chunked(Mask):
    """Causal within chunks of `size` positions, as Llama 4's chunked attention: key j <= p in the chunk of p.

    A query before position 0 sees nothing.
    """

    _fields = ("size",)

    def __init__(self, size: int) -> None:
        self.size = integer("size", size, minimum=1)

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        size = min(self.size, LONGEST)  # one chunk either way
        if may_launch(device):
            from warploom.masks.zoo.position_kernel import position_vectors

            vectors = position_vectors("chunks", size, (True, False, False, False), seqlen_q, seqlen_k, device)
            if vectors is not None:
                return ResolvedMask(None, 0, *vectors)
        end = (columns(seqlen_k, device) // size + 1) * size
        return ResolvedMask(None, 0, rows_of(end, seqlen_q, seqlen_k), None, None, None)


class Padding(Mask):
    """Hides padded keys from every query; padded queries still see the real keys, as with SDPA's key padding.

    Args:
        mask_2d_or_lengths: a mask (batch, seqlen_k), bool or numeric, nonzero = real token, on any side
            padded; or the number of real keys per batch entry, which come first (int, list, or tensor
            (batch,)).
    """

    _fields = ("lengths", "mask_2d")

    def __init__(self, mask_2d_or_lengths: Any) -> None:
        value = mask_2d_or_lengths
        takes = "a mask (batch, seqlen_k), nonzero = real, or lengths (batch,)"
        self.lengths: Tensor | None = None
        self.mask_2d: Tensor | None = None
        if isinstance(value, Tensor) and value.ndim == 2:
            if value.dtype not in (torch.bool, *FLOATS, *INTEGERS):
                raise TypeError(f"mask_2d_or_lengths takes {takes}; got {describe(value)}")
            self.mask_2d = with_values("mask_2d_or_lengths", strided("mask_2d_or_lengths", value))
            return
        if isinstance(value, Tensor) and value.is_floating_point():
            raise TypeError(f"mask_2d_or_lengths takes {takes}; got {describe(value)}")
        nested = isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], (list, tuple, Tensor))
        if nested and len({len(row) for row in value}) > 1:
            raise ValueError(f"mask_2d_or_lengths: rows of a mask differ in length: {sorted({len(row) for row in value})}")
        rows = per_batch_rows("mask_2d_or_lengths", value, takes, allow_bool=True)
        if nested or rows.dtype == torch.bool or rows.shape[0] > 1:
            self.mask_2d = rows
        else:
            check_values("mask_2d_or_lengths", rows, minimum=0, what="lengths of at least 0")
            self.lengths = rows

    def _extent(self) -> int | None:
        return None if self.mask_2d is None else self.mask_2d.shape[1]

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        if self.mask_2d is not None:
            self._check_length("the mask", self.mask_2d.shape[1], seqlen_k)
            real = self.mask_2d.to(device) != 0
        else:
            assert self.lengths is not None
            if readable(self.lengths) and self.lengths.numel() and int(self.lengths.max()) > seqlen_k:
                raise ValueError(f"Padding: a length is {int(self.lengths.max())}, but there are only {seqlen_k} keys")
            real = columns(seqlen_k, device) < scalar_or_column(self.lengths.reshape(-1, 1), device)
        lts = torch.where(real, seqlen_q, 0).to(torch.int32)
        return ResolvedMask(None, None, lts.unsqueeze(1), None, None, None)

    def __repr__(self) -> str:
        return f"Padding({summary(self.lengths if self.mask_2d is None else self.mask_2d)})"
