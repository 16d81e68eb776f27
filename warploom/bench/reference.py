"""What a result is compared with: fp32 arithmetic on one head, in row chunks, so that no size is too large to check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from warploom.attention.philox import keep_mask, keep_scale
from warploom.bench.harness import WrongResult
from warploom.masks.intervals import ResolvedMask
from warploom.masks.visible import visible

CHUNK = 1024
# Distance from fp32, relative to its norm, from which a bf16 or fp16 result is wrong rather than rounded: about three
# times what correct kernels show.
FURTHEST = {"out": 1e-2, "gradient": 2e-2}


@dataclass
class OneHead:
    """Of the last batch entry, for an upstream gradient: out and dq of the last query head, dk and dv of the last key head."""

    out: Tensor
    gradients: tuple[Tensor, Tensor, Tensor] | None

    def check_out(self, out: Tensor) -> float:
        """Error of out (batch, seqlen_q, heads, head_dim); WrongResult where it is none of this call's."""
        return distance("out", out[-1, :, -1], self.out, FURTHEST["out"])

    def check_gradients(self, gradients: tuple[Tensor, Tensor, Tensor]) -> float:
        """The largest error of dq, dk and dv."""
        assert self.gradients is not None
        found = zip(("dq", "dk", "dv"), gradients, self.gradients, strict=True)
        return max(distance(name, got[-1, :, -1], want, FURTHEST["gradient"]) for name, got, want in found)


@dataclass
class LastDocument(OneHead):
    """As `OneHead`, for the last of several packed sequences, which begins at ``start``."""

    start: int = 0

    def check_out(self, out: Tensor) -> float:
        return super().check_out(out[None, self.start :])

    def check_gradients(self, gradients: tuple[Tensor, Tensor, Tensor]) -> float:
        dq, dk, dv = (t[None, self.start :] for t in gradients)
        return super().check_gradients((dq, dk, dv))


@dataclass(frozen=True)
class Dropout:
    p: float
    seed: Tensor  # int64, one element

    def kept(self, batch: int, head: int, rows: Tensor, keys: int) -> Tensor:
        """What survives of one head, times `keep_scale`: fp32 (rows, keys)."""
        one = torch.zeros(1, dtype=torch.int64, device=rows.device)
        keep = keep_mask(self.seed, self.p, one + batch, one + head, rows, torch.arange(keys, device=rows.device))
        return keep[0, 0] * keep_scale(self.p)


def one_head(
    q: Tensor, k: Tensor, v: Tensor, mask: ResolvedMask, dout: Tensor | None, dropout: Dropout | None = None
) -> OneHead:
    """Attention of the last batch entry's last head, in fp32; dk and dv are sums over the query heads that share the key head.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim); dout: gradient of out, or None for no gradients.
    """
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    keys, values = (t.detach()[-1, :, -1].float() for t in (k, v))
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for head in range(heads - (1 if dout is None else group), heads):
            rows, upstream = q.detach()[-1, :, head], None if dout is None else dout[-1, :, head]
            kept = None if dropout is None else partial(dropout.kept, q.shape[0] - 1, head)
            out, dq = _head(rows, keys, values, _of_head(mask, head, heads, q.device), upstream, dk, dv, kept)
    finally:
        torch.set_float32_matmul_precision(precision)
    return OneHead(out, None if dout is None else (dq, dk, dv))


def _of_head(mask: ResolvedMask, head: int, heads: int, device: torch.device) -> ResolvedMask:
    """The last batch entry's mask of one of so many query heads."""
    chosen = [None if t is None else t[-1:, head * t.shape[1] // heads][:, None].to(device) for t in mask.vectors]
    return ResolvedMask(mask.left, mask.right, *chosen)


def _head(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: ResolvedMask,
    dout: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    kept: Callable[[Tensor, int], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Out and, given its gradient, dq of one head, (seqlen_q, head_dim) in fp32; what it adds to dk and dv is added there."""
    cols = torch.arange(len(keys), device=keys.device)
    scale = rows.shape[-1] ** -0.5
    outs, dqs = [], []
    for at in range(0, len(rows), CHUNK):
        part = rows[at : at + CHUNK].float()
        at_rows = torch.arange(at, at + len(part), device=keys.device)
        seen = visible(mask, at_rows, cols, len(keys) - len(rows))[0, 0]
        p = (part @ keys.T * scale).masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
        drop = 1.0 if kept is None else kept(at_rows, len(keys))
        out = p * drop @ values
        outs.append(out)
        if dout is not None:
            upstream = dout[at : at + CHUNK].float()
            dv += (p * drop).T @ upstream
            ds = p * (upstream @ values.T * drop - (out * upstream).sum(-1, keepdim=True)) * scale
            dqs.append(ds @ keys)
            dk += ds.T @ part
    return torch.cat(outs), torch.cat(dqs) if dqs else rows[:0].float()


def distance(name: str, got: Tensor, want: Tensor, furthest: float) -> float:
    """How far a result is from the wanted one, over that one's norm; WrongResult where it is more than ``furthest``."""
    distance = float((got.detach().float() - want).norm() / want.norm())
    if not distance <= furthest:
        raise WrongResult(f"{name} is {distance:.2g} of its norm away from fp32 arithmetic, more than {furthest:g}")
    return distance


def biased_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    leaf: Tensor,
    matrix: Callable[[Tensor, Tensor], Tensor],
    causal: bool,
) -> tuple[Tensor, ...]:
    """Of the last head, in fp32: out, and with ``dout`` the gradients of q, k and v of the last batch entry, and of the leaf.

    Args:
        leaf: what the head's bias is made of, which all batch entries share.
        matrix: of the leaf and some rows the bias of their elements, or what broadcasts to it.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        leaf, total = leaf.detach().float(), torch.zeros_like(leaf, dtype=torch.float32)
        for batch in range(0 if dout is not None else len(q) - 1, len(q)):
            leaves = [t.detach()[batch, :, -1].float().requires_grad_() for t in (q, k, v)]
            parts = []
            for at in range(0, q.shape[1], CHUNK):
                rows = torch.arange(at, min(at + CHUNK, q.shape[1]), device=q.device)
                own = leaf.clone().requires_grad_()
                scores = leaves[0][rows] @ leaves[1].T * q.shape[-1] ** -0.5 + matrix(own, rows)
                if causal:
                    hidden = rows[:, None] + (k.shape[1] - q.shape[1]) < torch.arange(k.shape[1], device=q.device)
                    scores = scores.masked_fill(hidden, float("-inf"))
                out = scores.softmax(-1) @ leaves[2]
                parts.append(out.detach())
                if dout is not None:
                    out.backward(dout[batch, rows, -1].float())
                    total += 0.0 if own.grad is None else own.grad
        out = torch.cat(parts)
        return (out,) if dout is None else (out, *(t.grad for t in leaves if t.grad is not None), total)
    finally:
        torch.set_float32_matmul_precision(precision)
