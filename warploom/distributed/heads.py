"""Method heads: all to all, so that each rank has all tokens of some heads and computes them as one device would.

DeepSpeed-Ulysses (arXiv 2309.14509). Work is even whatever the mask, and what is sent shrinks with the number of ranks; but a
rank takes whole heads of keys, so that there must be as many as ranks or a multiple.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.distributed import local
from warploom.distributed.call import Call
from warploom.distributed.collectives import exchange
from warploom.distributed.layout import Layout
from warploom.distributed.pieces import Piece


class Kept(NamedTuple):
    """Of a forward pass for its backward: all tokens of this rank's heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor  # (batch, heads, seqlen_q)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Kept]:
    """Out in q's dtype and lse, fp32 or wider, of this rank's queries, and what the backward pass needs."""
    tokens = (call.queries, call.keys, call.keys)
    all_q, all_k, all_v = _to_heads(call, (q, k, v), tokens)
    pieces = _pieces(call, q.shape[2], k.shape[2])
    out, lse = call.blank(all_q, v.shape[-1], _mine(call, sink), pieces)
    local.write(call.run, all_q, all_k, all_v, _mine(call, sink), pieces, out, lse)
    lse[:, :, call.last :] = float("-inf")
    (mine,) = _to_tokens(call, (out,), (call.queries,))
    (mine_lse,) = _to_tokens(call, (_rows_first(lse),), (call.queries,))
    return mine, _heads_first(mine_lse), Kept(all_q, all_k, all_v, out, lse)


def backward(
    call: Call, kept: Kept, sink: Tensor | None, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of this rank's q, k and v in fp32 or wider, and of the sink by its heads' share of all queries."""
    (all_dout,) = _to_heads(call, (dout,), (call.queries,))
    all_dlse = None
    if dlse is not None:
        all_dlse = _heads_first(_to_heads(call, (_rows_first(dlse),), (call.queries,))[0])
    ranks = call.ranks
    pieces = _pieces(call, kept.q.shape[2] * ranks, kept.k.shape[2] * ranks)
    found = local.backward(call.run, kept.q, kept.k, kept.v, all_dout, all_dlse, kept.out, kept.lse, pieces)
    dq, dk, dv = _to_tokens(call, found, (call.queries, call.keys, call.keys))
    dsink = None
    if sink is not None:
        own = _mine(call, sink)
        assert own is not None
        dsink = torch.zeros(sink.shape, dtype=kept.lse.dtype, device=sink.device)
        count = own.shape[0]
        first = call.rank * count
        dsink[first : first + count] = local.sink_gradient(own, all_dout, all_dlse, kept.out, kept.lse)
    return dq, dk, dv, dsink


def _pieces(call: Call, heads_q: int, heads_kv: int) -> tuple[Piece, ...]:
    at, ranks = call.rank, call.ranks
    kv, q = (at * heads_kv // ranks, (at + 1) * heads_kv // ranks), (at * heads_q // ranks, (at + 1) * heads_q // ranks)
    return call.sharded.heads(call.sharded.of_all(call.dropout), kv, q, heads_kv)


def _mine(call: Call, sink: Tensor | None) -> Tensor | None:
    return None if sink is None else sink.chunk(call.ranks)[call.rank]


def _to_heads(call: Call, tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
    """From this rank's tokens, (batch, rows, heads, ·), to its heads of all tokens in order."""
    ranks = call.ranks
    if call.group is None:
        return list(tensors)
    sent = [[t.chunk(ranks, 2)[rank] for t in tensors] for rank in range(ranks)]
    shapes = [
        [(t.shape[0], layout.counts[rank], t.shape[2] // ranks, t.shape[3]) for t, layout in zip(tensors, layouts, strict=True)]
        for rank in range(ranks)
    ]
    found = exchange(call.group, sent, shapes)
    return [_ordered(call, [several[n] for several in found], layout) for n, layout in enumerate(layouts)]


def _ordered(call: Call, parts: list[Tensor], layout: Layout) -> Tensor:
    """Tokens as ranks hold them in the order of the whole."""
    shape = parts[0].shape
    padded = parts[0].new_empty((shape[0], len(parts), layout.longest, *shape[2:]))
    for rank, part in enumerate(parts):
        padded[:, rank, : part.shape[1]] = part
    return padded.flatten(1, 2).index_select(1, _places(call, layout))


def _to_tokens(call: Call, tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
    """The way back."""
    ranks = call.ranks
    if call.group is None:
        return list(tensors)
    sent: list[list[Tensor]] = [[] for _ in range(ranks)]
    for t, layout in zip(tensors, layouts, strict=True):
        padded = t.new_empty((t.shape[0], ranks * layout.longest, *t.shape[2:])).index_copy_(1, _places(call, layout), t)
        for rank, part in enumerate(padded.split(layout.longest, 1)):
            sent[rank].append(part[:, : layout.counts[rank]])
    shapes = [(t.shape[0], layout.counts[call.rank], *t.shape[2:]) for t, layout in zip(tensors, layouts, strict=True)]
    found = exchange(call.group, sent, [shapes] * ranks)
    return [torch.cat([several[n] for several in found], 2) for n in range(len(tensors))]


def _places(call: Call, layout: Layout) -> Tensor:
    return call.query_places if layout is call.queries else call.key_places


def _rows_first(lse: Tensor) -> Tensor:
    """(batch, heads, rows) as (batch, rows, heads, 1)."""
    return lse.transpose(1, 2)[..., None]


def _heads_first(lse: Tensor) -> Tensor:
    return lse.squeeze(-1).transpose(1, 2).contiguous()
