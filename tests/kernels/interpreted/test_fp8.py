"""The quantising kernel: dims, dtypes, granularities, packed sequences, padding, what is not finite, strides."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.kernels.fp8_case import QuantizeCase, by_kernel, check
from warploom.kernels.triton import fp8_launch
from warploom.kernels.triton.fp8 import e4m3_bits

LENGTHS = (0, 1, 13, 0, 130), (130, 0, 7, 2, 61)
USED = (0, 1, 13, 0, 3), (130, 0, 0, 2, 60)


def drawing() -> int:
    return random.randrange(2**31)


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's fma rounds its product, which no GPU does: quotients between two bytes would go to the wrong one."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fma(_: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype("float64") * y.data + z.data
        return TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", fma)


@pytest.mark.parametrize(
    "dims,dtype",
    [((128, 64), torch.bfloat16), ((256, 40), torch.float32), ((72, 96), torch.float16), ((1, 3), torch.bfloat16)],
)
@pytest.mark.parametrize("large", [False, True])
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype, large: bool) -> None:
    check(QuantizeCase(drawing(), *dims, batch=1, dtype=dtype, large=large))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [
        {"bad": True, "large": True}, {"scale": 1e-32, "rows": (7, 16)}, {"scale": 1e-32, "rows": (7, 16), "large": True},
        {"strides": "heads first"},
    ],
    ids=str,
)  # fmt: skip
def test_dense_tiles_in_a_loop(dim: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than programs, whose last ones have rows of no token."""
    monkeypatch.setattr(fp8_launch, "_launch", None)
    options = {"rows": (130, 290), **options}
    check(QuantizeCase(drawing(), dim, dim, dtype=torch.bfloat16, **options))


@pytest.mark.parametrize("granularity,rotation", [("block", -3), ("head", None), ("tensor", 2)])
def test_sequences_and_padding(granularity: str, rotation: int | None) -> None:
    options: dict[str, Any] = {"granularity": granularity, "rotation": rotation, "bad": True}
    check(QuantizeCase(drawing(), 16, 24, used=((0, 90), (133, 3)), **options))
    check(QuantizeCase(drawing(), 24, 16, packed=LENGTHS, behind=37, **options))
    check(QuantizeCase(drawing(), 24, 16, packed=LENGTHS, used=USED, **options))


@pytest.mark.parametrize("strides", ["odd", "heads first", "every other"])
def test_strides(strides: str) -> None:
    check(QuantizeCase(drawing(), 32, 24, batch=1, strides=strides, dtype=torch.bfloat16))


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e-43])
def test_sizes(scale: float) -> None:
    """The smallest are subnormal, and so are their scales; tensor cores need not know of those."""
    check(QuantizeCase(drawing(), batch=1, scale=scale, rotation=None if scale < 1e-38 else 0))


def test_no_sequence_and_a_padded_tail() -> None:
    check(QuantizeCase(drawing(), packed=((), ()), behind=35))
    (_, _, v) = by_kernel(case := QuantizeCase(drawing(), packed=((5,), (9,)), behind=4), case.drawn())
    assert v.data.stride() == (1, 64 * 16, 16) and (v.data[9:].float() == 0).all()


def test_every_bit_pattern_is_rounded_as_torch_does() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x_ptr, out_ptr, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out_ptr + i, e4m3_bits(tl.load(x_ptr + i)))

    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = exact[exact.isfinite()].sort().values
    between = (exact[1:] + exact[:-1]) / 2  # ties
    x = torch.cat([exact, between, between.nextafter(exact[1:]), between.nextafter(exact[:-1])])
    x = torch.nn.functional.pad(x, (0, 2048 - len(x)), value=float("nan"))
    out = torch.empty(2048, dtype=torch.uint8)
    kernel[(1,)](x, out, N=2048)
    assert torch.equal(out, x.to(torch.float8_e4m3fn).view(torch.uint8))
