"""From some tokens of all heads to all tokens of some heads, and back: rows come to where they belong, and go from there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from warploom.distributed.collectives import Pending, in_words
from warploom.distributed.layout import Layout, Run

_BYTES = 16  # that kernels read at a time: rows of a tensor begin at their multiples


class Heads(NamedTuple):
    """Some heads of each rank: of its key heads those of ``kv``, and of the heads that share one ``members``.

    Attributes:
        ranks: how many.
        heads_kv: key heads of a rank.
        several: heads that share a key head.
    """

    ranks: int
    heads_kv: int
    several: int
    kv: Run
    members: Run

    @property
    def number(self) -> int:
        """Of a rank."""
        return (self.kv[1] - self.kv[0]) * (self.members[1] - self.members[0])

    @property
    def of_keys(self) -> Heads:
        """The key heads alone."""
        return Heads(self.ranks, self.heads_kv, 1, self.kv, (0, 1))

    def of(self, t: Tensor) -> Tensor:
        """Of (batch, rows, heads, ·): (ranks, rows, batch, key heads, members, ·), a view."""
        t = t.unflatten(2, (self.ranks, self.heads_kv, self.several))
        return t[:, :, :, slice(*self.kv), slice(*self.members)].permute(2, 1, 0, 3, 4, 5)


class Turn:
    """Rows for each rank, and room for those of each, run by run; they are sent by ``Swap``."""

    sent: Sequence[Sequence[Tensor]]
    found: Sequence[Sequence[Tensor]]


class ToHeads(Turn):
    """Some heads of this rank's rows to the heads' ranks, and of all rows those of this rank.

    What comes lies side by side, rows first and in order, so that it needs no copy.
    """

    def __init__(self, layout: Layout, rank: int, *tensors: tuple[Tensor, Heads]) -> None:
        """``tensors``: (batch, rows, heads, ·), the first of the smallest dtype."""
        first = tensors[0][0]
        parts, at = [(heads.of(t), heads.number) for t, heads in tensors], 0
        self._places = list[tuple[int, int, int, torch.dtype]]()
        for (t, _), (_, count) in zip(tensors, parts, strict=True):
            width = count * t.shape[3] * (t.itemsize // first.itemsize)
            self._places.append((at, at + width, count, t.dtype))
            at += -(-width * first.itemsize // _BYTES) * _BYTES // first.itemsize
        sent = first.new_empty((len(layout.runs), first.shape[1], first.shape[0], at))
        for (a, b, _, dtype), (part, _) in zip(self._places, parts, strict=True):
            room, some = in_words(sent[..., a:b].view(dtype).unflatten(-1, part.shape[3:]), part)
            room.copy_(some)
        self._found = first.new_empty((layout.seqlen, *sent.shape[2:]))
        own = _own(layout, rank)
        self.sent = [[part[a:b] for a, b in own] for part in sent]
        self.found = [[self._found[a:b] for a, b in runs] for runs in layout.runs]
        _copy(self.found[rank], self.sent[rank])

    def result(self) -> list[Tensor]:
        """Each tensor's heads of all rows, in order: (batch, seqlen, heads, ·) views."""
        found = [(self._found[..., a:b].view(dtype), count) for a, b, count, dtype in self._places]
        return [t.unflatten(-1, (count, -1)).transpose(0, 1) for t, count in found]


class ToTokens(Turn):
    """The way back: of this rank's heads all rows to the ranks that hold these, and of this rank's rows all heads."""

    def __init__(self, layout: Layout, rank: int, t: Tensor) -> None:
        """``t``: (seqlen, batch, heads, ·) in a row."""
        self._found = t.new_empty((len(layout.runs), layout.counts[rank], *t.shape[1:]))
        own = _own(layout, rank)
        self.sent = [[t[a:b] for a, b in runs] for runs in layout.runs]
        self.found = [[part[a:b] for a, b in own] for part in self._found]
        _copy(self.found[rank], self.sent[rank])

    def put(self, heads: Heads, *rooms: Tensor) -> None:
        """Write to (batch, rows, heads, ·) tensors what lies side by side."""
        for room, part in zip(rooms, self._found.split([t.shape[3] for t in rooms], -1), strict=True):
            into = heads.of(room)
            into, some = in_words(into, part.unflatten(3, into.shape[3:5]))
            into.copy_(some)


class Swap(Pending):
    """Several turns under way, all messages of which are one call of the backend's. What they send lives until ``wait``."""

    def __init__(self, group: Any, rank: int, turns: Sequence[Turn]) -> None:
        operations, buffers = [], []
        for turn in turns:
            buffers += [t for parts in turn.sent for t in parts]
            for other in range(len(turn.sent)):
                if other == rank:
                    continue
                peer = dist.get_global_rank(group, other)
                for what, parts in ((dist.isend, turn.sent[other]), (dist.irecv, turn.found[other])):
                    operations += [dist.P2POp(what, t, peer, group) for t in parts if t.numel()]
            turn.sent = turn.found = ()
        super().__init__(dist.batch_isend_irecv(operations) if operations else [], *buffers)


def _own(layout: Layout, rank: int) -> list[Run]:
    """A rank's runs of rows, as it holds them."""
    return list(pairwise(accumulate([b - a for a, b in layout.runs[rank]], initial=0)))


def _copy(rooms: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for room, part in zip(rooms, parts, strict=True):
        room.copy_(part)
