"""From key positions to rows.

Builders work in key coordinates, where query i sits at p = i + seqlen_k - seqlen_q.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import readable, saturated


def columns(seqlen_k: int, device: torch.device) -> Tensor:
    """Key positions, int32 (1, seqlen_k)."""
    return torch.arange(seqlen_k, dtype=torch.int32, device=device).unsqueeze(0)


def rows_of(position: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The row whose query sits at `position` (batch|1, seqlen_k), within [0, seqlen_q]: int32 (batch|1, 1, seqlen_k)."""
    return (position - (seqlen_k - seqlen_q)).clamp(0, seqlen_q).to(torch.int32).unsqueeze(1)


def scalar_or_column(value: Any, device: torch.device) -> Any:
    """An int within int32, or a per-batch tensor (batch, 1) as int32 on `device`; no position lies past these limits."""
    if isinstance(value, Tensor):
        return saturated(value.to(device))
    return min(value, 2**31 - 1) if type(value) is int else value


def cumulative(lengths: Tensor) -> Tensor:
    """Start of each document and the end of the last, int32 (batch, n + 1)."""
    # Sums that pass int32 stay at its largest, past every key.
    total = saturated(saturated(lengths).cumsum(1, dtype=torch.int64))
    return torch.cat(
        [torch.zeros_like(total[:, :1]) if lengths.shape[1] else total.new_zeros(lengths.shape[0], 1), total],
        dim=1,
    )


def locate(bounds: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The document of every position, from non-decreasing bounds (batch, n + 1) int32.

    Returns int64 index in [0, n], bool inside, int32 start and end, each (batch, seqlen_k); outside every
    document inside is False and the others have no meaning.
    """
    count = bounds.shape[1] - 1
    position = columns(seqlen_k, bounds.device).expand(bounds.shape[0], seqlen_k)
    ends = bounds[:, 1:].to(torch.int64)
    if bounds.device.type == "cpu":  # counting takes a quarter of the time of searching
        ended = ends.new_zeros(bounds.shape[0], seqlen_k + 1)
        ended.scatter_add_(1, ends.clamp(0, seqlen_k), torch.ones_like(ends))
        index = ended[:, :seqlen_k].cumsum(1)
    else:
        # Searched in another dtype: of a view Inductor knows no strides up to torch 2.11, and a clone it leaves out.
        index = torch.searchsorted(ends, position.to(torch.int64), right=True)
    start = bounds.gather(1, index)
    end = bounds.gather(1, (index + 1).clamp(max=count))
    return index, (index < count) & (position >= bounds[:, :1]), start, end


def largest(t: Tensor) -> int:
    """Of a value a batch entry; 0 of none."""
    return int(t.max()) if t.numel() else 0


def batch_of(one: Tensor, other: Tensor) -> int:
    """Batch entries of two that have a row for each, or one for all."""
    return other.shape[0] if one.shape[0] == 1 else one.shape[0]


def check_total(name: str, lengths: Tensor, seqlen_k: int) -> None:
    """ValueError if some batch entry's lengths exceed the keys, where contents may be read."""
    if not readable(lengths) or lengths.numel() == 0:
        return
    totals = saturated(lengths).sum(1)
    if int(totals.max()) > seqlen_k:
        raise ValueError(
            f"{name} sum to {int(totals.max())} in batch entry {int(totals.argmax())}, but there are only {seqlen_k} keys"
        )
