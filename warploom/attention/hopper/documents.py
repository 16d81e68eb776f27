"""Calls whose mask is nothing but documents in a row: their forward passes run as packed sequences.

Tiles begin where documents do, so that none straddles two of them, and nothing of a mask is read. Backward passes were not
found to be faster so, and run under the column mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from warploom.attention.bounds import bounds_of, with_bounds
from warploom.attention.problem import AttentionArgs, AttentionProblem

MOST_KEYS = 1 << 24  # tokens of k, past which the kernel's TMA views of packed sequences do not reach

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


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


def bind(args: AttentionArgs, packed_bind: Callable[[AttentionArgs], Forward]) -> Forward:
    """A forward call made ready: takes q, k, v and what a dense call under a column mask and of documents takes."""
    run = packed_bind(_packed(args))

    def launch(q: Tensor, k: Tensor, v: Tensor, sink: None, *mask: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = run(q[0], k[0], v[0], sink, mask[-1], None, None)
        return out[None], lse[None]

    return launch


def bind_backward(args: AttentionArgs, columns_bind: Callable[[AttentionArgs], Backward]) -> Backward:
    """A backward pass made ready, under the column mask: takes dout, dlse, out and lse before those."""
    left, right = args.left, args.right
    run = columns_bind(args._replace(documents=None))

    def launch(
        dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, *others: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v, sink, *vectors, _, _ = others
        bounds = bounds_of((*vectors, None), left, right, q.shape[1])
        return run(dout, dlse, out, lse, q, k, v, sink, *vectors, bounds)

    return launch
