"""Causal linear attention in chunks of matrix products: O(seqlen), differentiable through autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from warploom.linear.state import LinearState

CHUNK = 64


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
    state: LinearState | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """Causal linear attention on mapped queries and keys of one length, accumulated in fp32 (fp64 for fp64 inputs).

    Args:
        q, k: mapped queries and keys (batch, seqlen, heads, E).
        v: values (batch, seqlen, heads, M).
        normalize, eps, scale, state: as in `warploom.linear.reference.quadratic`.

    Returns:
        out (batch, seqlen, heads, M) in v's dtype, and the state after the last token.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    batch, seqlen, heads, dim = q.shape
    chunks = -(-seqlen // CHUNK)

    def split(t: torch.Tensor) -> torch.Tensor:
        """(batch, heads, chunks, CHUNK, dim); zero keys past the end add nothing to any sum."""
        t = F.pad(t.to(dtype).transpose(1, 2), (0, 0, 0, chunks * CHUNK - seqlen))
        return t.reshape(batch, heads, chunks, CHUNK, t.shape[-1])

    qc, kc, vc = split(q) * scale, split(k), split(v)
    first_s = vc.new_zeros(batch, heads, dim, v.shape[-1]) if state is None else state.s.to(dtype)
    first_z = vc.new_zeros(batch, heads, dim) if state is None else state.z.to(dtype)
    # Entry c is the state before chunk c, the last one the state after all of them.
    s = torch.cat([first_s.unsqueeze(2), kc.transpose(-1, -2) @ vc], 2).cumsum(2)
    z = torch.cat([first_z.unsqueeze(2), kc.sum(-2)], 2).cumsum(2)
    scores = (qc @ kc.transpose(-1, -2)).tril()
    out = scores @ vc + qc @ s[:, :, :-1]
    if normalize:
        norm = scores.sum(-1, keepdim=True) + qc @ z[:, :, :-1].unsqueeze(-1)
        out = out / (norm + eps)
    out = out.flatten(2, 3)[:, :, :seqlen].transpose(1, 2).to(v.dtype)
    return out, LinearState(s[:, :, -1], z[:, :, -1])
