"""A stand-in for `cudnn.flex_attention` (nvidia-cudnn-frontend 1.32) on a CPU: its signatures, what it refuses, its result."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


@dataclass
class MaskPlan:
    seen: Tensor  # (1 | heads_q, batch, seqlen_q, seqlen_k)
    backward: bool


def seen_by(mask_func: Tensor, batch: int, seqlen_k: int) -> Tensor:
    """What intervals [0, F0) ∪ [F1, F2) ∪ … show: bool (1 | heads_q, batch, seqlen_q, seqlen_k)."""
    keys = torch.arange(seqlen_k)
    first = torch.zeros_like(mask_func[:, :1])
    begins, ends = torch.cat([first, mask_func[:, 1::2]], 1), mask_func[:, 0::2]
    seen = ((keys >= begins[..., None]) & (keys < ends[..., None])).any(1)
    return seen.unflatten(1, (batch, -1))


def create_mask_plan(
    mask_func: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    pack_gqa: bool | None = None,
    build_backward: bool | None = None,
) -> MaskPlan:
    if mask_func.ndim != 3 or mask_func.dtype != torch.int32 or not mask_func.is_contiguous():
        raise ValueError("mask_func must be contiguous int32 [Hmask, nfunc, total_q]")
    heads, endpoints, total = mask_func.shape
    if heads not in (1, q.shape[2]) or endpoints % 2 == 0 or total != q.shape[0] * q.shape[1]:
        raise ValueError(f"mask_func has shape {tuple(mask_func.shape)}")
    previous = torch.zeros_like(mask_func[:, 0])
    for at in range(endpoints):  # in order, within the keys
        if (mask_func[:, at] < previous).any() or (mask_func[:, at] > k.shape[1]).any():
            raise ValueError("mask_func intervals must be sorted, disjoint and within [0, seqlen_k]")
        previous = mask_func[:, at]
    print("Compiled mask-plan classify in 0.1s")
    return MaskPlan(seen_by(mask_func, q.shape[0], k.shape[1]), bool(build_backward))


def flex_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask_plan: MaskPlan,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor:
    if torch.is_grad_enabled() and q.requires_grad and not mask_plan.backward:
        raise ValueError("MaskPlan was built without backward payloads")
    a, b, c = (t.transpose(1, 2) for t in (q, k, v))
    mask = mask_plan.seen.transpose(0, 1)
    return torch.nn.functional.scaled_dot_product_attention(a, b, c, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make `from cudnn import flex_attention` find this one."""
    cudnn: Any = ModuleType("cudnn")
    cudnn.flex_attention = fake = ModuleType("cudnn.flex_attention")
    fake.create_mask_plan, fake.flex_attn_func = create_mask_plan, flex_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", fake)
    return fake
