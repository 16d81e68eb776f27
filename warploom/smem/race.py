"""The swizzles of least excess among many, exactly, without counting every phase under every swizzle.

Three things spare work. Swizzles that bring the same addresses together in one bank are counted once. Of a phase whose
addresses are alike in all bits that a swizzle reads, the count is known: that without a swizzle. And a swizzle drops out as
soon as what has been counted of it, with the least that the rest can come to, is more than the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warploom.smem.classes import LINE, TOP, PhaseClasses, banks_from, distinct, encode

FIRST = 8  # classes on which all swizzles are counted before the hopeless ones drop out; then twice as many, and so on
CLOSE = 64  # from so many classes on, the leader is counted to the end at every turn, for the others to be measured by


@dataclass
class Work:
    """How many phases have been counted, under one layout each."""

    phases: int = 0

    def excess(self, classes: PhaseClasses, stacks: Tensor | None = None) -> Tensor:
        """Of each class under its own stack, or under none: int64 (classes,)."""
        self.phases += len(classes)
        return classes.excess(encode([()]).expand(len(classes), -1, -1) if stacks is None else stacks)


class _Table:
    """Classes of one unit: without a swizzle, with the best, and the bits above the bank's in which lanes differ."""

    def __init__(self, classes: PhaseClasses, lowest: int, work: Work) -> None:
        self.classes, self._work = classes, work
        self.varied, plain = classes.varied & -LINE, work.excess(classes)
        # What differs in bank bits alone conflicts under every swizzle as it does without.
        self.floor = torch.where(self.varied == 0, plain, classes.floor(lowest))
        self.beyond = (plain - self.floor) * classes.weights
        self.least = int((self.floor * classes.weights).sum())

    def known(self, sources: Tensor) -> Tensor:
        """What swizzles that read these bits leave, beyond the floor, in the classes that they do not change."""
        masks, which = torch.unique(sources, return_inverse=True)
        varied, member = torch.unique(self.varied, return_inverse=True)
        beyond = torch.zeros(len(varied), dtype=torch.int64).index_add_(0, member, self.beyond)
        return torch.where(varied & masks[:, None] == 0, beyond, 0).sum(1)[which]

    def changed(self, stacks: Tensor, sources: Tensor, part: slice) -> Tensor:
        """What each stack leaves, beyond the floor, in the classes of a part that it does change."""
        own, member = (self.varied[part] & sources[:, None]).nonzero().unbind(1)
        classes = self.classes.take(member + (part.start or 0))
        more = self._work.excess(classes, stacks[own]) - self.floor[part][member]
        return torch.zeros(len(stacks), dtype=torch.int64).index_add_(0, own, more * classes.weights)


class Race:
    """All accesses to a tile, as classes of different units; swizzles change no bit below `lowest`."""

    def __init__(self, classes: Sequence[PhaseClasses], lowest: int, work: Work) -> None:
        self._tables = [_Table(one, lowest, work) for one in classes]
        self._least = sum(one.least for one in self._tables)
        self._longest = max(len(one) for one in classes)
        self.plain = self._least + sum(int(one.beyond.sum()) for one in self._tables)

    def least(self, stacks: Tensor, limit: int | None = None) -> tuple[int, int] | None:
        """The least excess below `limit`, and the first stack, from `encode`, that leaves it; None where none does."""
        sources, banks = _sources(stacks)
        alive = distinct(banks, torch.ones(len(banks), dtype=torch.int64))[0].sort().values
        scores = self._least + torch.stack([one.known(sources[alive]) for one in self._tables]).sum(0)
        best: tuple[int, int] | None = None
        start, end = 0, FIRST
        while True:
            if limit is not None:
                winning = scores < limit
                alive, scores = alive[winning], scores[winning]
            if not len(alive):
                return best
            if start >= CLOSE and start < self._longest:
                leader = int(scores.argmin())
                score = int(scores[leader] + self._changed(stacks, sources, alive[leader : leader + 1], slice(start, None)))
                if limit is None or score < limit:
                    # Equals stay in: the first of them wins.
                    best = min(best or (score, len(stacks)), (score, int(alive[leader])))
                    limit = best[0] + 1
                others = torch.arange(len(alive)) != leader
                alive, scores = alive[others], scores[others]
            elif start >= self._longest:
                score = int(scores.min())
                ended = score, int(alive[scores == score][0])
                return ended if best is None else min(best, ended)
            scores = scores + self._changed(stacks, sources, alive, slice(start, end))
            start, end = end, 2 * end

    def _changed(self, stacks: Tensor, sources: Tensor, which: Tensor, part: slice) -> Tensor:
        return torch.stack([one.changed(stacks[which], sources[which], part) for one in self._tables]).sum(0)


def _sources(stacks: Tensor) -> tuple[Tensor, Tensor]:
    """The address bits that reach the bank through each stack, as a mask, and what `banks_from` says of them."""
    banks = banks_from(stacks)
    bits = (1 << torch.arange(TOP, 31)).to(torch.int32)
    return torch.where(banks != 0, bits, 0).sum(1).to(torch.int32), banks
