"""The Triton kernels as dispatch sees them: nothing of them is imported before a call that they may run."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from warploom.linear.problem import LinearCall

_HAS_TRITON = find_spec("triton") is not None and find_spec("warploom.linear.triton") is not None


def available() -> str | None:
    if not _HAS_TRITON:
        return "the triton package is not installed (pip install 'warploom[triton]')"
    if not _interpreting() and not torch.cuda.is_available():
        return "no CUDA device is visible"
    return None


def supports(call: LinearCall) -> str | None:
    if call.device != "cuda" and not (call.device == "cpu" and _interpreting()):
        return f"runs on CUDA tensors, not on {call.device}"
    reason: str | None = _kernels().supports(call)
    return reason


def forward(call: LinearCall, return_state: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    return _kernels().forward(call, return_state)  # type: ignore[no-any-return]


def backward(
    call: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    return _kernels().backward(call, dout, norm, ds, dz)  # type: ignore[no-any-return]


def step(call: LinearCall) -> tuple[Tensor, Tensor, Tensor]:
    return _kernels().step(call)  # type: ignore[no-any-return]


def _kernels() -> Any:
    from warploom.linear import triton  # type: ignore[attr-defined]

    return triton


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
