"""A band and two intervals per column for given runs of hidden rows, exactly or not at all."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from warploom.masks.intervals import Interval, ResolvedMask, band_rows, merge_by_value

KEPT = 4  # runs of a column that a mask can have: two intervals, and one on either side of a band
# Where users read what to do with a mask that is refused.
WAYS = "docs/masks.md, 'Masks that are not column masks', says what to do then"

Band = tuple[int | None, int | None]


def refuse(what: str, column: int, batch: int, head: int, runs: int) -> NoReturn:
    """The ValueError of a mask that is no column mask."""
    raise ValueError(
        f"{what} is not a column mask: column {column} (batch {batch}, head {head}) hides {runs} separate runs of rows, "
        f"and a column has two intervals; {WAYS}"
    )


def fit(what: str, runs: list[Interval], count: Tensor, seqlen_q: int, seqlen_k: int) -> ResolvedMask:
    """The column mask that hides these runs and nothing else, with as few vectors as do.

    No band or the causal one serves where it can; another band is taken only where neither does.

    Args:
        what: names the mask in the error.
        runs: the first KEPT hidden runs of each column, int32 (batch, heads, seqlen_k), ascending and apart; an
            empty one is none.
        count: runs that each column has.
        seqlen_q, seqlen_k: lengths.

    Raises:
        ValueError: some column needs more; the first such batch entry, head and column is named.
    """
    if not count.numel() or not seqlen_q:
        return ResolvedMask(None, None, torch.zeros_like(count, dtype=torch.int32), None, None, None)
    left, right = tight_band(runs, count, seqlen_q, seqlen_k)
    causal: list[Band] = [(None, 0)] if right is not None and right <= 0 else []
    best: ResolvedMask | None = None
    for band in (*causal, (None, None)):
        found = _with_band(band, runs, count, seqlen_q, seqlen_k)
        if found is not None and (best is None or _vectors(found) < _vectors(best)):
            best = found
    for band in ((None, right), (left, None), (left, right)):
        best = _with_band(band, runs, count, seqlen_q, seqlen_k) if best is None else best
    if best is None:
        check(what, runs, count, seqlen_q, seqlen_k)
    assert best is not None
    return best


def check(what: str, runs: list[Interval], count: Tensor, seqlen_q: int, seqlen_k: int) -> None:
    """ValueError where no band leaves two intervals to every column.

    A wider band never helps, so what is refused for some columns is refused for any more.
    """
    _, needed = _cut(tight_band(runs, count, seqlen_q, seqlen_k), runs, count, seqlen_q, seqlen_k)
    too_many = needed > 2
    if bool(too_many.any()):
        batch, head, column = too_many.nonzero()[0].tolist()
        refuse(what, column, batch, head, int(needed[batch, head, column]))


def tight_band(runs: list[Interval], count: Tensor, seqlen_q: int, seqlen_k: int) -> Band:
    """The narrowest band that holds everything visible; no band where nothing is.

    If any band helps a column, this one does: a band spares a run only where it ends with the first visible row. Columns
    whose last run was not kept, which no band helps, are left out.
    """
    starts = torch.stack([start for start, _ in runs if start is not None])
    ends = torch.stack([end for _, end in runs if end is not None])
    last = (count.long() - 1).clamp(0, len(runs) - 1).unsqueeze(0)
    some = count > 0
    top = torch.where(some & (starts[0] == 0), ends[0], 0)
    bottom = torch.where(some & (ends.gather(0, last)[0] == seqlen_q), starts.gather(0, last)[0], seqlen_q)
    diagonal = torch.arange(seqlen_k, device=count.device) - (seqlen_k - seqlen_q)
    seen = (top < bottom) & (count <= len(runs))
    if not bool(seen.any()):
        return None, None
    far = seqlen_q + seqlen_k + 1
    left = torch.where(seen, bottom - 1 - diagonal, -far).max()
    right = torch.where(seen, diagonal - top, -far).max()
    return int(left), int(right)


def _cut(band: Band, runs: list[Interval], count: Tensor, seqlen_q: int, seqlen_k: int) -> tuple[list[Interval], Tensor]:
    """Two intervals per column within the band, and how many it needs."""
    merged, needed = merge_by_value(band, runs, seqlen_q, seqlen_k)
    return merged, torch.where(count > KEPT, count, needed)


def _with_band(band: Band, runs: list[Interval], count: Tensor, seqlen_q: int, seqlen_k: int) -> ResolvedMask | None:
    """The mask with this band and the fewest vectors, or None where two intervals are too few."""
    ((s1, e1), (s2, e2)), needed = _cut(band, runs, count, seqlen_q, seqlen_k)
    assert s1 is not None and e1 is not None and s2 is not None and e2 is not None
    if bool((needed > 2).any()):
        return None
    one, two = needed > 0, needed > 1
    # Rows that the band hides anyway may be hidden twice: intervals then reach the edge and need no vector for it.
    columns = torch.arange(seqlen_k, dtype=torch.int32, device=count.device)
    first, last = band_rows(*band, seqlen_q, seqlen_k, columns)
    s1, e1 = torch.where(s1 <= first, 0, s1), torch.where(e1 >= last, seqlen_q, e1)
    e2 = torch.where(e2 >= last, seqlen_q, e2)
    from_zero, to_end, second_to_end = s1 == 0, e1 == seqlen_q, e2 == seqlen_q
    kinds = torch.stack(
        [
            (~one | ~two & to_end).all(),
            (~one | ~two & from_zero).all(),
            (~one | ~two & (from_zero | to_end) | from_zero & second_to_end).all(),
            (~two).all(),
            (~two | from_zero).all(),
            (~two | second_to_end).all(),
        ]
    )
    only_lts, only_ute, lts_ute, single, upper_from_zero, lower_to_end = kinds.tolist()
    if only_lts:
        return ResolvedMask(*band, torch.where(one, s1, seqlen_q), None, None, None)
    if only_ute:
        return ResolvedMask(*band, None, None, None, torch.where(one, e1, 0))
    upper = one & (two | ~to_end)  # the first of two goes up, and a single one that does not reach the end
    lts = torch.where(two, s2, torch.where(one & to_end, s1, seqlen_q))
    if lts_ute:
        return ResolvedMask(*band, lts, None, None, torch.where(upper, e1, 0))
    if single:
        return ResolvedMask(*band, torch.where(one, s1, seqlen_q), torch.where(one, e1, seqlen_q), None, None)
    if upper_from_zero:
        lts = torch.where(two, s2, torch.where(one, s1, seqlen_q))
        lte = torch.where(two, e2, torch.where(one, e1, seqlen_q))
        return ResolvedMask(*band, lts, lte, None, torch.where(two, e1, 0))
    uts, ute = torch.where(upper, s1, seqlen_q), torch.where(upper, e1, seqlen_q)
    return ResolvedMask(*band, lts, None if lower_to_end else torch.where(two, e2, seqlen_q), uts, ute)


def _vectors(mask: ResolvedMask) -> int:
    return sum(t is not None for t in mask.vectors)
