"""Method gather: every rank gets the keys and values that its queries see, some heads at a time, and computes these.

The next heads are on their way while these are computed, on the stream that the backend keeps for its collectives; gradients
of keys and values go back the same way, and are summed as in fp32. Where keys have to be in order all ranks get all of them.
Memory is that of two groups of heads of the keys that a rank has, of all heads where they are few bytes. A backward pass finds
the keys that it needs where they are few beside what is kept for it anyway; else they are sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.attention.problem import AttentionArgs
from warploom.distributed import documents, local
from warploom.distributed.call import Call
from warploom.distributed.collectives import (
    Exchange,
    Exchanging,
    Gathering,
    Returning,
    Scattering,
    in_words,
    put_beside,
    split_beside,
)
from warploom.distributed.documents import documents_of
from warploom.distributed.layout import Run, length_of
from warploom.distributed.pieces import Piece, Sharded

MOST_GROUPS = 4  # of heads: more would give kernels too little to do at a time
MANY = 2**30  # bytes of keys and values on a rank from which memory, not the kernels' ends, decides on the number of groups
FIRST = 4  # of so many heads one is in the first of two groups, where keys are in order
# Two groups of a forward pass, by a model: seconds of an all to all, which are START and bytes at LINK (two H200, 12 to 25 MB),
# seconds of a second launch whose end leaves processors idle, and operations a second of kernels.
START, LINK, END, SPEED = 25e-6, 340e9, 45e-6, 700e12
# Bytes of others' keys and values up to which all heads are one group in a backward pass. Two wait for half of them twice, at
# 300 GB/s, but copy each part of dq (0.08 ms of 8192 queries and 64 heads of 128), and have two kernels' ends: up to 0.3 ms
# where keys are few, none where they are many.
ONE_BACKWARD = 64 * 2**20
HIDDEN = 4  # of so many seconds of documents' kernels one may be others' keys' way: those that hide it are some of them
KEPT = 8  # others' keys and values are kept for a backward pass where they are one so-many-th of q, k, v and out at the most


class Amount(NamedTuple):
    """What decides on groups of heads, the same on every rank.

    Attributes:
        nbytes: of keys and values that the rank has that gets most from others.
        taken: of those that it gets.
        seconds: of a rank's forward kernels, on average; None where groups may depend on the whole alone.
    """

    nbytes: int
    taken: int
    seconds: float | None


def head_groups(heads_kv: int, amount: Amount, backward: bool = False) -> tuple[Run, ...]:
    """The heads of keys that are gathered together.

    A kernel's last tiles leave processors idle once for each group, and the first group is waited for: where memory allows
    two, a forward pass begins with few heads. Gradients of keys are computed by blocks of keys, of which few heads have too
    few, and the last group's are waited for too: those groups are alike.
    """
    if amount.nbytes < MANY and heads_kv > 0:
        if backward:
            first = heads_kv if amount.taken <= ONE_BACKWARD else (heads_kv + 1) // 2
        elif amount.seconds is not None:
            first = _fewest(heads_kv, amount.taken, amount.seconds)
        else:
            one = way(amount.taken) <= way(amount.taken / FIRST) + END
            first = heads_kv if one else max(heads_kv // FIRST, 1)
        return ((0, heads_kv),) if first == heads_kv else ((0, first), (first, heads_kv))
    count = next(n for n in range(min(MOST_GROUPS, max(heads_kv, 1)), 0, -1) if heads_kv % n == 0)
    step = heads_kv // count
    return tuple([(n * step, (n + 1) * step) for n in range(count)])


def way(nbytes: float) -> float:
    """Seconds that so many bytes are on their way to a rank."""
    return START + nbytes / LINK


def _fewest(heads_kv: int, taken: int, seconds: float) -> int:
    """Heads of the first of two groups, or all of them: those that leave least to wait for.

    The first group's way is waited for, and of the others' what its kernel does not hide.
    """

    def waited(first: int) -> float:
        share = first / heads_kv
        if first == heads_kv:
            return way(taken)
        return way(taken * share) + max(0.0, way(taken * (1 - share)) - seconds * share) + END

    return min(range(1, heads_kv + 1), key=waited)


class Keys(NamedTuple):
    """What a backward pass takes of keys and values.

    Attributes:
        tensors: k and v of this rank; or, side by side, what it sees of all ranks', a group of heads each; or k and v and
            what it sees of others', a group of heads each.
        gathered: whether it is one of the latter two.
        dims: of a head, of k and of v.
        apart: whether it is the last.
    """

    tensors: tuple[Tensor, ...]
    gathered: bool
    dims: tuple[int, int]
    apart: bool = False


class Group(NamedTuple):
    """Heads that are computed together.

    Attributes:
        heads, heads_kv: of q and of k.
        pieces: this rank's queries against keys.
        keys, values: of these heads; all in order, or what this rank sees of each rank's.
        beside: the latter, as ``Exchanging`` found them, else None.
    """

    heads: slice
    heads_kv: slice
    pieces: tuple[Piece, ...]
    keys: Tensor
    values: Tensor
    beside: Tensor | None


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, keeps: bool = True
) -> tuple[Tensor, Tensor, Keys]:
    """Out in q's dtype and lse, fp32 or wider, of this rank's queries; and what ``backward`` takes of keys and values.

    Others' keys may be among these, unless nothing of them ``keeps``.
    """
    keys = Keys((k, v), False, (k.shape[3], v.shape[3]))
    found = pieces_of(call.sharded, call.run.args, call.unit)
    keeps = keeps and not found[1] and _keeps(call, q, k, v)
    at_once = packs(call.sharded, call.run.args)
    packed = documents_of(call.sharded) if at_once else None
    out, lse = call.blank(q, v.shape[-1], sink, found[0] if packed is None else packed.pieces)
    if packed is not None:
        others = documents.forward(call, packed, q, k, v, sink, out, lse)
        if keeps:
            keys = keys._replace(tensors=(k, v, documents.alone(others)), gathered=True, apart=True)
        return out, lse, keys
    kept: list[Tensor] | None = [] if keeps else None
    apart, taken = keeps and call.sharded.causal, sum(call.sharded.exchange.taken) if keeps else 0

    def compute(group: Group) -> None:
        heads = group.heads
        some = None if sink is None else sink[heads]
        given = (q[:, :, heads], group.keys, group.values, some, group.pieces)
        local.write(call.run, *given, out[:, :, heads], lse[:, heads])
        if kept is not None and group.beside is not None:
            # A part of it alone: as a view it would keep the rank's own rows, which k and v hold.
            kept.append(group.beside[:taken].clone() if apart else group.beside)

    _by_groups(call, q, keys, found, compute, at_once=at_once)
    if kept is None:
        return out, lse, keys
    return out, lse, keys._replace(tensors=(k, v, *kept) if apart else tuple(kept), gathered=True, apart=apart)


def backward(
    call: Call, q: Tensor, keys: Keys, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q, k and v, in their dtypes or wider; those of k and v are summed in fp32 or wider."""
    if keys.apart and call.sharded.causal:
        return _apart(call, q, keys, (dout, dlse, out, lse))
    if keys.apart:
        keys = _joined(call.sharded.exchange, keys)
    dq, dk, dv = local.Heads(q.shape[2]), *[local.Heads(keys_heads(keys)) for _ in range(2)]
    pending: list[tuple[slice, Scattering | Returning]] = []

    def finish() -> None:
        while pending:
            heads_kv, coming = pending.pop()
            put(heads_kv, coming.result())

    def put(heads_kv: slice, of_keys: Sequence[Tensor]) -> None:
        for whole, part in zip((dk, dv), of_keys, strict=True):
            whole.put(heads_kv, part, q.dtype)

    def compute(group: Group) -> None:
        heads = group.heads
        row_dlse = None if dlse is None else dlse[:, heads]
        given = (dout[:, :, heads], row_dlse, out[:, :, heads], lse[:, heads])
        of_q, *of_keys = local.backward(call.run, q[:, :, heads], group.keys, group.values, *given, group.pieces)
        if call.group is None:
            put(group.heads_kv, of_keys)
        else:
            for _, coming in pending:
                coming.wait()  # before there is room for others
            count = call.keys.counts[call.rank]
            back: Scattering | Returning
            if group.beside is None:
                back = Scattering(call.group, call.keys, call.key_places, count, *of_keys)
            else:
                back = Returning(call.group, call.sharded.exchange, q.dtype, *of_keys)
                back.put_own(count, *[t[:, sum(call.sharded.exchange.taken) :] for t in of_keys])
            del of_keys
            finish()  # while those are on their way
            pending.append((group.heads_kv, back))
        dq.put(heads, of_q, q.dtype)

    _by_groups(call, q, keys, pieces_of(call.sharded, call.run.args, None), compute, backward=True)
    finish()
    return dq.whole, dk.whole, dv.whole


def keys_heads(keys: Keys) -> int:
    """Key heads in all."""
    return sum([t.shape[2] for t in keys.tensors]) if keys.gathered else keys.tensors[0].shape[2]


def amount(sharded: Sharded, q: Tensor, heads_kv: int, dims: int, in_order: bool) -> Amount:
    """Of a call: ``dims`` are those of a head of k and of v.

    In order they are those of the whole sequence, and so is the number of groups, whatever the number of ranks.
    """
    batch, _, heads, _ = q.shape
    token = batch * heads_kv * dims * q.element_size()
    if in_order:
        return Amount(sharded.keys.seqlen * token, sharded.keys.seqlen * token, None)
    taken = sharded.most_taken * token
    seconds = sharded.visible * batch * heads * dims * 2 / len(sharded.queries.counts) / SPEED
    return Amount(taken + sharded.keys.longest * token, taken, seconds)


def _apart(
    call: Call, q: Tensor, keys: Keys, upstream: tuple[Tensor, Tensor | None, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """A causal call's gradients: others' keys first, whose gradients are on their way back while own ones are computed.

    Either is a call that kernels know better than the columns of both: of no mask, if others' keys are seen by the same rows,
    and causal. That pays for the second launch, and for a sum of two terms of dq.
    """
    k, v, *others = keys.tensors
    others_k, others_v = of_keys = split_beside(_of_heads(others, (0, k.shape[2])), keys.dims)
    pieces, parts = call.sharded.against_others(), list[Tensor]()
    for piece in pieces:  # one, or none
        part, *of_keys = local.gradients(call.run, (q, others_k, others_v), upstream, piece)
        parts.append(part)
    back = Returning(call.group, call.sharded.exchange, q.dtype, *of_keys)
    del of_keys, others_k, others_v
    dq, *own = local.backward(call.run, q, k, v, *upstream, call.sharded.against_own(k.shape[0] * k.shape[2]))
    back.put_own(call.keys.counts[call.rank], *own)
    for piece, part in zip(pieces, parts, strict=True):
        dq[:, slice(*piece.rows)].add_(part)
    dk, dv = back.result()
    return dq, dk, dv


def _joined(exchange: Exchange, keys: Keys) -> Keys:
    """Others' keys and values, and the rank's own, as ``Exchanging`` finds them."""
    k, v, others = keys.tensors
    beside = others.new_empty((len(others) + length_of(exchange.own), *others.shape[1:]))
    beside[: len(others)] = others
    put_beside(beside[len(others) :], (k, v), exchange.own)
    return Keys((beside,), True, keys.dims)


def _keeps(call: Call, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether what ``Exchanging`` finds stays for the backward pass, the same on every rank that will have one."""
    return call.group is not None and call.run.backward and few(call.sharded, q, k, v)


def few(sharded: Sharded, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether others' keys and values are few beside what is kept of a forward pass anyway."""
    dims, size = k.shape[3] + v.shape[3], q.shape[0] * q.element_size()
    token_q, token_kv = q.shape[2] * dims * size, k.shape[2] * dims * size
    anyway = sharded.queries.longest * token_q + sharded.keys.longest * token_kv
    return sharded.most_taken * token_kv * KEPT <= anyway


def pieces_of(sharded: Sharded, args: AttentionArgs, unit: int | None) -> tuple[tuple[Piece, ...], bool]:
    """A rank's queries against keys, and whether these are all, in order; the latter is the same on every rank.

    Keys need no order where a mask is columns, and a rank only those that it sees, for one call of all its queries. Under
    dropout and in a batch-invariant call they are counted from the first, and in a deterministic order columns cost more than
    bands do.
    """
    exchanged = None if in_order(sharded, args, unit is not None) else sharded.exchanged()
    return (sharded.gathered(args.dropout_p > 0.0, unit), True) if exchanged is None else (exchanged, False)


def in_order(sharded: Sharded, args: AttentionArgs, invariant: bool) -> bool:
    """Whether keys are all, in order; the same on every rank. ``invariant``: a forward pass that is batch-invariant."""
    fixed = args.dropout_p > 0.0 or bool(args.deterministic) or invariant
    return len(sharded.queries.counts) == 1 or fixed or sharded.whole.as_columns is None


def forward_pieces(sharded: Sharded, args: AttentionArgs, unit: int | None) -> tuple[Piece, ...]:
    """The calls of a forward pass."""
    packed = documents_of(sharded) if packs(sharded, args) else None
    return pieces_of(sharded, args, unit)[0] if packed is None else packed.pieces


def packs(sharded: Sharded, args: AttentionArgs) -> bool:
    """Whether a forward pass is of documents, all heads at once, which hide the way of others' keys; the same on every rank."""
    if sharded.whole.documents is None or args.q.shape[0] != 1 or in_order(sharded, args, bool(args.batch_invariant)):
        return False
    found = amount(sharded, args.q, args.k.shape[2], args.k.shape[3] + args.v.shape[3], in_order=False)
    return found.seconds is not None and way(found.taken) * HIDDEN <= found.seconds


def _by_groups(
    call: Call,
    q: Tensor,
    keys: Keys,
    found: tuple[tuple[Piece, ...], bool],
    compute: Callable[[Group], None],
    backward: bool = False,
    at_once: bool = False,
) -> None:
    """One group after the other, of what ``pieces_of`` found; the next one's keys are on their way behind this one's.

    All heads are one group ``at_once``, as they are on ranks that run documents.
    """
    pieces, in_order = found
    heads_kv = keys_heads(keys)
    members = q.shape[2] // max(heads_kv, 1)
    runs: tuple[Run, ...] = ((0, heads_kv),)
    # A forward pass's bits may depend on how many heads are computed together: batch-invariant ones count one entry's bytes.
    if not at_once and (call.group is not None or (call.unit is not None and not backward)):
        counted = q if call.unit is None else q[:1]
        runs = head_groups(heads_kv, amount(call.sharded, counted, heads_kv, sum(keys.dims), in_order), backward)

    def begin(n: int) -> Gathering | Exchanging | None:
        if call.group is None or keys.gathered:
            return None
        some = [t[:, :, slice(*runs[n])] for t in keys.tensors]
        if in_order:
            return Gathering(call.group, call.keys, call.key_places, *some)
        return Exchanging(call.group, call.sharded.exchange, *some)

    coming = [begin(n) for n in range(min(len(runs), 2))]
    # The first of two groups' own keys follow its others': a kernel that began there, before the next exchange, would leave
    # that one no processors until its end.
    _put_own(coming[-1])
    for n, kv in enumerate(runs):
        of_q, of_kv = slice(kv[0] * members, kv[1] * members), slice(*kv)
        on_its_way, beside = coming.pop(0), None
        if isinstance(on_its_way, Gathering):
            k, v = on_its_way.result()
        elif isinstance(on_its_way, Exchanging) or keys.gathered:
            beside = _of_heads(keys.tensors, kv) if on_its_way is None else on_its_way.result()
            k, v = split_beside(beside, keys.dims)
        else:
            k, v = [t[:, :, of_kv] for t in keys.tensors]
        some = pieces if len(runs) == 1 else call.sharded.heads(pieces, kv, (of_q.start, of_q.stop), heads_kv)
        compute(Group(of_q, of_kv, some, k, v, beside))
        del on_its_way, beside, k, v  # before there is room for others
        if n + 2 < len(runs):
            coming.append(begin(n + 2))
            _put_own(coming[-1])


def _of_heads(groups: Sequence[Tensor], heads: Run) -> Tensor:
    """Some heads of what is there by groups of heads; a view where one group has them."""
    before = accumulate([t.shape[2] for t in groups], initial=0)
    cuts = [(t, max(heads[0] - at, 0), min(heads[1] - at, t.shape[2])) for t, at in zip(groups, before, strict=False)]
    some = [t[:, :, a:b] for t, a, b in cuts if a < b]
    return some[0] if len(some) == 1 else torch.cat(in_words(*some), 2).view(groups[0].dtype)


def _put_own(coming: Gathering | Exchanging | None) -> None:
    if isinstance(coming, Exchanging):
        coming.put_own()
