"""Draw a decode call, run it on a backend and judge it against the fp64 rows of a prefill."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import warploom
from tests.decode import biases
from warploom.attention.judge import judge, low_precision
from warploom.decode.api import decode
from warploom.decode.cache import KVCache, PagedKVCache


@dataclass
class Case:
    """A call of one sequence per entry of ``lengths``, drawn from one seed."""

    seed: int
    lengths: list[int]
    queries: int = 1
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    capacity: int = 0  # 0: the longest length
    page_size: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    sink: bool = False
    spread: float = 1.0  # standard deviation of q: larger makes the softmax peak
    tree: list[list[int]] | None = None  # parents, one row a sequence or one for all
    bias: str = ""  # of biases.KINDS
    latent: bool = False  # values are the first columns of keys
    keywords: dict[str, Any] = field(default_factory=dict)

    def q(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (len(self.lengths), self.queries, self.heads_q, self.head_dim)
        return (self.spread * torch.randn(shape, generator=generator)).to(self.device, self.dtype)

    def sinks(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.heads_q, generator=generator).to(self.device) if self.sink else None

    def parents(self) -> Tensor | None:
        return None if self.tree is None else torch.tensor(self.tree, dtype=torch.int32, device=self.device)

    def bias_numbers(self) -> Tensor:
        capacity = -(-(self.capacity or max(self.lengths)) // (self.page_size or 1)) * (self.page_size or 1)
        return biases.drawn(self.bias, (len(self.lengths), self.heads_q, capacity), self.seed, self.device)

    def bias_given(self) -> Any:
        """As decode() takes it, strided where it may be."""
        if not self.bias:
            return None
        kind, numbers = biases.KINDS[self.bias], self.bias_numbers()
        wide = torch.full((*numbers.shape[:-1], 2 * numbers.shape[-1]), float("nan"), dtype=kind.dtype, device=self.device)
        wide[..., ::2] = numbers
        return kind.build(wide[..., ::2])

    def kin(self, b: int) -> Tensor | None:
        """Bool (T, T) of sequence b's tree, walked token by token: whose key its row shows."""
        if self.tree is None:
            return None
        parents = self.tree[b if len(self.tree) > 1 else 0]
        kin = torch.zeros(self.queries, self.queries, dtype=torch.bool)
        for t in range(self.queries):
            at = t
            while at >= 0:
                kin[t, at] = True
                at = parents[at]
        return kin

    def sequences(self) -> list[tuple[Tensor, Tensor]]:
        """k (length, heads_kv, head_dim) and v of each sequence."""
        drawn = []
        for b, length in enumerate(self.lengths):
            generator = torch.Generator().manual_seed(1000 * self.seed + b)
            dims = (self.head_dim, self.head_dim if self.head_dim_v is None else self.head_dim_v)
            k, v = (torch.randn(length, self.heads_kv, dim, generator=generator).to(self.device, self.dtype) for dim in dims)
            drawn.append((k, k[..., : dims[1]] if self.latent else v))
        return drawn

    def cache(self, poison: float = float("nan")) -> KVCache | PagedKVCache:
        """The sequences in a cache whose every unused slot holds ``poison``; pages in random order."""
        sequences = self.sequences()
        capacity = self.capacity or max(self.lengths)
        dims = sequences[0][0].shape[-1], sequences[0][1].shape[-1]
        batch, heads = len(self.lengths), self.heads_kv
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        if self.page_size is None:
            k, v = (torch.full((batch, capacity, heads, dim), poison, **options) for dim in dims)
            v = k[..., : dims[1]] if self.latent else v
            for b, (keys, values) in enumerate(sequences):
                k[b, : len(keys)], v[b, : len(values)] = keys, values
            return KVCache(k, v, lengths)
        each = -(-capacity // self.page_size)
        pages = batch * each + 3
        k, v = (torch.full((pages, self.page_size, heads, dim), poison, **options) for dim in dims)
        v = k[..., : dims[1]] if self.latent else v
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(self.seed + 2))[: batch * each]
        table = order.view(batch, each).to(self.device, torch.int32)
        for b, (keys, values) in enumerate(sequences):
            for n in range(-(-len(keys) // self.page_size)):
                page, at = int(table[b, n]), n * self.page_size
                part = slice(at, at + self.page_size)
                k[page, : len(keys[part])], v[page, : len(values[part])] = keys[part], values[part]
        return PagedKVCache(k, v, table, lengths)


def run(case: Case, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Out and lse of the case."""
    options = {"sink": case.sinks(), "tree": case.parents(), "bias": case.bias_given(), **case.keywords}
    return decode(case.q(), case.cache(), return_lse=True, backend=backend, **options)


def prefill_rows(case: Case) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each sequence the fp64 out and lse of attention()'s last T rows, and those of the low-precision model.

    Under a tree what attention() would see is no band: then, and with a bias, the rows are a dense softmax.
    """
    sink, found = case.sinks(), []
    for b, (q, (k, v)) in enumerate(zip(case.q(), case.sequences(), strict=True)):
        wide = [t[None].double() for t in (q, k, v)]
        out, lse = warploom.attention(
            *wide,
            causal=True,
            sink=None if sink is None else sink.double(),
            return_lse=True,
            backend="reference",
            **case.keywords,
        )
        window = case.keywords.get("window", (None, None))
        place, own = torch.arange(len(k)), min(case.queries, len(k))
        token, kin = len(k) - case.queries + torch.arange(case.queries), case.kin(b)
        if kin is not None:
            token = len(k) - case.queries + kin.sum(1) - 1
            place[len(k) - own :] = token[case.queries - own :]
        distance = token[:, None] - place
        seen = distance >= (0 if window[1] is None else max(0, -window[1]))
        if window[0] is not None:
            seen &= distance <= window[0]
        out, lse = out[0], lse[0]
        if kin is not None:
            seen[:, len(k) - own :] &= kin[:, case.queries - own :]
        bias = None
        if case.bias:
            bias = biases.KINDS[case.bias].of(case.bias_numbers(), b, token.to(q.device), place.to(q.device))
        if kin is not None or bias is not None:
            out, lse = _dense(case, q, k, v, seen.to(q.device), sink, bias)
        low_out, low_lse = _model(case, q, k, v, seen.to(q.device), sink, bias)
        found.append((out, lse, low_out, low_lse))
    return found


def _dense(
    case: Case, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Out (T, heads_q, head_dim_v) in fp64 and lse (heads_q, T) by the textbook; a row that sees nothing is 0 and -inf."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(case.heads_q // case.heads_kv, 1) for t in (k, v))
    scores = torch.einsum("thd,nhd->htn", q, k) * (case.keywords.get("scale") or case.head_dim**-0.5)
    cap = case.keywords.get("softcap", 0.0)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~seen, float("-inf"))
    extra = q.new_full((case.heads_q,), float("-inf")) if sink is None else sink.double()
    scores = torch.cat([scores, extra[:, None, None].expand(-1, case.queries, 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :-1]
    return torch.einsum("htn,nhd->thd", weights, v), scores.logsumexp(-1).float()


def _model(
    case: Case, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if len(k) == 0:
        lse = torch.full((case.heads_q, case.queries), float("-inf"), device=q.device)
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), lse if sink is None else sink[:, None].expand_as(lse)
    low = low_precision(
        q[None],
        k[None],
        v[None],
        q.new_zeros((1, *q.shape[:-1], v.shape[-1])),
        torch.zeros((1, case.heads_q, case.queries), device=q.device),
        seen[None, None] if bias is None else seen & (bias != float("-inf"))[None],
        scale=case.keywords.get("scale") or case.head_dim**-0.5,
        softcap=case.keywords.get("softcap", 0.0),
        sink=sink,
        bias=None if bias is None else bias[None],
    )
    return low.out[0], low.lse[0]


def check(case: Case, backend: str) -> None:
    """Assert that out and lse of every sequence pass the criterion; the message holds the case and its seed."""
    out, lse = run(case, backend)
    batch = len(case.lengths)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    assert lse.shape == (batch, case.heads_q, case.queries)
    rows = prefill_rows(case)
    wanted = [torch.stack([r[n] for r in rows]) for n in range(4)]
    for name, got, want, low in (("out", out, wanted[0], wanted[2]), ("lse", lse, wanted[1], wanted[3])):
        verdict = judge(name, got, want, low, case.dtype)
        assert verdict.passed, f"{backend}: {verdict}\n{case}"


def check_bits(backend: str, length: int, *crowds: tuple[list[int], int, int | None], **shape: Any) -> None:
    """Assert that a sequence's bits depend on neither neighbours, capacity nor pages.

    ``crowds``: others beside it, a capacity (0: of the longest) and a page size, besides those that every backend takes.
    """
    seed = random.randrange(2**31)
    lone = run(Case(seed, [length], **shape), backend)
    for others, capacity, page_size in (
        ([], 65536, None),
        ([3, 700, 0], 0, None),
        ([5] * 63, 0, None),
        ([length, 17, 4096], 65536, 16),
        ([900], 65536, 256),
        *crowds,
    ):
        crowd = run(Case(seed, [length, *others], capacity=capacity, page_size=page_size, **shape), backend)
        for name, a, b in zip(("out", "lse"), lone, crowd, strict=True):
            assert torch.equal(a[0], b[0]), (seed, name, others[:3], capacity, page_size)
