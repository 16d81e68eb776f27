"""Pieces run on this rank: each is a call of whatever implementation takes it; results merge by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.attention.ops import attention_op
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.distributed.pieces import Piece
from warploom.runtime import dispatch


class Run(NamedTuple):
    """How pieces are run.

    Attributes:
        args: the validated call of this rank: scalars, dropout's seed; its tensors are replaced.
        backend: as the caller gave it.
        backward: whether gradients will be asked for.
    """

    args: AttentionArgs
    backend: str | None
    backward: bool


def forward(
    run: Run, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, pieces: Sequence[Piece]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of q, their out in q's dtype and their lse against the keys of each piece."""
    for piece in pieces:
        out, lse = attention_op.forward(*_call(run, q, k, v, sink, piece))
        if piece.among is not None:
            own = slice(piece.among[0], piece.among[0] + piece.rows[1] - piece.rows[0])
            out, lse = out[:, own], lse[:, :, own]
        yield slice(*piece.rows), out, lse


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
) -> tuple[Tensor, Tensor, Tensor]:
    """What the pieces add to dq, dk and dv, in fp32 (fp64 for fp64), given out and lse of all keys, a sink included."""
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide(t), device=t.device) for t in (q, k, v))
    for piece in pieces:
        rows, keys = slice(*piece.rows), slice(*piece.keys)
        upstream = dout[:, rows], None if dlse is None else dlse[:, :, rows]
        kept = out[:, rows], lse[:, :, rows].contiguous()
        found = attention_op.backward(upstream, kept, _call(run, q, k, v, None, piece))
        dq[:, rows] += found[0]
        dk[:, keys] += found[1]
        dv[:, keys] += found[2]
    return dq, dk, dv


def _call(run: Run, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, piece: Piece) -> AttentionArgs:
    rows, keys = slice(*piece.rows), slice(*piece.keys)
    offset, seed = None, run.args.dropout_seed
    if piece.offset is not None:
        offset = torch.full((q.shape[0],), piece.offset, dtype=torch.int32, device=q.device)
        seed = None if seed is None else torch.cat([seed.reshape(1), seed.new_full((1,), piece.head)])
    some = q[:, rows]
    if piece.among is not None:
        first, count = piece.among
        some = torch.nn.functional.pad(some, (0, 0, 0, 0, first, count - first - some.shape[1]))
    args = run.args._replace(q=some, k=k[:, keys], v=v[:, keys], sink=sink, **piece.mask._asdict())
    args = args._replace(q_offset=offset, dropout_seed=seed, bounds=None)
    chosen = dispatch.choose(AttentionProblem.from_args(args, run.backward), run.backend)
    return dispatch.find(chosen).prepare(args)._replace(backend=chosen)


class Merged:
    """Partial results of the same queries against disjoint keys, in fp32 (fp64 for fp64)."""

    def __init__(self, q: Tensor, head_dim_v: int) -> None:
        batch, rows, heads, _ = q.shape
        self.out = torch.zeros((batch, rows, heads, head_dim_v), dtype=wide(q), device=q.device)
        self.lse = torch.full((batch, heads, rows), float("-inf"), dtype=wide(q), device=q.device)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        before, part = self.lse[:, :, rows], lse.to(self.lse.dtype)
        after = torch.logaddexp(before, part)
        kept = self.out[:, rows] * _weight(before, after)
        self.out[:, rows] = kept.addcmul_(out.to(kept.dtype), _weight(part, after))
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
