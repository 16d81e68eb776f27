"""How many tiles of a mask are hidden, partial or full, a block of columns at a time: no tile is looked at.

The tests of `classify_row_block` compare a tile's first row, or its end, with a bound of its block of columns. What passes one
is a run of row blocks, so the counts of a block of columns are differences of bounds, however many tiles it has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.masks.segments import begun_blocks, row_segments, whole_blocks

_BLOCKS_AT_ONCE = 1 << 16  # blocks of columns counted in one go: some MiB, however long the sequence


def count_tiles(
    bounds: Tensor,
    edges: Tensor,
    left: int | None,
    right: int | None,
    seqlen_q: int,
    seqlen_k: int,
    block_m: int,
) -> Tensor:
    """Tiles of each class, as `classify_row_block` finds them for each row block.

    Args:
        bounds: from `column_bounds`, (batch|1, heads|1, n_blocks, 8).
        edges: column edges (n_blocks + 1,).
        left, right: the band.
        seqlen_q, seqlen_k: lengths.
        block_m: rows per row block.

    Returns:
        int64 (3, batch|1, heads|1): hidden, partial, full.
    """
    blocks = bounds.shape[2]
    step = max(1, _BLOCKS_AT_ONCE // max(1, bounds.shape[0] * bounds.shape[1]))
    shown = torch.zeros(bounds.shape[:2], dtype=torch.int64, device=bounds.device)
    full = torch.zeros_like(shown)
    for at in range(0, blocks, step):
        part, ends = bounds[:, :, at : at + step], edges[at : at + step + 1]
        runs = row_segments(part, ends, left, right, seqlen_q, seqlen_k, block_m)
        shown += (runs[..., 1] - runs[..., 0]).sum((2, 3))
        full += _full(part, ends, left, right, seqlen_q, seqlen_k, block_m).sum(2)
    every = blocks * ((seqlen_q + block_m - 1) // block_m)
    return torch.stack([every - shown, shown - full, full])


def _full(
    bounds: Tensor, edges: Tensor, left: int | None, right: int | None, seqlen_q: int, seqlen_k: int, block_m: int
) -> Tensor:
    """Full tiles of each block of columns: those that the band contains, less those that an interval touches."""
    rows = (seqlen_q, block_m)
    lts_min, _, _, lte_max, uts_min, _, _, ute_max = bounds.unbind(-1)
    offset = seqlen_k - seqlen_q
    begin, end = torch.zeros_like(lts_min), whole_blocks(torch.full_like(lts_min, seqlen_q), *rows)
    if left is not None:  # from the first row that sees no further back than the block's first column
        end = whole_blocks(edges[:-1] + (left - offset + 1), *rows).expand_as(begin)
    if right is not None:
        begin = begun_blocks(edges[1:] - (right + offset + 1), *rows).expand_as(begin)
    touched = [(whole_blocks(a, *rows), begun_blocks(b, *rows)) for a, b in ((lts_min, lte_max), (uts_min, ute_max))]
    (a0, b0), (a1, b1) = [(torch.maximum(a, begin), torch.minimum(b, end)) for a, b in touched]
    either = _length(a0, b0) + _length(a1, b1) - _length(torch.maximum(a0, a1), torch.minimum(b0, b1))
    return _length(begin, end) - either


def _length(begin: Tensor, end: Tensor) -> Tensor:
    return (end - begin).clamp(min=0)
