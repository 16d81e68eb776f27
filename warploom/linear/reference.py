"""Linear attention as its definition says, on mapped queries and keys: the specification (Katharopoulos et al., 2020, eq. 5-9).

Query i sees keys j <= i when causal: positions are counted from the start of both, so keys past the last query are never seen
and queries past the last key see every key. The denominator is scale * q.z + eps, eps added once, as in idiap's code.
"""

from __future__ import annotations

import torch

from warploom.linear.state import LinearState


def quadratic(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
    state: LinearState | None = None,
) -> torch.Tensor:
    """Linear attention through the (seqlen_q, seqlen_k) score matrix, in fp64.

    Args:
        q: mapped queries (batch, seqlen_q, heads, E).
        k: mapped keys (batch, seqlen_k, heads, E).
        v: values (batch, seqlen_k, heads, M).
        causal: whether query i sees only keys j <= i.
        normalize: whether to divide by scale * q.z + eps.
        eps: added to the denominator.
        scale: factor of the mapped queries, in numerator and denominator.
        state: sums over earlier keys, which every query sees.

    Returns:
        (batch, seqlen_q, heads, M) fp64.
    """
    q, k, v = (t.double() for t in (q, k, v))
    scores = torch.einsum("blhe,bshe->bhls", q * scale, k)
    if causal:
        scores = scores.tril()
    out = torch.einsum("bhls,bshm->blhm", scores, v)
    norm = scores.sum(-1).transpose(1, 2)
    if state is not None:
        out = out + torch.einsum("blhe,bhem->blhm", q * scale, state.s.double())
        norm = norm + torch.einsum("blhe,bhe->blh", q * scale, state.z.double())
    return out / (norm + eps).unsqueeze(-1) if normalize else out


def cumulative(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
    state: LinearState | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """Causal linear attention one token at a time, in fp64; seqlen_q equals seqlen_k, other arguments as `quadratic`.

    Returns:
        out (batch, seqlen, heads, M) and the state after the last token, both fp64.
    """
    q, k, v = (t.double() for t in (q, k, v))
    batch, seqlen, heads, dim = q.shape
    s = q.new_zeros(batch, heads, dim, v.shape[-1]) if state is None else state.s.double()
    z = q.new_zeros(batch, heads, dim) if state is None else state.z.double()
    rows = []
    for i in range(seqlen):
        s = s + torch.einsum("bhe,bhm->bhem", k[:, i], v[:, i])
        z = z + k[:, i]
        row = torch.einsum("bhe,bhem->bhm", q[:, i] * scale, s)
        if normalize:
            row = row / (torch.einsum("bhe,bhe->bh", q[:, i] * scale, z) + eps).unsqueeze(-1)
        rows.append(row)
    out = torch.stack(rows, 1) if rows else v.new_zeros(batch, 0, heads, v.shape[-1])
    return out, LinearState(s, z)
