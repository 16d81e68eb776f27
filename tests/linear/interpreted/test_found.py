"""Failures that the fuzzer found on a GPU, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from warploom import linear_attention


@pytest.mark.parametrize("causal", [True, False])
def test_a_query_that_a_map_made_zero_took_all_bits_of_its_chunk_in_fp16(causal: bool) -> None:
    """Its norm is eps, whose reciprocal scaled the other queries' weights to nothing: such queries cost no accuracy."""
    generator = torch.Generator().manual_seed(5)
    q, k, v, dout = (torch.randn(2, 40, 2, 4, generator=generator).abs() + 0.5 for _ in range(4))
    zeroed = q.clone()
    zeroed[:, 3::7] *= -1.0

    def gradients(q: Tensor, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
        leaves = [t.half().to(dtype).requires_grad_() for t in (q, k, v)]
        out = linear_attention(*leaves, causal=causal, feature_map=("relu", "identity"), backend=backend)
        return torch.autograd.grad(out, leaves[1:], dout.half().to(dtype))

    def errors(q: Tensor) -> list[float]:
        pairs = zip(gradients(q, torch.float16, "triton"), gradients(q, torch.float64, "reference"), strict=True)
        return [float((found.double() - want).norm() / want.norm()) for found, want in pairs]

    for error, usual in zip(errors(zeroed), errors(q), strict=True):
        assert error <= 2 * usual
