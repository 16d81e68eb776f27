"""fp32 calls with products summed as tensor cores sum them, each step rounded towards zero, and judged like all others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

from tests.linear.triton_cases import Case, check

STEP = 4  # terms that a tensor core adds at once


def towards_zero(x: Any) -> Any:
    nearest = x.astype(np.float32)
    return np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)


def tf32(x: Any) -> Any:
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def tensor_core(a: Any, b: Any, total: Any) -> Any:
    """total + a @ b of TF32 numbers."""
    for k in range(0, a.shape[-1], STEP):
        total = towards_zero(total + a[..., k : k + STEP].astype(np.float64) @ b[..., k : k + STEP, :])
    return total


def three_products(a: Any, b: Any) -> Any:
    high_a, high_b = tf32(a), tf32(b)
    total = tensor_core(tf32(a - high_a), high_b, np.zeros((*a.shape[:-1], b.shape[-1]), np.float32))
    return tensor_core(high_a, high_b, tensor_core(high_a, tf32(b - high_b), total))


@pytest.mark.parametrize("dims", [(256, 32), (32, 256)], ids=str)
def test_dims(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    products = []

    def create_dot(_: Any, a: Any, b: Any, c: Any, precision: Any, __: Any) -> Any:
        products.append(precision)
        left, right = (np.ascontiguousarray(t.data) for t in (a, b))
        return interpreter.TensorHandle(three_products(left, right) + c.data, c.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    check(Case(random.randrange(2**31), rows=90, e=dims[0], m=dims[1], mean=0.5))
    assert products and all("TF32x3" in str(p) for p in products)
