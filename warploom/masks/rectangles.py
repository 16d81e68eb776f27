"""An exact, disjoint cover of what a mask shows by rectangles that dense kernels can run.

Three kinds: "full" (every element visible), "causal" (row r0 + a sees columns c0 … c0 + a: a top-left causal square)
and "masked" (needs the element test). Column vectors that are constant over long runs (documents, prefixes,
padding) are cut exactly at their change points; vectors that vary from column to column fall back to a
regular grid. Memory is O(seqlen), work O(visible tiles + grid cells).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from warploom.masks.intervals import ResolvedMask
from warploom.masks.tiles import block_edges, classify_row_block, column_bounds

# A masked rectangle evaluates the element test and computes its hidden elements too: rows this tall keep both
# small beside the visible work of a window or a diagonal.
BLOCK_ROWS = 128
BLOCK_COLS = 64
# Exact cuts pay while a piece is at least this long on average; below it the fixed cost of a kernel call dominates
# (measured break-even: 12 tokens with 12 heads of 32, 8 with heads of 64).
SHORTEST_PIECE = 12
# Plans kept: a step uses one mask, or one for each kind of layer, in every layer and again in the backward.
_KEPT_PLANS = 8
# Grid cells classified at once: bounds the planner's memory.
_CELLS = 1 << 20

Kind = Literal["full", "causal", "masked"]


class Rectangle(NamedTuple):
    """Rows [r0, r1) × columns [c0, c1)."""

    r0: int
    r1: int
    c0: int
    c1: int
    kind: Kind


_Plans = list[list["Rectangle"]]
_kept: dict[tuple[object, ...], tuple[list[Tensor], _Plans]] = {}


def covers(mask: ResolvedMask, batches: int, heads: int, seqlen_q: int, seqlen_k: int) -> _Plans:
    """`cover` of every (batch, head) of a mask, batch-major; kept, since the layers of a model share a mask.

    What is kept is found by the vectors' contents, never by their identity: a compiled region may reuse a buffer for
    another mask without its version showing it.
    """
    vectors = [t for t in mask.vectors if t is not None]
    present = tuple([t is not None for t in mask.vectors])
    key = (mask.left, mask.right, present, batches, heads, seqlen_q, seqlen_k, tuple([t.shape for t in vectors]))
    found = _kept.get(key)
    if found is not None and all(torch.equal(a, b) for a, b in zip(found[0], vectors, strict=True)):
        return found[1]
    plans = [cover(mask, b, h, seqlen_q, seqlen_k) for b in range(batches) for h in range(heads)]
    while len(_kept) >= _KEPT_PLANS:
        _kept.pop(next(iter(_kept)), None)
    _kept[key] = [t.clone() for t in vectors], plans
    return plans


def cover(mask: ResolvedMask, batch: int, head: int, seqlen_q: int, seqlen_k: int) -> list[Rectangle]:
    """Rectangles that hold every visible element of one (batch, head) of the mask exactly once.

    Args:
        mask: CPU vectors; ``batch`` and ``head`` index them (0 where a dimension is 1).
    """
    if seqlen_q == 0 or seqlen_k == 0:
        return []
    offset = seqlen_k - seqlen_q
    result: list[Rectangle] = []
    for r0, r1, c0, c1, exact in _grid_runs(mask, batch, head, seqlen_q, seqlen_k):
        _add_band_pieces(result, mask.left, mask.right, offset, r0, r1, c0, c1, exact)
    return result


def _grid_runs(
    mask: ResolvedMask, batch: int, head: int, seqlen_q: int, seqlen_k: int
) -> list[tuple[int, int, int, int, bool]]:
    """(r0, r1, c0, c1, exact): runs of columns not hidden by the vectors; exact = all of it visible to them."""
    vectors = [t.flatten() for t in single(mask, batch, head).vectors if t is not None]
    if not vectors:
        return [(0, seqlen_q, 0, seqlen_k, True)]
    stacked = torch.stack(vectors).clamp(0, seqlen_q)
    changes = (stacked[:, 1:] != stacked[:, :-1]).any(0).nonzero().flatten() + 1
    row_edges = stacked.unique()
    row_edges = row_edges[(row_edges > 0) & (row_edges < seqlen_q)]
    exact_cuts = (
        changes.numel() <= max(8, seqlen_k // SHORTEST_PIECE)
        and row_edges.numel() <= max(8, seqlen_q // SHORTEST_PIECE)
    )  # fmt: skip
    if exact_cuts:
        columns, rows = _with_ends(changes, seqlen_k), _with_ends(row_edges, seqlen_q)
    else:
        columns = block_edges(seqlen_k, BLOCK_COLS)
        rows = block_edges(seqlen_q, BLOCK_ROWS)
    bounds = column_bounds(single(mask, batch, head), seqlen_q, seqlen_k, columns)

    runs: list[tuple[int, int, int, int, bool]] = []
    count = columns.numel() - 1
    for first in range(0, rows.numel() - 1, max(1, _CELLS // count)):
        edges = rows[first : first + max(1, _CELLS // count) + 1]
        classes = classify_row_block(bounds, columns, edges[:-1, None], edges[1:, None], None, None, seqlen_q, seqlen_k)[0, 0]
        # Sentinels of class 0 (hidden) on both sides make every run begin and end with a change.
        padded = torch.nn.functional.pad(classes, (1, 1))
        row, column = (padded[:, 1:] != padded[:, :-1]).nonzero().unbind(1)
        starts = list(zip(row.tolist(), column.tolist(), padded[row, column + 1].tolist(), strict=True))
        edge_list, column_list = edges.tolist(), columns.tolist()
        for (r, c, kind), (_, stop, _) in pairwise(starts):
            if kind:
                runs.append((edge_list[r], edge_list[r + 1], column_list[c], column_list[stop], kind == 2))
    return runs


def _with_ends(inner: Tensor, length: int) -> Tensor:
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), length)]).long()


def single(mask: ResolvedMask, batch: int, head: int) -> ResolvedMask:
    """The vectors of one (batch, head), each (1, 1, seqlen_k), and the band; 0 picks where a dimension is 1."""

    def pick(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        b, h = min(batch, t.shape[0] - 1), min(head, t.shape[1] - 1)
        return t[b : b + 1, h : h + 1]

    return ResolvedMask(mask.left, mask.right, *(pick(t) for t in mask.vectors))


def _add_band_pieces(
    result: list[Rectangle],
    left: int | None,
    right: int | None,
    offset: int,
    r0: int,
    r1: int,
    c0: int,
    c1: int,
    exact: bool,
) -> None:
    """Cut rows [r0, r1) × columns [c0, c1) along the band and append the visible pieces."""
    if left is not None or not exact:
        for top in range(r0, r1, BLOCK_ROWS):
            _add_strip(result, left, right, offset, top, min(top + BLOCK_ROWS, r1), c0, c1, exact)
        return
    if right is None:
        result.append(Rectangle(r0, r1, c0, c1, "full"))
        return
    corner = r0 + offset + right  # the last column that row r0 sees
    if corner > c0:
        result.append(Rectangle(r0, r1, c0, min(corner, c1), "full"))
    x0 = max(c0, corner)
    first = x0 - offset - right  # the row whose last visible column is x0
    if first >= r1 or x0 >= c1:
        return
    width = min(c1 - x0, r1 - first)
    result.append(Rectangle(first, first + width, x0, x0 + width, "causal"))
    if first + width < r1:
        result.append(Rectangle(first + width, r1, x0, x0 + width, "full"))


def _add_strip(
    result: list[Rectangle],
    left: int | None,
    right: int | None,
    offset: int,
    r0: int,
    r1: int,
    c0: int,
    c1: int,
    exact: bool,
) -> None:
    """One strip of at most BLOCK_ROWS rows: the band's interior apart where it is wide, its edges masked."""
    low = c0 if left is None else max(c0, r0 + offset - left)
    high = c1 if right is None else min(c1, r1 + offset + right)
    if low >= high:
        return
    inner_low = c0 if left is None else max(low, r1 - 1 + offset - left)
    inner_high = c1 if right is None else min(high, r0 + offset + right + 1)
    if not exact or inner_high - inner_low < 2 * BLOCK_ROWS:
        whole = exact and inner_low <= low and inner_high >= high
        result.append(Rectangle(r0, r1, low, high, "full" if whole else "masked"))
        return
    if low < inner_low:
        result.append(Rectangle(r0, r1, low, inner_low, "masked"))
    result.append(Rectangle(r0, r1, inner_low, inner_high, "full"))
    if inner_high < high:
        result.append(Rectangle(r0, r1, inner_high, high, "masked"))
