"""Chunks of one longer sequence as a batch, on a GPU: inputs, calls with gradients, and which backends a machine can ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from warploom import masks
from warploom.attention import hopper
from warploom.attention.chunks import attention_chunks

SEQLEN, ROWS = 2000, 300
MASKED = ["causal", "documents"]
MISSING = hopper.BACKEND.available()
NEEDS_HOPPER = pytest.mark.skipif(MISSING is not None, reason=f"the hopper backend cannot run: {MISSING}")
BACKENDS = ["triton", pytest.param("hopper", marks=NEEDS_HOPPER)]


def offsets(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def inputs(dim: int = 128) -> list[Tensor]:
    return [torch.randn(2, n, h, dim, device="cuda", dtype=torch.bfloat16) for n, h in ((ROWS, 8), (SEQLEN, 2), (SEQLEN, 2))]


def results(q: Tensor, k: Tensor, v: Tensor, at: Tensor, **options: Any) -> list[Tensor]:
    """out, lse and the gradients, in the same bits from run to run unless the options say otherwise."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    options = {"deterministic": True, **options}
    out, lse = attention_chunks(*leaves, at, seqlen_q=SEQLEN, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def masked(name: str) -> dict[str, Any]:
    return {"causal": True} if name == "causal" else {"mask": masks.Document([900, 20, 80, 1000]).to("cuda")}
