"""Paddle's flashmask_attention bounds of any mask."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.masks import intervals as iv
from warploom.masks.intervals import Resolvable, finish
from warploom.masks.united import united


def startend(mask: Resolvable, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, bool]:
    """See `Mask.to_startend_row_indices`."""
    resolved = mask.resolve(seqlen_q, seqlen_k)
    hidden = iv.intervals_of(resolved)
    causal = resolved.right == 0
    if causal:  # the left limit, if any, becomes the end of each column's rows
        within = iv.merge_by_structure(hidden + iv.band_as_intervals(resolved.left, None, seqlen_q, seqlen_k, mask.device))
        causal = len(within) <= 1 and all(start is not None for start, _ in within)
    if not causal:
        within = hidden + iv.band_as_intervals(resolved.left, resolved.right, seqlen_q, seqlen_k, mask.device)
    folded = finish(united(mask, (None, None), within, seqlen_q, seqlen_k))
    shape = next((t.shape for t in folded.vectors if t is not None), torch.Size((1, 1, seqlen_k)))

    def rows(vector: Tensor | None, default: int) -> Tensor:
        return torch.full(shape, default, dtype=torch.int32, device=mask.device) if vector is None else vector

    lts = rows(folded.lts, seqlen_q)
    if causal:
        return torch.stack([lts] if folded.lte is None else [lts, folded.lte], dim=-1), True
    if folded.lte is None and folded.uts is None:
        return torch.stack([lts, rows(folded.ute, 0)], dim=-1), False
    return torch.stack([lts, rows(folded.lte, seqlen_q), rows(folded.uts, 0), rows(folded.ute, 0)], dim=-1), False
