"""Method gather-heads: a forward pass by gather, and its backward pass by heads, where each rank has all tokens of some.

All tokens are one device's call again: kernels know a long mask better than the columns of a rank's rows, and no gradients are
summed over ranks. But q, k, v, out and their gradients are sent, which are more bytes than keys alone. So heads go in shares:
the next one's rows, and the last one's gradients, are on their way under this one's kernel. A forward pass keeps nothing more.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.distributed import local
from warploom.distributed.call import Call
from warploom.distributed.layout import Run, joined
from warploom.distributed.pieces import Piece, Sharded
from warploom.distributed.turning import ToHeads, ToTokens

# Of so many heads one is in the first share, whose way is waited for, and one in the last, whose gradients are: kernels of the
# others hide the rest.
ENDS = 4


class Share(NamedTuple):
    """Heads that a rank computes together.

    Attributes:
        kv: of its key heads.
        members: of the query heads of each of these.
    """

    kv: Run
    members: Run


class _Coming(NamedTuple):
    """What a share takes: q, dout and out; lse, and dlse if there is one; keys and values, unless the share before had them."""

    queries: ToHeads
    statistics: ToHeads
    keys: ToHeads | None


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q, k and v in their dtypes; those of k and v are summed over shares in fp32 or wider."""
    heads_kv, members = k.shape[2] // call.ranks, q.shape[2] // k.shape[2]
    pieces = call.sharded.of_all(call.dropout)
    todo = shares(heads_kv, members, together(call.sharded, call.dropout))
    statistics = [t.transpose(1, 2).contiguous()[..., None] for t in (lse, dlse) if t is not None]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))

    def begin(share: Share) -> _Coming:
        of_q, of_kv = _heads(call, share, heads_kv, members)
        keys = None if share.members[0] else ToHeads(call.group, call.keys, call.rank, of_kv, k, v)
        to_heads = call.group, call.queries, call.rank, of_q
        return _Coming(ToHeads(*to_heads, q, dout, out), ToHeads(*to_heads, *statistics), keys)

    def finish(share: Share, of_q: ToTokens, of_keys: ToTokens | None) -> None:
        heads_q, heads_k = _heads(call, share, heads_kv, members)
        of_q.put(heads_q, dq)
        if of_keys is not None:
            of_keys.put(heads_k, dk, dv)

    coming = [begin(share) for share in todo[:2]]
    keys, sums, pending = list[Tensor](), list[Tensor](), list[tuple[Share, ToTokens, ToTokens | None]]()
    for n, share in enumerate(todo):
        here = coming.pop(0)
        keys = keys if here.keys is None else here.keys.result()
        (some_q, some_dout, some_out), (some_k, some_v) = here.queries.result(), keys
        some_lse, *some_dlse = [t.squeeze(-1).transpose(1, 2).contiguous() for t in here.statistics.result()]
        upstream = some_dout, some_dlse[0] if some_dlse else None, some_out, some_lse
        cut = _pieces(call, pieces, share, heads_kv, members)
        of_q, *of_keys = local.backward(call.run, some_q, some_k, some_v, *upstream, cut)
        del here, some_q, some_dout, some_out, upstream
        back = ToTokens(call.group, call.queries, call.rank, of_q.to(q.dtype))
        if share.members[0]:
            sums = [total.to(local.wide(total)).add_(part) for total, part in zip(sums, of_keys, strict=True)]
        else:
            sums = of_keys
        back_keys = None
        if share.members[1] == members:
            back_keys = ToTokens(call.group, call.keys, call.rank, *[t.to(k.dtype) for t in sums])
        del of_q, of_keys
        if n + 2 < len(todo):
            coming.append(begin(todo[n + 2]))
        for before in pending:  # its gradients were on their way under this kernel
            finish(*before)
        pending = [(share, back, back_keys)]
    for before in pending:
        finish(*before)
    return dq, dk, dv


def shares(heads_kv: int, members: int, together: bool) -> tuple[Share, ...]:
    """Of a rank with so many key heads, and so many query heads of each, which may have to stay ``together``.

    Else all key heads are in every share: they have more blocks of keys, of which the longest do not outlast the others.
    """
    apart = members > 1 and not together
    count = members if apart else heads_kv
    few = max(count // ENDS, 1)
    runs = pairwise(sorted({0, min(few, count), max(count - few, 0), count}))
    return tuple([Share((0, heads_kv), run) if apart else Share(run, (0, members)) for run in runs])


def together(sharded: Sharded, dropout: bool) -> bool:
    """Whether heads are known by their numbers, and neighbours then: under dropout, and by vectors of several heads."""
    return dropout or any([t is not None and t.shape[1] > 1 for t in sharded.whole.mask.vectors])


def _heads(call: Call, share: Share, heads_kv: int, members: int) -> tuple[list[tuple[Run, ...]], list[tuple[Run, ...]]]:
    """Query and key heads of a share, by rank."""
    of_q, of_kv = list[tuple[Run, ...]](), list[tuple[Run, ...]]()
    for rank in range(call.ranks):
        first, past = rank * heads_kv + share.kv[0], rank * heads_kv + share.kv[1]
        of_kv.append(((first, past),))
        of_q.append(joined([(kv * members + share.members[0], kv * members + share.members[1]) for kv in range(first, past)]))
    return of_q, of_kv


def _pieces(call: Call, pieces: tuple[Piece, ...], share: Share, heads_kv: int, members: int) -> tuple[Piece, ...]:
    """Of this rank's heads of a share."""
    if share.members != (0, members):
        return pieces
    first, past = call.rank * heads_kv + share.kv[0], call.rank * heads_kv + share.kv[1]
    return call.sharded.heads(pieces, (first, past), (first * members, past * members), heads_kv * call.ranks)
