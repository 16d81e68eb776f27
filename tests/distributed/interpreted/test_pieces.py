"""The Triton kernels in the interpreter on the rows of one rank: a mask by its rows, two runs of a band, dropout's offsets."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from warploom import masks
from warploom.attention import philox
from warploom.attention.arguments import dense_args
from warploom.attention.judge import judge, low_precision
from warploom.distributed import local
from warploom.distributed.api import _sharded, _whole
from warploom.distributed.documents import documents_of
from warploom.distributed.plan import planned

SEQLEN = 48
CALLS: dict[str, dict[str, Any]] = {
    "documents": {"mask": masks.Document([20, 17, 11])},
    "causal, two runs": {"causal": True, "chunk": 12},
    "causal, keys by ranks": {"causal": True, "chunk": 12, "ranked": True},
    "documents, keys by ranks": {"mask": masks.Document([20, 17, 11]), "ranked": True},
    "causal, dropout": {"causal": True, "dropout_p": 0.3},
    "causal, dropout of later heads": {"causal": True, "dropout_p": 0.3, "head": 5},
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_of_a_rank(name: str) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    band = dict(CALLS[name])
    dropout = {"dropout_p": band.pop("dropout_p", 0.0), "dropout_seed": seed}
    head, ranked = band.pop("head", 0), band.pop("ranked", False)
    plan = planned(SEQLEN, 2, 0, **{"chunk": 6, **band})
    band.pop("chunk", None)
    q, k, v, dout = torch.randn(4, 1, SEQLEN, 2, 16).unbind()
    here = torch.zeros(SEQLEN, dtype=torch.bool).index_fill_(0, plan.positions(), True)
    dout = dout.masked_fill(~here[:, None, None], 0.0)  # of the other rank's rows nothing comes
    seen = band.get("mask", masks.Causal()).dense(SEQLEN, SEQLEN)
    sizes = (torch.arange(1), torch.arange(head, head + 2), torch.arange(SEQLEN), torch.arange(SEQLEN))
    keep = philox.keep_mask(torch.tensor(seed), dropout["dropout_p"], *sizes).double() * philox.keep_scale(dropout["dropout_p"])
    models = []
    for dtype in (torch.float64, torch.float32):
        given = (t.to(dtype) for t in (q, k, v, dout))
        models.append(low_precision(*given, torch.zeros(1, 2, SEQLEN), seen, scale=0.25, keep=keep))

    rows = plan.shard(q, 1)
    run = local.Run(dense_args(rows, rows, rows, **dropout), "triton", True, {})
    whole = _whole(plan, band.get("mask"), band.get("causal", False), None)
    sharded = _sharded(plan, whole, torch.device("cpu"))
    pieces = sharded.gathered(dropout["dropout_p"] > 0.0)
    pieces = tuple(replace(piece, head=head) for piece in pieces)
    order = torch.arange(SEQLEN)
    if ranked:
        pieces = sharded.exchanged()
        assert pieces is not None and len(pieces) == 1
        order = torch.cat([torch.arange(a, b) for source in (1, 0) for a, b in sharded.needed(0, source)])
        k, v = k[:, order], v[:, order]
    out, lse = torch.zeros_like(rows), torch.full((1, 2, rows.shape[1]), float("-inf"))
    for some, part, part_lse in local.forward(run, rows, k, v, None, pieces):
        out[:, some], lse[:, :, some] = part, part_lse
    dq, dk, dv = local.backward(run, rows, k, v, plan.shard(dout, 1), None, out, lse, pieces)
    for what, found in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
        exact, lowp = (getattr(model, what) for model in models)
        if what in ("out", "dq"):
            exact, lowp = plan.shard(exact, 1), plan.shard(lowp, 1)
        else:
            exact, lowp = exact[:, order], lowp[:, order]
        verdict = judge(what, found, exact, lowp, torch.float32)
        assert verdict.passed, verdict


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rank", range(2))
def test_packed_documents_of_a_rank(rank: int, causal: bool) -> None:
    """Sequences without a query or without a key among them."""
    mask = masks.Document([5, 15, 13, 15], causal=causal)
    plan = planned(SEQLEN, 2, rank, mask=mask, chunk=6)
    q, k, v = torch.randn(3, 1, SEQLEN, 2, 16).unbind()
    sharded = _sharded(plan, _whole(plan, mask, False, None), torch.device("cpu"))
    found = documents_of(sharded)
    assert found is not None
    own, taken = plan.positions(), [torch.arange(a, b) for a, b in sharded.needed(rank, 1 - rank)]
    before, behind = [[own[a:b] for a, b in runs] for runs in (found.exchange.before, found.exchange.own)]
    order = torch.cat([*before, *taken, *behind])
    rows, others = plan.shard(q, 1), [t[:, order] for t in (k, v)]
    out, lse = torch.full_like(rows, float("nan")), torch.full((1, 2, rows.shape[1]), float("nan"))
    run = local.Run(dense_args(rows, rows, rows), "triton", False, {})
    if found.whole is not None:
        local.write(run, rows, plan.shard(k, 1), plan.shard(v, 1), None, (found.whole,), out, lse)
    for piece, runs in found.shared:
        some = others if len(runs) == 1 else [torch.cat([t[:, a:b] for a, b in runs], 1) for t in others]
        local.write(run, rows, some[0], some[1], None, (piece,), out, lse)
    models = []
    for dtype in (torch.float64, torch.float32):
        given = (t.to(dtype) for t in (q, k, v, torch.zeros_like(q)))
        models.append(low_precision(*given, torch.zeros(1, 2, SEQLEN), mask.dense(SEQLEN, SEQLEN), scale=0.25))
    exact, lowp = (plan.shard(model.out, 1) for model in models)
    verdict = judge("out", out, exact, lowp, torch.float32)
    assert verdict.passed, verdict
