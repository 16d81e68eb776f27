"""Tiles of Triton's kernels: what their tables must hold for every call."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from warploom.attention.features import Features
from warploom.attention.triton.config import config, shared_tiling


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_tables_gradient_has_square_tiles(dtype: torch.dtype, capability: int) -> None:
    """Tiles of one diagonal are added before their elements are."""
    for dim, columns, dropout, boxes in itertools.product((64, 128, 256), *[(False, True)] * 3):
        features = Features(dtype, dim, dim, columns=columns, dropout=dropout, bias="distance", bias_grad=True)
        tiling = config(features, capability, boxes).dtable
        assert tiling.m == tiling.n


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_batch_entries_that_share_a_matrix_go_in_two_launches_at_most(dim: int, itemsize: int) -> None:
    """A launch reads the sum of the one before from the gradient, which has rounded it."""
    found = shared_tiling(Features(torch.bfloat16, dim, dim, bias="tensor", bias_grad=True), 90)
    assert found is not None
    most = found.entries.get(itemsize, 0)
    for batches in range(1, 12):
        launches = found.launches(batches, itemsize)
        assert bool(launches) == (1 < batches <= 2 * most)
        assert sum(launches) in (0, batches) and len(launches) <= 2 and max(launches, default=0) <= most


@pytest.mark.parametrize("changes", [{"dropout": True}, {"columns": True}, {"q_offset": True}, {"head_dim": 256}], ids=str)
def test_calls_whose_batch_entries_share_no_walk(changes: dict[str, object]) -> None:
    features = Features(torch.bfloat16, 64, 64, bias="tensor", bias_grad=True)._replace(**changes)  # type: ignore[arg-type]
    assert shared_tiling(features, 90) is None and shared_tiling(features._replace(head_dim=64), 80) is None
