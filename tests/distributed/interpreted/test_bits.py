"""The Triton kernels in the interpreter, batch-invariant: a row has the bits that attention() gives it, whoever holds it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import warploom
from warploom import masks
from warploom.attention.arguments import dense_args
from warploom.distributed import local
from warploom.distributed.api import _sharded, _unit, _whole
from warploom.distributed.plan import planned

pytestmark = pytest.mark.usefixtures("products_in_order")
SEQLEN = 150
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "a window": {"window": (40, 3)},
    "documents": {"mask": masks.Document([20, 87, 0, 40])},
    "no mask": {},
    "causal, dropout": {"causal": True, "dropout_p": 0.3},
}


@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_ranks(name: str) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    band = dict(CALLS[name])
    dropout: dict[str, Any] = {"dropout_p": band.pop("dropout_p", 0.0), "dropout_seed": seed}
    q, k, v = torch.randn(3, 1, SEQLEN, 2, 16).unbind()
    sink = torch.randn(2)
    options: dict[str, Any] = {"backend": "triton", "batch_invariant": True, "return_lse": True}
    want, want_lse = warploom.attention(q, k, v, **band, **dropout, sink=sink, **options)
    for ranks in (1, 3):
        for rank in range(ranks):
            plan = planned(SEQLEN, ranks, rank, chunk=17, **band)
            rows = plan.shard(q, 1)
            whole = _whole(plan, band.get("mask"), band.get("causal", False), band.get("window"))
            args = dense_args(rows, rows, rows, **dropout, batch_invariant=True)
            unit = _unit(args, whole, "triton", False)
            assert unit == 0
            pieces = _sharded(plan, whole, q.device).gathered(args.dropout_p > 0.0, unit)
            assert len(pieces) == len(plan.queries.runs[rank])
            for some, part, part_lse in local.forward(local.Run(args, "triton", False, {}), rows, k, v, sink, pieces):
                assert torch.equal(part, plan.shard(want, 1)[:, some])
                assert torch.equal(part_lse, plan.shard(want_lse, 2)[:, :, some])


def test_without_it_bits_differ() -> None:
    """So that the test above says something."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, SEQLEN, 2, 16).unbind()
    plan = planned(SEQLEN, 3, 1, causal=True, chunk=17)
    rows = plan.shard(q, 1)
    pieces = _sharded(plan, _whole(plan, None, True, None), q.device).gathered(False)
    run = local.Run(dense_args(rows, rows, rows), "triton", False, {})
    parts = list(local.forward(run, rows, k, v, None, pieces))
    want = plan.shard(warploom.attention(q, k, v, causal=True, backend="triton"), 1)
    assert not all(torch.equal(part, want[:, some]) for some, part, _ in parts)
