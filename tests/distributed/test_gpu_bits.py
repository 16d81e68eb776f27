"""batch_invariant on a GPU: rows of any number of ranks, which one process computes one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom import masks
from warploom.attention.arguments import dense_args
from warploom.distributed import local
from warploom.distributed.api import _sharded, _unit, _whole
from warploom.distributed.plan import planned
from warploom.runtime import dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

SEQLEN = 1500
CALLS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"causal": True},
    "a window": {"window": (300, 0)},
    "documents": {"mask": masks.Document([200, 870, 0, 400])},
    "prefix": {"mask": masks.PrefixLM(333)},
}


def rows_of_ranks(q: Any, k: Any, v: Any, band: dict[str, Any], ranks: int, backend: str) -> tuple[list[int], Any, Any]:
    """The units of all ranks, and their out and lse as one."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], SEQLEN, device=q.device)
    units = []
    for rank in range(ranks):
        plan = planned(SEQLEN, ranks, rank, chunk=170, **band)
        rows, whole = plan.shard(q, 1), _whole(plan, band.get("mask"), band.get("causal", False), band.get("window"))
        args = dense_args(rows, rows[:, :, : k.shape[2]], rows[:, :, : k.shape[2]], batch_invariant=True)
        units.append(_unit(args, whole, backend, False))
        pieces = _sharded(plan, whole, q.device).gathered(False, units[-1])
        own = plan.positions().to(q.device)
        for some, part, part_lse in local.forward(local.Run(args, backend, False, {}), rows, k, v, None, pieces):
            out[:, own[some]], lse[:, :, own[some]] = part, part_lse
    return units, out, lse


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_any_number_of_ranks(backend: str, name: str, head_dim: int) -> None:
    refused = dispatch.find(backend).available()
    if refused is not None:
        pytest.skip(refused)
    make = torch.Generator(device="cuda").manual_seed(head_dim)
    draw = {"device": "cuda", "dtype": torch.bfloat16, "generator": make}
    q = torch.randn(1, SEQLEN, 4, head_dim, **draw)
    k, v = torch.randn(2, 1, SEQLEN, 2, head_dim, **draw).unbind()
    band = CALLS[name]
    found = [rows_of_ranks(q, k, v, band, ranks, backend) for ranks in (1, 2, 4, 7)]
    for units, out, lse in found[1:]:
        assert set(units) == set(found[0][0])
        assert torch.equal(out, found[0][1]) and torch.equal(lse, found[0][2])
    if units[0] == 0:  # rows are apart: then they have one device's bits
        options: dict[str, Any] = {"backend": backend, "batch_invariant": True, "return_lse": True}
        want = warploom.attention(q, k, v, **band, **options)
        assert torch.equal(found[0][1], want[0]) and torch.equal(found[0][2], want[1])
