"""The truth that the Triton kernels are held against is what autograd makes of the score matrix in fp64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.linear.triton_model import results
from warploom.linear import reference
from warploom.linear.feature_maps import NAMED
from warploom.linear.problem import LinearCall


@pytest.mark.parametrize("map_q,map_k", [("elu+1", "elu+1"), ("relu", "identity")])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("causal,rows,keys", [(True, 150, 150), (True, 70, 150), (True, 150, 70), (False, 70, 150)])
def test_chunks_equal_the_score_matrix(map_q: str, map_k: str, normalize: bool, causal: bool, rows: int, keys: int) -> None:
    seed = random.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v = draw(2, rows, 4, 8), draw(2, keys, 2, 8), draw(2, keys, 2, 12)
    s, z = draw(2, 2, 8, 12), draw(2, 2, 8)
    dout, ds, dz = (draw(*shape).detach() for shape in ((2, rows, 4, 12), (2, 2, 8, 12), (2, 2, 8)))
    # With signed keys the denominator may vanish; eps keeps it away from 0.
    eps = 1e-6 if map_k == "elu+1" else 1e3
    fq, fk, wide_v = NAMED[map_q](q), NAMED[map_k](k).repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    wide_s, wide_z = s.repeat_interleave(2, 1), z.abs().repeat_interleave(2, 1)
    p = torch.einsum("blhe,bshe->bhls", fq, fk) * 0.7
    p = p.tril() if causal else p
    num = torch.einsum("bhls,bshm->blhm", p, wide_v) + torch.einsum("blhe,bhem->blhm", fq, wide_s) * 0.7
    norm = p.sum(-1) + torch.einsum("blhe,bhe->bhl", fq, wide_z) * 0.7 + eps
    out = num / norm.transpose(1, 2)[..., None] if normalize else num
    last_s = s + torch.einsum("bshe,bshm->bhem", NAMED[map_k](k), v)
    last_z = z.abs() + NAMED[map_k](k).sum(1)
    loss = (out * dout).sum() + (last_s * ds).sum() + (last_z * dz).sum()
    dq, dk, dv, ds0, dz0 = torch.autograd.grad(loss, (q, k, v, s, z))

    call = LinearCall(*(t.detach() for t in (q, k, v)), map_q, map_k, causal, normalize, eps, 0.7, s, z.abs(), None, None)
    got = results(call, dout, ds, dz, exact=True)
    norm = norm if normalize else torch.ones_like(norm)
    want = (out, norm, last_s, last_z, dq, dk, dv, ds0, dz0 * z.sign(), torch.zeros(2, keys, 2, dtype=torch.float64))
    for name, a, b in zip(got._fields, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"seed {seed} {name}: {m}")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rows,keys", [(150, 150), (70, 150), (150, 70)])
def test_chunks_that_fade_equal_the_recurrence(normalize: bool, rows: int, keys: int) -> None:
    """In fp64, against the reference, token by token, and its gradients by autograd."""
    seed = random.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    q, k, v = draw(2, rows, 4, 8), draw(2, keys, 2, 8), draw(2, keys, 2, 12)
    s, z = draw(2, 2, 8, 12), draw(2, 2, 8).abs()
    dout, ds, dz = draw(2, rows, 4, 12), draw(2, 2, 8, 12), draw(2, 2, 8)
    decay = -draw(2, keys, 2).abs()
    decay[draw(2, keys, 2) > 1.5] = -torch.inf
    options = (None, None, decay, True)
    call = LinearCall(q, k, v, "elu+1", "relu", True, normalize, 0.1, 0.7, s, z, *options)
    got = results(call, dout, ds, dz, exact=True)._asdict()
    out, norm, *last = reference.BACKEND.forward(call, True)
    gradients = reference.BACKEND.backward(call, dout, norm, ds, dz)
    norm = torch.ones_like(got["norm"]) if norm is None else norm
    for (name, a), b in zip(got.items(), (out, norm, *last, *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"seed {seed} {name}: {m}")
