"""From some tokens of all heads to all tokens of some heads, and back: rows come to where they belong, and go from there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warploom.distributed.collectives import Pending, beside, in_words, put_beside
from warploom.distributed.layout import Layout, Run, length_of


class Swap(Pending):
    """All to all of rows that lie anywhere: ``sent[rank]`` goes there, and what that rank sends comes to ``found[rank]``."""

    def __init__(self, group: Any, found: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        self._found: Sequence[Tensor] = ()
        if found[0].is_cuda and "nccl" in dist.get_backend(group):
            work = dist.all_to_all(list(found), list(sent), group=group, async_op=True)
            super().__init__([work], *sent)
            return
        # Of such lists gloo takes only parts of one size.
        flat, self._sizes = torch.cat(list(sent)), [len(t) for t in found]
        self._found, self._came = found, flat.new_empty((sum(self._sizes), *flat.shape[1:]))
        counts = [len(t) for t in sent]
        work = dist.all_to_all_single(self._came, flat, self._sizes, counts, group=group, async_op=True)
        super().__init__([work], flat)

    def wait(self) -> None:
        super().wait()
        for room, part in zip(self._found, self._came.split(self._sizes) if self._found else (), strict=True):
            room.copy_(part)
        self._found = ()


class ToHeads(Pending):
    """Some heads of tensors (batch, rows, heads, ·), on their way from each rank's rows to all rows on the heads' rank.

    What comes lies side by side, rows first and in order, so that it needs no copy. Of each run of rows that ranks hold there
    is one message to each other rank.
    """

    def __init__(self, group: Any, layout: Layout, rank: int, heads: Sequence[Sequence[Run]], *tensors: Tensor) -> None:
        """``heads``: for each rank."""
        self._count = length_of(heads[rank])
        self._sizes = [self._count * t.shape[3] for t in tensors]
        first, local, ranks = tensors[0], _local(layout, rank), range(len(heads))
        parts = [[t[:, :, a:b].flatten(2)[:, :, None] for t in tensors for a, b in runs] for runs in heads]
        self._found = first.new_empty((layout.seqlen, first.shape[0], 1, sum(self._sizes)))
        none = self._found[:0]
        sent = [none if to == rank else beside(parts[to], [(0, first.shape[1])]) for to in ranks]
        places = [runs if source != rank else () for source, runs in enumerate(layout.runs)]
        swaps = [
            Swap(group, [_nth(self._found, runs, n) for runs in places], [_nth(each, local, n) for each in sent])
            for n in range(_most_runs(layout))
        ]
        for (a, b), own in zip(layout.runs[rank], local, strict=True):
            put_beside(self._found[a:b], parts[rank], [own])
        super().__init__(swaps)

    def result(self) -> list[Tensor]:
        """Each tensor's heads of all rows, in order: (batch, seqlen, heads, ·) views."""
        self.wait()
        return [t.squeeze(2).unflatten(-1, (self._count, -1)).transpose(0, 1) for t in self._found.split(self._sizes, -1)]


class ToTokens(Pending):
    """The way back: all rows of some heads, (batch, seqlen, heads, ·), to the ranks that hold the rows."""

    def __init__(self, group: Any, layout: Layout, rank: int, *tensors: Tensor) -> None:
        """``tensors`` differ in their last dimension alone."""
        self._sizes = [t.shape[3] for t in tensors]
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)
        sent, local, ranks = whole.transpose(0, 1).contiguous(), _local(layout, rank), range(len(layout.runs))
        self._found = sent.new_empty((len(layout.runs), layout.counts[rank], *sent.shape[1:]))
        places = [local if source != rank else () for source in ranks]
        targets = [runs if to != rank else () for to, runs in enumerate(layout.runs)]
        swaps = [
            Swap(
                group,
                [_nth(room, runs, n) for room, runs in zip(self._found, places, strict=True)],
                [_nth(sent, runs, n) for runs in targets],
            )
            for n in range(_most_runs(layout))
        ]
        for (a, b), (first, past) in zip(layout.runs[rank], local, strict=True):
            self._found[rank, first:past] = sent[a:b]
        super().__init__(swaps)

    def put(self, heads: Sequence[Sequence[Run]], *rooms: Tensor) -> None:
        """Write each tensor's to (batch, rows, heads, ·); ``heads``: as ``ToHeads`` was given them."""
        self.wait()
        for room, part in zip(rooms, self._found.split(self._sizes, -1), strict=True):
            for runs, of_rank in zip(heads, part.transpose(1, 2), strict=True):
                at = 0
                for a, b in runs:
                    into, some = in_words(room[:, :, a:b], of_rank[:, :, at : at + b - a])
                    into.copy_(some)
                    at += b - a


def _local(layout: Layout, rank: int) -> list[Run]:
    """A rank's runs of rows, as it holds them."""
    return list(pairwise(accumulate([b - a for a, b in layout.runs[rank]], initial=0)))


def _most_runs(layout: Layout) -> int:
    return max(map(len, layout.runs))


def _nth(t: Tensor, runs: Sequence[Run], n: int) -> Tensor:
    """Rows of a run; none where there are fewer runs."""
    return t[slice(*runs[n])] if n < len(runs) else t[:0]
