"""The inverse by blocks, in fp32, against the same in fp64."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from warploom.delta.triton.inverse import unit_inverse


@triton.jit
def _kernel(a_ptr, x_ptr, C: tl.constexpr):
    n = tl.arange(0, C)
    at = n[:, None] * C + n[None, :]
    tl.store(x_ptr + at, unit_inverse(tl.load(a_ptr + at), C))


def matrix(kind: str, size: int, generator: torch.Generator) -> torch.Tensor:
    """A = strictly lower (k kT) beta."""
    k = torch.randn(size, 24, generator=generator, dtype=torch.float64)
    if kind == "equal keys, beta 2":
        # Its inverse has elements of 2, its powers some of 1e26.
        k = k[:1].expand(size, -1)
    k = k / k.norm(dim=1, keepdim=True)
    beta = torch.full((size,), 2.0) if "2" in kind else torch.rand(size, generator=generator)
    return ((k @ k.T) * beta).tril(-1)


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("kind", ["drawn", "drawn, beta 2", "equal keys, beta 2"])
def test_inverse(kind: str, size: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    a = matrix(kind, size, torch.Generator().manual_seed(seed)).float()
    x = torch.full((size, size), float("nan"))
    _kernel[(1,)](a, x, C=size)
    eye = torch.eye(size, dtype=torch.float64)
    want = torch.linalg.solve_triangular(eye + a.double(), eye, upper=False, unitriangular=True) - eye
    assert torch.equal(x.triu(), torch.zeros_like(x))
    assert (x.double() - want).norm() <= 1e-6 * (1 + want.norm()) * 4
