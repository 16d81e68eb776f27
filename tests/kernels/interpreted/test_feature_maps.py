"""Triton's feature maps against torch's, which tests/linear/test_feature_maps.py holds against the in-place ones."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.maps import agree, by_triton, expected, numbers
from warploom.linear.feature_maps import NAMED


@pytest.mark.parametrize("name", NAMED)
def test_tritons_maps_and_slopes_are_torchs(name: str) -> None:
    x = numbers()
    mapped, slope = by_triton(name, x)
    want, want_slope = expected(name, x)
    agree(mapped, want)
    agree(slope, want_slope)
    if name != "elu+1":
        assert torch.equal(mapped.signbit()[~x.isnan()], want.signbit()[~x.isnan()])
