"""What the distributed suite times: contenders that hold a part of a sequence on each rank, and how they cut it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warploom import distributed
from warploom.bench import peers
from warploom.distributed.choice import METHODS
from warploom.distributed.collectives import all_gather, reduce_scatter
from warploom.masks import Causal, Mask
from warploom.masks.visible import visible


@dataclass(frozen=True)
class Parts:
    """A contender for one length and mask.

    Attributes:
        shard: this rank's part of a whole tensor (1, seqlen, heads, head_dim).
        unshard: the whole of all ranks' parts; a collective.
        attend: of the parts of q, k and v, out's part.
        around: what a call and its backward pass run within; entered before the clock starts.
        more: what a row of results says of it.
    """

    shard: Callable[[Tensor], Tensor]
    unshard: Callable[[Tensor], Tensor]
    attend: peers.Attention
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    more: dict[str, Any] = field(default_factory=dict)


Make = Callable[[Mask, int, torch.device], Parts]


def contenders() -> dict[str, Make]:
    """By name, ours first."""
    return {
        "warploom": partial(ours, "auto"),
        **{f"warploom, {method}": partial(ours, method) for method in METHODS},
        "all-gather + SDPA": gathered,
        "torch context_parallel": partial(torch_context_parallel, False),
        "torch context_parallel, heads repeated": partial(torch_context_parallel, True),
    }


def ours(method: str, mask: Mask, seqlen: int, device: torch.device, group: Any = None) -> Parts:
    plan = distributed.shard_plan(seqlen, group, mask=mask, method=method)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = distributed.attention(q, k, v, plan=plan, mask=mask)
        assert isinstance(out, Tensor)
        return out

    return Parts(partial(plan.shard, dim=1), partial(plan.unshard, dim=1), attend, more={"imbalance": plan.imbalance})


def of_fewer(count: int, mask: Mask, seqlen: int, device: torch.device) -> Parts:
    """Ours on the first ``count`` ranks, while the others have nothing to do."""
    group = _first(count, dist.group.WORLD)
    if dist.get_rank() < count:
        return ours("auto", mask, seqlen, device, group)
    return Parts(lambda t: t[:, :0], lambda t: t, lambda q, k, v: q + k.sum() + v.sum())


@cache
def _first(count: int, world: Any) -> Any:
    """A group of the first ranks of a world, made once."""
    return dist.new_group(list(range(count)))


def gathered(mask: Mask, seqlen: int, device: torch.device) -> Parts:
    """Keys and values of all ranks by one all-gather, then torch's scaled_dot_product_attention.

    Of a causal mask each half of the rows goes over the keys up to its last one, aligned to the lower right, which torch has
    a kernel for. Other masks are dense, held to cuDNN on a GPU.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    half = seqlen // (2 * ranks)
    halves = [(n * half, (n + 1) * half) for n in (rank, 2 * ranks - 1 - rank)]
    shown: Tensor | None = None
    if not isinstance(mask, Causal):
        rows = torch.cat([torch.arange(a, b, device=device) for a, b in halves])
        shown = visible(mask.resolve(seqlen, seqlen, device), rows, torch.arange(seqlen, device=device), 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right

        keys, values = (_in_order(_Gathered.apply(t)) for t in (k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        shared = q.shape[2] != k.shape[2]
        if shown is not None:
            a, b, c = peers.heads_first(q, keys, values)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if device.type == "cuda" else nullcontext():
                return attention(a, b, c, attn_mask=shown, enable_gqa=shared).transpose(1, 2)
        outs = []
        for at, (_, end) in enumerate(halves):
            a, b, c = peers.heads_first(q[:, at * half : (at + 1) * half], keys[:, :end], values[:, :end])
            outs.append(attention(a, b, c, attn_mask=causal_lower_right(half, end), enable_gqa=shared).transpose(1, 2))
        return torch.cat(outs, 1)

    return Parts(_ends, _whole, attend)


def torch_context_parallel(repeat: bool, mask: Mask, seqlen: int, device: torch.device) -> Parts:
    """torch's own, which patches scaled_dot_product_attention; rows as its load balancer has them.

    Args:
        repeat: keys' heads repeated for the query heads of each, before they are sent: for versions that want as many.
    """
    if not isinstance(mask, Causal):
        raise peers.NotHere("it shards causal attention only")
    try:
        from torch.distributed.tensor.experimental import context_parallel
    except ImportError as error:
        raise peers.NotHere(f"this torch has none: {error}") from None
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        if repeat:
            k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        a, b, c = (t.contiguous() for t in peers.heads_first(q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(a, b, c, is_causal=True, enable_gqa=group > 1 and not repeat).transpose(1, 2)

    def around() -> AbstractContextManager[Any]:
        # It wants something to cut: it looks at its length and device.
        return context_parallel(mesh, buffers=[torch.zeros(seqlen, device=device)], buffer_seq_dims=[0])

    return Parts(_ends, _whole, attend, around)


def _ends(t: Tensor) -> Tensor:
    """Of twice as many pieces as ranks one from each end: even work under a causal mask."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = t.chunk(2 * ranks, 1)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]], 1)


def _whole(t: Tensor) -> Tensor:
    return _in_order(_Gathered.apply(t))


def _in_order(parts: Tensor) -> Tensor:
    """(ranks, batch, rows, heads, ·), rows as `_ends` cuts them, as (batch, seqlen, heads, ·)."""
    firsts, seconds = parts.chunk(2, 2)
    return torch.cat([*firsts, *seconds.flip(0)], 1)


class _Gathered(torch.autograd.Function):
    """Every rank's part, (ranks, …); gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        found = t.new_empty((dist.get_world_size(), *t.shape))
        all_gather(found.view(-1), t.contiguous().view(-1))
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found = gradient.new_empty(gradient.shape[1:])
        reduce_scatter(found.view(-1), gradient.contiguous().view(-1))
        return found
