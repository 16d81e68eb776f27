"""What ranks send each other: all of it in flat buffers, begun here and waited for by whoever needs it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warploom.distributed.layout import Layout

# torch 2.13 gave them new names, and warns of the old.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)

MOST_SEGMENTS = 16  # copies of runs of positions that take the host no longer than an index does the device


class Pending:
    """A collective under way. It runs on the backend's own stream, behind what this stream has been given so far.

    ``wait`` makes this stream wait on a GPU, this process on a CPU. Buffers live until then.
    """

    def __init__(self, works: Sequence[Any], *buffers: Tensor) -> None:
        self._works, self._buffers = works, buffers

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._works, self._buffers = (), ()


class Gathering(Pending):
    """Keys and values of some heads on their way from every rank to every rank."""

    def __init__(self, group: Any, layout: Layout, places: Tensor, *tensors: Tensor) -> None:
        self._layout, self._places = layout, places
        self._shapes = [(t.shape[0], layout.longest, *t.shape[2:]) for t in tensors]
        sent = torch.cat([_padded(t, layout.longest).flatten() for t in tensors])
        self._found = sent.new_empty(len(layout.counts) * sent.numel())
        super().__init__([all_gather(self._found, sent, group=group, async_op=True)], sent)

    def result(self) -> list[Tensor]:
        """Each tensor over the whole sequence, in order: (batch, seqlen, heads, ·)."""
        self.wait()
        parts = self._found.view(len(self._layout.counts), -1).split([prod(shape) for shape in self._shapes], 1)
        found = [part.unflatten(1, shape) for part, shape in zip(parts, self._shapes, strict=True)]  # of each rank
        segments = self._layout.segments
        if 0 < len(segments) <= MOST_SEGMENTS:
            return [torch.cat([t[rank, :, at : at + b - a] for rank, at, a, b in segments], 1) for t in found]
        # With the batch first ranks and rows are one dimension.
        return [t.transpose(0, 1).flatten(1, 2).index_select(1, self._places) for t in found]


class Scattering(Pending):
    """Gradients of keys and values of some heads, summed over ranks on their way to who holds the keys."""

    def __init__(self, group: Any, layout: Layout, places: Tensor, *tensors: Tensor) -> None:
        ranks, longest = len(layout.counts), layout.longest
        self._shapes = [(t.shape[0], longest, *t.shape[2:]) for t in tensors]
        sizes = list(map(prod, self._shapes))
        make = tensors[0].new_empty if min(layout.counts) == longest else tensors[0].new_zeros
        rooms = make(ranks, sum(sizes))
        for t, room, shape in zip(tensors, rooms.split(sizes, 1), self._shapes, strict=True):
            of_ranks = room.unflatten(1, shape)
            if len(layout.segments) <= MOST_SEGMENTS:
                for rank, at, a, b in layout.segments:
                    of_ranks[rank, :, at : at + b - a] = t[:, a:b]
            else:
                spread = t.new_zeros((t.shape[0], ranks * longest, *t.shape[2:])).index_copy_(1, places, t)
                of_ranks.copy_(spread.unflatten(1, (ranks, longest)).transpose(0, 1))
        sent = rooms.flatten()
        self._found = sent.new_empty(sent.numel() // ranks)
        super().__init__([reduce_scatter(self._found, sent, group=group, async_op=True)], sent)

    def result(self, count: int) -> list[Tensor]:
        """Of this rank's ``count`` keys, (batch, count, heads, ·)."""
        self.wait()
        parts = self._found.split([prod(shape) for shape in self._shapes])
        return [part.view(shape)[:, :count] for part, shape in zip(parts, self._shapes, strict=True)]


def exchange(group: Any, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Tensor]]:
    """All to all: ``sent[rank]`` goes to each rank, what it sent here comes back with these shapes."""
    flat = torch.cat([t.flatten() for tensors in sent for t in tensors])
    counts = [sum(t.numel() for t in tensors) for tensors in sent]
    sizes = [[prod(shape) for shape in several] for several in shapes]
    found = flat.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(found, flat, [sum(several) for several in sizes], counts, group=group)
    parts = iter(found.split([size for several in sizes for size in several]))
    return [[next(parts).view(shape) for shape in several] for several in shapes]


class Passing(Pending):
    """Tensors sent to one rank while others come from another; either may be none."""

    def __init__(
        self, group: Any, sent: Sequence[Tensor], to: int, shapes: Sequence[tuple[int, ...]], source: int, like: Tensor
    ) -> None:
        self._shapes = shapes
        self._found = like.new_empty(sum(map(prod, shapes)))
        works, buffers = [], []
        if sent and sum(t.numel() for t in sent):
            buffers.append(torch.cat([t.flatten() for t in sent]))
            works.append(dist.P2POp(dist.isend, buffers[0], group=group, group_peer=to))
        if self._found.numel():
            works.append(dist.P2POp(dist.irecv, self._found, group=group, group_peer=source))
        super().__init__(dist.batch_isend_irecv(works) if works else [], *buffers)

    def result(self) -> list[Tensor]:
        self.wait()
        parts = self._found.split(list(map(prod, self._shapes)))
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _padded(t: Tensor, length: int) -> Tensor:
    missing = length - t.shape[1]
    return t if not missing else torch.cat([t, t.new_zeros((t.shape[0], missing, *t.shape[2:]))], 1)
