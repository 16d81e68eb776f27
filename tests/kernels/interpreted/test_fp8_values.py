"""The kernel that lays packed values block by block, against the same by torch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from warploom.attention.hopper.fp8_run import values_by_block
from warploom.kernels.triton.fp8_values import lay_values


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


STARTS = ints(0, 5, 5, 200, 328, 690)
QUERIES = ints(0, 50, 60, 80, 300, 500)


@pytest.mark.parametrize("keys_last", [False, True])
@pytest.mark.parametrize(
    "used,left,right",
    [(None, None, None), (None, None, 0), (ints(4, 0, 100, 128, 362), 30, -3), (ints(4, 0, 100, 128, 362), -2, None)],
    ids=str,
)
def test_as_by_torch(keys_last: bool, used: Tensor | None, left: int | None, right: int | None) -> None:
    drawing = random.randrange(2**31)
    bits = torch.randint(256, (3, 48, 704), generator=torch.Generator().manual_seed(drawing), dtype=torch.uint8)
    v = bits[..., :700].permute(2, 0, 1)
    v = v if keys_last else v.contiguous()
    want = values_by_block(v, QUERIES, STARTS, used, left, right)
    out = torch.full((3, 48, want.shape[0]), 77, dtype=torch.uint8)
    lay_values(out, v, QUERIES, STARTS, used, left, right)
    assert want.any() and torch.equal(out.permute(2, 0, 1), want), drawing


def test_windows_past_32_bits() -> None:
    """Which hide what windows as long as any sequence do; the kernel has their sides in 32 bits."""
    used = ints(4, 0, 100, 128, 362)
    v = torch.randint(256, (700, 3, 48), dtype=torch.uint8)
    for far, near in (((2**40 + 5, None), (None, None)), ((None, 2**40), (None, None)), ((None, -(2**40) + 7), (None, -1000))):
        found = values_by_block(v, QUERIES, STARTS, used, *far)
        assert torch.equal(found, values_by_block(v, QUERIES, STARTS, used, *near)), far
