"""Bounds of a packed column mask by the definition: each sequence's own, where `warploom.attention.bounds` says they stand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warploom.attention.bounds import BLOCK, COARSE_BLOCK
from warploom.masks.intervals import ResolvedMask
from warploom.masks.tiles import column_bounds


def packed_bounds(
    mask: ResolvedMask, starts_q: Sequence[int], starts_k: Sequence[int], used: Sequence[int] | None = None, fill: int = 0
) -> tuple[Tensor, Tensor]:
    """Bounds int32 (1, heads|1, blocks, 8), ``fill`` in those that nobody may read, and bool (blocks,): which are written.

    Args:
        mask: packed vectors, int32 (1, heads|1, total_k), and the band.
        starts_q, starts_k: as cu_seqlens_q and cu_seqlens_k have them.
        used: keys of each sequence that count; None: all.
    """
    some = next(t for t in mask.vectors if t is not None)
    heads, total, sequences = some.shape[1], some.shape[2], len(starts_q) - 1
    fine = total // BLOCK + sequences
    found = some.new_full((1, heads, fine + total // COARSE_BLOCK + sequences, 8), fill)
    written = torch.zeros(found.shape[2], dtype=torch.bool)
    for n in range(sequences):
        queries, first, last = starts_q[n + 1] - starts_q[n], starts_k[n], starts_k[n + 1]
        keys = last - first if used is None else used[n]
        own = ResolvedMask(*mask[:2], *[None if t is None else t[..., first : first + keys].contiguous() for t in mask.vectors])
        for block, behind in ((BLOCK, 0), (COARSE_BLOCK, fine)):
            at = behind + first // block + n
            blocks = -(-keys // block)
            assert not written[at : at + blocks].any()
            written[at : at + blocks] = True
            if keys:
                found[:, :, at : at + blocks] = column_bounds(own, queries, keys, block)
    return found, written
