"""Calls whose mask is nothing but documents in a row, which run as packed sequences.

Tiles begin where documents do, so that none straddles two of them, and nothing of a mask is read. Of tiles that are counted
from key 0 causal documents of 200 to 6000 tokens show 0.90 of the elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from warploom.attention.bounds import with_bounds
from warploom.attention.problem import AttentionArgs, AttentionProblem

MOST_KEYS = 1 << 24  # tokens of k, past which the kernel's TMA views of packed sequences do not reach

Launch = Callable[..., tuple[Tensor, ...]]


def as_packed(problem: AttentionProblem) -> AttentionProblem:
    """The packed problem that a problem is run as, or itself.

    Dropout counts batch entries and rows of whole calls, a token of no document has no sink in packed ones, and the others
    are features that not all packed calls are known to have.
    """
    apart = problem.dropout or problem.sink or problem.bias or problem.batch_invariant or problem.q_offset
    if not problem.documents or apart:
        return problem
    return replace(problem, layout="varlen", columns=(), documents=False)


def packed(args: AttentionArgs) -> AttentionArgs | None:
    """The packed call that a call is run as, or None; its vectors are left out."""
    if args.documents is None or args.scale <= 0.0 or args.k.shape[1] > MOST_KEYS:
        return None
    apart = as_packed(AttentionProblem.from_args(args, False)).documents
    return None if apart else _packed(args)


def settled(args: AttentionArgs) -> AttentionArgs:
    """The call, with bounds of its column mask if it is not run as a packed one for its documents."""
    return with_bounds(args, packed=True) if packed(args) is None else args


def _packed(args: AttentionArgs) -> AttentionArgs:
    return args._replace(
        q=args.q[0],
        k=args.k[0],
        v=args.v[0],
        lts=None,
        lte=None,
        uts=None,
        ute=None,
        documents=None,
        cu_seqlens_q=args.documents,
        max_seqlen_q=args.q.shape[1],
        max_seqlen_k=args.k.shape[1],
    )


def bind(args: AttentionArgs, packed_bind: Callable[[AttentionArgs], Launch]) -> Launch:
    """A forward call made ready: takes q, k, v and what a dense call under a column mask and of documents takes."""
    return partial(_forward, packed_bind(_packed(args)))


def _forward(run: Launch, q: Tensor, k: Tensor, v: Tensor, sink: None, *mask: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse = run(q[0], k[0], v[0], sink, mask[-1], None, None)
    return out[None], lse[None]


def bind_backward(args: AttentionArgs, with_dlse: bool, packed_bind: Callable[[AttentionArgs, bool], Any]) -> Launch:
    """As ``bind``, of a backward pass: takes dout, dlse, out and lse before those."""
    return partial(_backward, packed_bind(_packed(args), with_dlse))


def _backward(
    run: Launch, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, sink: None, *mask: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    upstream = dout[0], None if dlse is None else dlse[0]
    dq, dk, dv, dsink = run(*upstream, out[0], lse[0], q[0], k[0], v[0], sink, mask[-1], None, None)
    return dq[None], dk[None], dv[None], dsink
