"""Tiles of Triton's kernels: what their tables must hold for every call."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from warploom.attention.features import Features
from warploom.attention.triton.config import config


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_tables_gradient_has_square_tiles(dtype: torch.dtype, capability: int) -> None:
    """Tiles of one diagonal are added before their elements are."""
    for dim, columns, dropout, boxes in itertools.product((64, 128, 256), *[(False, True)] * 3):
        features = Features(dtype, dim, dim, columns=columns, dropout=dropout, bias="distance", bias_grad=True)
        tiling = config(features, capability, boxes).dtable
        assert tiling.m == tiling.n
