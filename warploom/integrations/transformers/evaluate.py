"""Column bounds of a mask function that is only known by what it returns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # 16 MiB of booleans at a time, whatever the sequence length


def reduce_rows(
    rows: Callable[[int, int], Tensor], batch: int, seqlen_q: int, seqlen_k: int, device: torch.device | str
) -> Tensor:
    """Reduce a dense mask, read in chunks of rows, to column bounds, exactly.

    Args:
        rows: `rows(low, high)` is the mask of those query rows, bool `(batch | 1, 1, high - low, seqlen_k)`,
            True = visible.

    Returns:
        int32 `(batch, 1, seqlen_k, 4)`. Memory beyond one chunk is O(batch · seqlen_k).

    Raises:
        ValueError: a key is hidden from three or more separate runs of rows, which column bounds cannot say.
    """
    compiling = torch.compiler.is_compiling()
    step = seqlen_q if compiling else max(1, CHUNK_ELEMENTS // max(1, batch * seqlen_k))
    count = torch.zeros(batch, seqlen_k, dtype=torch.int32, device=device)
    before = torch.zeros(batch, 1, seqlen_k, dtype=torch.bool, device=device)
    first = [torch.full_like(count, seqlen_q) for _ in range(2)]
    last = [torch.zeros_like(count) for _ in range(2)]
    for low in range(0, seqlen_q, step):
        high = min(low + step, seqlen_q)
        hidden = ~rows(low, high)[:, 0].expand(batch, high - low, seqlen_k)
        opens = hidden & ~torch.cat([before, hidden[:, :-1]], 1)
        ordinal = count[:, None] + opens.cumsum(1, dtype=torch.int32)
        index = torch.arange(low, high, dtype=torch.int32, device=device)[None, :, None]
        for k in range(2):
            run = hidden & (ordinal == k + 1)
            first[k] = torch.minimum(first[k], torch.where(run, index, seqlen_q).amin(1))
            last[k] = torch.maximum(last[k], torch.where(run, index + 1, 0).amax(1))
        count, before = ordinal[:, -1], hidden[:, -1:]
    _refuse_third_run(count, compiling)
    # Of two runs the earlier is the upper interval; a single run is the lower one unless it starts at row 0.
    swap = (count <= 1) & (first[0] > 0)
    lower_start, lower_end = torch.where(swap, first[0], first[1]), torch.where(swap, last[0], last[1])
    upper_start, upper_end = torch.where(swap, first[1], first[0]), torch.where(swap, last[1], last[0])
    # A run that is not there was left as [seqlen_q, 0).
    lower_start, upper_start = torch.minimum(lower_start, lower_end), torch.minimum(upper_start, upper_end)
    return torch.stack([lower_start, lower_end, upper_start, upper_end]).unsqueeze(2).permute(1, 2, 3, 0)


def _refuse_third_run(count: Tensor, compiling: bool) -> None:
    if compiling:
        message = "a key of this mask is hidden from three or more separate runs of query rows"
        torch._assert_async((count <= 2).all(), message)
    elif count.numel() and bool((count > 2).any()):
        batch, key = (count > 2).nonzero()[0].tolist()
        raise ValueError(
            f"mask_function: key {key} of batch row {batch} is hidden from {int(count[batch, key])} separate "
            "runs of query rows, and column bounds hold at most two; use attn_implementation='sdpa' for this "
            "mask"
        )
