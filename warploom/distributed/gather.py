"""Method gather: every rank gets the keys and values that its queries see, some heads at a time, and computes these.

The next heads are on their way while these are computed, on the stream that the backend keeps for its collectives; gradients
of keys and values go back the same way, and are summed in fp32. Where keys have to be in order all ranks get all of them.
Memory is that of two groups of heads over the whole sequence, of all heads where they are few bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.attention.problem import AttentionArgs
from warploom.distributed import local
from warploom.distributed.call import Call
from warploom.distributed.collectives import Exchanging, Gathering, Returning, Scattering
from warploom.distributed.layout import Layout, Run
from warploom.distributed.pieces import Piece, Sharded

MOST_GROUPS = 4  # of heads: more would give kernels too little to do at a time
MANY = 2**30  # bytes of all keys and values from which memory, not the kernels' ends, decides on the number of groups
FIRST = 4  # of so many heads one is in a forward pass's first group, which is waited for, and hides the other one's way


def head_groups(heads_kv: int, nbytes: int, backward: bool = False) -> tuple[Run, ...]:
    """The heads of keys that are gathered together, ``nbytes`` of keys and values in all.

    A kernel's last tiles leave processors idle once for each group, and the first group is waited for: where memory allows
    two, a forward pass begins with few heads. Gradients of keys are computed by blocks of keys, of which few heads have too
    few, and the last group's are waited for too: those groups are alike.
    """
    if nbytes < MANY and not backward and heads_kv > 1:
        first = max(heads_kv // FIRST, 1)
        return (0, first), (first, heads_kv)
    most = MOST_GROUPS if nbytes >= MANY else 2
    count = next(n for n in range(min(most, max(heads_kv, 1)), 0, -1) if heads_kv % n == 0)
    step = heads_kv // count
    return tuple([(n * step, (n + 1) * step) for n in range(count)])


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse, fp32 or wider, of this rank's queries."""
    found = pieces_of(call.sharded, call.run.args, call.unit)
    out, lse = call.blank(q, v.shape[-1], sink, found[0])

    def compute(group: Group) -> None:
        heads = group.heads
        some = None if sink is None else sink[heads]
        given = (q[:, :, heads], group.keys, group.values, some, group.pieces)
        local.write(call.run, *given, out[:, :, heads], lse[:, heads])

    _by_groups(call, q, k, v, found, compute)
    return out, lse


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q, k and v, in their dtypes; those of k and v are summed in fp32 or wider before."""
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    pending: list[tuple[slice, Scattering | Returning]] = []

    def finish() -> None:
        while pending:
            heads_kv, coming = pending.pop()
            dk[:, :, heads_kv], dv[:, :, heads_kv] = coming.result(k.shape[1])

    def compute(group: Group) -> None:
        heads = group.heads
        row_dlse = None if dlse is None else dlse[:, heads]
        given = (dout[:, :, heads], row_dlse, out[:, :, heads], lse[:, heads])
        of_q, *of_keys = local.backward(call.run, q[:, :, heads], group.keys, group.values, *given, group.pieces)
        dq[:, :, heads] = of_q
        if call.group is None:
            dk[:, :, group.heads_kv], dv[:, :, group.heads_kv] = of_keys
            return
        finish()
        back: Scattering | Returning
        if group.in_order:
            back = Scattering(call.group, call.keys, call.key_places, *of_keys)
        else:
            back = Returning(call.group, call.sharded.exchange, k.dtype, *of_keys)
        pending.append((group.heads_kv, back))

    _by_groups(call, q, k, v, pieces_of(call.sharded, call.run.args, None), compute, backward=True)
    finish()
    return dq, dk, dv


def whole_bytes(layout: Layout, k: Tensor, v: Tensor) -> int:
    """Of all ranks' keys and values."""
    return layout.seqlen * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()


class Group(NamedTuple):
    """Heads that are computed together.

    Attributes:
        heads, heads_kv: of q and of k.
        pieces: this rank's queries against keys.
        keys, values: of these heads; all ``in_order``, or what this rank sees of each rank's.
    """

    heads: slice
    heads_kv: slice
    pieces: tuple[Piece, ...]
    keys: Tensor
    values: Tensor
    in_order: bool


def pieces_of(sharded: Sharded, args: AttentionArgs, unit: int | None) -> tuple[tuple[Piece, ...], bool]:
    """A rank's queries against keys, and whether these are all, in order; the latter is the same on every rank.

    Keys need no order where a mask is columns, and a rank only those that it sees, for one call of all its queries. Under
    dropout and in a batch-invariant call they are counted from the first, and in a deterministic order columns cost more than
    bands do.
    """
    dropout = args.dropout_p > 0.0
    if len(sharded.queries.counts) > 1 and not (dropout or args.deterministic or unit is not None):
        exchanged = sharded.exchanged()
        if exchanged is not None:
            return exchanged, False
    return sharded.gathered(dropout, unit), True


def _by_groups(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: tuple[tuple[Piece, ...], bool],
    compute: Callable[[Group], None],
    backward: bool = False,
) -> None:
    """One group after the other, of what ``pieces_of`` found; the next one's keys are on their way behind this one's."""
    pieces, in_order = found
    heads_kv, members = k.shape[2], q.shape[2] // max(k.shape[2], 1)
    runs: tuple[Run, ...] = ((0, heads_kv),)
    # A forward pass's bits may depend on how many heads are computed together.
    if call.group is not None or (call.unit is not None and not backward):
        runs = head_groups(heads_kv, whole_bytes(call.keys, k, v), backward)

    def begin(n: int) -> Gathering | Exchanging | None:
        some = [t[:, :, slice(*runs[n])] for t in (k, v)]
        if call.group is None:
            return None
        if in_order:
            return Gathering(call.group, call.keys, call.key_places, *some)
        return Exchanging(call.group, call.sharded.exchange, *some)

    coming = [begin(n) for n in range(min(len(runs), 2))]
    for n, kv in enumerate(runs):
        of_q: Run = (kv[0] * members, kv[1] * members)
        of_kv = coming.pop(0)
        keys, values = (k[:, :, slice(*kv)], v[:, :, slice(*kv)]) if of_kv is None else of_kv.result()
        some = pieces if len(runs) == 1 else call.sharded.heads(pieces, kv, of_q, heads_kv)
        compute(Group(slice(*of_q), slice(*kv), some, keys, values, in_order))
        del of_kv, keys, values  # before there is room for others
        if n + 2 < len(runs):
            coming.append(begin(n + 2))
