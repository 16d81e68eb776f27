"""Run one call on a backend and judge out, lse and every gradient against the fp64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom.attention import philox
from warploom.attention.arguments import dense_args
from warploom.attention.judge import judge, low_precision
from warploom.masks.visible import visible


@dataclass
class Call:
    """A dense call: tensors, keywords and upstream gradients, drawn from one seed."""

    seed: int
    batch: int = 2
    seqlen_q: int = 37
    seqlen_k: int = 53
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    sink: bool = False
    lse_gradient: bool = False
    strided: bool = False
    expanded: bool = False  # one key head and one gradient for all, by strides of 0
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0)  # elements from an aligned address to q, k, v and the gradient of out
    pitch: int | None = None  # elements from a row of a head to the next, more than head_dim
    keywords: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(seqlen: int, heads: int, dim: int) -> Tensor:
            # Strided: every other token of a buffer in (batch, heads, seqlen, dim) order, as a sliced projection is.
            if self.strided:
                wide = torch.randn(self.batch, heads, 2 * seqlen, dim, generator=generator)
                return wide.to(self.device, self.dtype)[:, :, ::2].transpose(1, 2)
            return torch.randn(self.batch, seqlen, heads, dim, generator=generator).to(self.device, self.dtype)

        dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        q = draw(self.seqlen_q, self.heads_q, self.head_dim)
        k, v = draw(self.seqlen_k, self.heads_kv, self.head_dim), draw(self.seqlen_k, self.heads_kv, dim_v)
        if self.expanded:
            k, v = (t[:1, :, :1].expand(t.shape) for t in (k, v))
        q, k, v = (self._placed(t, offset) for t, offset in zip((q, k, v), self.offsets, strict=False))
        sink = torch.randn(self.heads_q, generator=generator).to(self.device) if self.sink else None
        return q, k, v, sink

    def _placed(self, t: Tensor, offset: int) -> Tensor:
        if self.pitch is not None:
            t = t.new_empty(*t.shape[:-1], self.pitch)[..., : t.shape[-1]].copy_(t)
        if offset:
            t = t.new_empty(t.numel() + offset)[offset:].view(t.shape).copy_(t)
        return t

    def upstream(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        dout = torch.randn(out.shape, generator=generator).to(out)
        if self.expanded:
            dout = dout[:1, :1, :1].expand(out.shape)
        dout = self._placed(dout, self.offsets[3])
        dlse = torch.randn(lse.shape, generator=generator).to(lse) if self.lse_gradient else torch.zeros_like(lse)
        return dout, dlse


def results(
    call: Call, backend: str, dtype: torch.dtype | None = None, bias: tuple[Tensor, Any] | None = None
) -> dict[str, Tensor]:
    """out, lse and gradients of one backend, inputs cast to ``dtype`` (default: the call's); ``bias``: its leaf and itself."""
    q, k, v, sink = call.tensors()
    leaves = [t.to(dtype or call.dtype).detach() for t in (q, k, v)]
    if call.strided and dtype is None:
        leaves = [q, k, v]
    leaves = [t.requires_grad_() for t in leaves]
    sink_leaf = None if sink is None else sink.to(torch.float64 if dtype == torch.float64 else sink.dtype)
    if sink_leaf is not None:
        leaves.append(sink_leaf.requires_grad_())
    keywords = call.keywords
    if bias is not None:
        leaves.append(bias[0])
        keywords = {**keywords, "bias": bias[1]}
    out, lse = warploom.attention(*leaves[:3], sink=sink_leaf, return_lse=True, backend=backend, **keywords)
    dout, dlse = call.upstream(out.to(call.dtype), lse)
    total = (out * dout.to(out.dtype)).sum()
    if call.lse_gradient:
        # Queries that see nothing have an infinite lse that no loss can use.
        total = total + (lse * dlse.to(lse.dtype)).masked_fill(torch.isinf(lse), 0.0).sum()
    if call.expanded or call.offsets[3] or call.pitch:
        # A product would hand over a gradient with strides and an address of its own.
        gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    else:
        gradients = torch.autograd.grad(total, leaves)
    names = ["dq", "dk", "dv", *["dsink"] * call.sink, *["dbias"] * (bias is not None)]
    return {"out": out, "lse": lse, **dict(zip(names, gradients, strict=True))}


def model(call: Call) -> dict[str, Tensor]:
    """The low-precision model of a correct kernel on the same call."""
    q, k, v, sink = call.tensors()
    args = dense_args(q, k, v, sink=sink, **{k_: v_ for k_, v_ in call.keywords.items() if k_ != "return_lse"})
    rows, cols = torch.arange(call.seqlen_q, device=q.device), torch.arange(call.seqlen_k, device=q.device)
    seen = visible(args.mask, rows, cols, call.seqlen_k - call.seqlen_q)
    if seen.shape[1] not in (1, call.heads_q):
        seen = seen.repeat_interleave(call.heads_q // seen.shape[1], dim=1)
    keep = None
    if args.dropout_p:
        batches, heads = torch.arange(call.batch, device=q.device), torch.arange(call.heads_q, device=q.device)
        kept = philox.keep_mask(args.dropout_seed, args.dropout_p, batches, heads, rows, cols)
        keep = kept * philox.keep_scale(args.dropout_p)
    shape = (call.batch, call.heads_q, call.seqlen_q)
    out_like = q.new_empty((call.batch, call.seqlen_q, call.heads_q, v.shape[-1]))
    dout, dlse = call.upstream(out_like, torch.empty(shape, device=q.device))
    options = {"scale": args.scale, "softcap": args.softcap, "sink": sink, "keep": keep}
    low = low_precision(q, k, v, dout, dlse, seen, **options)
    named = {"out": low.out, "lse": low.lse, "dq": low.dq, "dk": low.dk, "dv": low.dv}
    if sink is not None:
        options["sink"] = sink.double()
        exact = low_precision(q.double(), k.double(), v.double(), dout.double(), dlse.double(), seen, **options)
        named["dsink"] = low.dsink_like(exact)
    return named


def check(call: Call, backend: str) -> None:
    """Assert that every result of the backend passes the criterion; the message holds the call and its seed."""
    got, want, low = results(call, backend), results(call, "reference", torch.float64), model(call)
    for name, value in got.items():
        verdict = judge(name, value, want[name], low[name], call.dtype)
        assert verdict.passed, f"{backend}: {verdict}\n{call}"
