"""Method ring: keys and values come from one rank after the other, only those that this rank's queries see.

Ring attention (arXiv 2310.01889) with the exchange of step t between ranks t apart instead of a chain of neighbours: what a
mask hides is never sent, and a pair that has nothing for each other skips its step. The next block is on its way while this
one is computed; results merge by log-sum-exp in fp32. Memory is that of two blocks of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from warploom.distributed import local
from warploom.distributed.call import Call
from warploom.distributed.collectives import Passing
from warploom.distributed.pieces import Piece


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse, fp32 or wider, of this rank's queries."""
    merged = local.Merged(q, v.shape[-1])
    for _, pieces, keys, values in _blocks(call, k, v):
        for rows, out, lse in local.forward(call.run, q, keys, values, None, pieces):
            merged.add(rows, out, lse)
    if sink is not None:
        merged.add_sink(sink)
    return merged.out.to(q.dtype), merged.lse


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q, k and v, in fp32 or wider. Those of another's keys go back to it."""
    dq, dk, dv = (torch.zeros(t.shape, dtype=local.wide(t), device=t.device) for t in (q, k, v))
    returning: list[tuple[Tensor, Passing]] = []

    def finish() -> None:
        while returning:
            rows, passing = returning.pop()
            for total, part in zip((dk, dv), passing.result(), strict=True):
                total.index_add_(1, rows, part)

    for step, pieces, keys, values in _blocks(call, k, v):
        _, *of_keys = local.backward(call.run, q, keys, values, dout, dlse, out, lse, pieces, dq)
        finish()
        if step == 0:
            rows = call.sharded.rows(call.rank)
            for total, gradient in zip((dk, dv), of_keys, strict=True):
                total.index_add_(1, rows, gradient.to(total.dtype))
            continue
        source, target = (call.rank - step) % call.ranks, (call.rank + step) % call.ranks
        rows = call.sharded.rows(target)
        shapes = [(t.shape[0], len(rows), *t.shape[2:]) for t in (k, v)]
        returning.append((rows, Passing(call.group, of_keys, source, shapes, target, dk)))
    finish()
    return dq, dk, dv


def _blocks(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, tuple[Piece, ...], Tensor, Tensor]]:
    """Step by step the pieces, keys and values of a block; the next one is on its way by then. The first is this rank's own."""
    own = call.sharded.rows(call.rank)
    coming = _passing(call, k, v, 1)
    yield 0, call.sharded.against(call.rank), k.index_select(1, own), v.index_select(1, own)
    for step in range(1, call.ranks):
        keys, values = coming.result()
        coming = _passing(call, k, v, step + 1)
        yield step, call.sharded.against((call.rank - step) % call.ranks), keys, values


def _passing(call: Call, k: Tensor, v: Tensor, step: int) -> Passing:
    """This rank's keys to the one ``step`` further, which sees some, while those of the one ``step`` before come."""
    if step >= call.ranks:
        return Passing(call.group, (), 0, (), 0, k)
    target, source = (call.rank + step) % call.ranks, (call.rank - step) % call.ranks
    rows = call.sharded.rows(target)
    count = sum(b - a for a, b in call.sharded.needed(call.rank, source))
    shapes = [(t.shape[0], count, *t.shape[2:]) for t in (k, v)]
    return Passing(call.group, [t.index_select(1, rows) for t in (k, v)], target, shapes, source, k)
