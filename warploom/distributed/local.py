"""Pieces run on this rank: each is a call of whatever implementation takes it; results merge by log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warploom.attention.ops import attention_op
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.distributed.collectives import in_words
from warploom.distributed.pieces import Piece
from warploom.runtime import dispatch
from warploom.runtime.alignment import is_aligned
from warploom.runtime.backend import Backend
from warploom.runtime.op import plain

# Of a piece's kind of call: what launches it, and what that takes behind q, k, v and the sink; None until it came twice.
Launchers = dict[Hashable, tuple[Callable[..., Any], tuple[Tensor | None, ...]] | None]


class Run(NamedTuple):
    """How pieces are run.

    Attributes:
        args: the validated call of this rank: scalars, dropout's seed; its tensors are replaced.
        backend: as the caller gave it.
        backward: whether gradients will be asked for.
        launchers: of the plan's pieces, for calls like this one.
    """

    args: AttentionArgs
    backend: str | None
    backward: bool
    launchers: Launchers


def write(
    run: Run, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, pieces: Sequence[Piece], out: Tensor, lse: Tensor
) -> None:
    """Write out, in q's dtype, and lse, (batch, heads, rows), of the rows that pieces have; others stay as they are."""
    for piece in pieces:
        rows = slice(*piece.rows)
        _write(run, (q, k, v), sink, piece, (out[:, rows], lse[:, :, rows]))


def forward(
    run: Run, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, pieces: Sequence[Piece]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of q, their out in q's dtype and their lse against the keys of each piece; these live as long as the caller's."""
    for piece in pieces:
        yield slice(*piece.rows), *_write(run, (q, k, v), sink, piece, None)


def _write(
    run: Run, tensors: tuple[Tensor, Tensor, Tensor], sink: Tensor | None, piece: Piece, into: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Write a piece's out and lse, or make them."""
    given = _cut(*tensors, piece)
    key = _key("forward", run, piece, (*given, *(into or (None, None))), sink)
    kept = run.launchers.get(key)
    if kept is not None and dispatch.settled(key) is not None:
        launch, behind = kept
        found = launch(*given, sink, *behind, into=into)
        return found if into is None else into
    args, backend = _call(run, given, sink, piece, key)
    first = 0 if piece.among is None else piece.among[0]
    own = slice(first, first + piece.rows[1] - piece.rows[0])
    found = attention_op.forward(*args)
    found = _own(found if piece.sequences is None else [t[None] for t in found], own, into)

    def make() -> Callable[..., Any] | None:
        launch = backend.bind(args)
        direct = piece.among is None and backend.writes_into(args) and (into is None or is_aligned(into[0]))
        if launch is not None and piece.sequences is not None:
            launch = partial(_launch_packed, launch, direct)
        return launch if direct or launch is None else partial(_launch_and_copy, launch, own)

    _keep(run.launchers, key, args, make)
    return found


def _launch_and_copy(
    launch: Callable[..., Any], own: slice, *tensors: Tensor | None, into: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """As a launch that takes ``into``."""
    return _own(launch(*tensors), own, into)


def _launch_packed(
    launch: Callable[..., Any],
    direct: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Tensor | None,
    into: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor]:
    """A packed launch of tensors with a batch dimension; ``direct``: to ``into``."""
    room = {} if into is None or not direct else {"into": (into[0][0], into[1][0])}
    return [t[None] for t in launch(q[0], k[0], v[0], *others, **room)]


def _own(found: Sequence[Tensor], own: slice, into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """A piece's own rows of out and lse, in ``into`` if given."""
    some = found[0][:, own], found[1][:, :, own]
    if into is None:
        return some
    for room, t in zip(into, some, strict=True):
        room.copy_(t)
    return into


def backward(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    pieces: Sequence[Piece],
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the pieces add to dq, dk and dv, given out and lse of all keys, a sink included; dq is added to ``total``, if given.

    dk and dv are sums in fp32 (fp64 for fp64), and so is dq where two pieces may share a row; else it has q's dtype. One piece
    of all keys gives dk and dv in their own dtypes.
    """
    given, upstream = (q, k, v), (dout, dlse, out, lse)
    runs = [piece.rows for piece in pieces]
    if len(pieces) == 1 and pieces[0].among is None and pieces[0].keys == (0, k.shape[1]):
        if total is not None:
            of_q, *of_keys = gradients(run, given, upstream, pieces[0])
            total[:, slice(*runs[0])].add_(of_q)
            return total, of_keys[0], of_keys[1]
        if runs[0] == (0, q.shape[1]):
            return gradients(run, given, upstream, pieces[0])
    apart = total is None and _apart(runs)
    dq = total
    if dq is None:
        dq = _blank(q, q.dtype if apart else wide(q), apart and sum(b - a for a, b in runs) == q.shape[1])
    dk, dv = (_blank(t, wide(t), len(pieces) == 1 and pieces[0].keys == (0, t.shape[1])) for t in (k, v))
    for piece in pieces:
        rows, keys = slice(*piece.rows), slice(*piece.keys)
        of_q, *of_keys = gradients(run, given, upstream, piece)
        if apart:
            dq[:, rows] = of_q
        else:
            dq[:, rows] += of_q
        for whole, part in zip((dk, dv), of_keys, strict=True):
            if len(pieces) == 1:
                whole[:, keys] = part
            else:
                whole[:, keys] += part
        del of_q, of_keys, part  # before the next piece has its own
    return dq, dk, dv


def gradients(
    run: Run,
    tensors: tuple[Tensor, Tensor, Tensor],
    upstream: tuple[Tensor, Tensor | None, Tensor, Tensor],
    piece: Piece,
) -> tuple[Tensor, Tensor, Tensor]:
    """A piece's gradients of its rows and keys, in their dtypes."""
    rows, (dout, dlse, out, lse) = slice(*piece.rows), upstream
    gradients = dout[:, rows], None if dlse is None else dlse[:, :, rows]
    results = out[:, rows], lse[:, :, rows].contiguous()
    given = _cut(*tensors, piece)
    key = _key("backward", run, piece, (*given, *gradients, *results), None)
    kept = run.launchers.get(key)
    if kept is not None and dispatch.settled(key) is not None:
        launch, behind = kept
        found = launch(*gradients, *results, *given, None, *behind)
    else:
        args, backend = _call(run, given, None, piece, key)
        found = attention_op.backward(gradients, results, args)
        ready = (args, *gradients, *results)
        _keep(run.launchers, key, args, lambda: backend.bind_backward(*ready))
    return found[0], found[1], found[2]


def _blank(t: Tensor, dtype: torch.dtype, whole: bool) -> Tensor:
    """Room for a gradient of t; zeros unless the ``whole`` of it will be written."""
    make = torch.empty if whole else torch.zeros
    return make(t.shape, dtype=dtype, device=t.device)


def _apart(runs: Sequence[tuple[int, int]]) -> bool:
    ordered = sorted(runs)
    return all(b <= c for (_, b), (c, _) in pairwise(ordered))


def _cut(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """The rows and keys of a piece."""
    some, keys = q[:, slice(*piece.rows)], slice(*piece.keys)
    if piece.among is not None:
        first, count = piece.among
        some = torch.nn.functional.pad(some, (0, 0, 0, 0, first, count - first - some.shape[1]))
    return some, k[:, keys], v[:, keys]


def _key(pass_: str, run: Run, piece: Piece, tensors: Sequence[Tensor | None], sink: Tensor | None) -> Hashable:
    """Of what a launcher depends on beside the kind of call that the launchers are for; None: none may be kept.

    A piece that has launchers lives as long as they do, so its id is its own.
    """
    if run.args.dropout_p or not plain(*tensors, sink):
        return None
    views = [None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in tensors]
    return (pass_, id(run.launchers), id(piece), run.backend, run.backward, sink is None, *views)


def _keep(launchers: Launchers, key: Hashable, args: AttentionArgs, make: Callable[[], Callable[..., Any] | None]) -> None:
    """A launcher is made when its key comes for the second time."""
    if key is None or dispatch.settled(key) is None:
        return
    launch = make() if key in launchers else None
    launchers[key] = None if launch is None else (launch, args.tensors()[4:])


def _call(
    run: Run, given: tuple[Tensor, Tensor, Tensor], sink: Tensor | None, piece: Piece, key: Hashable
) -> tuple[AttentionArgs, Backend]:
    q, k, v = given
    offset, seed = None, run.args.dropout_seed
    if piece.offset is not None:
        offset = torch.full((q.shape[0],), piece.offset, dtype=torch.int32, device=q.device)
        seed = None if seed is None else torch.cat([seed.reshape(1), seed.new_full((1,), piece.head)])
    args = run.args._replace(q=q, k=k, v=v, sink=sink, **piece.mask._asdict())
    args = piece.packed(args._replace(q_offset=offset, dropout_seed=seed, bounds=None))
    problem = AttentionProblem.from_args(args, run.backward)
    chosen = dispatch.choose(problem, run.backend)
    if key is not None and q.is_cuda:
        dispatch.settle(key, chosen, "attention", run.backend is not None, problem)
    backend = dispatch.find(chosen)
    return backend.prepare(args)._replace(backend=chosen), backend


class Heads:
    """A tensor (batch, rows, heads, ·) of all ``heads``, which come in groups in their order: one group is not copied."""

    whole: Tensor

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def put(self, heads: slice, part: Tensor, dtype: torch.dtype) -> None:
        if part.shape[2] == self._heads:
            self.whole = part
            return
        if heads.start == 0:
            batch, rows, _, head_dim = part.shape
            self.whole = part.new_empty((batch, rows, self._heads, head_dim), dtype=dtype)
        room = self.whole[:, :, heads]
        if part.dtype == dtype:
            room, part = in_words(room, part)
        room.copy_(part)


class Merged:
    """Partial results of the same queries against disjoint keys, in fp32 (fp64 for fp64)."""

    def __init__(self, q: Tensor, head_dim_v: int) -> None:
        batch, rows, heads, _ = q.shape
        self.out = torch.zeros((batch, rows, heads, head_dim_v), dtype=wide(q), device=q.device)
        self.lse = torch.full((batch, heads, rows), float("-inf"), dtype=wide(q), device=q.device)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        before, part = self.lse[:, :, rows], lse.to(self.lse.dtype)
        after = torch.logaddexp(before, part)
        self.out[:, rows].mul_(_weight(before, after)).addcmul_(out, _weight(part, after))
        self.lse[:, :, rows] = after

    def add_sink(self, sink: Tensor) -> None:
        """The sink joins the denominator once, after all keys."""
        after = torch.logaddexp(self.lse, sink.to(self.lse.dtype)[:, None])
        self.out *= _weight(self.lse, after)
        self.lse = after


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """exp(part - total) by (batch, rows, heads, 1), 0 where both are -inf; a NaN stays a NaN."""
    weight = torch.exp(part - total.masked_fill(total == float("-inf"), 0.0))
    return weight.transpose(1, 2)[..., None]


def sink_gradient(sink: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """What these queries give the sink: -sum exp(sink - lse) (rowsum(dout out) - dlse), (heads,) in fp32 (fp64 for fp64)."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(sink.to(lse.dtype)[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    return -(share * delta).sum((0, 2))


def wide(t: Tensor) -> torch.dtype:
    """The dtype that sums are kept in."""
    return torch.promote_types(t.dtype, torch.float32)
