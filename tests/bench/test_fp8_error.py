"""The errors that docs/fp8.md shows: what is emulated, and that page and pictures are of the committed numbers."""

from __future__ import annotations

import json
import random

import pytest
import torch

from benchmarks import fp8_error
from benchmarks.fp8_error import BITS, Kernel, attend, bf16, exact, tensor_core
from warploom import attention
from warploom.fp8 import quantize

FOUND = json.loads(fp8_error.RESULTS.read_text(encoding="utf-8"))


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_page_and_its_pictures_are_of_the_committed_numbers() -> None:
    page = (fp8_error.ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")
    for table in fp8_error.tables(FOUND):
        assert table in page
    for name, picture in fp8_error.pictures(FOUND).items():
        assert (fp8_error.IMAGES / name).read_text(encoding="utf-8") == picture and f"images/{name}" in page


def test_the_committed_numbers_are_within_the_bars() -> None:
    """FlashAttention-3's outliers as its paper has them, 0.4 of what they are without a rotation; long sums as short ones."""
    outliers = {row["way"]: row["rmse"] for row in FOUND["distributions"] if row["draw"] == "outliers"}
    assert outliers["both"] <= 9.1e-3 and outliers["both"] <= 0.4 * outliers["not rotated"]
    lengths = {row["length"]: row["relative"] for row in FOUND["lengths"] if row["sums"] == "two levels"}
    assert lengths[131072] <= lengths[4096]


def test_the_tensor_core_is_exact_on_small_integers() -> None:
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    a, b = (torch.randint(-4, 5, shape, generator=generator).float() for shape in ((3, 96), (96, 5)))
    assert torch.equal(tensor_core(torch.zeros(3, 5), a, b), a @ b)


def test_the_tensor_core_cuts_what_is_small_beside_the_largest() -> None:
    ones = torch.ones(1, 1)
    large = torch.tensor([[2.0**BITS]])
    assert tensor_core(large, ones, 1.75 * ones) == large + 1  # toward zero, in steps of 1
    assert tensor_core(2 * large, ones, 1.75 * ones) == 2 * large
    assert tensor_core(-2 * large, ones, -1.75 * ones) == -2 * large
    assert tensor_core(torch.zeros(1, 1), ones, 1.75 * ones) == 1.75


@pytest.mark.parametrize("kernel", [Kernel(), Kernel(levels=1), Kernel(levels=0, granularity="tensor"), Kernel(hadamard=False)])
def test_values_of_one_give_one(kernel: Kernel) -> None:
    """But for the rounding of weights, which row sums are not of: a sixteenth of one at most, of many next to nothing."""
    drawing = random.randrange(2**31)
    q, k = drawn(drawing, 300, 32), drawn(drawing + 1, 300, 32)
    out = attend(kernel, q, k, torch.ones(300, 8), 20)
    # Each of a sum's 10 steps may lose 2^-13 of it for each of 33 numbers.
    assert torch.allclose(out, torch.ones(20, 8), rtol=2.0**-6 + (10 * 33 * 2.0**-13 if kernel.levels else 0)), drawing


@pytest.mark.parametrize("granularity", ["block", "tensor"])
def test_the_emulation_is_of_the_package(granularity: str) -> None:
    """But for the rounding of P, a sixteenth of a weight at most, it is attention() over the same numbers."""
    drawing = random.randrange(2**31)
    given = [3 * drawn(drawing + n, 300, 64) for n in range(3)]
    out = attend(Kernel(levels=0, granularity=granularity), *given, 50)  # type: ignore[arg-type]
    want = attention(*quantize(*(t[None, :, None] for t in given), granularity=granularity))[0, :50, 0]  # type: ignore[arg-type]
    assert 0 < (out - want).norm() / want.norm() < 1 / 16, drawing


@pytest.mark.parametrize("dim", [16, 32, 128, 256])
def test_rounding_once_is_what_narrow_and_wide_heads_have(dim: int) -> None:
    drawing = random.randrange(2**31)
    given = [drawn(drawing + n, 1024, dim) for n in range(3)]
    once, twice = (attend(Kernel(levels=0, again=again), *given, 200) for again in (False, True))
    assert torch.equal(once, twice) == (dim in (16, 256)), drawing


def test_bf16_is_finer() -> None:
    drawing = random.randrange(2**31)
    given = [drawn(drawing + n, 512, 64) for n in range(3)]
    want = exact(*given, 40)
    errors = [(out - want).norm() / want.norm() for out in (bf16(*given, 40), attend(Kernel(), *given, 40))]
    assert errors[0] < 0.01 < errors[1] < 0.1, (drawing, errors)


def test_one_level_loses_long_sums() -> None:
    drawing = random.randrange(2**31)
    q, k, v = (drawn(drawing + n, 4096, 32) for n in range(3))
    v = v[:, :8] + 1
    want = exact(q, k, v, 4)
    one, two = ((attend(Kernel(levels=levels), q, k, v, 4) - want).norm() / want.norm() for levels in (1, 2))
    assert two < 0.01 < 0.02 < one, (drawing, one, two)
