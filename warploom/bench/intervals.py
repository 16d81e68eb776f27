"""Column masks as row intervals: for each query the runs of keys it sees, the form that `cudnn.flex_attention` takes.

Its `mask_func` is int32 (1 | heads_q, n, batch * seqlen_q), n odd. The endpoints F of a row, in order and within
[0, seqlen_k], show it the keys [0, F0) ∪ [F1, F2) ∪ [F3, F4) ∪ …; keys count within their batch entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.bench.peers import NotHere
from warploom.masks.intervals import ResolvedMask
from warploom.masks.visible import visible

# Intervals of a row at the most. Nothing bounds n there, but every endpoint of a row is read for each of its tiles, which is
# made for a few; a row of random eviction has thousands.
MOST = 16
_CELLS = 1 << 25  # elements of the dense mask held at once


def row_intervals(mask: ResolvedMask, seqlen_q: int, seqlen_k: int, batch: int, heads_q: int, device: torch.device) -> Tensor:
    """The mask's `mask_func`, exactly.

    Args:
        mask: resolved for these lengths; its vectors have batch or 1 and heads_q, a divisor of it, or 1 as leading sizes.
        batch, heads_q: of q.

    Returns:
        int32 (1 | heads_q, n, batch * seqlen_q), contiguous, on the device.

    Raises:
        NotHere: some row needs more than `MOST` intervals.
    """
    mask = ResolvedMask(mask.left, mask.right, *[None if t is None else t.to(device) for t in mask.vectors])
    some = next((t for t in mask.vectors if t is not None), None)
    lead = (1, 1) if some is None else tuple(some.shape[:2])
    cols = torch.arange(seqlen_k, device=device)
    step = max(1, _CELLS // max(1, lead[0] * lead[1] * seqlen_k))
    parts = []
    for at in range(0, seqlen_q, step):
        rows = torch.arange(at, min(at + step, seqlen_q), device=device)
        parts.append(_of_rows(visible(mask, rows, cols, seqlen_k - seqlen_q).expand(*lead, -1, -1)))
    slots = max((begin.shape[-1] for begin, _ in parts), default=1)
    begins, ends = (torch.cat([_widened(each[side], slots) for each in parts], 2) for side in range(2))
    ends = ends.cummax(-1).values  # a slot that is not used ends, and begins, where the one before it ends
    begins = torch.where(begins < 0, ends, begins)
    endpoints = torch.stack([begins, ends], -1).flatten(-2)[..., 1:]  # the first interval begins at 0
    endpoints = endpoints.expand(batch, -1, -1, -1).permute(1, 3, 0, 2)
    if lead[1] not in (1, heads_q):
        endpoints = endpoints.repeat_interleave(heads_q // lead[1], 0)
    return endpoints.reshape(endpoints.shape[0], endpoints.shape[1], batch * seqlen_q).int().contiguous()


def _of_rows(seen: Tensor) -> tuple[Tensor, Tensor]:
    """First and past-the-last keys of each row's intervals: int64 (batch, heads, rows, slots), of unused slots -1 and 0."""
    length = seen.shape[-1]
    edge = torch.zeros_like(seen[..., :1])
    starts = seen & ~torch.cat([edge, seen[..., :-1]], -1)
    stops = seen & ~torch.cat([seen[..., 1:], edge], -1)
    counts = starts.sum(-1)
    late = counts.gt(0) & ~seen[..., 0] if length else counts.gt(0)  # the slot that begins at key 0 stays empty
    used = int((counts + late).max()) if counts.numel() else 0
    if used > MOST:
        raise NotHere(f"a query sees {int(counts.max())} separate runs of keys, its row intervals are made for at most {MOST}")
    begin = torch.full((*counts.shape, max(used, 1)), -1, dtype=torch.int64, device=seen.device)
    end = torch.zeros_like(begin)
    begin[..., 0] = 0
    of_row = starts.flatten(0, 2).nonzero()  # row by row, ascending
    each = counts.flatten()
    slot = torch.arange(len(of_row), device=seen.device) - (each.cumsum(0) - each).repeat_interleave(each)
    at = of_row[:, 0], slot + late.flatten()[of_row[:, 0]]
    begin.view(-1, begin.shape[-1])[at] = of_row[:, 1]
    end.view(-1, end.shape[-1])[at] = stops.flatten(0, 2).nonzero()[:, 1] + 1
    return begin, end


def _widened(slots: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(slots, (0, count - slots.shape[-1]), value=-1)
