"""flash-linear-attention as its callers see it: the two recurrences token by token."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


class _Refusing(torch.autograd.Function):
    """As the gated delta rule's backward on a Hopper GPU below Triton 3.7.1."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        raise RuntimeError("these versions compute wrong gradients\nand more words")


def _delta(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, **state: Any
) -> tuple[Tensor, Tensor]:
    assert use_qk_l2norm_in_kernel
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[2] // q.shape[2], 2) for t in (q * q.shape[3] ** -0.5, k))
    batch, tokens, heads, dim = q.shape
    s, rows = state.get("initial_state", q.new_zeros(batch, heads, dim, v.shape[3])), []
    for i in range(tokens):
        s = s * g[:, i, :, None, None].exp()
        learned = beta[:, i, :, None] * (v[:, i] - (s * k[:, i, ..., None]).sum(-2))
        s = s + k[:, i, ..., None] * learned[:, :, None]
        rows.append((s * q[:, i, ..., None]).sum(-2))
    return torch.stack(rows, 1), s


def _refusing(*tensors: Tensor, **options: Any) -> tuple[Tensor, None]:
    return _Refusing.apply(_delta(*tensors, **options)[0]), None


def _simple_gla(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, g_gamma: Tensor | None, scale: float
) -> tuple[Tensor, None]:
    s, rows = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for i in range(q.shape[1]):
        logs = g_gamma if g is None else g[:, i]
        assert logs is not None
        s = s * logs.exp()[..., None, None] + k[:, i, ..., None] * v[:, i, :, None]
        rows.append(scale * (s * q[:, i, ..., None]).sum(-2))
    return torch.stack(rows, 1), None


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it importable."""
    found = {
        "gated_delta_rule": {"chunk_gated_delta_rule": _refusing, "fused_recurrent_gated_delta_rule": _delta},
        "simple_gla": {"chunk_simple_gla": _simple_gla},
    }
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for family, functions in found.items():
        module = ModuleType(f"fla.ops.{family}")
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
