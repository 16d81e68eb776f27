"""Method gather-heads: a forward pass by gather, and its backward pass by heads, where each rank has all tokens of some.

All tokens are one device's call again: kernels know a long mask better than the columns of a rank's rows, and no gradients are
summed over ranks. But q, k, v, out and their gradients are sent, which are more bytes than keys alone. So heads go in two
shares: the second one's rows are on their way under the first one's kernel, the first one's gradients under the second's. A
forward pass keeps nothing more.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.distributed import local
from warploom.distributed.call import Call
from warploom.distributed.pieces import Piece, Sharded
from warploom.distributed.turning import Heads, Swap, ToHeads, ToTokens

# Of so many heads one is in the first share, whose way is waited for. Its kernel still takes longer than the others' way: of a
# causal call of 4 x 8192 tokens, 64 heads over 8 of 128, 2 ms for 0.8. A third share would leave 0.2 ms less of gradients' way,
# but has a kernel's end and one more sum of gradients of keys.
FIRST = 8


class _Share(NamedTuple):
    """Of a share what is on its way here; ``keys``: None where the one before had them."""

    heads: Heads
    queries: ToHeads
    keys: ToHeads | None
    way: Swap


class _Back(NamedTuple):
    """Of a share what is on its way back; ``of_keys``: None where those of the next one are added first."""

    heads: Heads
    of_q: ToTokens
    of_keys: ToTokens | None
    way: Swap


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q, k and v in their dtypes; where two shares give some to a key, each is rounded."""
    statistics = [t.transpose(1, 2)[..., None] for t in (lse, dlse)]

    def begin(heads: Heads) -> _Share:
        queries = ToHeads(call.queries, call.rank, *[(t, heads) for t in (q, dout, out, *statistics)])
        keys = ToHeads(call.keys, call.rank, (k, heads.of_keys), (v, heads.of_keys)) if heads.members[0] == 0 else None
        return _Share(heads, queries, keys, Swap(call.group, call.rank, [queries] if keys is None else [keys, queries]))

    pieces = call.sharded.of_all(call.dropout)
    shares = [begin(heads) for heads in shares_of(call.sharded, q.shape[2], k.shape[2], call.dropout)]
    backs, of_keys, gradients = list[_Back](), list[Tensor](), list[Tensor]()
    while shares:
        heads, queries, keys, way = shares.pop(0)
        way.wait()
        of_keys = of_keys if keys is None else keys.result()
        (some_q, some_dout, some_out, *rows), (some_k, some_v) = queries.result(), of_keys
        some_lse, some_dlse = [t.squeeze(-1).transpose(1, 2).contiguous() for t in rows]
        upstream = some_dout, some_dlse, some_out, some_lse
        dq, *parts = local.backward(call.run, some_q, some_k, some_v, *upstream, _cut(call, pieces, heads))
        del queries, keys, way, some_q, some_dout, some_out, upstream
        gradients = [a + b for a, b in zip(gradients, parts, strict=True)] if heads.members[0] else parts
        turns = [ToTokens(call.queries, call.rank, dq.to(q.dtype).transpose(0, 1).contiguous())]
        if heads.members[1] == heads.several:
            beside = torch.cat([t.to(k.dtype) for t in gradients], -1)
            turns.append(ToTokens(call.keys, call.rank, beside.transpose(0, 1).contiguous()))
        backs.append(_Back(heads, turns[0], turns[1] if len(turns) == 2 else None, Swap(call.group, call.rank, turns)))
        del dq, parts
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    for back in backs:
        back.way.wait()
        back.of_q.put(back.heads, dq)
        if back.of_keys is not None:
            back.of_keys.put(back.heads.of_keys, dk, dv)
    return dq, dk, dv


def shares_of(sharded: Sharded, heads_q: int, heads_kv: int, dropout: bool) -> list[Heads]:
    """Two shares of the heads that ranks have, or one of one.

    All key heads are in both where each has several query heads: they have more blocks of keys, of which the longest do not
    outlast the others. But dropout, and vectors of several heads, know heads by their numbers: they stay neighbours.
    """
    ranks = len(sharded.queries.counts)
    own, several = heads_kv // ranks, heads_q // heads_kv
    numbered = dropout or any([t is not None and t.shape[1] > 1 for t in sharded.whole.mask.vectors])
    by_members = several > 1 and not numbered
    count = several if by_members else own
    runs = pairwise(sorted({0, max(count // FIRST, 1), count}))
    return [Heads(ranks, own, several, *(((0, own), run) if by_members else (run, (0, several)))) for run in runs]


def _cut(call: Call, pieces: tuple[Piece, ...], heads: Heads) -> tuple[Piece, ...]:
    """Pieces of this rank's heads of a share: of all, where they do not tell heads apart."""
    if heads.members != (0, heads.several):
        return pieces
    first, past = [call.rank * heads.heads_kv + kv for kv in heads.kv]
    q = first * heads.several, past * heads.several
    return call.sharded.heads(pieces, (first, past), q, heads.heads_kv * heads.ranks)
