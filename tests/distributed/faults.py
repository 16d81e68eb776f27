"""What goes wrong on one rank is said in words on all of them, before any work."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.registry import case
from warploom import distributed, masks


def planned(**keywords: Any) -> distributed.ShardPlan:
    return distributed.shard_plan(keywords.pop("seqlen_q", 24), None, **{"causal": True, **keywords})


def parts(plan: distributed.ShardPlan, heads: int = 4, **options: Any) -> list[torch.Tensor]:
    return [torch.randn(1, plan.tokens[plan.rank], heads, 8, **options) for _ in range(3)]


DIFFER: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "length": (lambda rank: {"seqlen_q": 24 + rank}, "seqlen_q differs between .* rank 0 has 24, rank 1 has 25"),
    "method": (lambda rank: {"method": ("gather", "ring")[rank % 2]}, "method differs .* has 'gather', rank 1 has 'ring'"),
    "band": (lambda rank: {"window": (5 + rank, 0)}, "mask, causal and window differs"),
    "vectors": (lambda rank: {"mask": masks.Document([12 + rank, 12 - rank])}, "mask, causal and window differs"),
    "packing": (lambda rank: {"cu_seqlens": [0, 5 + rank, 24]}, "cu_seqlens differs"),
}


@case("a plan of ranks that differ")
def differing_plans(rank: int, world: int, seed: int) -> None:
    for keywords, words in DIFFER.values():
        with pytest.raises(ValueError, match=words):
            planned(**keywords(rank))


@case("a plan that one rank cannot make")
def failing_plan(rank: int, world: int, seed: int) -> None:
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match="chunk must be at least 1, got 0") as raised:
        planned(chunk=512 if rank != 1 else 0)
    assert rank == 1 or "rank 1 of the group could not make a plan" in str(raised.value)


CALLS: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "scale": (lambda rank: {"scale": 1.0 + rank}, "scale differs between ranks of the group"),
    "softcap": (lambda rank: {"softcap": float(rank)}, "softcap differs"),
    "mask": (lambda rank: {"mask": masks.Document([12 + rank, 12 - rank])}, "mask, causal and window differs"),
    "deterministic": (lambda rank: {"deterministic": rank == 0}, "deterministic differs"),
    "batch_invariant": (lambda rank: {"batch_invariant": rank == 0, "deterministic": True}, "batch_invariant differs"),
    "backend": (lambda rank: {"backend": "cpu" if rank else "reference"}, "backend differs"),
}


@case("a first call of ranks that differ")
def differing_calls(rank: int, world: int, seed: int) -> None:
    for keywords, words in CALLS.values():
        plan = planned()
        with pytest.raises(ValueError, match=words):
            distributed.attention(*parts(plan), plan=plan, **keywords(rank))
    seeds: tuple[tuple[Any, Any, str], ...] = (
        (3, 4, "dropout_seed differs .* rank 0 has 3, rank 1 has 4"),
        (torch.tensor([3]), torch.tensor([5]), "dropout_seed differs .* rank 0 has 3, rank 1 has 5"),
        (None, 3, "dropout_seed differs .* rank 0 has None, rank 1 has 3"),
        (3, None, "dropout_seed differs .* rank 0 has 3, rank 1 has None"),
    )
    for first, other, words in seeds:
        plan = planned()
        with pytest.raises(ValueError, match=words):
            distributed.attention(*parts(plan), plan=plan, dropout_p=0.1, dropout_seed=other if rank else first)
    plan = planned()
    with pytest.raises(ValueError, match="heads and head_dim of q differs"):
        distributed.attention(*parts(plan, heads=4 + rank), plan=plan)
    with pytest.raises(ValueError, match="dtype differs"):
        distributed.attention(*parts(plan, dtype=torch.float64 if rank else torch.float32), plan=plan)
    with pytest.raises(ValueError, match="whether gradients are wanted differs"):
        distributed.attention(*parts(plan, requires_grad=rank == 0), plan=plan)


@case("a first call that one rank cannot make")
def failing_call(rank: int, world: int, seed: int) -> None:
    plan = planned()
    q, k, v = parts(plan)
    if rank == 1:
        k = k[:, 1:]
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match=r"k has .* tokens, and rank 1 of the plan holds"):
        distributed.attention(q, k, v, plan=plan, causal=True)
    out = distributed.attention(q, q, q, plan=plan, causal=True)  # and the group is whole
    assert out.shape == q.shape


@case("methods that cannot take a call")
def refusing_methods(rank: int, world: int, seed: int) -> None:
    for method, call, words in (
        ("heads", {"heads": world + 1}, f"the plan needs heads in multiples of the {world} ranks, got {world + 1} of q"),
        ("ring", {"heads": 1, "dropout_p": 0.1}, "dropout counts keys of the whole; .* with method='auto' or 'gather'"),
    ):
        plan = planned(method=method)
        tensors = parts(plan, call.pop("heads"))
        with pytest.raises(ValueError, match=words):
            distributed.attention(*tensors, plan=plan, **call)
    plan = planned(cu_seqlens=[0, 10, 24])
    with pytest.raises(ValueError, match="dropout_p must be 0 with cu_seqlens"):
        distributed.attention(*(t[0] for t in parts(plan)), plan=plan, dropout_p=0.1)


@case("tensors that are not the rank's own")
def foreign_tensors(rank: int, world: int, seed: int) -> None:
    plan = planned()
    whole = torch.randn(1, 24, 4, 8)
    with pytest.raises(ValueError, match=rf"q has 24 tokens, and rank {rank} of the plan holds .*plan.shard\(q, 1\)"):
        distributed.attention(whole, whole, whole, plan=plan)
    for call, words in (
        (lambda: plan.shard(whole, 2), "t has 4 entries in dimension 2, and the plan is for 24"),
        (lambda: plan.unshard(whole, 1), f"t has 24 entries in dimension 1, and rank {rank} holds"),
        (lambda: plan.positions(world), f"rank must be at most {world - 1}"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match=r"plan must be what shard_plan\(\) returns, got None"):
        distributed.attention(whole, whole, whole, plan=None)  # type: ignore[arg-type]


@case("a plan never changes")
def frozen(rank: int, world: int, seed: int) -> None:
    plan = planned()
    with pytest.raises(AttributeError):
        plan.chunk = 3  # type: ignore[misc]


def death(rank: int, world: int, seed: int) -> None:
    """The last rank dies between two calls: the others end with an error."""
    plan = distributed.shard_plan(24, None, causal=True)
    tensors = parts(plan)
    distributed.attention(*tensors, plan=plan, causal=True)
    if rank == world - 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"(?i)connection|timed? ?out|closed"):
        distributed.attention(*tensors, plan=plan, causal=True)
