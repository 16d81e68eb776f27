"""The plan of a sharded sequence: made once for a length and a mask, the same on every rank."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warploom.distributed import groups
from warploom.distributed.choice import METHODS
from warploom.distributed.collectives import Gathering, Scattering
from warploom.distributed.layout import Layout, balanced, split
from warploom.distributed.local import wide
from warploom.distributed.whole import Whole, resolved
from warploom.masks import Mask
from warploom.runtime import arguments
from warploom.runtime.arguments import Window
from warploom.runtime.limits import LONGEST


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """Which positions of a sequence each rank of a group holds. Made by `shard_plan`; never changes.

    Attributes:
        seqlen_q, seqlen_k: positions of queries and of keys; of packed sequences all tokens.
        ranks, rank: size of the group and this process's number in it.
        chunk: positions that are dealt out together, at most what was asked for.
        method: as asked for; "auto" chooses at a call, which knows heads and head_dim.
        queries, keys: the layouts; one and the same where the lengths are equal.
        work: visible elements of each rank's queries, under the mask that the plan was made for.
        starts: starts of packed sequences and the end of the last, or None.
    """

    seqlen_q: int
    seqlen_k: int
    ranks: int
    rank: int
    chunk: int
    method: str
    queries: Layout
    keys: Layout
    work: tuple[int, ...]
    starts: tuple[int, ...] | None
    whole: Whole = field(repr=False)
    group: Any = field(repr=False)
    kept: OrderedDict[Any, Any] = field(default_factory=OrderedDict, repr=False)  # by kind of call, as api.py has them

    @property
    def imbalance(self) -> float:
        """How much more work the busiest rank has than the mean, as a fraction."""
        total = sum(self.work)
        return max(self.work) * self.ranks / total - 1.0 if total else 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Queries that each rank holds."""
        return self.queries.counts

    def positions(self, rank: int | None = None) -> Tensor:
        """The positions of a rank's queries in the order in which it holds them: int64 on the CPU, ascending.

        Args:
            rank: in the group; default: this one's.
        """
        rank = self.rank if rank is None else arguments.integer("rank", rank, minimum=0, maximum=self.ranks - 1)
        return self.queries.positions(rank)

    def shard(self, t: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that every rank has whole, such as tokens, shifted labels or position ids.

        Args:
            t: any dtype; ``seqlen_q`` or ``seqlen_k`` entries along ``dim``.
            dim: the dimension of positions.

        Returns:
            A copy with this rank's positions, ascending; differentiable.
        """
        dim = _dimension(t, dim)
        length = t.shape[dim]
        if length not in (self.seqlen_q, self.seqlen_k):
            lengths = f"{self.seqlen_q}" + (f" or {self.seqlen_k}" if self.seqlen_k != self.seqlen_q else "")
            raise ValueError(f"t has {length} entries in dimension {dim}, and the plan is for {lengths}: give the whole tensor")
        layout = self.queries if length == self.seqlen_q else self.keys
        runs = [t.narrow(dim, a, b - a) for a, b in layout.runs[self.rank]]
        return torch.cat(runs or [t.narrow(dim, 0, 0)], dim)

    def unshard(self, t: Tensor, dim: int, *, keys: bool = False) -> Tensor:
        """The whole tensor, on every rank, of parts as ``shard`` gives them. A collective: every rank calls it.

        Args:
            t: this rank's positions along ``dim``; any dtype.
            dim: the dimension of positions.
            keys: whether they are positions of keys; it matters where seqlen_k is not seqlen_q.

        Returns:
            The positions in order. Its gradient is summed over ranks, as of the sum of their losses.
        """
        dim = _dimension(t, dim)
        layout = self.keys if arguments.flag("keys", keys) else self.queries
        held = layout.counts[self.rank]
        if t.shape[dim] != held:
            what = "keys" if keys else "queries"
            raise ValueError(f"t has {t.shape[dim]} entries in dimension {dim}, and rank {self.rank} holds {held} {what}")
        if self.group is None:
            return t.clone()
        rows = t.movedim(dim, 0)[None, ..., None]
        found: Tensor = _Unsharded.apply(rows.view(torch.uint8) if t.dtype == torch.bool else rows, self.group, layout)
        found = found.view(torch.bool) if t.dtype == torch.bool else found
        return found[0, ..., 0].movedim(0, dim).contiguous()

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws who holds which queries and what work that is, to an .svg or .png file; needs matplotlib."""
        from warploom.distributed.draw import draw

        draw(path, self.whole, self.queries, self.chunk, self.work)

    def __str__(self) -> str:
        lengths = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q} × {self.seqlen_k}"
        packed = f" in {len(self.starts) - 1} sequences" if self.starts is not None else ""
        lines = [f"{lengths} positions{packed} on {self.ranks} ranks in chunks of {self.chunk}; method {self.method}"]
        total = sum(self.work)
        for rank, (runs, count) in enumerate(zip(self.queries.runs, self.tokens, strict=True)):
            some = ", ".join(f"{a}-{b - 1}" for a, b in runs[:6]) + (f" and {len(runs) - 6} more" if len(runs) > 6 else "")
            share = self.work[rank] / total if total else 0.0
            lines.append(f"rank {rank}: {count} tokens, {share:.1%} of the work: {some or 'nothing'}")
        lines.append(f"imbalance {self.imbalance:.2%}")
        return "\n".join(lines)


def shard_plan(
    seqlen_q: int,
    group_or_mesh: Any,
    *,
    seqlen_k: int | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: Window | None = None,
    cu_seqlens: Tensor | list[int] | None = None,
    chunk: int = 512,
    method: str = "auto",
) -> ShardPlan:
    """Who of a group holds which positions, so that each has as many tokens and as much to compute as the others.

    Every rank of the group calls it, with equal arguments; they are compared. Work is counted in visible elements, in
    O(seqlen). A model whose layers have several masks makes its plan for the one that costs most: `attention` takes the mask
    of each layer. A mask on a GPU is copied to the host, which waits for the device once.

    Args:
        seqlen_q: positions of queries; of packed sequences all tokens.
        group_or_mesh: a ProcessGroup, a DeviceMesh of one dimension (``mesh["context"]``), or None for all processes.
        seqlen_k: positions of keys; default: seqlen_q. Where they differ keys are dealt out evenly in order.
        mask, causal, window: what the work is counted of, as `warploom.attention` takes them for the whole sequence.
        cu_seqlens: starts of packed sequences, from 0, with the end of the last, a list or a CPU tensor; on a device it is
            waited for.
        chunk: most positions that are dealt out together. Chunks are smaller where counts come out more equal so, and where
            a rank would have fewer than four.
        method: gather, heads, ring, gather-heads, or auto, which chooses at a call.

    Raises:
        TypeError, ValueError: on every rank, where one of them has an argument that is wrong or unlike the others'.
        ImportError: several ranks, and NumPy is not installed, by which torch.distributed sends what they compare.
        RuntimeError: without torch.distributed, or for what another rank could not do.
    """
    parent = groups.of(group_or_mesh)
    ranks, rank = dist.get_world_size(parent), dist.get_rank(parent)
    group = groups.own(parent) if ranks > 1 else None
    facts: dict[str, Any] = {}
    plan: ShardPlan | None = None
    error: Exception | None = None
    try:
        bands: dict[str, Any] = {"mask": mask, "causal": causal, "window": window, "cu_seqlens": cu_seqlens}
        plan = planned(seqlen_q, ranks, rank, group, seqlen_k=seqlen_k, **bands, chunk=chunk, method=method)
        facts = {name: getattr(plan, name) for name in ("seqlen_q", "seqlen_k", "chunk", "method")}
        facts |= {"cu_seqlens": plan.starts and hash(plan.starts), "mask, causal and window": plan.whole.digest()}
    except (TypeError, ValueError) as raised:
        error = raised
    if group is not None:
        groups.compared(group, facts, error, "a plan")
    if error is not None:
        raise error
    assert plan is not None
    return plan


def planned(
    seqlen_q: Any,
    ranks: int,
    rank: int,
    group: Any = None,
    *,
    seqlen_k: Any = None,
    mask: Any = None,
    causal: Any = False,
    window: Any = None,
    cu_seqlens: Any = None,
    chunk: Any = 512,
    method: Any = "auto",
) -> ShardPlan:
    """The plan of one rank, compared with nobody's; without a group of processes it is good for looking at."""
    seqlen_q = arguments.integer("seqlen_q", seqlen_q, minimum=0, maximum=LONGEST)
    seqlen_k = arguments.integer("seqlen_k", seqlen_k, minimum=0, maximum=LONGEST, optional=True)
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    chunk = arguments.integer("chunk", chunk, minimum=1)
    if arguments.text("method", method, optional=False) not in (*METHODS, "auto"):
        raise ValueError(f"method must be one of {', '.join(METHODS)} or auto, got {method!r}")
    starts = _starts(cu_seqlens, seqlen_q, seqlen_k)
    whole = Whole.of(resolved(mask, causal, window, seqlen_q, seqlen_k, starts is not None), seqlen_q, seqlen_k, starts)
    queries, size, work = balanced(whole.work(), seqlen_q, ranks, chunk)
    keys = queries if seqlen_k == seqlen_q else split(seqlen_k, ranks)
    return ShardPlan(seqlen_q, seqlen_k, ranks, rank, size, method, queries, keys, work, starts, whole, group)


def _starts(cu_seqlens: Any, seqlen_q: int, seqlen_k: int) -> tuple[int, ...] | None:
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dtype not in arguments.INTEGERS or cu_seqlens.ndim != 1:
            raise TypeError(f"cu_seqlens must be a list of ints or a vector of integers, got {arguments.describe(cu_seqlens)}")
        cu_seqlens = arguments.with_values("cu_seqlens", cu_seqlens).tolist()
    if not isinstance(cu_seqlens, (list, tuple)):
        raise TypeError(f"cu_seqlens must be a list of ints or a vector of integers, got {arguments.describe(cu_seqlens)}")
    starts = tuple([arguments.integer("cu_seqlens", n) for n in cu_seqlens])
    if not starts or starts[0] != 0 or starts[-1] > seqlen_q or any([a > b for a, b in pairwise(starts)]):
        raise ValueError(
            f"cu_seqlens must ascend from 0 to at most seqlen_q, {seqlen_q}, got {arguments.describe(list(starts))}"
        )
    if seqlen_k != seqlen_q:
        raise ValueError(f"cu_seqlens are of queries and keys alike: seqlen_k must be {seqlen_q}, got {seqlen_k}")
    return starts


def _dimension(t: Any, dim: Any) -> int:
    count = arguments.strided("t", t).ndim
    dim = arguments.integer("dim", dim, minimum=-count, maximum=count - 1)
    return int(dim) % max(count, 1)


class _Unsharded(torch.autograd.Function):
    """Rows (1, count, …, 1) of every rank as (1, seqlen, …, 1)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, layout: Layout) -> Tensor:
        ctx.group, ctx.layout, ctx.count = group, layout, rows.shape[1]
        return Gathering(group, layout, layout.places.to(rows.device), rows).result()[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        places = ctx.layout.places.to(gradient.device)
        part = Scattering(ctx.group, ctx.layout, places, ctx.count, gradient.to(wide(gradient))).result()[0]
        return part.to(gradient.dtype), None, None
