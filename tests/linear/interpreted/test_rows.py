"""What surrounds the Hopper walks, in the interpreter, against the same in fp64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from warploom.linear.feature_maps import NAMED
from warploom.linear.hopper import rows

BATCH, HEADS, SEGMENT = 2, 2, 16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several segments of several tiles, in one case more than are added up at a time."""
    monkeypatch.setattr(rows, "SEGMENT", SEGMENT)
    monkeypatch.setattr(rows, "TILES", {kernel: ((16, 4), (16, 4)) for kernel in rows.TILES})
    rows._launch.cache_clear()


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(random.randrange(2**31))).to(dtype)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


CASES = [(70, 24, torch.float32, "elu+1"), (33, 16, torch.float16, "relu"), (290, 8, torch.float32, "identity")]
CASES += [(1, 8, torch.float32, "elu+1")]


@pytest.mark.parametrize(("seqlen", "e", "dtype", "name"), CASES, ids=str)
def test_forward(seqlen: int, e: int, dtype: torch.dtype, name: str) -> None:
    raw = [draw(dtype, BATCH, HEADS, seqlen, e).transpose(1, 2) for _ in range(2)]
    if name == "identity":
        raw = [t.abs() for t in raw]
    q, (k, sums) = rows.mapped(raw[0], name), rows.mapped_and_sums(raw[1], name)
    assert sums.shape == (BATCH, HEADS, -(-seqlen // SEGMENT), e)
    norm, weights = rows.denominators(q, k, sums, 0.3, 1e-1)
    for got, t in ((q, raw[0]), (k, raw[1])):
        assert (got is t) == (name == "identity")
        assert_near(got, NAMED[name](t.double()), dtype)
    want = 0.3 * (q.double() * k.double().cumsum(1)).sum(-1).transpose(1, 2) + 1e-1
    assert_near(norm, want, torch.float32)
    assert_near(weights, 1 / want, torch.float32)


@pytest.mark.parametrize(("seqlen", "e", "dtype", "name"), CASES, ids=str)
def test_backward(seqlen: int, e: int, dtype: torch.dtype, name: str) -> None:
    q = rows.mapped(draw(dtype, BATCH, seqlen, HEADS, e), name)
    k, sums = rows.mapped_and_sums(draw(dtype, BATCH, seqlen, HEADS, e), name)
    x, weights = draw(torch.float32, BATCH, seqlen, HEADS, e), 1 / (draw(torch.float32, BATCH, HEADS, seqlen).abs() + 1)
    dq, bias = rows.queries_gradient(q, k, sums, x, weights, 0.3, name)
    fq, fk, wide, weight = q.double(), k.double(), x.double(), weights.double().transpose(1, 2)[..., None]
    want_bias = weight * (fq * wide).sum(-1, keepdim=True)
    slopes = [{"identity": torch.ones_like(t), "elu+1": t.clamp_max(1), "relu": (t > 0).double()}[name] for t in (fq, fk)]
    assert_near(bias, want_bias[..., 0].transpose(1, 2), torch.float32)
    assert_near(dq, slopes[0] * weight * (wide - 0.3 * want_bias * fk.cumsum(1)), dtype)
    dk = draw(dtype, BATCH, seqlen, HEADS, e)
    want = slopes[1] * dk.double()
    assert rows.through(dk, k, name) is dk
    assert_near(dk, want, dtype)


def test_relus_slope_at_a_nan_is_torchs() -> None:
    """The walks once had 0 there, and Triton's kernels and torch 1."""
    x = draw(torch.float32, 1, 5, 2, 8)
    x[0, 1, 0, 3] = float("nan")
    gradient = draw(torch.float32, 1, 5, 2, 8)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(NAMED["relu"](leaf), leaf, gradient)
    assert want[0, 1, 0, 3] == gradient[0, 1, 0, 3]
    got = rows.through(gradient.clone(), rows.mapped(x, "relu"), "relu")
    assert torch.equal(got, want)


@pytest.mark.parametrize("constant", [True, False], ids=["a head", "a token"])
def test_sums_of_logs(constant: bool) -> None:
    """A log that forgets is held to one whose exponential is 0."""
    logs = -draw(torch.float32, 2, 70, 19).abs()
    logs[0, 3, 1] = -torch.inf
    logs = logs[0, 5].expand(2, 70, 19) if constant else logs
    want = torch.cat([t.double().clamp_min(-128.0).cumsum(1) for t in logs.split(32, 1)], 1) / torch.tensor(2.0).double().log()
    torch.testing.assert_close(rows.bind_sums(logs, 32)(logs), want.transpose(1, 2).float(), rtol=1e-6, atol=0.0)
