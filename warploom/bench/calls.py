"""Attention calls to compare: their shapes and inputs, and the comparisons of their forward and backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from warploom.bench import peers
from warploom.bench.harness import Call, Comparison, first_line
from warploom.bench.patience import PATIENCE
from warploom.bench.reference import OneHead, one_head
from warploom.masks import Mask


@dataclass(frozen=True)
class Shape:
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    heads_kv: int | None = None  # as many as heads
    head_dim_v: int | None = None  # head_dim

    def flops(self, density: float) -> float:
        """FLOPs of a forward pass: two products over the visible scores."""
        dims = self.head_dim + (self.head_dim_v or self.head_dim)
        return 2.0 * self.batch * self.heads * self.seqlen**2 * dims * density

    def draw(self, device: torch.device) -> list[Tensor]:
        """q, k, v and an upstream gradient."""
        heads_kv, dim_v = self.heads_kv or self.heads, self.head_dim_v or self.head_dim
        ends = ((self.heads, self.head_dim), (heads_kv, self.head_dim), (heads_kv, dim_v), (self.heads, dim_v))
        return [torch.randn(self.batch, self.seqlen, *end, device=device).bfloat16() for end in ends]

    @property
    def name(self) -> str:
        """Head dims, length, and the heads where keys have fewer."""
        dims = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        return f"{dims} S{self.seqlen}" + (f" heads {self.heads}/{self.heads_kv}" if self.heads_kv else "")


def comparisons(
    contenders: dict[str, peers.Attention],
    refused: dict[str, str],
    inputs: list[Tensor],
    mask: Mask,
    flops: float,
    passes: list[str],
    more: dict[str, Any],
) -> Iterator[tuple[str, Comparison]]:
    """Of the chosen passes, "forward" and "backward", against fp32 arithmetic."""
    q, k, v, dout = inputs
    resolved = mask.resolve(q.shape[1], k.shape[1], q.device)
    want = one_head(q, k, v, resolved, dout if "backward" in passes else None)
    if "forward" in passes:
        calls: dict[str, Call] = {name: partial(forward, attend, q, k, v) for name, attend in contenders.items()}
        yield "forward", Comparison(calls, want.check_out, flops, None, refused, more=more)
    if "backward" in passes:
        yield "backward", backward(contenders, refused, inputs, want, flops, more)


def forward(attend: peers.Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return attend(q, k, v)


def backward(
    contenders: dict[str, peers.Attention],
    refused: dict[str, str],
    inputs: list[Tensor],
    want: OneHead,
    flops: float,
    more: dict[str, Any],
) -> Comparison:
    """The comparison of gradients of q, k and v; a backward pass counts five products, a forward pass two."""
    calls: dict[str, Call] = {}
    refused = dict(refused)
    for name, attend in contenders.items():
        try:
            calls[name] = PATIENCE.first(name, partial(gradients, attend, inputs))
        except Exception as error:  # a peer may fail in any way
            refused[name] = first_line(error)
    return Comparison(calls, want.check_gradients, 2.5 * flops, None, refused, more=more)


def gradients(attend: peers.Attention, inputs: list[Tensor]) -> Call:
    """A call's backward pass: gradients of q, k and v for the last of the inputs; the forward pass runs once, here."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # the graph is walked many times
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs[3], retain_graph=True)


def torch_sdpa(causal: bool, mask: Tensor | None = None) -> peers.Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, b, c = peers.heads_first(q, k, v)
        return torch.nn.functional.scaled_dot_product_attention(a, b, c, attn_mask=mask, is_causal=causal).transpose(1, 2)

    return attend
