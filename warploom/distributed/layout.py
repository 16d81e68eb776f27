"""Who holds which positions: a sequence cut into chunks, dealt to ranks so that work is even and counts of tokens are equal."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from warploom.distributed.work import Work

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

    @cached_property
    def segments(self) -> tuple[tuple[int, int, int, int], ...]:
        """All runs, ascending: rank, where among its positions one begins, first position of the whole and past the last."""
        found = []
        for rank, runs in enumerate(self.runs):
            at = 0
            for a, b in runs:
                found.append((rank, at, a, b))
                at += b - a
        return tuple(sorted(found, key=lambda segment: segment[2]))

    @cached_property
    def in_order(self) -> bool:
        """Whether ``places`` are the positions themselves: ranks hold neighbours, and as many, but for the last."""
        return all([rank * self.longest + at == first for rank, at, first, _ in self.segments])

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


@lru_cache(256)
def chunk_size(seqlen: int, ranks: int, chunk: int) -> int:
    """Positions of a chunk, at most ``chunk``: the size that gives ranks the most equal counts.

    Among equals it is whole tiles, then the largest.
    """
    most = max(1, min(chunk, -(-seqlen // (FEWEST * ranks))))
    if seqlen % (most * ranks) == 0 and most % TILE == 0:
        return most

    def score(size: int) -> tuple[int, bool, bool, int]:
        full, rest = divmod(seqlen, size)
        more = full % ranks
        spread = rest if not more else size - rest if more == ranks - 1 else size
        return spread, bool(size % TILE), bool(size % 16), -size

    return min(range(max(1, (most + 1) // 2), most + 1), key=score)


def balanced(work: Work, seqlen: int, ranks: int, chunk: int) -> tuple[Layout, int, tuple[int, ...]]:
    """Chunks dealt to ranks, their size, and the work of each rank.

    There are three ways: to each rank one run of neighbours (no mask, documents of similar lengths); two, one from each end
    (causal: the zigzag of ring attention; windows), cut where tiles are if chunks are not even so; or, where neither is nearly
    even, the dearest chunks first, one to each rank in a round, the dearest of a round to the rank that has least. Exchanges
    between the fullest and the emptiest rank finish what is not nearly even. What is not even enough is tried again in smaller
    chunks.

    Args:
        work: of the queries, by chunks.
        chunk: most positions of a chunk.
    """
    best: tuple[float, list[list[int]], int, list[int]] | None = None
    by_tiles = False  # whether two runs cut by tiles were tried, which are the same whatever the chunks
    while True:
        size = chunk_size(seqlen, ranks, chunk)
        costs: list[int] = work.of_chunks(size).tolist()
        if size > SMALLEST and max(costs, default=0) * ranks > (1.0 + GOOD) * sum(costs):  # more than a rank's share in one
            chunk = size // 2
            continue
        held, imbalance = _dealt(seqlen, ranks, costs, size)
        if not by_tiles and size > TILE and sum(len(_runs(chunks)) for chunks in held) > 2 * ranks:
            by_tiles = True
            small = chunk_size(seqlen, ranks, TILE)
            fine: list[int] = work.of_chunks(small).tolist()
            ends = _ends(seqlen, ranks, fine, small)
            uneven = _imbalance(ends, fine)
            if uneven <= NEAR:
                best = uneven, ends, small, fine
                break
        if best is None or imbalance < best[0]:
            best = imbalance, held, size, costs
        if best[0] <= GOOD or size <= SMALLEST:
            break
        chunk = size // 2
    _, held, size, costs = best
    runs = [tuple([(a * size, min(b * size, seqlen)) for a, b in _runs(chunks)]) for chunks in held]
    return Layout(seqlen, tuple(runs)), size, tuple(_loads(held, costs))


def _dealt(seqlen: int, ranks: int, costs: list[int], size: int) -> tuple[list[list[int]], float]:
    """The chunks of each rank, and their imbalance: of the ways that are nearly even the one of fewest runs, else the best."""
    found: list[tuple[float, int, float, list[list[int]]]] = []
    for deal, exchanges in ((_neighbours, 2 * ranks), (_ends, 2 * ranks), (_rounds, _EXCHANGES)):
        held = deal(seqlen, ranks, costs, size)
        imbalance = _imbalance(held, costs)
        if imbalance > NEAR:
            held = _improved(held, costs, seqlen // size, exchanges)
            imbalance = _imbalance(held, costs)
        runs = sum(len(_runs(chunks)) for chunks in held)
        found.append((max(imbalance, NEAR), runs, imbalance, held))
        if min(found)[0] <= NEAR and (runs <= ranks or deal is _ends):
            break  # fewer runs there are not
    *_, imbalance, held = min(found, key=lambda each: each[:3])
    return held, imbalance


def _imbalance(held: list[list[int]], costs: list[int]) -> float:
    total = sum(costs)
    return max(_loads(held, costs)) * len(held) / total - 1.0 if total else 0.0


def _loads(held: list[list[int]], costs: list[int]) -> list[int]:
    return [sum(map(costs.__getitem__, chunks)) for chunks in held]


def _runs(chunks: list[int]) -> list[Run]:
    """Chunks that follow each other, as the first one and the one after the last."""
    every = set(chunks)
    after = set(map((1).__add__, chunks))
    return list(zip(sorted(every - after), sorted(after - every), strict=True))


def _neighbours(seqlen: int, ranks: int, costs: list[int], size: int) -> list[list[int]]:
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


def _ends(seqlen: int, ranks: int, costs: list[int], size: int) -> list[list[int]]:
    """To each rank neighbours from both ends of what is left, as many from each as come nearest to its share of the work."""
    full, rest = divmod(seqlen, size)
    each, more = divmod(full, ranks)
    before = list(accumulate(costs, initial=0))
    low, high, held = 0, full, []
    for rank in range(ranks):
        count = each + (rank < more)
        share = (before[high] - before[low]) / (ranks - rank) + before[low] - before[high]
        best, first = float("inf"), 0
        for n in range(count + 1):
            off = before[low + n] - before[high - count + n] - share
            off = -off if off < 0 else off
            if off < best:
                best, first = off, n
        held.append([*range(low, low + first), *range(high - count + first, high)])
        low, high = low + first, high - count + first
    if rest:
        held[-1].append(full)
    return held


def _rounds(seqlen: int, ranks: int, costs: list[int], size: int) -> list[list[int]]:
    full, rest = divmod(seqlen, size)
    held: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    dearest = sorted(range(full), key=costs.__getitem__, reverse=True)
    for at in range(0, full, ranks):
        for n, rank in zip(dearest[at : at + ranks], sorted(range(ranks), key=loads.__getitem__), strict=False):
            held[rank].append(n)
            loads[rank] += costs[n]
    if rest:  # to a rank that has fewest
        rank = min(range(ranks), key=lambda rank: (len(held[rank]), loads[rank]))
        held[rank].append(full)
    return held


def _improved(held: list[list[int]], costs: list[int], full: int, exchanges: int) -> list[list[int]]:
    """Full chunks exchanged between the rank that has most and the one that has least, while that helps."""
    loads = _loads(held, costs)
    mean = sum(loads) / len(loads)
    enough = EVEN * mean
    by_cost: dict[int, list[tuple[int, int]]] = {}  # of ranks that exchanged something: their full chunks, ascending
    for _ in range(exchanges):
        high, low = loads.index(max(loads)), loads.index(min(loads))
        if loads[high] - mean <= enough:
            break
        for rank in (high, low):
            if rank not in by_cost:
                by_cost[rank] = sorted([(costs[n], n) for n in held[rank] if n < full])
        gap = loads[high] - loads[low]
        pair = _exchange(by_cost[high], by_cost[low], gap / 2, enough / 2)
        if pair is None:
            break
        dear, cheap = by_cost[high].pop(pair[0]), by_cost[low].pop(pair[1])
        insort(by_cost[high], cheap)
        insort(by_cost[low], dear)
        loads[high] += cheap[0] - dear[0]
        loads[low] += dear[0] - cheap[0]
    for rank, chunks in by_cost.items():
        held[rank] = [n for _, n in chunks] + [n for n in held[rank] if n >= full]
    return held


def _exchange(high: list[tuple[int, int]], low: list[tuple[int, int]], wanted: float, enough: float) -> tuple[int, int] | None:
    """Which two to exchange for about the wanted cost to go over: the first pair near enough, else the nearest if it helps."""
    if not high or not low or high[-1][0] - low[0][0] <= 0:
        return None
    if high[-1][0] - low[0][0] <= wanted:
        return len(high) - 1, 0
    best, least = None, wanted
    i = j = 0
    while i < len(high) and j < len(low):
        off = high[i][0] - low[j][0] - wanted
        if abs(off) < least:
            best, least = (i, j), abs(off)
            if least <= enough:
                break
        if off < 0:
            i += 1
        else:
            j += 1
    return best


def joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Ascending runs, neighbours as one."""
    found: list[Run] = []
    for a, b in runs:
        if found and found[-1][1] == a:
            found[-1] = found[-1][0], b
        else:
            found.append((a, b))
    return tuple(found)


def length_of(runs: Sequence[Run]) -> int:
    """Positions of runs."""
    return sum([b - a for a, b in runs])
