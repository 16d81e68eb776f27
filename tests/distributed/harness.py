"""One sharded call against one device's, by an oracle that knows of no ranks: the fp64 model of the whole call."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from warploom import distributed, masks
from warploom.attention import philox
from warploom.attention.judge import judge, low_precision
from warploom.distributed import by_heads, collectives, gather, ring
from warploom.distributed.plan import planned

# q, k, v and sink, then the gradients of out and lse.
Tensors = tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], Tensor, Tensor]


@dataclass
class Sharded:
    """A call of distributed.attention(); ``seen`` stands for a mask whose dense() is not to be trusted."""

    seed: int
    seqlen_q: int = 70
    seqlen_k: int | None = None
    batch: int = 1
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 8
    head_dim_v: int = 8
    dtype: torch.dtype = torch.float64
    method: str = "gather"
    keywords: dict[str, Any] = field(default_factory=dict)
    cu_seqlens: list[int] | None = None
    sink: bool = False
    chunk: int = 512
    seen: Tensor | None = field(default=None, repr=False)
    group: Any = None
    plan_mask: dict[str, Any] | None = None  # the plan's, where it is another than the call's
    poison: bool = True  # NaN in keys that nobody sees
    device: str = "cpu"

    def check(self) -> distributed.ShardPlan:
        """By seed with the groups of heads, packed documents, kept keys and sums of calls that send more or less."""
        rng = random.Random(self.seed)
        limits = {"END": rng.choice([-1.0, gather.END]), "ONE_BACKWARD": rng.choice([0, gather.ONE_BACKWARD])}
        limits["HIDDEN"] = rng.choice([0, gather.HIDDEN])
        limits["KEPT"] = rng.choice([0, 2**40])
        sums = rng.choice([0, collectives.MOST_SUMS])
        least = {name: rng.choice([0, getattr(ring, name)]) for name in ("LEAST_FORWARD", "LEAST_BACKWARD", "LEAST_OF_TWO")}
        one = {"MOST_SUMS": (collectives, sums), "FIRST": (by_heads, rng.choice([1, 2, by_heads.FIRST]))}
        with ExitStack() as stack:
            for where, several in ((gather, limits), (ring, least)):
                stack.enter_context(patch.multiple(where, **several))
            for name, (where, value) in one.items():
                stack.enter_context(patch.object(where, name, value))
            return self._check()

    def _check(self) -> distributed.ShardPlan:
        plan = distributed.shard_plan(group_or_mesh=self.group, **self.planning())
        tensors, dout, dlse = self.tensors()
        seen, keep = self.visible(), self.kept()
        scale, softcap = self.keywords.get("scale", self.head_dim**-0.5), self.keywords.get("softcap", 0.0)
        models = []
        for dtype in (torch.float64, self.dtype):
            q, k, v, sink = (None if t is None else t.to(dtype) for t in tensors)
            models.append(
                low_precision(q, k, v, dout.to(dtype), dlse, seen, scale=scale, softcap=softcap, sink=sink, keep=keep)
            )
        exact, lowp = models

        q, k, v, sink = tensors
        if self.poison:
            shown = seen.any(2).expand(self.batch, self.heads_q, -1).unflatten(1, (self.heads_kv, -1)).any(2)
            k, v = (t.masked_fill(~shown.transpose(1, 2)[..., None], float("nan")) for t in (k, v))
        out, lse, *gradients = self.call(plan, ((q, k, v, sink), dout, dlse))
        assert lse.dtype == torch.float32 and out.dtype == self.dtype
        if self.cu_seqlens is not None:
            out, lse = out[None], lse[None]
        found = {"out": plan.unshard(out, 1), "lse": plan.unshard(lse, 2)}
        found |= {
            name: plan.unshard(t, 1, keys=name != "dq") for name, t in zip(("dq", "dk", "dv"), gradients[:3], strict=True)
        }
        for name, t in found.items():
            dtype = torch.float32 if name == "lse" and self.dtype == torch.float64 else self.dtype
            want, model = getattr(exact, name), getattr(lowp, name)
            if name == "lse" and self.cu_seqlens is not None:
                want, model = (x.clone() for x in (want, model))
                want[..., self.cu_seqlens[-1] :] = model[..., self.cu_seqlens[-1] :] = float("-inf")
            verdict = judge(name, t, want, model, dtype)
            assert verdict.passed, f"{verdict}; {self}"
        if sink is not None:
            dsink = gradients[3].clone()
            dist.all_reduce(dsink, group=self.group)
            want, model = exact.dsink, lowp.dsink_like(exact)
            if self.cu_seqlens is None:  # tokens of no sequence have no sink here
                verdict = judge("dsink", dsink, want, model, self.dtype)
                assert verdict.passed, f"{verdict}; {self}"
        if self.keywords.get("batch_invariant") and plan.method not in ("heads", "ring"):
            self.check_bits(plan, (q, k, v), sink, found["out"], found["lse"])
        return plan

    def planning(self) -> dict[str, Any]:
        """What the plan is made with, beside a group."""
        band = {name: self.keywords[name] for name in ("mask", "causal", "window") if name in self.keywords}
        lengths = {"seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k, "cu_seqlens": self.cu_seqlens}
        return {**lengths, **(band if self.plan_mask is None else self.plan_mask), "chunk": self.chunk, "method": self.method}

    def call(self, plan: distributed.ShardPlan, given: Tensors | None = None) -> list[Tensor]:
        """This rank's out, lse, dq, dk and dv, and its share of dsink; ``given``: in place of ``tensors``."""
        (q, k, v, sink), dout, dlse = given or self.tensors()
        parts = [plan.shard(t, 1).requires_grad_() for t in (q, k, v)]
        # In half precision each rank would round its part of the sink's gradient.
        leaf = None if sink is None else sink.to(torch.promote_types(self.dtype, torch.float32), copy=True).requires_grad_()
        some, upstream = parts, (plan.shard(dout, 1), plan.shard(dlse, 2))
        if self.cu_seqlens is not None:
            some, upstream = [t[0] for t in parts], (upstream[0][0], upstream[1][0])
        out, lse = distributed.attention(*some, plan=plan, sink=leaf, return_lse=True, **self.keywords)
        return [out, lse, *torch.autograd.grad((out, lse), parts if leaf is None else [*parts, leaf], upstream)]

    def check_bits(
        self, plan: distributed.ShardPlan, tensors: tuple[Tensor, ...], sink: Tensor | None, out: Tensor, lse: Tensor
    ) -> None:
        """Of out and lse, against one rank that has everything."""
        alone = planned(self.seqlen_q, 1, 0, seqlen_k=self.seqlen_k, cu_seqlens=self.cu_seqlens)
        given = [t if self.cu_seqlens is None else t[0] for t in tensors]
        whole = distributed.attention(*given, plan=alone, sink=sink, return_lse=True, **self.keywords)
        packed = self.cu_seqlens is not None
        assert not any(t.isnan().any() for t in whole)
        for name, part, t in (("out", out, whole[0]), ("lse", lse, whole[1])):
            assert torch.equal(part[0] if packed else part, t), f"{name} has other bits than of one rank: {self}"

    def tensors(self) -> Tensors:
        """q, k, v and sink, then the gradients of out and lse; drawn on the host, so the same on every rank."""
        make = torch.Generator().manual_seed(self.seed)
        seqlen_k = self.seqlen_q if self.seqlen_k is None else self.seqlen_k

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, dtype=torch.float64).to(self.device, self.dtype)

        q = draw(self.batch, self.seqlen_q, self.heads_q, self.head_dim)
        k = draw(self.batch, seqlen_k, self.heads_kv, self.head_dim)
        v = draw(self.batch, seqlen_k, self.heads_kv, self.head_dim_v)
        sink = draw(self.heads_q) if self.sink else None
        dout = draw(self.batch, self.seqlen_q, self.heads_q, self.head_dim_v)
        dlse = torch.randn(self.batch, self.heads_q, self.seqlen_q, generator=make).to(self.device)
        return (q, k, v, sink), dout, dlse

    def visible(self) -> Tensor:
        """bool (batch|1, heads_q|1, seqlen_q, seqlen_k)."""
        seqlen_k = self.seqlen_q if self.seqlen_k is None else self.seqlen_k
        packed = self.cu_seqlens is not None
        return (self._visible_packed() if packed else self._visible(self.keywords, self.seqlen_q, seqlen_k)).to(self.device)

    def _visible(self, keywords: dict[str, Any], seqlen_q: int, seqlen_k: int) -> Tensor:
        seen = self.seen
        if seen is None:
            seen = keywords.get("mask", masks.Full()).dense(seqlen_q, seqlen_k)
        for band in ({"window": keywords.get("window")}, {"window": (None, 0) if keywords.get("causal") else None}):
            if band["window"] is not None:
                seen = seen & masks.SlidingWindow(*band["window"]).dense(seqlen_q, seqlen_k)
        if seen.shape[1] not in (1, self.heads_q):
            seen = seen.repeat_interleave(self.heads_q // seen.shape[1], 1)
        return seen

    def _visible_packed(self) -> Tensor:
        """Sequence by sequence, by rows of its own."""
        assert self.cu_seqlens is not None
        found = torch.zeros(1, self.heads_q, self.seqlen_q, self.seqlen_q, dtype=torch.bool)
        mask = self.keywords.get("mask")
        for a, b in pairwise(self.cu_seqlens):
            keywords = dict(self.keywords)
            if isinstance(mask, masks.ColumnMask):
                cut = [None if t is None else t[..., a:b] for t in (mask.lts, mask.lte, mask.uts, mask.ute)]
                keywords["mask"] = masks.ColumnMask(*cut, causal=mask.causal)
            found[:, :, a:b, a:b] = self._visible(keywords, b - a, b - a)
        return found

    def kept(self) -> Tensor | None:
        p = self.keywords.get("dropout_p", 0.0)
        if not p:
            return None
        seqlen_k = self.seqlen_q if self.seqlen_k is None else self.seqlen_k
        sizes = (self.batch, self.heads_q, self.seqlen_q, seqlen_k)
        seed = torch.tensor([self.keywords["dropout_seed"]])
        return philox.keep_mask(seed, p, *(torch.arange(n) for n in sizes)).double().to(self.device) * philox.keep_scale(p)
