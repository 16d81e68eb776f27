"""The specification: eager decode, one sequence after the other, exact per element, any float dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.decode.backend import DecodeBackend
from warploom.decode.bias import terms
from warploom.decode.gather import keys_and_values
from warploom.decode.problem import DecodeArgs, DecodeProblem
from warploom.decode.tree import kinship, places, sees_keys


def _attend(args: DecodeArgs, b: int, q: Tensor, k: Tensor, v: Tensor, kin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out (T, heads_q, head_dim_v) and lse (heads_q, T) of sequence b from its keys and values; kin (T, T) of its tree."""
    queries, length, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    tokens, keys = places(kin, queries, 0, length, length, q.device)
    distance = tokens[:, None] - keys
    seen = distance >= -args.right
    if args.left is not None:
        seen = seen & (distance <= args.left)
    if kin is not None:
        seen = seen & sees_keys(kin, 0, length, length)
    seen = seen[None]
    bias = None if args.bias is None else terms(args, b, tokens, keys, q.dtype)
    if bias is not None:
        seen = seen & (bias != float("-inf"))
    # A hidden key or value may hold anything, so it is replaced before it is multiplied.
    pairs, values = (torch.where(seen.permute(1, 2, 0)[..., None], t, 0.0).contiguous() for t in (k, v))
    scores = torch.einsum("thd,tnhd->htn", q, pairs) * args.scale
    if args.softcap:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, float("-inf"))
    if args.sink is not None:
        scores = torch.cat([scores, args.sink.to(q.dtype)[:, None, None].expand(-1, queries, 1)], dim=-1)
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:2], 1), float("-inf"))
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top + torch.log(total)).masked_fill(empty, float("-inf")).squeeze(-1)
    out = torch.einsum("htn,tnhd->thd", (weights / total)[..., :length], values)
    return out, lse


class Reference(DecodeBackend):
    """Every call."""

    name = "reference"
    eager = True

    def supports(self, problem: DecodeProblem) -> str | None:
        return None

    def describe(self, problem: DecodeProblem) -> str:
        """What becomes of a shared prefix."""
        return "each sequence reads the prefix itself" if problem.prefix else ""

    def forward(self, args: DecodeArgs) -> tuple[Tensor, Tensor]:
        """Out (batch, T, heads_q, head_dim_v) in q's dtype and lse (batch, heads_q, T), fp32 (fp64 for fp64)."""
        q = args.q
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:-1], args.v.shape[-1]))
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=wide)
        kin = None if args.tree is None else kinship(args.tree).expand(q.shape[0], -1, -1)
        for b, (k, v) in enumerate(keys_and_values(args)):
            # A copy: products sum in another order for other strides and addresses, and a sequence's bits are its own.
            rows = q[b].to(wide, copy=True, memory_format=torch.contiguous_format)
            part, lse[b] = _attend(args, b, rows, k.to(wide), v.to(wide), None if kin is None else kin[b])
            out[b] = part.to(q.dtype)
        return out, lse


BACKEND = Reference()
