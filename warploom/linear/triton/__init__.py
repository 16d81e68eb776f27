"""Linear attention on the GPU in Triton: every tensor read once where there are heads enough, deterministic gradients.

One pass with the state in registers where sequences × heads fill the device; else sequences are cut into segments whose
states are summed first (the two regimes of Katharopoulos et al., 2020, arXiv 2006.16236, in chunks of matrix products).
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from warploom.linear.problem import LinearCall

# Read here once: torch.compile does not trace the lookup.
_HAS_TRITON = find_spec("triton") is not None


def available() -> str | None:
    if not _HAS_TRITON:
        return "the triton package is not installed (pip install 'warploom[triton]')"
    if not _interpreting() and not torch.cuda.is_available():
        return "no CUDA device is visible"
    return None


def supports(call: LinearCall) -> str | None:
    device, dtype = call.v.device.type, call.v.dtype
    if device != "cuda" and not (device == "cpu" and _interpreting()):
        return f"runs on CUDA tensors, not on {device}"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 or float32, not {dtype}"
    if any(t.dtype != dtype for t in (call.q, call.k)):
        return f"takes q, k and v of one dtype, not {call.q.dtype}, {call.k.dtype} and {dtype}"
    if dtype == torch.bfloat16 and device == "cpu":
        return "Triton's interpreter multiplies bfloat16 as integers"
    for name, dim in (("E (the keys' dim)", call.q.shape[3]), ("M (the values' dim)", call.v.shape[3])):
        if not 1 <= dim <= 256:
            return f"takes {name} up to 256, not {dim}"
    return None


def forward(call: LinearCall, return_state: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Out, norm, s and z; see `warploom.linear.problem`."""
    from warploom.linear.triton.run import forward as run

    return run(call, return_state)


def backward(
    call: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv, and ds0 and dz0 where the call has a state."""
    from warploom.linear.triton.run import backward as run

    return run(call, dout, norm, ds, dz)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    *,
    map_q: str,
    map_k: str,
    normalize: bool,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of decoding: out and the new s and z."""
    from warploom.linear.triton.run import step as run

    return run(q, k, v, s, z, map_q=map_q, map_k=map_k, normalize=normalize, eps=eps, scale=scale)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
