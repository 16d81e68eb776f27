"""What ranks send each other: all of it in flat buffers, begun here and waited for by whoever needs it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from warploom.distributed.layout import Layout, Run, length_of

# torch 2.13 gave them new names, and warns of the old.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)

MOST_SEGMENTS = 16  # copies of runs of positions that take the host no longer than an index does the device
# Rows of its own that a rank copies behind an exchange's beginning, and again with all: a large kernel at once would hold the
# processors that the exchange begins on, to its end.
FEW_ROWS = 128
FEW_SEGMENTS = 3  # copies that begin sooner than an index of what lies side by side
MOST_SUMS = 64  # sums of runs of gradients that take the host no longer than an index of each row does the device


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
        found, segments = split_beside(self._found, self._sizes), self._layout.segments
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

    def __init__(self, group: Any, layout: Layout, places: Tensor, count: int, *tensors: Tensor) -> None:
        """``count``: this rank's keys."""
        self._count = count
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

    def result(self) -> list[Tensor]:
        """Of this rank's keys, (batch, count, heads, ·) views."""
        self.wait()
        return split_beside(self._found[: self._count], self._sizes)


class Sum(NamedTuple):
    """Rows of keys of which the gradients come from the same ranks.

    Attributes:
        rows: of a rank's.
        own: where their first one lies among the rows that the rank sees itself; None: it sees none of them.
        others: where it lies among what others give back, rank by rank.
    """

    rows: Run
    own: int | None
    others: tuple[int, ...]


class Exchange(NamedTuple):
    """Which rows of keys go where; a rank's own stay on it, behind what comes from the others.

    Attributes:
        runs: of this rank's rows those that the first rank sees, then the second one's, and so on, but for its own.
        rows: all of these as numbers, int64 on the keys' device.
        counts: how many each rank is given.
        taken: how many rows come from each rank.
        own: runs of this rank's rows that it sees itself.
        sums: what adds up to the gradients of this rank's rows, all of these in order; None: too many.
        idle: no rank sees another's keys.
        before: runs of this rank's rows that it wants before what comes from others.
    """

    runs: list[Run]
    rows: Tensor
    counts: list[int]
    taken: list[int]
    own: list[Run]
    sums: Sequence[Sum] | None
    idle: bool
    before: Sequence[Run] = ()


class Exchanging(Pending):
    """Keys and values of some heads on their way from who holds them to every rank that sees them.

    Attributes:
        found: the tensors side by side, (rows, batch, heads, ·): what comes from others, once it is there, own rows around it.
        received: where that is.
    """

    def __init__(self, group: Any, plan: Exchange, *tensors: Tensor) -> None:
        like, shape, first = tensors[0], _beside(tensors), length_of(plan.before)
        self.received = slice(first, first + sum(plan.taken))
        sent = beside(tensors, plan.runs, plan.rows)
        self.found = like.new_empty((self.received.stop + length_of(plan.own), *shape))
        self._own: tuple[Exchange, Sequence[Tensor]] | None = plan, tensors
        work = None
        if not plan.idle:
            received = self.found[self.received]
            work = dist.all_to_all_single(received, sent, plan.taken, plan.counts, group=group, async_op=True)
            few = [(a, min(b, a + FEW_ROWS)) for a, b in plan.own[:1]]
            put_beside(self.found[self.received.stop :], tensors, few)
        super().__init__([work], sent)

    def put_own(self) -> None:
        """Write own rows, before ``result`` while the others' are on their way."""
        if self._own is not None:
            plan, tensors = self._own
            put_beside(self.found, tensors, plan.before)
            put_beside(self.found[self.received.stop :], tensors, plan.own)
            self._own = None

    def result(self) -> Tensor:
        """``found``: one rank's rows behind the other's."""
        self.wait()
        self.put_own()
        return self.found


class Returning(Pending):
    """Gradients of what ``Exchanging`` brought, on their way back, as ``dtype``; those of own keys stay."""

    def __init__(self, group: Any, plan: Exchange, dtype: torch.dtype, *tensors: Tensor) -> None:
        """Others' rows are the first ones of ``tensors``."""
        taken = sum(plan.taken)
        sent = tensors[0].new_empty((taken, *_beside(tensors)), dtype=dtype)
        put_beside(sent, [t[:, :taken].to(dtype) for t in tensors], [(0, taken)])
        self._plan, self._found = plan, sent.new_empty((len(plan.rows), *sent.shape[1:]))
        work = None
        if not plan.idle:
            work = dist.all_to_all_single(self._found, sent, plan.counts, plan.taken, group=group, async_op=True)
        super().__init__([work], sent)

    def put_own(self, count: int, *tensors: Tensor) -> None:
        """Gradients of the rows that the rank sees itself, before ``result``; ``count``: its keys."""
        self._totals = list(tensors)
        whole = self._plan.own == [(0, count)]
        if not whole or any([t.untyped_storage().nbytes() > t.nbytes for t in tensors]):  # a view would keep others' alive
            self._totals = [self._placed(t, count) for t in tensors]

    def _placed(self, own: Tensor, count: int) -> Tensor:
        """Gradients of the rows that the rank sees itself among those of all its rows."""
        make = own.new_zeros if self._plan.sums is None else own.new_empty
        total = make((own.shape[0], count, *own.shape[2:]))
        _split_to(total, own, self._plan.own)
        return total

    def result(self) -> list[Tensor]:
        """Of this rank's keys their sums over ranks, as of fp32 (fp64 for fp64): (batch, count, heads, ·).

        Each is this rank's own and then rank by rank, so that sums have an order.
        """
        self.wait()
        parts = split_beside(self._found, [t.shape[-1] for t in self._totals])
        add = self._by_rows if self._plan.sums is None else _by_runs
        return [add(t, part, self._plan) for t, part in zip(self._totals, parts, strict=True)]

    @staticmethod
    def _by_rows(total: Tensor, part: Tensor, plan: Exchange) -> Tensor:
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        for rows, given in zip(plan.rows.split(plan.counts), part.split(plan.counts, 1), strict=True):
            if len(rows):
                total.index_add_(1, rows, given.to(total.dtype))
        return total


def _by_runs(total: Tensor, part: Tensor, plan: Exchange) -> Tensor:
    """Two terms are rounded each, and their sum; more are summed wide and rounded once."""
    for (a, b), own, others in plan.sums or ():
        room, terms = total[:, a:b], [part[:, at : at + b - a] for at in others]
        if own is None:
            room.copy_(terms.pop(0)) if terms else room.zero_()
        if len(terms) == 1:
            room += terms[0]
        elif terms:
            some = room.to(torch.promote_types(total.dtype, torch.float32))
            for term in terms:
                some += term
            if some is not room:
                room.copy_(some)
    return total


def sums_of(count: int, own: Sequence[Run], given: Sequence[Run]) -> list[Sum] | None:
    """`Exchange.sums` of ``count`` rows; ``given``: what `Exchange.runs` is."""
    if len(own) + len(given) > MOST_SUMS:
        return None
    edges = sorted({0, count, *[end for run in (*own, *given) for end in run]})
    found = []
    for a, b in pairwise(edges):
        here = _places(own, a)
        found.append(Sum((a, b), here[0] if here else None, tuple(_places(given, a))))
    return found if sum([1 + len(each.others) for each in found]) <= MOST_SUMS else None


def _places(runs: Sequence[Run], row: int) -> list[int]:
    """Where a row lies among runs that lie one behind the other."""
    before = accumulate([b - a for a, b in runs], initial=0)
    return [at + row - a for (a, b), at in zip(runs, before, strict=False) if a <= row < b]


def _beside(tensors: Sequence[Tensor]) -> tuple[int, int, int]:
    """Batch, heads and last dimension of tensors side by side."""
    batch, _, heads, _ = tensors[0].shape
    return batch, heads, sum([t.shape[-1] for t in tensors])


def beside(tensors: Sequence[Tensor], runs: Sequence[Run], rows: Tensor | None = None) -> Tensor:
    """Rows of tensors (batch, rows, heads, ·) side by side, rows first: those of ``runs``, which ``rows`` has as numbers."""
    room = tensors[0].new_empty((length_of(runs), *_beside(tensors)))
    if rows is None or len(runs) <= FEW_SEGMENTS:
        put_beside(room, tensors, runs)
    else:
        torch.index_select(torch.cat(list(tensors), -1).transpose(0, 1), 0, rows, out=room)
    return room


def put_beside(room: Tensor, tensors: Sequence[Tensor], runs: Sequence[Run]) -> None:
    """Write rows of tensors (batch, rows, heads, ·) side by side to (rows, batch, heads, ·), one run behind the other."""
    whole, parts, at = room, list(tensors), 0
    if not all([t.transpose(0, 1).is_contiguous() for t in tensors]):
        whole, *parts = in_words(room, *tensors)
    for a, b in runs:
        torch.cat([t[:, a:b].transpose(0, 1) for t in parts], -1, out=whole[at : at + b - a])
        at += b - a


def in_words(*tensors: Tensor) -> list[Tensor]:
    """Views as numbers of 16, 8 or 4 bytes, where all can be viewed so: a GPU copies heads that lie apart number by number."""
    for dtype in (torch.complex128, torch.int64, torch.int32):
        if all([_divides(dtype.itemsize, t) for t in tensors]):
            return [t.view(dtype) for t in tensors]
    return list(tensors)


def _divides(nbytes: int, t: Tensor) -> bool:
    """Whether ``nbytes`` divide where each row of the last dimension begins, and its length."""
    steps = t.shape[-1], t.storage_offset(), *t.stride()[:-1]
    return t.stride(-1) == 1 and not any([step * t.element_size() % nbytes for step in steps]) and not t.data_ptr() % nbytes


def _split_to(whole: Tensor, t: Tensor, runs: Sequence[Run]) -> None:
    """Write rows of (batch, rows, heads, ·), one run behind the other, to where they belong in ``whole``."""
    at = 0
    for a, b in runs:
        whole[:, a:b] = t[:, at : at + b - a]
        at += b - a


def split_beside(t: Tensor, sizes: Sequence[int]) -> list[Tensor]:
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
    """Rows of tensors sent to one rank, while ``count`` come from another; either may be none.

    It is a collective, of which every rank gives and takes what it has: one message each way, and one call of the backend's.
    """

    def __init__(self, group: Any, ranks: int, sent: Tensor, to: int, count: int, source: int, sizes: Sequence[int]) -> None:
        """``sent``: tensors of ``sizes`` side by side, rows first."""
        self._sizes, self._found = sizes, sent.new_empty((count, *sent.shape[1:]))
        given, taken = [0] * ranks, [0] * ranks
        given[to], taken[source] = len(sent), count
        super().__init__([dist.all_to_all_single(self._found, sent, taken, given, group=group, async_op=True)], sent)

    def result(self) -> list[Tensor]:
        """What came, once, as (batch, rows, heads, ·) views: it lives as long as the caller's."""
        self.wait()
        # An empty view would keep what it is a view of.
        found, self._found = split_beside(self._found, self._sizes), self._found.new_empty((0, *self._found.shape[1:]))
        return found


def _padded(t: Tensor, length: int) -> Tensor:
    missing = length - t.shape[1]
    return t if not missing else torch.cat([t, t.new_zeros((t.shape[0], missing, *t.shape[2:]))], 1)
