"""Column bounds of a mask function that is only known by what it returns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warploom.masks.runs import Runs

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
    runs = Runs((batch, seqlen_k), seqlen_q, keep=2, device=device)
    for low in range(0, seqlen_q, step):
        high = min(low + step, seqlen_q)
        runs.add(low, rows(low, high)[:, 0].expand(batch, high - low, seqlen_k))
    _refuse_third_run(runs.count, compiling)
    # Of two runs the earlier is the upper interval; a single run is the lower one unless it starts at row 0.
    (start, end), (start2, end2) = runs.kept
    lower = (runs.count <= 1) & (start > 0)
    bounds = [
        torch.where(lower, start, start2),
        torch.where(lower, end, end2),
        torch.where(lower, start2, start),
        torch.where(lower, end2, end),
    ]
    return torch.stack(bounds).unsqueeze(2).permute(1, 2, 3, 0)


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
