"""What ranks send each other: all of it in flat buffers, begun here and waited for by whoever needs it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from warploom.distributed.layout import Layout, Run

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
    """Keys and values of some heads on their way from every rank to every rank.

    Tensors differ in their last dimension alone. They are sent side by side, rows first, so that results of ranks that hold
    neighbours are views of what comes.
    """

    def __init__(self, group: Any, layout: Layout, places: Tensor, *tensors: Tensor) -> None:
        self._layout, self._places = layout, places
        self._sizes = [t.shape[-1] for t in tensors]
        sent = torch.cat([_padded(t, layout.longest).transpose(0, 1) for t in tensors], -1)
        self._found = sent.new_empty((len(layout.counts) * layout.longest, *sent.shape[1:]))
        super().__init__([all_gather(self._found, sent, group=group, async_op=True)], sent)

    def result(self) -> list[Tensor]:
        """Each tensor over the whole sequence, in order: (batch, seqlen, heads, ·)."""
        self.wait()
        found, segments = _beside(self._found, self._sizes), self._layout.segments
        if self._layout.in_order:
            return [t[:, : self._layout.seqlen] for t in found]
        if len(segments) <= MOST_SEGMENTS:
            starts = [(rank * self._layout.longest + at, b - a) for rank, at, a, b in segments]
            return [torch.cat([t.narrow(1, *run) for run in starts], 1) for t in found]
        return [t.index_select(1, self._places) for t in found]


class Scattering(Pending):
    """Gradients of keys and values of some heads, in order, summed over ranks on their way to who holds the keys.

    They are sent in fp32 (fp64 for fp64), as ``Gathering`` sends what they are of.
    """

    def __init__(self, group: Any, layout: Layout, places: Tensor, *tensors: Tensor) -> None:
        ranks, longest, first = len(layout.counts), layout.longest, tensors[0]
        self._sizes = [t.shape[-1] for t in tensors]
        shape = (ranks * longest, first.shape[0], *first.shape[2:-1], sum(self._sizes))
        make = torch.empty if min(layout.counts) == longest else torch.zeros
        sent = make(shape, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
        for t, room in zip(tensors, sent.split(self._sizes, -1), strict=True):
            rows = t.transpose(0, 1)
            if layout.in_order:
                room[: len(rows)] = rows
            elif len(layout.segments) <= MOST_SEGMENTS:
                for rank, at, a, b in layout.segments:
                    room[rank * longest + at :][: b - a] = rows[a:b]
            else:
                room.index_copy_(0, places, rows.to(room.dtype))
        self._found = sent.new_empty((longest, *shape[1:]))
        super().__init__([reduce_scatter(self._found, sent, group=group, async_op=True)], sent)

    def result(self, count: int) -> list[Tensor]:
        """Of this rank's ``count`` keys, (batch, count, heads, ·) views."""
        self.wait()
        return _beside(self._found[:count], self._sizes)


class Exchange(NamedTuple):
    """Which rows of keys go where.

    Attributes:
        runs: of this rank's rows those that the first rank sees, then the second one's, and so on.
        rows: all of these as numbers, int64 on the keys' device.
        counts: how many each rank is given.
        taken: how many rows come from each rank.
    """

    runs: list[Run]
    rows: Tensor
    counts: list[int]
    taken: list[int]


class Exchanging(Pending):
    """Keys and values of some heads on their way from who holds them to every rank that sees them."""

    def __init__(self, group: Any, plan: Exchange, *tensors: Tensor) -> None:
        self._sizes = [t.shape[-1] for t in tensors]
        # Two operations, where copies run by run would keep the host longer than they do the device.
        sent = torch.cat(tensors, -1).index_select(1, plan.rows).transpose(0, 1).contiguous()
        self._found = sent.new_empty((sum(plan.taken), *sent.shape[1:]))
        work = dist.all_to_all_single(self._found, sent, plan.taken, plan.counts, group=group, async_op=True)
        super().__init__([work], sent)

    def result(self) -> list[Tensor]:
        """Each tensor's rows of one rank behind the other's: (batch, rows, heads, ·) views."""
        self.wait()
        return _beside(self._found, self._sizes)


class Returning(Pending):
    """Gradients of what ``Exchanging`` brought, on their way back, as ``dtype``."""

    def __init__(self, group: Any, plan: Exchange, dtype: torch.dtype, *tensors: Tensor) -> None:
        self._sizes, self._plan = [t.shape[-1] for t in tensors], plan
        sent = torch.cat([t.transpose(0, 1).to(dtype) for t in tensors], -1)
        self._found = sent.new_empty((len(plan.rows), *sent.shape[1:]))
        work = dist.all_to_all_single(self._found, sent, plan.counts, plan.taken, group=group, async_op=True)
        super().__init__([work], sent)

    def result(self, count: int) -> list[Tensor]:
        """Of this rank's ``count`` keys their sums over ranks, in fp32 (fp64 for fp64): (batch, count, heads, ·) views."""
        self.wait()
        found, plan = self._found, self._plan
        wide = torch.promote_types(found.dtype, torch.float32)
        total = torch.zeros((count, *found.shape[1:]), dtype=wide, device=found.device)
        if len(plan.runs) <= MOST_SEGMENTS:
            for (a, b), part in zip(plan.runs, found.split([b - a for a, b in plan.runs]), strict=True):
                total[a:b] += part
        else:  # rank by rank, of which each has a row once, so that sums have an order
            for rows, part in zip(plan.rows.split(plan.counts), found.split(plan.counts), strict=True):
                total.index_add_(0, rows, part.to(wide))
        return _beside(total, self._sizes)


def _beside(t: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Tensors that lie side by side, rows first, as (batch, rows, heads, ·) views."""
    return [part.transpose(0, 1) for part in t.split(list(sizes), -1)]


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
