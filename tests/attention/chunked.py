"""Calls on chunks of longer sequences, judged against fp64 references of whole calls, which know of no offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import warploom
from tests.attention.harness import Call
from warploom import masks
from warploom.attention import philox
from warploom.attention.chunks import attention_chunks
from warploom.attention.judge import judge, low_precision
from warploom.masks import Mask


@dataclass
class Chunked:
    """A call whose batch entries are rows [offsets[b], offsets[b] + call.seqlen_q) of sequences of `whole` rows.

    Keys and values that no row of an entry sees are NaN for whoever is judged.
    """

    call: Call
    whole: int
    offsets: tuple[int, ...]
    chunks: int = 1
    shared: bool = False  # all entries have the keys of the first, by strides of 0

    def __post_init__(self) -> None:
        self.call = replace(self.call, batch=len(self.offsets))
        call = self.call
        self.q, self.k, self.v, self.sink = call.tensors()
        if self.shared:
            self.k, self.v = (t[:1].expand(t.shape) for t in (self.k, self.v))
        self.keywords = {"dropout_p": 0.0, "scale": call.head_dim**-0.5, "softcap": 0.0, **call.keywords}
        whole = self._seen_of_whole()
        entries = range(len(self.offsets))
        self.seen = torch.cat([self._rows(whole[min(b, len(whole) - 1)][None], b) for b in entries])
        self.keep = None
        if self.keywords["dropout_p"]:
            kept = self._kept_of_whole()
            self.keep = torch.cat([self._rows(kept[b // self.chunks][None], b) for b in entries])
        out = self.q.new_empty((*self.q.shape[:-1], self.v.shape[-1]))
        self.dout, self.dlse = call.upstream(out, self.q.new_empty(self.q.shape[0], call.heads_q, call.seqlen_q).float())

    def _rows(self, t: Tensor, b: int) -> Tensor:
        """(1, heads, seqlen_q, …) of the whole to the rows of an entry."""
        return t[:, :, self.offsets[b] : self.offsets[b] + self.call.seqlen_q]

    def _seen_of_whole(self) -> Tensor:
        """bool (batch|1, heads_q|1, whole, seqlen_k)."""
        mask = self.keywords.get("mask", masks.Full())
        left, right = self.keywords.get("window", (None, None))
        band = masks.SlidingWindow(left, 0 if self.keywords.get("causal") else right)
        seen, lengths = mask.dense(self.whole, self.call.seqlen_k), (self.whole, self.call.seqlen_k)
        if seen.shape[1] not in (1, self.call.heads_q):
            seen = seen.repeat_interleave(self.call.heads_q // seen.shape[1], dim=1)
        return seen.to(self.q.device) & band.dense(*lengths).to(self.q.device)

    def _kept_of_whole(self) -> Tensor:
        """Multipliers (sequences, heads_q, whole, seqlen_k)."""
        p, seed = self.keywords["dropout_p"], torch.tensor([self.keywords["dropout_seed"]])
        sizes = (len(self.offsets) // self.chunks, self.call.heads_q, self.whole, self.call.seqlen_k)
        kept = philox.keep_mask(seed, p, *(torch.arange(n) for n in sizes)) * philox.keep_scale(p)
        return kept.to(self.q.device)

    def _hostile(self, t: Tensor) -> Tensor:
        """k or v with NaN in keys that no row of the entry sees."""
        call = self.call
        shown = self.seen.any(2).expand(-1, call.heads_q, -1).unflatten(1, (call.heads_kv, -1)).any(2)
        if self.shared:  # of all entries: they have the same memory
            shown = shown.any(0, keepdim=True)
        hidden = ~shown.transpose(1, 2)[..., None]
        return (t[:1] if self.shared else t).detach().masked_fill(hidden, float("nan"))

    def results(self, backend: str) -> dict[str, Tensor]:
        """out, lse and gradients of one backend."""
        q, k, v = self.q.detach().requires_grad_(), *(self._hostile(t).requires_grad_() for t in (self.k, self.v))
        leaves, options = [q, k, v], {**self.keywords, "chunks": self.chunks, "seqlen_q": self.whole}
        if self.sink is not None:
            options["sink"] = self.sink.detach().requires_grad_()
            leaves.append(options["sink"])
        keys = [t.expand(q.shape[0], -1, -1, -1) for t in (k, v)]
        offsets = torch.tensor(self.offsets, dtype=torch.int32, device=q.device)
        out, lse = attention_chunks(q, *keys, offsets, backend=backend, **options)
        total = (out * self.dout).sum()
        if self.call.lse_gradient:
            total = total + (lse * self.dlse).masked_fill(torch.isinf(lse), 0.0).sum()
        gradients = torch.autograd.grad(total, leaves)
        return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsink"), gradients, strict=False))}

    def expected(self) -> dict[str, Tensor]:
        """The same from whole calls: a call for the first chunk of every sequence, one for the second, …

        The other rows of its queries are zeros, and so are the gradients that reach them.
        """
        call, step, rows = self.call, self.chunks, self.call.seqlen_q
        found = {"out": self.dout.double(), "lse": self.dlse.double(), "dq": self.q.double()}
        found |= {name: t.double().clone() for name, t in (("dk", self.k), ("dv", self.v))}
        found = {name: torch.zeros_like(t) for name, t in found.items()}
        sink = None if self.sink is None else self.sink.double().requires_grad_()
        found |= {} if sink is None else {"dsink": torch.zeros_like(sink)}
        for first in range(step):
            entries = range(first, len(self.offsets), step)
            q = self.q.new_zeros((len(entries), self.whole, *self.q.shape[2:]), dtype=torch.float64)
            dout = q.new_zeros((*q.shape[:-1], self.v.shape[-1]))
            dlse = q.new_zeros((len(entries), call.heads_q, self.whole))
            for n, b in enumerate(entries):
                at = slice(self.offsets[b], self.offsets[b] + rows)
                q[n, at], dout[n, at], dlse[n, :, at] = self.q[b].double(), self.dout[b].double(), self.dlse[b].double()
            leaves = [q, *(t[first::step].double() for t in (self.k, self.v))]
            leaves = [t.requires_grad_() for t in leaves]
            out, lse = warploom.attention(*leaves, sink=sink, return_lse=True, backend="reference", **self.keywords)
            total = (out * dout).sum() + (lse * dlse).masked_fill(torch.isinf(lse), 0.0).sum()
            dq, dk, dv, *dsink = torch.autograd.grad(total, leaves if sink is None else [*leaves, sink])
            for n, b in enumerate(entries):
                at = slice(self.offsets[b], self.offsets[b] + rows)
                found["out"][b], found["lse"][b], found["dq"][b] = out[n, at], lse[n, :, at], dq[n, at]
                found["dk"][b], found["dv"][b] = dk[n], dv[n]
            if dsink:
                found["dsink"] += dsink[0]
        return self._summed({name: t.detach() for name, t in found.items()})

    def model(self) -> dict[str, Tensor]:
        """The low-precision model of a correct kernel."""
        options = {"scale": self.keywords["scale"], "softcap": self.keywords["softcap"], "sink": self.sink, "keep": self.keep}
        low = low_precision(self.q, self.k, self.v, self.dout, self.dlse, self.seen, **options)
        named = {name: getattr(low, name) for name in ("out", "lse", "dq", "dk", "dv")}
        if self.sink is not None:
            wide = (t.double() for t in (self.q, self.k, self.v, self.dout, self.dlse))
            named["dsink"] = low.dsink_like(low_precision(*wide, self.seen, **{**options, "sink": self.sink.double()}))
        return self._summed(named)

    def _summed(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of keys that all entries share are sums over them."""
        if not self.shared:
            return named
        return {name: t.sum(0, keepdim=True).to(t.dtype) if name in ("dk", "dv") else t for name, t in named.items()}

    def check(self, backend: str) -> None:
        got, want, low = self.results(backend), self.expected(), self.model()
        for name, value in got.items():
            verdict = judge(name, value, want[name], low[name], self.call.dtype)
            assert verdict.passed, f"{backend}: {verdict}\n{self.call}, {self.whole} rows, chunks at {self.offsets}"


def _vectors(count: int, heads: int, batch: int, queries: int, keys: int, causal: bool = False) -> Callable[[], Mask]:
    """Drawn vectors, out of range at both ends and at int32's."""

    def build() -> Mask:
        generator = torch.Generator().manual_seed(count * 7 + heads)
        shape = (batch, heads, keys)
        drawn = [torch.randint(-20, queries + 20, shape, generator=generator, dtype=torch.int32) for _ in range(count)]
        for n, t in enumerate(drawn):
            t[..., n :: keys // 3] = 2**31 - 1 if n % 2 else -(2**31)
        return masks.ColumnMask(*drawn[:2], *([None, drawn[2]] if count == 3 else drawn[2:]), causal=causal)

    return build


# name: rows of the whole sequence, where chunks begin, keys, and what else a call has; "mask" is built
_SMALL = {"heads_q": 2, "heads_kv": 1, "seqlen_q": 37, "seqlen_k": 200}
CHUNKED: dict[str, dict[str, Any]] = {
    "no band": {"seqlen_k": 130},
    "causal": {"keywords": {"causal": True}},
    "causal, more keys": {"seqlen_k": 290, "keywords": {"causal": True}},
    "causal, rows that see nothing": {"seqlen_k": 90, "sink": True, "keywords": {"causal": True}},
    "one row": {"seqlen_q": 1, "offsets": (0, 5, 63, 64, 199), "keywords": {"causal": True}},
    "a whole sequence": {"seqlen_q": 200, "offsets": (0,), "keywords": {"causal": True}},
    "whole tiles": {"seqlen_q": 128, "seqlen_k": 256, "whole": 256, "offsets": (0, 128), "keywords": {"causal": True}},
    "window": {"keywords": {"window": (50, 20)}},
    "window behind": {"keywords": {"window": (90, -5)}},
    "window ahead": {"keywords": {"window": (-3, 40)}},
    "window past the keys": {"seqlen_k": 90, "keywords": {"window": (10, 0)}},
    "window without a left limit": {"keywords": {"window": (None, 7)}},
    "window without a right limit": {"keywords": {"window": (30, None)}},
    "window of nothing": {"keywords": {"window": (-5, 3)}},
    "group of 7": {"heads_q": 7, "keywords": {"causal": True}},
    "head_dim 40 and 72": {"head_dim": 40, "head_dim_v": 72, "keywords": {"causal": True}},
    "head_dim 128": {"head_dim": 128, "keywords": {"causal": True}},
    "softcap, sink and lse": {"sink": True, "lse_gradient": True, "keywords": {"causal": True, "softcap": 3.0}},
    "negative scale": {"keywords": {"causal": True, "scale": -0.3}},
    "strided": {"strided": True, "keywords": {"causal": True}},
    "dropout": {"keywords": {"causal": True, "dropout_p": 0.3, "dropout_seed": 12345678901234}},
    "dropout, two chunks a sequence": {"chunks": 2, "keywords": {"dropout_p": 0.5, "dropout_seed": -7, "softcap": 2.0}},
    "one sequence": {"seqlen_q": 50, "offsets": (0, 50, 100, 150), "shared": True, "keywords": {"causal": True}},
    "one sequence, dropout": {
        "seqlen_q": 50,
        "offsets": (0, 50, 100, 150),
        "chunks": 4,
        "shared": True,
        "mask": lambda: masks.Document([120, 80]),
        "keywords": {"dropout_p": 0.3, "dropout_seed": 3},
    },
    "documents": {"mask": lambda: masks.Document([100, 37, 63])},
    "documents, both ways": {"mask": lambda: masks.Document([100, 37, 63], causal=False)},
    "documents of each entry": {
        "mask": lambda: masks.Document([[100, 37, 63], [200, 0, 0], [1, 198, 1], [50, 50, 100], [10, 180, 10]])
    },
    "a prefix": {"mask": lambda: masks.PrefixLM(20)},
    "padding": {"mask": lambda: masks.Padding(torch.arange(200)[None] % 7 != 0)},
    "lts": {"mask": _vectors(1, 1, 1, 200, 200, causal=True)},
    "lts and lte, per query head": {"mask": _vectors(2, 2, 1, 200, 200)},
    "lts and lte, window": {"mask": _vectors(2, 1, 1, 200, 200), "keywords": {"window": (60, 30)}},
    "three vectors, per key head": {
        "mask": _vectors(3, 2, 1, 200, 200),
        "heads_q": 6,
        "heads_kv": 2,
    },
    "four vectors": {"mask": _vectors(4, 1, 1, 200, 150), "seqlen_k": 150},
    "four vectors of each entry, causal": {"mask": _vectors(4, 4, 5, 200, 290, causal=True), "seqlen_k": 290, "heads_q": 4},
    "four vectors and dropout": {
        "mask": _vectors(4, 1, 1, 200, 200),
        "keywords": {"dropout_p": 0.3, "dropout_seed": 5, "softcap": 2.0},
        "sink": True,
    },
    "all hidden": {"mask": lambda: masks.ColumnMask(torch.zeros(1, 1, 200, dtype=torch.int32)), "sink": True},
}


def chunked(name: str, seed: int, **changes: Any) -> Chunked:
    given = {**_SMALL, **CHUNKED[name], **changes}
    device = given.get("device", "cpu")
    options = {key: given.pop(key) for key in ("chunks", "shared") if key in given}
    whole, offsets = given.pop("whole", 200), given.pop("offsets", (0, 163, 5, 64, 100)[: 4 if "chunks" in options else 5])
    keywords = dict(given.pop("keywords", {}))
    if "mask" in given:
        keywords["mask"] = given.pop("mask")().to(device)
    return Chunked(Call(seed=seed, keywords=keywords, **given), whole, offsets, **options)
