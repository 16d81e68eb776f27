"""Triton's feature maps and tanh on a CUDA device, where exponentials are the hardware's and pairs inline assembly."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.maps import TINY, agree, by_triton, expected, numbers, pairs_by_triton, tanh_by_triton
from warploom.linear.feature_maps import NAMED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", NAMED)
def test_maps_and_slopes_are_torchs(name: str) -> None:
    x = numbers("cuda")
    for found, want in zip(by_triton(name, x), expected(name, x), strict=True):
        agree(found, want)


def test_pairs_of_bf16_are_the_map_rounded_once() -> None:
    x = numbers("cuda").to(torch.bfloat16)
    want, _ = expected("elu+1", x.float())
    # Half a unit in the last place, and as much where the hardware's exponential falls on the other side of a tie.
    torch.testing.assert_close(pairs_by_triton(x).double(), want, rtol=2.0**-8, atol=TINY, equal_nan=True)


def test_tanh_keeps_its_digits_and_a_nan() -> None:
    x = numbers("cuda")
    agree(tanh_by_triton(x), x.double().tanh())
