"""The column mask of a dense one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import describe, strided, with_values
from warploom.masks.intervals import ResolvedMask
from warploom.masks.scan import Span, scan


def from_dense(visible: Any) -> ResolvedMask:
    """Band and vectors of a bool mask, with as few vectors as do; ValueError where none do."""
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        raise TypeError(f"from_dense takes a bool tensor, True = visible, got {describe(visible)}")
    with_values("from_dense's mask", strided("from_dense's mask", visible))
    if visible.ndim == 2:
        visible = visible[None, None]
    if visible.ndim != 4:
        raise ValueError(
            f"from_dense takes shape (seqlen_q, seqlen_k) or (batch|1, heads|1, seqlen_q, seqlen_k), got {tuple(visible.shape)}"
        )

    def block(b: Span, h: Span, rows: Span, columns: Span) -> Tensor:
        return visible[slice(*b), slice(*h), slice(*rows), slice(*columns)]

    batch, heads, seqlen_q, seqlen_k = visible.shape
    return scan("this matrix", block, (batch, heads, seqlen_q, seqlen_k), visible.device)
