"""Launches of the gated delta rule's Triton kernels that do not happen."""

from __future__ import annotations

from unittest.mock import patch

import torch

from tools.kernel_resources import Recorded, recorder
from warploom.delta.problem import DeltaCall, StepArgs
from warploom.delta.triton import run


def launches(
    e: int, m: int, dtype: torch.dtype = torch.bfloat16, group: int = 1, state: bool = False, packed: bool = False
) -> list[Recorded]:
    """Of a forward pass, a backward pass and a step."""
    found: list[Recorded] = []
    cached = [f for f in vars(run).values() if hasattr(f, "cache_clear")]
    for f in cached:
        f.cache_clear()
    tokens, heads = 1024, 2
    q, k = (torch.zeros(1, tokens, heads, e, dtype=dtype) for _ in range(2))
    v = torch.zeros(1, tokens, heads * group, m, dtype=dtype)
    beta, decay = (torch.zeros(1, tokens, heads * group) for _ in range(2))
    s = torch.zeros(1, heads * group, e, m)
    cu = torch.tensor([0, tokens], dtype=torch.int32) if packed else None
    call = DeltaCall(q, k, v, beta, decay, 1.0, True, 1e-6, s if state else None, None, cu)
    one = (t[:, 0] for t in (q, k, v, beta))
    try:
        with patch.object(run, "Launch", recorder(found)):
            run.forward(call, state)
            run.backward(call, v, s if state else None)
            run.step(StepArgs(*one, s, decay[:, 0], 1.0, True, 1e-6, "triton"), None)
    finally:
        for f in cached:
            f.cache_clear()
    return found
