"""Column intervals of a dense mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import describe, strided, with_values


def column_intervals(visible: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, bool]:
    """(lts, lte, uts, ute, causal) of a bool mask, with as few vectors as do; ValueError where none do."""
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        raise TypeError(f"from_dense takes a bool tensor, True = visible, got {describe(visible)}")
    with_values("from_dense's mask", strided("from_dense's mask", visible))
    if visible.ndim == 2:
        visible = visible[None, None]
    if visible.ndim != 4:
        raise ValueError(
            f"from_dense takes shape (seqlen_q, seqlen_k) or (batch|1, heads|1, seqlen_q, seqlen_k), got {tuple(visible.shape)}"
        )
    batch, heads, seqlen_q, seqlen_k = visible.shape
    if visible.numel() == 0:
        return (
            torch.zeros(batch, heads, seqlen_k, dtype=torch.int32, device=visible.device),
            None,
            None,
            None,
            False,
        )
    row = torch.arange(seqlen_q, device=visible.device).view(-1, 1)
    below = row + (seqlen_k - seqlen_q) >= torch.arange(seqlen_k, device=visible.device)
    causal = not bool((visible & ~below).any())
    hidden = ~visible & below if causal else ~visible  # rows above a causal band need no interval
    edge = torch.zeros_like(hidden[:, :, :1])
    begins = hidden & ~torch.cat([edge, hidden[:, :, :-1]], dim=2)
    ends = hidden & ~torch.cat([hidden[:, :, 1:], edge], dim=2)
    runs = begins.sum(2)
    if bool((runs > 2).any()):
        b, h, j = (runs > 2).nonzero()[0].tolist()
        raise ValueError(
            f"not a column mask: column {j} (batch {b}, head {h}) hides {int(runs[b, h, j])} runs of rows, "
            "and a column has two intervals"
        )

    def first(flags: Tensor) -> Tensor:
        return flags.to(torch.uint8).argmax(2).to(torch.int32)

    def last(flags: Tensor) -> Tensor:
        return seqlen_q - 1 - first(flags.flip(2))

    some, two = runs > 0, runs > 1
    start, end = torch.where(some, first(begins), seqlen_q), torch.where(some, first(ends) + 1, seqlen_q)
    start2, end2 = torch.where(two, last(begins), seqlen_q), torch.where(two, last(ends) + 1, seqlen_q)
    if not bool(two.any()):
        to_end = end == seqlen_q
        if bool(to_end.all()):
            return start, None, None, None, causal
        if causal:
            return start, end, None, None, True
    elif causal:
        return start2, end2, start, end, True
    upper = some & (start == 0)  # the first run is the upper interval where it starts at row 0
    lower_start = torch.where(upper, start2, start)
    lower_end = torch.where(upper, end2, end)
    if not bool((two & ~upper).any()) and bool((lower_end == seqlen_q).all()):
        return lower_start, None, None, torch.where(upper, end, 0), False
    return start2, end2, start, end, False
