"""What a call's ``return_stats`` asks for, and which implementation computes it.

Stats follow from q, k, the mask, the bias and lse: an implementation without stats of its own leaves them to another. Those
that have them are dispatch's list ``FAMILY``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.runtime import arguments, dispatch
from warploom.runtime.backend import Backend

FAMILY = "attention stats"
NAMES = ("max_logits", "column_sums")


class AttentionStats(NamedTuple):
    """What ``return_stats`` names; None where it does not. No gradient goes through either.

    Attributes:
        max_logits: float32 (batch, heads_q), or (sequences, heads_q) of a packed call: the largest of the logits that enter the
            softmax, softcap(scale · q kᵀ) + bias, over all visible pairs of a query and a key; -inf where nothing is visible.
        column_sums: float32 (batch, heads_q, seqlen_k), or (heads_q, total_k) of a packed call: of each key the sum over
            queries of its softmax probability, 0 where nobody sees it. Without the sink and before dropout: those of all keys
            sum to the number of queries that see one.
    """

    max_logits: Tensor | None = None
    column_sums: Tensor | None = None


torch.serialization.add_safe_globals([AttentionStats])


class StatsBackend(Backend):
    """A backend of attention that computes stats too."""

    @abstractmethod
    def stats(
        self, args: AttentionArgs, lse: Tensor | None, max_logits: bool, column_sums: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Max logits and column sums as `AttentionStats` has them, None where not asked for; of the reference in its precision.

        Args:
            args: a call that `stats_args` made; one of kernels has a query and a key.
            lse: of that call, where kernels are asked for column sums.
        """
        ...


class Beside(Backend):
    """A backend of attention whose forward pass finds max logits beside out and lse, of some calls."""

    @abstractmethod
    def max_logits_refusal(self, args: AttentionArgs) -> str | None:
        """Why it does not, of a call that it runs, or None."""
        ...

    @abstractmethod
    def forward_with_max_logits(self, args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor]:
        """Out and lse as ``forward`` has them, bit for bit, and max logits as `AttentionStats` has them."""
        ...


class Behind(StatsBackend):
    """A `StatsBackend` of kernels for column sums alone, behind the forward pass of the backend of attention of its name."""


def checked_names(return_stats: Any, block_table: Any = None) -> tuple[str, ...]:
    """The names that a user gave, or an error in words."""
    if type(return_stats) is tuple and not return_stats:
        return ()
    if not isinstance(return_stats, (tuple, list)) or not all([type(name) is str for name in return_stats]):
        raise TypeError(f"return_stats must be a tuple of names, out of {NAMES}, got {arguments.describe(return_stats)}")
    for name in return_stats:
        if name not in NAMES:
            raise ValueError(f"return_stats takes {' and '.join(map(repr, NAMES))}, got {name!r}")
    if block_table is not None:
        raise ValueError("return_stats does not take paged keys: leave block_table out and give k and v packed")
    return tuple(return_stats)


def stats_args(args: AttentionArgs) -> AttentionArgs:
    """The call whose stats a call has: without sink, dropout and gradients, and k in the place of v, which nothing reads."""
    q, k = args.q.detach(), args.k.detach()
    bias = None if args.bias is None else args.bias.detach()
    return args._replace(q=q, k=k, v=k, sink=None, dropout_p=0.0, dropout_seed=None, bias=bias, bias_grad=False, bounds=None)


def comes_beside(args: AttentionArgs, chosen: str, names: tuple[str, ...]) -> bool:
    """Whether the forward pass of ``chosen``, which runs the call, finds all the stats that are asked for."""
    if names != ("max_logits",):
        return False
    implementation = dispatch.find(chosen)
    return isinstance(implementation, Beside) and implementation.max_logits_refusal(args) is None


def measured_by(args: AttentionArgs, problem: AttentionProblem, chosen: str, names: tuple[str, ...]) -> str | None:
    """The implementation that computes the stats that a call asks for; None where it asks for none."""
    if not names:
        return None
    return chosen if comes_beside(args, chosen, names) else stats_backend(problem, chosen, names)


def stats_backend(problem: AttentionProblem, chosen: str, names: tuple[str, ...] = NAMES) -> str:
    """The implementation with a pass of its own for a call's stats: ``chosen``, or the first that does not refuse.

    Raises:
        RuntimeError: under strict(), where a GPU's call would fall to a slower one.
    """
    plain = replace(problem, head_dim_v=problem.head_dim, sink=False, dropout=False, backward=False, bias_grad=False)
    own = [implementation for implementation in dispatch.implementations(FAMILY) if implementation.name == chosen]
    if own and isinstance(own[0], Behind):
        if names == ("column_sums",) and own[0].refusal(plain, by_name=True) is None:
            return chosen
        own = []
    return dispatch.choose(plain, chosen if own else None, FAMILY)


def warm_stats(args: AttentionArgs, chosen: str, measuring: str, names: tuple[str, ...]) -> None:
    """Make ready what ``measuring`` runs for the stats of a call that ``chosen`` runs."""
    if comes_beside(args, chosen, names):
        return
    plain = stats_args(args)
    if args.sink is not None and "column_sums" in names:  # whose lse is that of a forward pass without it
        dispatch.find(measuring).warm(plain)
    found = dispatch.find(measuring, FAMILY)
    if isinstance(found, Behind):
        found.warm(plain)
