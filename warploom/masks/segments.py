"""The row blocks that a block of columns visits, as runs."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.runtime.arguments import keeps_nothing

LTS_MIN, LTS_MAX, LTE_MIN, LTE_MAX, UTS_MIN, UTS_MAX, UTE_MIN, UTE_MAX = range(8)  # of what `column_bounds` gives


def whole_blocks(row: Tensor, seqlen_q: int, block_m: int) -> Tensor:
    """Row blocks that end at or before `row`; the last one ends at seqlen_q."""
    count = (seqlen_q + block_m - 1) // block_m
    return torch.where(row >= seqlen_q, count, row.clamp(min=0).div(block_m, rounding_mode="floor")).to(torch.int32)


def begun_blocks(row: Tensor, seqlen_q: int, block_m: int) -> Tensor:
    """Row blocks that begin before `row`."""
    return (row.clamp(0, seqlen_q) + (block_m - 1)).div(block_m, rounding_mode="floor").to(torch.int32)


def row_segments(
    bounds: Tensor,
    edges: Tensor,
    left: int | None,
    right: int | None,
    seqlen_q: int,
    seqlen_k: int,
    block_m: int = 1,
) -> Tensor:
    """For each block of columns, at most three runs of row blocks that hold every tile not hidden.

    The backward pass walks these runs; they agree with `classify_row_block` tile for tile.

    Args:
        bounds, edges, left, right, seqlen_q, seqlen_k: as for `classify_row_block`.
        block_m: rows per row block.

    Returns:
        int32 (batch|1, heads|1, n_blocks, 3, 2): first and past-the-last row block of each run, in order and
        disjoint; an unused run has both equal.
    """
    lts_max, lte_min, uts_max, ute_min = (bounds[..., i] for i in (LTS_MAX, LTE_MIN, UTS_MAX, UTE_MIN))
    offset = seqlen_k - seqlen_q
    rows = (seqlen_q, block_m)

    begin, end = torch.zeros_like(lts_max), torch.full_like(lts_max, (seqlen_q + block_m - 1) // block_m)
    if right is not None:  # up to the first row that some column shows
        begin = whole_blocks(edges[:-1] - right - offset, *rows).expand_as(begin)
    if left is not None:
        end = begun_blocks(edges[1:] + left - offset, *rows).expand_as(end)
    if keeps_nothing(left, right):
        end = begin
    end = torch.maximum(begin, end)

    # Rows hidden in every column: two runs, or one where the intervals meet from both sides.
    meet = (ute_min >= lts_max) & (lte_min >= uts_max)
    first_start = torch.where(meet, torch.minimum(lts_max, uts_max), uts_max)
    first_stop = torch.where(meet, torch.maximum(lte_min, ute_min), ute_min)
    runs = []
    for start, stop in ((first_start, first_stop), (lts_max, torch.where(meet, 0, lte_min))):
        a = torch.maximum(begun_blocks(start, *rows), begin)
        b = torch.minimum(whole_blocks(stop, *rows), end)
        runs.append((torch.where(a < b, a, begin), torch.where(a < b, b, begin)))
    (a0, b0), (a1, b1) = runs
    swap = b1 < b0  # disjoint, so ends order them; an unused one comes first
    a0, a1 = torch.where(swap, a1, a0), torch.where(swap, a0, a1)
    b0, b1 = torch.where(swap, b1, b0), torch.where(swap, b0, b1)
    return torch.stack([begin, a0, b0, a1, b1, end], dim=-1).unflatten(-1, (3, 2))
