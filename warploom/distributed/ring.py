"""Method ring: keys and values come from one rank after the other, only those that this rank's queries see.

Ring attention (arXiv 2310.01889) with the exchange of step t between ranks t apart instead of a chain of neighbours: what a
mask hides is never sent, and a step in which no rank has anything for another is skipped. The next block is on its way while
this one is computed; results merge by log-sum-exp in fp32.

Memory is why it is there. Where sums in fp32 are many bytes, key heads go round in groups, and all that a pass needs beside its
tensors and results is a group's: forward out in fp32, a block's out, and the keys and values of this block and the next;
backward dq in fp32, what a kernel needs for a block's, dk and dv, and the same of keys and values. Where no sum has more than
two terms, as on two ranks, they are summed in their own dtype: each is rounded, and their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.distributed import local
from warploom.distributed.call import Call
from warploom.distributed.collectives import MOST_SEGMENTS, Passing, beside
from warploom.distributed.layout import length_of
from warploom.distributed.pieces import Piece, Sharded

# Bytes that a group's out, or dq, has in fp32 at least. A backward pass has one and a half times as much again for a group, a
# forward pass half, beside keys and values. 64 heads over 8 of 128, 8192 rows, two H200: 658 MiB and 24.9 ms backward in 8
# groups; one key head's blocks did not fill the processors, and the host launched slower than these kernels run (`choice`).
LEAST_FORWARD, LEAST_BACKWARD = 2**27, 2**25
LEAST_OF_TWO = 2**26  # backward, where sums have two terms: 698 MiB in 4 groups, counted by `tests/distributed/ring_bytes.py`


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse, fp32 or wider, of this rank's queries."""
    batch, rows, heads_q, _ = q.shape
    out = q.new_empty((batch, rows, heads_q, v.shape[-1]))
    lse = torch.empty((batch, heads_q, rows), dtype=local.wide(q), device=q.device)
    groups = _groups(q, k, group_count(call.queries.longest, q, k.shape[2], v.shape[-1], LEAST_FORWARD))
    blocks = _blocks(call, k, v, groups, call.sharded.against_own())
    for group in groups:
        some = q[:, :, group.of_q]
        merged = local.Merged(some, v.shape[-1])
        for _, pieces, keys, values in _of_group(call, blocks):
            for part in local.forward(call.run, some, keys, values, None, group.cut(call, pieces)):
                merged.add(*part)
                del part  # before the next piece has its own
            del keys, values  # before there is room for others
        if sink is not None:
            merged.add_sink(sink[group.of_q])
        out[:, :, group.of_q], lse[:, group.of_q] = merged.out, merged.lse
        del merged
    return out, lse


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q, k and v, in their dtypes or wider; those of another's keys go back to it.

    Sums are in fp32 or wider, their terms in k's and v's dtype.
    """
    dq, dk, dv = local.Heads(q.shape[2]), local.Heads(k.shape[2]), local.Heads(k.shape[2])
    pending: list[Callable[[], None]] = []

    def finish() -> None:
        while pending:
            pending.pop(0)()

    def put(heads: slice, of_keys: Sequence[Tensor]) -> None:
        for whole, part, t in zip((dk, dv), of_keys, (k, v), strict=True):
            whole.put(heads, part, t.dtype)

    two = call.sharded.most_blocks <= 2
    groups = _groups(q, k, backward_groups(call.sharded, q, k.shape[2]))
    blocks = _blocks(call, k, v, groups, call.sharded.against_own(k.shape[0] * k.shape[2] // len(groups)))
    for group in groups:
        heads = group.of_q
        upstream = dout[:, :, heads], None if dlse is None else dlse[:, heads], out[:, :, heads], lse[:, heads]
        sums: list[Tensor] = []
        for step, pieces, keys, values in _of_group(call, blocks):
            given = (q[:, :, heads], keys, values, *upstream, group.cut(call, pieces), sums[0] if sums else None)
            of_q, *parts = local.backward(call.run, *given)
            del keys, values, given
            finish()
            if step == 0:
                sums = [of_q if two else of_q.to(local.wide(q)), *_own_sums(call, group.of_keys(k, v), parts, two)]
            else:
                pending.append(partial(_add_returned, call, step, sums[1:], _returning(call, step, k.dtype, parts)))
            del of_q, parts
        dq.put(heads, sums[0], q.dtype)
        pending.append(partial(put, group.of_kv, sums[1:]))
        del sums
    finish()
    return dq.whole, dk.whole, dv.whole


class _Group(NamedTuple):
    """Heads that go round together: of q, and of k and v, which have ``heads_kv`` in all."""

    of_q: slice
    of_kv: slice
    heads_kv: int

    def cut(self, call: Call, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Pieces of these heads."""
        kv, q = (self.of_kv.start, self.of_kv.stop), (self.of_q.start, self.of_q.stop)
        return pieces if kv == (0, self.heads_kv) else call.sharded.heads(pieces, kv, q, self.heads_kv)

    def of_keys(self, k: Tensor, v: Tensor) -> list[Tensor]:
        return [t[:, :, self.of_kv] for t in (k, v)]


def group_count(rows: int, q: Tensor, heads_kv: int, head_dim: int, least: int) -> int:
    """As many groups as leave each ``least`` bytes of sums of q's heads, ``head_dim`` each; ``rows``: of the longest rank."""
    nbytes = q.shape[0] * rows * q.shape[2] * head_dim * local.wide(q).itemsize
    return max([n for n in range(1, heads_kv + 1) if heads_kv % n == 0 and nbytes // n >= least], default=1)


def backward_groups(sharded: Sharded, q: Tensor, heads_kv: int) -> int:
    """Groups of a backward pass, the same on every rank."""
    least = LEAST_OF_TWO if sharded.most_blocks <= 2 else LEAST_BACKWARD
    return group_count(sharded.queries.longest, q, heads_kv, q.shape[3], least)


def _groups(q: Tensor, k: Tensor, count: int) -> list[_Group]:
    heads_kv = k.shape[2]
    of_q, of_kv = q.shape[2] // count, heads_kv // count
    return [_Group(slice(n * of_q, (n + 1) * of_q), slice(n * of_kv, (n + 1) * of_kv), heads_kv) for n in range(count)]


class _Block(NamedTuple):
    step: int
    pieces: tuple[Piece, ...]
    keys: Tensor
    values: Tensor


def _blocks(call: Call, k: Tensor, v: Tensor, groups: Sequence[_Group], own: tuple[Piece, ...]) -> Iterator[_Block]:
    """For each group, rank by rank from this one down, without those that no rank needs anything of.

    What they hold lives as long as the caller's. The next block is on its way by then, if it is another rank's.
    """
    turns = [(group, step) for group in groups for step in _steps(call)]
    coming: Passing | None = None
    for (group, step), (then, further) in zip(turns, [*turns[1:], (groups[0], 0)], strict=True):
        here, coming = coming, None
        if further:
            coming = _passing(call, then.of_keys(k, v), further)
        if here is None:
            yield _Block(step, own, *_own(call, group.of_keys(k, v)))
        else:
            yield _Block(step, call.sharded.against((call.rank - step) % call.ranks), *here.result())


def _steps(call: Call) -> list[int]:
    return [step for step in range(call.ranks) if step == 0 or not call.sharded.idle(step)]


def _of_group(call: Call, blocks: Iterator[_Block]) -> Iterator[_Block]:
    """Its blocks of all."""
    return (next(blocks) for _ in _steps(call))


def _own(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of this rank's keys and values those that it sees itself: views where they lie together."""
    runs = call.sharded.held(call.rank)
    if len(runs) == 1:
        return [t[:, slice(*runs[0])] for t in tensors]
    return [t.index_select(1, call.sharded.rows(call.rank)) for t in tensors]


def _passing(call: Call, tensors: Sequence[Tensor], step: int) -> Passing:
    """This rank's keys and values to the one ``step`` further, which sees some, while those of the one ``step`` before come."""
    target, source = (call.rank + step) % call.ranks, (call.rank - step) % call.ranks
    count = length_of(call.sharded.needed(call.rank, source))
    sent = beside(tensors, call.sharded.held(target), call.sharded.rows(target))
    return Passing(call.group, call.ranks, sent, target, count, source, [t.shape[3] for t in tensors])


def _returning(call: Call, step: int, dtype: torch.dtype, parts: Sequence[Tensor]) -> Passing:
    """Gradients of the keys that came ``step`` ranks far, back to their rank, while those of this rank's come back."""
    target, source = (call.rank + step) % call.ranks, (call.rank - step) % call.ranks
    count = length_of(call.sharded.held(target))
    sent = beside([part.to(dtype) for part in parts], [(0, parts[0].shape[1])])
    return Passing(call.group, call.ranks, sent, source, count, target, [part.shape[3] for part in parts])


def _add_returned(call: Call, step: int, sums: Sequence[Tensor], coming: Passing) -> None:
    _add(call, (call.rank + step) % call.ranks, sums, coming.result())


def _own_sums(call: Call, own: Sequence[Tensor], parts: Sequence[Tensor], two: bool) -> list[Tensor]:
    """What this rank's queries give its own keys, as sums begin: in the terms' dtype where they have ``two``, else wider."""
    dtypes = [part.dtype if two else local.wide(t) for part, t in zip(parts, own, strict=True)]
    if call.sharded.held(call.rank) == [(0, own[0].shape[1])]:
        return [part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)]
    sums = [torch.zeros(t.shape, dtype=dtype, device=t.device) for t, dtype in zip(own, dtypes, strict=True)]
    _add(call, call.rank, sums, parts)
    return sums


def _add(call: Call, reader: int, sums: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """To the sums of this rank's keys those gradients that a rank gives them which sees some of them."""
    runs = call.sharded.held(reader)
    for total, part in zip(sums, parts, strict=True):
        if len(runs) > MOST_SEGMENTS:
            total.index_add_(1, call.sharded.rows(reader), part.to(total.dtype))
            continue
        at = 0
        for a, b in runs:
            total[:, a:b].add_(part[:, at : at + b - a])
            at += b - a
