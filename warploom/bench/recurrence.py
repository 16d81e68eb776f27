"""What linear attention with a decay and the gated delta rule are compared with: one key head in fp64, chunk by chunk.

O(tokens) in time, and differentiable, so that no length is too long to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from warploom.bench.reference import FURTHEST, distance

CHUNK = 64
NAMES = ("dq", "dk", "dv", "ddecay", "dbeta")


@dataclass(frozen=True)
class Rule:
    """What is done to queries and keys; with ``beta`` the delta rule."""

    scale: float = 1.0
    eps: float | None = None  # under the square root of q's and k's norms; None: they are taken as they are


@dataclass(frozen=True)
class LastKeyHead:
    """Of the last batch entry: out and gradients of the value heads that read the last key head, and of that head."""

    out: Tensor  # (tokens, group, M)
    gradients: tuple[Tensor, ...] | None  # as NAMES

    def check_out(self, out: Tensor) -> float:
        """Error of out (batch, tokens, heads_v, M); WrongResult where it is none of this call's."""
        return distance("out", out[-1, :, -self.out.shape[1] :], self.out, FURTHEST["out"])

    def check_gradients(self, gradients: Sequence[Tensor]) -> float:
        """The largest error of dq, dk, dv and, where they were asked for, of ddecay and dbeta."""
        assert self.gradients is not None
        worst = 0.0
        for name, got, want in zip(NAMES, gradients, self.gradients, strict=False):
            last = got[-1, :, -1] if name in ("dq", "dk") else got[-1, :, -self.out.shape[1] :]
            worst = max(worst, distance(name, last, want, FURTHEST["gradient"]))
        return worst


def last_key_head(
    rule: Rule, dout: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, beta: Tensor | None = None
) -> LastKeyHead:
    """The rule on the last batch entry's last key head.

    Args:
        dout: gradient of out, or None for no gradients.
        q, k: (batch, tokens, heads_qk, E); v, dout: (batch, tokens, heads_v, M); beta: (batch, tokens, heads_v).
        decay: as beta, or (heads_v,); None: nothing is forgotten.
        beta: None: linear attention, which only adds.
    """
    group = v.shape[2] // k.shape[2]
    whole = v[-1, :, -group:]
    fade = whole.new_zeros(whole.shape[:2]) if decay is None else _last(decay, group).expand(whole.shape[:2])
    rows = [q[-1, :, -1], k[-1, :, -1], whole, fade, *(() if beta is None else (_last(beta, group),))]
    leaves = [t.detach().double().requires_grad_(dout is not None) for t in rows]
    with torch.set_grad_enabled(dout is not None):
        out = _chunked(rule, *leaves)
        if dout is None:
            return LastKeyHead(out.float(), None)
        found = torch.autograd.grad(out, leaves, dout[-1, :, -group:].double())
    return LastKeyHead(out.detach().float(), tuple(t.float() for t in found))


def _last(t: Tensor, group: int) -> Tensor:
    return t[-group:] if t.ndim == 1 else t[-1, :, -group:]


def _chunked(rule: Rule, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
    """Out (tokens, group, M) of q and k (tokens, E), v (tokens, group, M), decay and beta (tokens, group), all fp64.

    With D_ij the decays after token j up to i and X what the tokens of a chunk write: X = V, or by the delta rule the solution
    of (I + tril(beta KKᵀ ∘ D, -1)) X = beta (V - first K S). Then out = first Q S + (QKᵀ ∘ D) X (docs/delta.md).
    """
    if rule.eps is not None:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + rule.eps) for t in (q, k))
    tokens, spare = len(q), -len(q) % CHUNK  # keys of zeros that nothing fades before change nothing
    q, k = (F.pad(t, (0, 0, 0, spare)).view(-1, 1, CHUNK, t.shape[1]) for t in (q * rule.scale, k))
    v = F.pad(v, (0, 0, 0, 0, 0, spare)).unflatten(0, (-1, CHUNK)).transpose(1, 2)
    sums = F.pad(decay, (0, 0, 0, spare)).unflatten(0, (-1, CHUNK)).transpose(1, 2).cumsum(-1)
    # Of later tokens the differences are positive and might overflow.
    between = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()
    first, rest, end = sums.exp(), (sums[..., -1:] - sums).exp(), sums[..., -1].exp()
    written, reads = v, None
    if beta is not None:
        beta = F.pad(beta, (0, 0, 0, spare)).unflatten(0, (-1, CHUNK)).transpose(1, 2)[..., None]
        system = (beta * between * (k @ k.mT)).tril(-1) + torch.eye(CHUNK, dtype=k.dtype, device=k.device)
        solved = torch.linalg.solve_triangular(
            system, torch.cat([beta * v, beta * first[..., None] * k], -1), upper=False, unitriangular=True
        )
        written, reads = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    # Unbound at once: an index a chunk would have a gradient as large as all chunks.
    asked = (first[..., None] * q).unbind(0)
    kept, scores, faded = ((rest[..., None] * k).mT.unbind(0), (between * (q @ k.mT)).unbind(0), end[..., None, None].unbind(0))
    parts, read = written.unbind(0), None if reads is None else reads.unbind(0)
    s, outs = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1]), []
    for n, part in enumerate(parts):
        x = part if read is None else part - read[n] @ s
        outs.append(asked[n] @ s + scores[n] @ x)
        s = faded[n] * s + kept[n] @ x
    return torch.cat(outs, 1)[:, :tokens].transpose(0, 1)
