"""The merge's rules: exact in any split, nothing from nothing, and a NaN stays one."""

from __future__ import annotations

import random

import pytest
import torch

from warploom.decode.merge import merge

INF = float("inf")


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("sink", [False, True])
def test_any_split_gives_the_softmax(splits: int, sink: bool) -> None:
    seed = random.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    scores = 5 * torch.randn(3, 64, generator=generator, dtype=torch.float64)
    values = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    extra = torch.randn(3, generator=generator, dtype=torch.float64) if sink else None
    outs, lses = [], []
    for part in torch.arange(64).tensor_split(splits):
        outs.append(scores[:, part].softmax(-1) @ values[part])
        lses.append(scores[:, part].logsumexp(-1))
    out, lse = merge(torch.stack(outs), torch.stack(lses), extra)
    everything = scores if extra is None else torch.cat([scores, extra[:, None]], 1)
    want = everything.softmax(-1)[:, :64] @ values
    assert torch.allclose(out, want, rtol=1e-13, atol=1e-13), seed
    assert torch.allclose(lse, everything.logsumexp(-1), rtol=1e-13), seed


def test_nothing_from_nothing() -> None:
    outs, lses = torch.zeros(3, 2, 4), torch.full((3, 2), -INF)
    out, lse = merge(outs, lses)
    assert torch.equal(out, torch.zeros(2, 4)) and torch.equal(lse, torch.full((2,), -INF))
    out, lse = merge(outs, lses, torch.tensor([0.5, -INF]))
    assert torch.equal(out, torch.zeros(2, 4)) and torch.equal(lse, torch.tensor([0.5, -INF]))
    out, lse = merge(outs[:0], lses[:0])
    assert torch.equal(out, torch.zeros(2, 4)) and torch.equal(lse, torch.full((2,), -INF))


def test_an_empty_split_changes_nothing() -> None:
    outs, lses = torch.randn(1, 2, 4), torch.randn(1, 2)
    padded = torch.cat([outs, torch.zeros(1, 2, 4)]), torch.cat([lses, torch.full((1, 2), -INF)])
    for alone, both in zip(merge(outs, lses), merge(*padded), strict=True):
        assert torch.equal(alone, both)


@pytest.mark.parametrize("other", [1.0, -INF])
def test_nan_stays(other: float) -> None:
    lses = torch.tensor([[float("nan")], [other]])
    out, lse = merge(torch.ones(2, 1, 4), lses)
    assert out.isnan().all() and lse.isnan().all()


def test_far_apart() -> None:
    out, lse = merge(torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[-9e4], [-8e4]]))
    assert out.item() == 2.0 and lse.item() == -8e4
