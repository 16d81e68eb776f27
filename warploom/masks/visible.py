"""The element test that defines a mask: which query rows see which key columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from warploom.masks.intervals import ResolvedMask


def visible(mask: ResolvedMask, rows: Tensor, cols: Tensor, offset: int) -> Tensor:
    """True where key ``cols[n]`` is visible to query ``rows[m]``.

    Args:
        mask: the band and column vectors of one call.
        rows: int64 (m,), query indices; (batch, 1, m) where batch entries have rows of their own.
        cols: int64 (n,), key indices.
        offset: seqlen_k - seqlen_q, so that query i sits at key position p = i + offset.

    Returns:
        bool (batch|1, heads|1, m, n).
    """
    i = rows[..., None]
    distance = i + offset - cols
    seen = torch.ones_like(distance, dtype=torch.bool)
    if mask.left is not None:
        seen = seen & (distance <= mask.left)
    if mask.right is not None:
        seen = seen & (distance >= -mask.right)
    if rows.ndim == 1:
        seen = seen[None, None]
    if mask.lts is not None:
        hidden = i >= mask.lts[..., None, cols]
        if mask.lte is not None:
            hidden = hidden & (i < mask.lte[..., None, cols])
        seen = seen & ~hidden
    if mask.ute is not None:
        hidden = i < mask.ute[..., None, cols]
        if mask.uts is not None:
            hidden = hidden & (i >= mask.uts[..., None, cols])
        seen = seen & ~hidden
    return seen
