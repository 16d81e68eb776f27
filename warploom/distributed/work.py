"""Visible elements of a mask by chunks of rows, in closed form over runs of columns.

In a run of columns every end of what a column shows or hides stays where it is or moves down by one row a column: a band
makes three such runs, documents and the like a few each. A column that shows rows from e on gives r - e elements to those
before row r, which summed over a run is a polynomial in r from where the run's ends begin. So a chunk costs what the
polynomials begun before it say, and nothing here is as long as the sequence but the comparisons that find the runs.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from copy import copy
from functools import reduce
from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor

from warploom.masks.intervals import ResolvedMask, band_rows

WORTH = 8  # columns a run: with shorter ones going through all columns is faster


class Work(Protocol):
    def of_chunks(self, size: int) -> Tensor:
        """Visible elements of each chunk of ``size`` rows, summed over the mask's batch entries and heads: int64."""


class ByRow:
    """Counted row by row."""

    def __init__(self, counts: Tensor) -> None:
        self._before = torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    def of_chunks(self, size: int) -> Tensor:
        return self._before[_edges(self._before.shape[0] - 1, size)].diff()


class ByBand:
    """Of a band alone: row i sees keys from i + shift - left to i + shift + right, of those that there are."""

    def __init__(self, left: int | None, right: int | None, seqlen_q: int, seqlen_k: int) -> None:
        reach, shift = seqlen_q + seqlen_k, seqlen_k - seqlen_q
        self._seqlen_q, self._seqlen_k = seqlen_q, seqlen_k
        self._end = reach if right is None else shift + max(min(right, reach), -reach) + 1
        self._start = -reach if left is None else min(shift - max(min(left, reach), -reach), self._end)

    def of_chunks(self, size: int) -> Tensor:
        edges = _edges(self._seqlen_q, size)
        return (self._keys(edges, self._end) - self._keys(edges, self._start)).diff()

    def _keys(self, edges: Tensor, first: int) -> Tensor:
        """Sums of i + first, within [0, seqlen_k], over rows i before each edge, and something that is always the same."""
        within = (edges + first).clamp_(0, self._seqlen_k)
        past = (edges + (first - self._seqlen_k)).clamp_(min=max(first - self._seqlen_k, 0))
        return (within * (within - 1)).div_(2, rounding_mode="floor").add_(past, alpha=self._seqlen_k)


class ByRuns:
    """Twice the elements before row r are the sum of a + b r + c r² over the polynomials that begin before r.

    Args:
        begins: int64 (n,), in [0, seqlen_q + 1].
        terms: a, b and c, int64 (3, n).
    """

    def __init__(self, seqlen_q: int, begins: Tensor, terms: Tensor) -> None:
        self._seqlen, self._begins, self._terms = seqlen_q, begins, terms

    def of_chunks(self, size: int) -> Tensor:
        edges = _edges(self._seqlen, size)
        sums = self._terms.new_zeros((3, edges.shape[0] + 2))  # of those that begin behind the last row too
        sums.index_add_(1, self._begins.div(size, rounding_mode="floor").add_(1), self._terms)
        a, b, c = sums.cumsum(1)[:, :-2]
        return c.mul_(edges).add_(b).mul_(edges).add_(a).div_(2, rounding_mode="floor").diff()


class Runs:
    """Runs of columns in which every end of what a column shows or hides is constant or goes down by one row a column.

    Attributes:
        starts: the first column of each, counted through batch entries and heads: int64, ascending.
        ends: rows at the first and at the last column of each run, int64 (n, 2, runs): where the band begins and ends, where
            packed sequences do, if there are any, and what the mask's vectors hold.
    """

    def __init__(self, mask: ResolvedMask, seqlen_q: int, seqlen_k: int, sequences: Tensor | None) -> None:
        self._mask, self._seqlen_q, self._seqlen_k, self._sequences = mask, seqlen_q, seqlen_k, sequences
        # A row past the last one hides what the row after the last does.
        self._vectors = [t.reshape(-1).clamp(0, seqlen_q) for t in mask.vectors if t is not None]
        self._total = self._vectors[0].shape[0] if self._vectors else seqlen_k
        self.starts = self.ends = torch.empty(0)

    @classmethod
    def of(cls, mask: ResolvedMask, seqlen_q: int, seqlen_k: int, sequences: Tensor | None) -> Runs | None:
        """None where runs are too short, or vectors fall or rise in other steps.

        Args:
            sequences: of packed ones the starts, the end of the last and all tokens, int64; rows of the mask are numbered
                through.
        """
        found = cls(mask, seqlen_q, seqlen_k, sequences)
        breaks = found._breaks()
        if found._vectors:
            begins = torch.zeros(found._total, dtype=torch.bool)
            for t in found._vectors:
                steps = t[1:] - t[:-1]
                begins[2:] |= steps[1:] != steps[:-1]
            if int(begins.count_nonzero()) * WORTH > found._total:
                return None
            breaks = begins.index_fill_(0, breaks, True).nonzero().view(-1)
        found._cut(breaks)
        rise = found.ends[-len(found._vectors) :, 1] - found.ends[-len(found._vectors) :, 0]
        if found._vectors and not bool(((rise == 0) | (rise == found._counts - 1)).all()):
            return None
        return found

    def _breaks(self) -> Tensor:
        """Columns where the band, or what sequences show, begins or ends to move; of each batch entry and head."""
        reach, shift = self._seqlen_q + self._seqlen_k, self._seqlen_k - self._seqlen_q
        edges = {0}
        for side, after in ((self._mask.right, 0), (self._mask.left, -1)):
            if side is not None:
                moves = shift + after + max(min(side, reach), -reach) * (1 if after == 0 else -1)
                edges |= {moves, moves + self._seqlen_q}
        found = torch.tensor([n for n in edges if 0 <= n < self._seqlen_k], dtype=torch.int64)
        if self._sequences is not None:
            found = torch.cat([found, self._sequences[self._sequences < self._seqlen_k]])
        if self._total == self._seqlen_k:
            return found.unique()
        return (torch.arange(0, self._total, self._seqlen_k)[:, None] + found).unique()

    def _cut(self, starts: Tensor) -> None:
        """Runs that begin at these columns, and the ends' rows in them."""
        self.starts = starts
        self._counts = torch.cat([self.starts, self.starts.new_tensor([self._total])]).diff()
        at = torch.cat([self.starts, self.starts + self._counts - 1])
        column = at if self._total == self._seqlen_k else at % self._seqlen_k
        found = list(band_rows(self._mask.left, self._mask.right, self._seqlen_q, self._seqlen_k, column))
        if self._sequences is not None:
            number = torch.searchsorted(self._sequences, column, right=True)
            # Behind the last sequence are tokens that see nothing.
            inside = number < self._sequences.shape[0] - 1
            first = self._sequences[number - 1].where(inside, self._seqlen_q)
            found += [first, self._sequences[number.clamp_(max=self._sequences.shape[0] - 1)]]
        found += [t[at] for t in self._vectors]
        self.ends = torch.stack([t.long() for t in found]).view(len(found), 2, len(self.starts))

    def work(self) -> ByRuns:
        """What the mask shows."""
        runs = self._cut_where_ends_meet()
        lows, highs, apart = [0], [1], []
        if self._sequences is not None:
            lows, highs = [0, 2], [1, 3]
        numbers = iter(range(len(lows) + len(highs), len(self.ends)))
        lts, lte, uts, ute = [None if t is None else next(numbers) for t in self._mask.vectors]
        if lts is not None:
            apart += [] if lte is None else [(lts, lte)]
            highs += [lts] if lte is None else []
        if ute is not None:
            apart += [] if uts is None else [(uts, ute)]
            lows += [ute] if uts is None else []
        parts = []
        for count in range(len(apart) + 1):
            for hidden in combinations(apart, count):  # rows hidden twice are taken away twice, and given back
                # One after the other: a reduction over the first dimension takes torch many times as long.
                low = reduce(torch.maximum, [runs.ends[n] for n in lows + [a for a, _ in hidden]])
                high = reduce(torch.minimum, [runs.ends[n] for n in highs + [b for _, b in hidden]])
                parts.append(runs._terms(low, high, (-1) ** count))
        begins, terms = zip(*parts, strict=True)
        return ByRuns(self._seqlen_q, torch.cat(begins), torch.cat(terms, 1))

    def _cut_where_ends_meet(self) -> Runs:
        """Runs in which one end is the first of any two: where they meet, one moves by a row a column and the other stays."""
        if torch.equal(self.ends[:, 0], self.ends[:, 1]):  # none moves
            return self
        a, b = torch.triu_indices(len(self.ends), len(self.ends), 1)
        apart = self.ends[a] - self.ends[b]
        meet = (apart[:, 0] * apart[:, 1] < 0).nonzero()
        if not meet.shape[0]:
            return self
        pair, run = meet.unbind(1)
        found = copy(self)
        found._cut(torch.cat([self.starts, self.starts[run] + apart[pair, 0, run].abs()]).unique())
        return found

    def _terms(self, low: Tensor, high: Tensor, sign: int) -> tuple[Tensor, Tensor]:
        """The polynomials of rows from ``low`` to ``high``, each (2, runs)."""
        ends = torch.stack([low, torch.maximum(low, high)])
        begin, moves = ends[:, 0], ends[:, 1] > ends[:, 0]
        weight = torch.tensor([[sign], [-sign]])
        # Of n ends that stay 2 n (r - e); of ends e, e + 1, ... the triangle (r - e) (r - e + 1) less that of (r - e - n).
        staying = 2 * weight * self._counts * ~moves
        stay = torch.stack([-staying * begin, staying, torch.zeros_like(begin)]).view(3, -1)
        if not bool(moves.any()):
            return begin.reshape(-1), stay
        moving = weight * moves
        corners = torch.cat([begin, torch.where(moves, begin + self._counts, begin)])
        triangles = torch.stack([corners * (corners - 1), 1 - 2 * corners, torch.ones_like(corners)])
        triangles.mul_(torch.cat([moving, -moving]))
        triangles[:, :2] += stay.view(3, 2, -1)
        return corners.view(-1), triangles.view(3, -1)


def _edges(length: int, size: int) -> Tensor:
    return torch.arange(0, length + size, size).clamp_(max=length)


def digest(words: str, tensors: Sequence[Tensor]) -> str:
    """Equal where the words and the tensors are."""
    found = hashlib.blake2b(repr((words, [(t.dtype, tuple(t.shape)) for t in tensors])).encode(), digest_size=16)
    for t in tensors:
        t = t.contiguous()
        if t.numel():
            found.update((ctypes.c_char * (t.numel() * t.element_size())).from_address(t.data_ptr()))
    return found.hexdigest()
