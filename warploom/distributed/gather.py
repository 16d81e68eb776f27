"""Method gather: every rank gets all keys and values, some heads at a time, and computes its own queries.

The next heads are on their way while these are computed, on the stream that the backend keeps for its collectives; gradients
of keys and values go back by reduce-scatter in fp32 the same way. Memory is that of two groups of heads over the whole
sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from warploom.distributed import local
from warploom.distributed.call import Call
from warploom.distributed.collectives import Gathering, Scattering
from warploom.distributed.layout import Layout, Run
from warploom.distributed.pieces import Piece

MOST_GROUPS = 4  # of heads: more would give kernels too little to do at a time
MANY = 2**30  # bytes of all keys and values from which memory, not the kernels' ends, decides on the number of groups


def head_groups(heads_kv: int, nbytes: int) -> int:
    """In how many goes heads are gathered, ``nbytes`` of keys and values in all.

    A kernel's last tiles leave processors idle once for each group, and the first group is waited for.
    """
    most = MOST_GROUPS if nbytes >= MANY else 2
    return next(n for n in range(min(most, max(heads_kv, 1)), 0, -1) if heads_kv % n == 0)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse, fp32 or wider, of this rank's queries."""
    out, lse = call.blank(q, v.shape[-1], sink)
    for heads, _, pieces, keys, values in _groups(call, q, k, v, call.unit):
        some = None if sink is None else sink[heads]
        for rows, part_out, part_lse in local.forward(call.run, q[:, :, heads], keys, values, some, pieces):
            out[:, rows, heads], lse[:, heads, rows] = part_out, part_lse
    return out, lse


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q, in its dtype or wider, and of k and v, in fp32 or wider."""
    dq: Tensor | None = None
    dk, dv = (torch.empty(t.shape, dtype=local.wide(t), device=t.device) for t in (k, v))
    pending: list[tuple[slice, Scattering]] = []

    def finish(most: int) -> None:
        while len(pending) > most:
            heads_kv, scattering = pending.pop(0)
            dk[:, :, heads_kv], dv[:, :, heads_kv] = scattering.result(k.shape[1])

    for heads, heads_kv, pieces, keys, values in _groups(call, q, k, v):
        row_dlse = None if dlse is None else dlse[:, heads]
        given = (dout[:, :, heads], row_dlse, out[:, :, heads], lse[:, heads])
        of_q, dkeys, dvalues = local.backward(call.run, q[:, :, heads], keys, values, *given, pieces)
        if of_q.shape == q.shape:
            dq = of_q
        else:
            dq = of_q.new_empty(q.shape) if dq is None else dq
            dq[:, :, heads] = of_q
        if call.group is None:
            dk[:, :, heads_kv], dv[:, :, heads_kv] = dkeys, dvalues
            continue
        finish(0)
        pending.append((heads_kv, Scattering(call.group, call.keys, call.key_places, dkeys, dvalues)))
    finish(0)
    assert dq is not None
    return dq, dk, dv


def whole_bytes(layout: Layout, k: Tensor, v: Tensor) -> int:
    """Of all ranks' keys and values."""
    return layout.seqlen * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()


def _groups(
    call: Call, q: Tensor, k: Tensor, v: Tensor, unit: int | None = None
) -> Iterator[tuple[slice, slice, tuple[Piece, ...], Tensor, Tensor]]:
    """Heads of q and of k, the pieces and all keys and values of each group; the next one's are on their way by then."""
    heads_q, heads_kv = q.shape[2], k.shape[2]
    count = head_groups(heads_kv, whole_bytes(call.keys, k, v))
    step, step_q = heads_kv // count, heads_q // count

    def begin(n: int) -> Gathering | None:
        heads = slice(n * step, (n + 1) * step)
        return None if call.group is None else Gathering(call.group, call.keys, call.key_places, k[:, :, heads], v[:, :, heads])

    coming = begin(0)
    for n in range(count):
        kv: Run = (n * step, (n + 1) * step)
        of_q: Run = (n * step_q, (n + 1) * step_q)
        if coming is None:
            keys, values = k[:, :, slice(*kv)], v[:, :, slice(*kv)]
        else:
            keys, values = coming.result()
        coming = begin(n + 1) if n + 1 < count else None
        pieces = call.sharded.gathered(call.dropout, unit)
        if count > 1:
            pieces = call.sharded.heads(pieces, kv, of_q, heads_kv)
        yield slice(*of_q), slice(*kv), pieces, keys, values
