"""Split-KV decode on the CPU: one sequence after the other, fp32 arithmetic over splits of its visible keys."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.decode.backend import DecodeBackend
from warploom.decode.bias import terms
from warploom.decode.gather import keys_and_values
from warploom.decode.merge import merge
from warploom.decode.problem import DecodeArgs, DecodeProblem
from warploom.decode.tree import kinship, places, sees_keys

# Keys of a split: its fp32 copies of K and V and its scores stay within a core's L2 for usual head dims.
SPLIT = 512


def _attend(
    args: DecodeArgs, b: int, rows: Tensor, k: Tensor, v: Tensor, rooms: list[Tensor], kin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Out (heads_kv, group · T, head_dim_v) and lse of sequence b; ``rooms`` hold a split's keys and values, kin its tree."""
    queries, length = args.q.shape[1], k.shape[0]
    first = 0 if args.left is None else max(length - queries - args.left, 0)
    outs, lses = [], []
    for begin in range(first, length + args.right, SPLIT):
        end = min(begin + SPLIT, length + args.right)
        keys, values = (_tile(room, t[begin:end]).transpose(0, 1) for room, t in zip(rooms, (k, v), strict=True))
        scores = rows @ keys.transpose(-1, -2) * args.scale
        if args.softcap:
            scores = args.softcap * torch.tanh(scores / args.softcap)
        if queries > 1 or args.bias is not None:
            tokens, cols = places(kin, queries, begin, end, length, rows.device)
            distance = tokens[:, None] - cols
            hidden = distance < -args.right
            if args.left is not None:
                hidden = hidden | (distance > args.left)
            if kin is not None:
                hidden = hidden | ~sees_keys(kin, begin, end, length)
            hidden = hidden.repeat(rows.shape[1] // queries, 1)
            if args.bias is not None:
                bias = terms(args, b, tokens, cols, torch.float32).reshape(scores.shape)
                scores, hidden = scores + bias, hidden | (bias == float("-inf"))
            if kin is not None or args.bias is not None:
                # On no path may be keys that a window ends before; weights of 0 would still pass their NaN on.
                values.masked_fill_(hidden.all(-2)[..., None], 0.0)
            scores = scores.masked_fill(hidden, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0.0))
        total = weights.sum(-1, keepdim=True)
        outs.append(weights @ values / total.masked_fill(total == 0, 1.0))
        lses.append((top + torch.log(total)).squeeze(-1))
    sink = None
    if args.sink is not None:
        sink = args.sink.float().repeat_interleave(queries).view(rows.shape[:2])
    if not outs:
        outs, lses = [rows.new_zeros((*rows.shape[:2], v.shape[-1]))], [rows.new_full(rows.shape[:2], float("-inf"))]
    return merge(torch.stack(outs), torch.stack(lses), sink)


def _tile(room: Tensor, t: Tensor) -> Tensor:
    """A copy of t in fp32, contiguous and aligned, in memory that all splits share.

    How a matrix product sums depends on strides and addresses: without it a sequence's bits would follow the layout of its
    cache.
    """
    return room[: t.numel()].view(t.shape).copy_(t)


class Cpu(DecodeBackend):
    """Every call on CPU tensors but those in float64."""

    name = "cpu"
    device = "cpu"

    def supports(self, problem: DecodeProblem) -> str | None:
        if problem.device != "cpu":
            return f"runs on CPU tensors, not on {problem.device}"
        if problem.dtype == torch.float64:
            return "accumulates in fp32; float64 runs on the reference"
        return None

    def describe(self, problem: DecodeProblem) -> str:
        """What becomes of a shared prefix."""
        return "each sequence reads the prefix itself" if problem.prefix else ""

    def forward(self, args: DecodeArgs) -> tuple[Tensor, Tensor]:
        """Out (batch, T, heads_q, head_dim_v) in q's dtype and lse, fp32 (batch, heads_q, T)."""
        batch, queries, heads_q, _ = args.q.shape
        heads_kv = args.k.shape[2]
        out = args.q.new_empty((*args.q.shape[:-1], args.v.shape[-1]))
        lse = args.q.new_empty((batch, heads_q, queries), dtype=torch.float32)
        most = heads_kv * min(SPLIT, args.capacity)
        rooms = [torch.empty(most * t.shape[-1], dtype=torch.float32) for t in (args.k, args.v)]
        kin = None if args.tree is None else kinship(args.tree).expand(batch, -1, -1)
        for b, (k, v) in enumerate(keys_and_values(args)):
            # Rows of a kv head: T queries of each head of its group, so that K and V are read once.
            own = args.q[b].unflatten(1, (heads_kv, -1)).permute(1, 2, 0, 3)
            rows = torch.empty(own.shape, dtype=torch.float32).copy_(own).flatten(1, 2)
            part, part_lse = _attend(args, b, rows, k, v, rooms, None if kin is None else kin[b])
            out[b] = part.view(heads_q, queries, -1).transpose(0, 1)
            lse[b] = part_lse.view(heads_q, queries)
        return out, lse


BACKEND = Cpu()
