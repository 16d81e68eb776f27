"""Who holds which positions: a sequence cut into chunks, dealt to ranks so that work is even and counts of tokens are equal."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

Run = tuple[int, int]  # first position and past the last

TILE = 128  # rows of a kernel's tile: chunks of whole tiles leave none half empty
FEWEST = 4  # chunks of a rank: with fewer their costs cannot be evened out
NEAR = 0.01  # imbalance that is worth neighbours staying together: fewer runs, and fewer keys that other ranks need
GOOD = 0.02  # imbalance that smaller chunks are not worth
SMALLEST = 16  # positions of a chunk
EVEN = 0.002  # imbalance that no further exchange is worth
_EXCHANGES = 64


@dataclass(frozen=True)
class Layout:
    """The positions of one sequence that each rank holds.

    Attributes:
        seqlen: positions in all.
        runs: of each rank, ascending and apart.
    """

    seqlen: int
    runs: tuple[tuple[Run, ...], ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Positions of each rank."""
        return tuple([sum(b - a for a, b in runs) for runs in self.runs])

    @property
    def longest(self) -> int:
        """Positions of the rank that has most."""
        return max(self.counts)

    def positions(self, rank: int) -> Tensor:
        """Of a rank, in the order in which it holds them: int64, ascending."""
        return torch.cat([torch.arange(a, b) for a, b in self.runs[rank]] or [torch.arange(0)])

    @cached_property
    def places(self) -> Tensor:
        """Where each position is once every rank's are padded to ``longest`` and joined: int64 (seqlen,)."""
        found = torch.empty(self.seqlen, dtype=torch.int64)
        for rank, count in enumerate(self.counts):
            found[self.positions(rank)] = torch.arange(count) + rank * self.longest
        return found

    def before(self, rank: int) -> Tensor:
        """How many of a rank's positions lie before each: int32 (seqlen + 1,), ascending."""
        held = torch.zeros(self.seqlen + 1, dtype=torch.int32)
        for a, b in self.runs[rank]:
            held[a + 1 : b + 1] = 1
        return held.cumsum(0, dtype=torch.int32)


def whole(seqlen: int) -> Layout:
    """One rank that holds everything."""
    return Layout(seqlen, (((0, seqlen),) if seqlen else (),))


def split(seqlen: int, ranks: int) -> Layout:
    """Neighbouring positions to each rank, as many to each as there can be."""
    edges = [seqlen * rank // ranks for rank in range(ranks + 1)]
    return Layout(seqlen, tuple([((a, b),) if a < b else () for a, b in pairwise(edges)]))


def chunk_size(seqlen: int, ranks: int, chunk: int) -> int:
    """Positions of a chunk, at most ``chunk``: the size that gives ranks the most equal counts.

    Among equals it is whole tiles, then the largest.
    """
    most = max(1, min(chunk, -(-seqlen // (FEWEST * ranks))))

    def score(size: int) -> tuple[int, bool, bool, int]:
        full, rest = divmod(seqlen, size)
        more = full % ranks
        spread = rest if not more else size - rest if more == ranks - 1 else size
        return spread, bool(size % TILE), bool(size % 16), -size

    return min(range(max(1, (most + 1) // 2), most + 1), key=score)


def balanced(work: Tensor, ranks: int, chunk: int) -> tuple[Layout, int]:
    """Chunks dealt to ranks, and their size.

    There are three ways: to each rank one run of neighbours (no mask, windows, documents of similar lengths); two, one from
    each end, the zigzag of ring attention (causal); or the dearest chunks first, one to each rank in a round, the dearest of a
    round to the rank that has least. Exchanges between the fullest and the emptiest rank finish each. What is not even
    enough is tried again in smaller chunks.

    Args:
        work: before each position and behind the last, the sum over those before it: int64 (seqlen + 1,).
        chunk: most positions of a chunk.
    """
    seqlen = work.shape[0] - 1
    best: tuple[float, Layout, int] | None = None
    while True:
        size = chunk_size(seqlen, ranks, chunk)
        costs = work[torch.arange(0, seqlen + size, size).clamp(max=seqlen)].diff().tolist()
        held, imbalance = _dealt(seqlen, ranks, costs, size)
        if best is None or imbalance < best[0]:
            runs = [joined([(n * size, min((n + 1) * size, seqlen)) for n in sorted(chunks)]) for chunks in held]
            best = imbalance, Layout(seqlen, tuple(runs)), size
        if best[0] <= GOOD or size <= SMALLEST:
            return best[1], best[2]
        chunk = size // 2


def _dealt(seqlen: int, ranks: int, costs: Sequence[int], size: int) -> tuple[list[list[int]], float]:
    """The chunks of each rank, and their imbalance: of the ways that are nearly even the one of fewest runs, else the best."""
    total = sum(costs)
    found = []
    for deal, exchanges in ((_neighbours, 2 * ranks), (_zigzag, 2 * ranks), (_rounds, _EXCHANGES)):
        held = _improved(deal(seqlen, ranks, costs, size), costs, seqlen, size, exchanges)
        most = max(sum(costs[n] for n in chunks) for chunks in held)
        imbalance = most * ranks / total - 1.0 if total else 0.0
        runs = sum(n - 1 not in chunks for chunks in map(set, held) for n in chunks)
        found.append((max(imbalance, NEAR), runs, imbalance, held))
    *_, imbalance, held = min(found, key=lambda each: each[:3])
    return held, imbalance


def _neighbours(seqlen: int, ranks: int, costs: Sequence[int], size: int) -> list[list[int]]:
    full, rest = divmod(seqlen, size)
    each, more = divmod(full, ranks)
    held, at = [], 0
    for rank in range(ranks):
        count = each + (rank < more)
        held.append(list(range(at, at + count)))
        at += count
    if rest:
        held[-1].append(full)
    return held


def _zigzag(seqlen: int, ranks: int, costs: Sequence[int], size: int) -> list[list[int]]:
    """To each rank neighbours from both ends, what is left in the middle one by one."""
    full, rest = divmod(seqlen, size)
    half = full // ranks // 2
    held = []
    for rank in range(ranks):
        first = list(range(rank * half, (rank + 1) * half))
        held.append([*first, *(full - 1 - n for n in first)])
    for n in range(ranks * half, full - ranks * half):
        held[(n - ranks * half) % ranks].append(n)
    if rest:
        held[-1].append(full)
    return held


def _rounds(seqlen: int, ranks: int, costs: Sequence[int], size: int) -> list[list[int]]:
    full, rest = divmod(seqlen, size)
    held: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    dearest = sorted(range(full), key=lambda n: -costs[n])
    for at in range(0, full, ranks):
        for n, rank in zip(dearest[at : at + ranks], sorted(range(ranks), key=loads.__getitem__), strict=False):
            held[rank].append(n)
            loads[rank] += costs[n]
    if rest:  # to a rank that has fewest
        rank = min(range(ranks), key=lambda rank: (len(held[rank]), loads[rank]))
        held[rank].append(full)
    return held


def _improved(held: list[list[int]], costs: Sequence[int], seqlen: int, size: int, exchanges: int) -> list[list[int]]:
    """Full chunks exchanged between the rank that has most and the one that has least, while that helps."""
    full = seqlen // size
    loads = [sum(costs[n] for n in chunks) for chunks in held]
    mean = sum(loads) / len(loads)
    for _ in range(exchanges):
        high, low = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[high] - loads[low]
        if loads[high] - mean <= EVEN * mean:
            break
        others = sorted((costs[n], n) for n in held[low] if n < full)
        best: tuple[float, int, int] | None = None
        for n in held[high]:
            if n >= full:
                continue
            at = bisect_left(others, (costs[n] - gap / 2, -1))
            for cost, other in others[max(0, at - 1) : at + 1]:
                off = abs(costs[n] - cost - gap / 2)
                if off < gap / 2 and (best is None or off < best[0]):
                    best = off, n, other
        if best is None:
            break
        _, n, other = best
        held[high][held[high].index(n)], held[low][held[low].index(other)] = other, n
        loads[high] += costs[other] - costs[n]
        loads[low] += costs[n] - costs[other]
    return held


def joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Ascending runs, neighbours as one."""
    found: list[Run] = []
    for a, b in runs:
        if found and found[-1][1] == a:
            found[-1] = found[-1][0], b
        else:
            found.append((a, b))
    return tuple(found)
