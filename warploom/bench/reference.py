"""What a result is compared with: fp32 arithmetic on one head, in row chunks, so that no size is too large to check."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from warploom.bench.harness import WrongResult
from warploom.masks.intervals import ResolvedMask
from warploom.masks.visible import visible

CHUNK = 1024
# Distance from fp32, relative to its norm, from which a bf16 or fp16 result is wrong rather than rounded: about three
# times what correct kernels show.
FURTHEST = {"out": 1e-2, "gradient": 2e-2}


@dataclass
class OneHead:
    """Out, and gradients for an upstream gradient, of the last batch entry and query head."""

    out: Tensor
    gradients: tuple[Tensor, Tensor, Tensor] | None
    group: int

    def check_out(self, out: Tensor) -> float:
        """Error of out (batch, seqlen_q, heads, head_dim); WrongResult where it is none of this call's."""
        return _distance("out", out[-1, :, -1], self.out, FURTHEST["out"])

    def check_gradients(self, gradients: tuple[Tensor, Tensor, Tensor]) -> float:
        """The largest error of dq, and of dk and dv where a key head has one query head."""
        assert self.gradients is not None
        names = ("dq", "dk", "dv") if self.group == 1 else ("dq",)
        pairs = zip(names, gradients, self.gradients, strict=False)
        return max(_distance(name, got[-1, :, -1], want, FURTHEST["gradient"]) for name, got, want in pairs)


@dataclass
class LastDocument(OneHead):
    """As `OneHead`, for the last of several packed sequences, which begins at ``start``."""

    start: int = 0

    def check_out(self, out: Tensor) -> float:
        return super().check_out(out[None, self.start :])

    def check_gradients(self, gradients: tuple[Tensor, Tensor, Tensor]) -> float:
        dq, dk, dv = (t[None, self.start :] for t in gradients)
        return super().check_gradients((dq, dk, dv))


def one_head(q: Tensor, k: Tensor, v: Tensor, mask: ResolvedMask, dout: Tensor | None) -> OneHead:
    """Attention of the last batch entry's last head, in fp32.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim); dout: gradient of out, or None for no gradients.
    """
    group = q.shape[2] // k.shape[2]
    rows, keys, values = (t.detach()[-1, :, -1].float() for t in (q, k, v))
    chosen = ResolvedMask(mask.left, mask.right, *[None if t is None else t[-1:, -1:].to(q.device) for t in mask.vectors])
    cols = torch.arange(len(keys), device=q.device)
    scale = q.shape[-1] ** -0.5
    outs, dqs = [], []
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for at in range(0, len(rows), CHUNK):
            part = rows[at : at + CHUNK]
            seen = visible(chosen, torch.arange(at, at + len(part), device=q.device), cols, len(keys) - len(rows))[0, 0]
            scores = (part @ keys.T * scale).masked_fill(~seen, float("-inf"))
            p = scores.softmax(-1).nan_to_num(0.0)
            out = p @ values
            outs.append(out)
            if dout is not None:
                upstream = dout[-1, at : at + CHUNK, -1].float()
                dv += p.T @ upstream
                ds = p * (upstream @ values.T - (out * upstream).sum(-1, keepdim=True)) * scale
                dqs.append(ds @ keys)
                dk += ds.T @ part
    finally:
        torch.set_float32_matmul_precision(precision)
    return OneHead(torch.cat(outs), None if dout is None else (torch.cat(dqs), dk, dv), group)


def _distance(name: str, got: Tensor, want: Tensor, furthest: float) -> float:
    distance = float((got.detach().float() - want).norm() / want.norm())
    if not distance <= furthest:
        raise WrongResult(f"{name} is {distance:.2g} of its norm away from fp32 arithmetic, more than {furthest:g}")
    return distance
