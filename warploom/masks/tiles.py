"""Which tiles of a column mask are hidden, partial or full, in O(seqlen_k) memory.

There are two steps. `column_bounds` reduces each vector to its minimum and maximum over a block of columns, empty
intervals put aside first. `classify_row_block` then compares rows [m0, m1) with these eight numbers. With lts_max
for the greatest lower start in the block and so on, a tile is

- hidden, if one interval covers it in every column: lts_max <= m0 and m1 <= lte_min, or the same with uts and ute.
  Or if both cover it together: uts_max <= m0 and ute_min >= lts_max and m1 <= lte_min, or the pairs swapped; the
  middle condition makes the hull of the two sound. Or if the band misses it.
- full, if no interval touches it, m0 >= end_max or m1 <= start_min, and the band contains it.
- partial otherwise.

This is sound: a tile called hidden has no visible element, and a full one has no hidden element. A partial tile may
turn out to be either. Lists of tiles are never kept: they would be O(seqlen^2 / tile^2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import integer
from warploom.masks.band_counts import count_band
from warploom.masks.intervals import ResolvedMask, band_rows
from warploom.masks.segments import row_segments
from warploom.masks.tile_counts import count_tiles

HIDDEN, PARTIAL, FULL = 0, 1, 2
_LARGEST = 1 << 30
_FAR = 1 << 40  # stands for an unlimited band
_CELLS_AT_ONCE = 1 << 18  # tiles classified in one go: some MiB, however long the sequence


def block_edges(length: int, block: int | Tensor, device: Any = None) -> Tensor:
    """Edges of blocks of `block`, the last one cut at `length`: int64 (n_blocks + 1,).

    A tensor of edges passes through.
    """
    if isinstance(block, Tensor):
        return block.to(device=device, dtype=torch.int64)
    count = (length + block - 1) // block
    return (torch.arange(count + 1, device=device) * block).clamp(max=length)


def column_bounds(mask: ResolvedMask, seqlen_q: int, seqlen_k: int, block_n: int | Tensor, device: Any = None) -> Tensor:
    """Minimum and maximum of each vector over each block of columns.

    Args:
        mask: the resolved mask.
        seqlen_q, seqlen_k: lengths.
        block_n: columns per block, or int edges (n_blocks + 1,) from 0 to seqlen_k, increasing.
        device: where the result of a mask without vectors lives.

    Returns:
        int32 (batch|1, heads|1, n_blocks, 8): lts min, max, lte min, max, uts min, max, ute min, max, of the
        intervals as `normalised` gives them. Without vectors all blocks are one, expanded.
    """
    if not any([t is not None for t in mask.vectors]):
        count = block_n.shape[0] - 1 if isinstance(block_n, Tensor) else (seqlen_k + block_n - 1) // block_n
        absent = torch.zeros(2, 2, 2, dtype=torch.int32, device=device)
        absent[:, 0] = seqlen_q
        return absent.reshape(1, 1, 1, 8).expand(1, 1, count, 8)
    vectors = normalised(mask, seqlen_q, seqlen_k, device)
    lead, device = vectors.shape[:3], vectors.device
    if isinstance(block_n, Tensor):
        count = block_n.shape[0] - 1
        inner = block_n[1:].to(device=device, dtype=torch.int64)
        block = torch.searchsorted(inner, torch.arange(seqlen_k, device=device), right=True).expand_as(vectors)
        low = vectors.new_full((*lead, count), seqlen_q).scatter_reduce(3, block, vectors, "amin")
        high = vectors.new_zeros((*lead, count)).scatter_reduce(3, block, vectors, "amax")
    else:
        count = (seqlen_k + block_n - 1) // block_n
        if seqlen_k % block_n:
            fill = vectors[..., -1:].expand(*lead, count * block_n - seqlen_k)
            vectors = torch.cat([vectors, fill], dim=3)
        blocks = vectors.reshape(*lead, count, block_n)
        low, high = blocks.aminmax(dim=4) if count else (vectors, vectors)
    return torch.stack([low, high], dim=3).flatten(2, 3).transpose(2, 3).contiguous()


def normalised(mask: ResolvedMask, seqlen_q: int, seqlen_k: int, device: Any = None) -> Tensor:
    """The vectors in the form whose block minima and maxima say most; with the band they hide the same elements.

    An interval that is absent or empty starts at seqlen_q and ends at 0, so that it neither covers nor touches a tile.
    One that reaches rows the band hides anyway goes on to the edge. A column that shows nothing at all is hidden by
    both intervals, so that it never spoils what the other columns of its block have in common.

    Returns:
        int32 (batch|1, heads|1, 4, seqlen_k): lts, lte, uts, ute.
    """
    present = [t for t in mask.vectors if t is not None]
    if present:
        device, shape = present[0].device, present[0].shape
    else:
        shape = torch.Size((1, 1, seqlen_k))
    empty_start = torch.full(shape, seqlen_q, dtype=torch.int32, device=device)
    empty_end = torch.zeros_like(empty_start)
    if not present:
        return torch.stack([empty_start, empty_end, empty_start, empty_end], dim=2)
    column = torch.arange(seqlen_k, dtype=torch.int32, device=device).view(1, 1, -1)
    first, last = band_rows(mask.left, mask.right, seqlen_q, seqlen_k, column)

    def interval(start: Tensor | None, end: Tensor | None, exists: bool) -> tuple[Tensor, Tensor]:
        if not exists:
            return empty_start, empty_end
        start = empty_end if start is None else start
        end = empty_start if end is None else end
        empty = (start >= end) | (start >= seqlen_q) | (end <= 0)
        start = torch.where(start <= first, 0, start)
        end = torch.where(end >= last, seqlen_q, end)
        return torch.where(empty, seqlen_q, start), torch.where(empty, 0, end)

    lts, lte = interval(mask.lts, mask.lte, mask.lts is not None)
    uts, ute = interval(mask.uts, mask.ute, mask.ute is not None)
    hidden = (first >= last) | ((lts == 0) & (lte == seqlen_q)) | ((uts == 0) & (ute == seqlen_q))
    hidden = hidden | ((uts == 0) & (ute >= lts) & (lte == seqlen_q))
    hidden = hidden | ((lts == 0) & (lte >= uts) & (ute == seqlen_q))
    lts, uts = lts.masked_fill(hidden, 0), uts.masked_fill(hidden, 0)
    lte, ute = lte.masked_fill(hidden, seqlen_q), ute.masked_fill(hidden, seqlen_q)
    return torch.stack([lts, lte, uts, ute], dim=2)


def classify_row_block(
    bounds: Tensor,
    edges: Tensor,
    m0: int | Tensor,
    m1: int | Tensor,
    left: int | None,
    right: int | None,
    seqlen_q: int,
    seqlen_k: int,
) -> Tensor:
    """Classes of the tiles of rows [m0, m1) against every block of columns.

    Args:
        bounds: from `column_bounds`, (batch|1, heads|1, n_blocks, 8).
        edges: column edges (n_blocks + 1,), as `block_edges` makes them.
        m0, m1: first and past-the-last row, m0 < m1 <= seqlen_q; ints, or tensors (n_row_blocks, 1) for
            several row blocks.
        left, right: the band.
        seqlen_q, seqlen_k: lengths.

    Returns:
        int8 (batch|1, heads|1, n_blocks), or (batch|1, heads|1, n_row_blocks, n_blocks) where m0 is a tensor:
        HIDDEN, PARTIAL or FULL (0, 1, 2).
    """
    if isinstance(m0, Tensor):
        bounds = bounds.unsqueeze(2)
    lts_min, lts_max, lte_min, lte_max, uts_min, uts_max, ute_min, ute_max = bounds.unbind(-1)
    hidden = ((lts_max <= m0) & (lte_min >= m1)) | ((uts_max <= m0) & (ute_min >= m1))
    hidden = hidden | ((uts_max <= m0) & (ute_min >= lts_max) & (lte_min >= m1))
    hidden = hidden | ((lts_max <= m0) & (lte_min >= uts_max) & (ute_min >= m1))
    touched = ((lte_max > m0) & (lts_min < m1)) | ((ute_max > m0) & (uts_min < m1))
    offset = seqlen_k - seqlen_q
    nearest = m0 + offset - (edges[1:] - 1)  # least and greatest p - j in the tile; every value between occurs
    farthest = m1 - 1 + offset - edges[:-1]
    low, high = -_FAR if right is None else -right, _FAR if left is None else left
    hidden = hidden | (torch.clamp(nearest, min=low) > torch.clamp(farthest, max=high))
    touched = touched | (nearest < low) | (farthest > high)
    return torch.where(hidden, HIDDEN, torch.where(touched, PARTIAL, FULL)).to(torch.int8)


@dataclass(frozen=True)
class TileClasses:
    """Tiles of one mask, counted. Made by `Mask.tiles()`.

    Attributes:
        block_m, block_n: queries and keys per tile.
        seqlen_q, seqlen_k: lengths.
        left, right: the band.
        bounds: int32 (batch|1, heads|1, n_blocks, 8), from `column_bounds`.
        hidden, partial, full: int64 (batch|1, heads|1), tiles of each class.
    """

    block_m: int
    block_n: int
    seqlen_q: int
    seqlen_k: int
    left: int | None
    right: int | None
    bounds: Tensor = field(repr=False)
    hidden: Tensor
    partial: Tensor
    full: Tensor

    @classmethod
    def of(
        cls, mask: ResolvedMask, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int, device: Any = None
    ) -> TileClasses:
        """Classifies the tiles of a resolved mask. Reads nothing back from the device."""
        block_m, block_n = integer("block_m", block_m, minimum=1), integer("block_n", block_n, minimum=1)
        block_m, block_n = min(block_m, _LARGEST), min(block_n, _LARGEST)  # one tile either way
        bounds = column_bounds(mask, seqlen_q, seqlen_k, min(block_n, max(seqlen_k, 1)), device)
        band = (mask.left, mask.right, seqlen_q, seqlen_k)
        counts: Iterable[Tensor]
        if any([t is not None for t in mask.vectors]):
            counts = count_tiles(bounds, block_edges(seqlen_k, block_n, bounds.device), *band, block_m)
        else:
            found = count_band(*band, block_m, block_n)
            counts = [torch.full((1, 1), n, dtype=torch.int64, device=bounds.device) for n in found]
        return cls(block_m, block_n, seqlen_q, seqlen_k, mask.left, mask.right, bounds, *counts)

    @property
    def shape(self) -> tuple[int, int]:
        """Row blocks and column blocks."""
        return (self.seqlen_q + self.block_m - 1) // self.block_m, self.bounds.shape[2]

    @property
    def skipped(self) -> float:
        """Fraction of tiles that are hidden, over all batch entries and heads."""
        total = self.hidden.numel() * self.shape[0] * self.shape[1]
        return int(self.hidden.sum()) / total if total else 0.0

    def in_tiles(self, block_n: int) -> dict[str, int]:
        """Tiles of ``block_n`` keys, a divisor of this object's, counted by the class of the wider tile around each.

        A kernel that walks in narrower tiles than it skips by counts so. The counts are over all batch entries and heads
        of the mask.
        """
        each = self.block_n // block_n
        past = self.shape[1] * each - (self.seqlen_k + block_n - 1) // block_n  # of the last block, behind the last key
        counts = [each * int(count.sum()) for count in (self.hidden, self.partial, self.full)]
        if past:
            end = block_edges(self.seqlen_k, self.block_n, self.bounds.device)[-2:]
            band = (self.left, self.right, self.seqlen_q, self.seqlen_k)
            last = count_tiles(self.bounds[:, :, -1:], end, *band, self.block_m).sum((1, 2))
            counts = [count - past * n for count, n in zip(counts, last.tolist(), strict=True)]
        return dict(zip(("hidden", "partial", "full"), counts, strict=True))

    def rows(self) -> Iterator[tuple[int, int, Tensor]]:
        """Row block by row block: first row, past-the-last row, int8 classes (batch|1, heads|1, n_blocks)."""
        start = 0
        for classes in self._chunks():
            for i in range(classes.shape[2]):
                stop = min(start + self.block_m, self.seqlen_q)
                yield start, stop, classes[:, :, i]
                start = stop

    def matrix(self, batch: int = 0, head: int = 0) -> Tensor:
        """One batch entry and head: int8 (row blocks, column blocks); 0 hidden, 1 partial, 2 full."""
        batches, heads = self.bounds.shape[:2]
        batch, head = integer("batch", batch), integer("head", head)
        if (batches != 1 and not 0 <= batch < batches) or (heads != 1 and not 0 <= head < heads):
            raise ValueError(f"batch={batch}, head={head}: the mask has {batches} batch entries and {heads} heads")
        one = self.bounds[batch if batches > 1 else 0 :, head if heads > 1 else 0 :][:1, :1]
        parts = [classes[0, 0] for classes in self._chunks(one)]
        return torch.cat(parts) if parts else one.new_zeros(self.shape, dtype=torch.int8)

    def segments(self) -> Tensor:
        """Row blocks a column block visits, int32 (batch|1, heads|1, n_blocks, 3, 2); see `row_segments`."""
        edges = block_edges(self.seqlen_k, self.block_n, self.bounds.device)
        return row_segments(self.bounds, edges, self.left, self.right, self.seqlen_q, self.seqlen_k, self.block_m)

    def _chunks(self, bounds: Tensor | None = None) -> Iterator[Tensor]:
        """Classes of several row blocks at a time, int8 (batch|1, heads|1, row blocks, n_blocks)."""
        bounds = self.bounds if bounds is None else bounds
        edges = block_edges(self.seqlen_k, self.block_n, bounds.device)
        row_edges = block_edges(self.seqlen_q, self.block_m, bounds.device)
        step = max(1, _CELLS_AT_ONCE // max(1, bounds[..., 0].numel()))
        for at in range(0, self.shape[0], step):
            part = row_edges[at : at + step + 1].unsqueeze(1)
            yield classify_row_block(bounds, edges, part[:-1], part[1:], self.left, self.right, self.seqlen_q, self.seqlen_k)
