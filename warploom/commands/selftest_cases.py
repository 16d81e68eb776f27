"""The selftest's calls: a small one for each feature, with what the reference and the model make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom.attention import philox
from warploom.attention.judge import low_precision
from warploom.masks import Causal, ColumnMask, Document, Full, Mask, SlidingWindow
from warploom.runtime.plan import Plan

BATCH = 2


def _columns(draw: torch.Generator) -> ColumnMask:
    """Hidden rows that differ from column to column, batch to batch and head to head."""
    start = torch.randint(0, 96, (BATCH, 2, 96), generator=draw, dtype=torch.int32)
    return ColumnMask(start, start + 24)


@dataclass(frozen=True)
class Case:
    """One call. `mask` makes its mask; `keywords` go to attention() as they are."""

    name: str
    seqlen_q: int = 96
    seqlen_k: int = 96
    heads: int = 4
    heads_kv: int = 4
    head_dim: int = 64
    head_dim_v: int = 64
    mask: Callable[[torch.Generator], Mask] | None = None
    sink: bool = False
    packed: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("full"),
    Case("causal", keywords={"causal": True}),
    Case("causal, seqlen_q < seqlen_k", seqlen_q=61, seqlen_k=130, keywords={"causal": True}),
    Case("queries that see no key", seqlen_q=130, seqlen_k=61, keywords={"causal": True}),
    Case("sliding window", keywords={"window": (17, 5)}),
    Case("documents", mask=lambda draw: Document([40, 1, 55])),
    Case("column mask per head", heads_kv=2, mask=_columns),
    Case("GQA, head_dim 72 and 40", heads_kv=1, head_dim=72, head_dim_v=40),
    Case("softcap", keywords={"softcap": 2.0}),
    Case("sink", sink=True, keywords={"causal": True}),
    Case("dropout", keywords={"dropout_p": 0.25}),
    Case("packed sequences", packed=True, keywords={"causal": True}),
)


class Call:
    """The tensors of one case in one dtype on one device."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str, seed: int) -> None:
        self.case, self.dtype = case, dtype
        generator = torch.Generator().manual_seed(seed)
        batch = () if case.packed else (BATCH,)

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.q = draw(*batch, case.seqlen_q, case.heads, case.head_dim)
        self.k = draw(*batch, case.seqlen_k, case.heads_kv, case.head_dim)
        self.v = draw(*batch, case.seqlen_k, case.heads_kv, case.head_dim_v)
        self.sink = draw(case.heads, dtype=torch.float32) if case.sink else None
        self.dout = draw(*batch, case.seqlen_q, case.heads, case.head_dim_v)
        self.dlse = draw(*batch, case.heads, case.seqlen_q, dtype=torch.float32)
        self.dropout_seed = torch.tensor([seed], dtype=torch.int64, device=device)
        self.mask = None if case.mask is None else case.mask(generator).to(device)
        # One sequence is empty, so that packing over it is checked too.
        self.cu_seqlens = torch.tensor([0, 70, 70, case.seqlen_q], dtype=torch.int32, device=device)

    def plan(self, backend: str) -> Plan:
        """explain()'s answer; ValueError where `backend` refuses the call."""
        leaves, keywords = self._arguments(self.dtype)
        return warploom.explain(*leaves[:3], **keywords, backend=backend)

    def results(self, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """out, lse and the gradients of a loss that uses both, by `backend` from inputs in `dtype`."""
        leaves, keywords = self._arguments(dtype)
        entry: Callable[..., Any] = warploom.attention_varlen if self.case.packed else warploom.attention
        out, lse = entry(*leaves[:3], **keywords, return_lse=True, backend=backend)
        finite = torch.isfinite(lse)
        loss = (out.double() * self.dout).sum() + (lse.double()[finite] * self.dlse[finite]).sum()
        gradients = torch.autograd.grad(loss, leaves)
        return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsink"), gradients, strict=False))}

    def model(self) -> dict[str, Tensor]:
        """The same from the low-precision model, sequence by sequence; see `LowPrecision.dsink_like`."""
        if not self.case.packed:
            return self._dense(self.q, self.k, self.v, self.dout, self.dlse)
        parts = []
        for a, b in pairwise(self.cu_seqlens.tolist()):
            if a < b:
                q, k, v, dout = (t[None, a:b] for t in (self.q, self.k, self.v, self.dout))
                part = self._dense(q, k, v, dout, self.dlse[None, :, a:b])
                parts.append({name: t[0] for name, t in part.items()})
        axes = {name: 1 if name == "lse" else 0 for name in parts[0]}
        return {name: torch.cat([part[name] for part in parts], dim=axis) for name, axis in axes.items()}

    def _arguments(self, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (self.q, self.k, self.v)]
        keywords = dict(self.case.keywords)
        if self.sink is not None:
            keywords["sink"] = self.sink.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
            leaves.append(keywords["sink"])
        if "dropout_p" in keywords:
            keywords["dropout_seed"] = self.dropout_seed
        if self.case.packed:
            keywords["cu_seqlens_q"] = self.cu_seqlens
        else:
            keywords["mask"] = self.mask
        return leaves, keywords

    def _visible(self) -> Mask:
        if self.mask is not None:
            return self.mask
        if "window" in self.case.keywords:
            return SlidingWindow(*self.case.keywords["window"])
        return Causal() if self.case.keywords.get("causal") else Full()

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
        heads, keywords = self.case.heads, self.case.keywords
        seen = self._visible().dense(q.shape[1], k.shape[1]).to(q.device)
        if seen.shape[1] not in (1, heads):
            seen = seen.repeat_interleave(heads // seen.shape[1], dim=1)
        options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "sink": self.sink}
        options["softcap"] = keywords.get("softcap", 0.0)
        if "dropout_p" in keywords:
            p = keywords["dropout_p"]
            sizes = (q.shape[0], heads, q.shape[1], k.shape[1])
            indices = [torch.arange(n, device=q.device) for n in sizes]
            options["keep"] = philox.keep_mask(self.dropout_seed, p, *indices).double() * philox.keep_scale(p)
        low = low_precision(q, k, v, dout, dlse, seen, **options)
        parts = {"out": low.out, "lse": low.lse, "dq": low.dq, "dk": low.dk, "dv": low.dv}
        if self.sink is not None:
            q, k, v, dout, dlse = (t.double() for t in (q, k, v, dout, dlse))
            exact = low_precision(q, k, v, dout, dlse, seen, **options)
            parts["dsink"] = low.dsink_like(exact)
        return parts
