"""One sequence in many batches: what batch_invariant=True promises of its bits, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import warploom
from warploom import masks

LAYOUTS = ("dense", "packed", "used", "paged")
NAN = float("nan")


@dataclass
class Batches:
    """A sequence of a model, and the batches that it comes in; lengths up to ``longest``."""

    seed: int
    backend: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    longest: int = 200
    head_dims: tuple[int, ...] = (16, 32)
    layouts: tuple[str, ...] = LAYOUTS
    columns: bool = True  # some sequences have a column mask
    page_sizes: tuple[int, ...] = (1, 16, 48, 64, 256)
    paged_windows: bool = True  # pages under a window have the bits of other layouts
    options: dict[str, Any] = field(default_factory=dict)  # of every call, besides those drawn
    each: int = 1  # seeds in a row that share a model, and so its compiled kernels

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        draw = random.Random(-1 - self.seed // self.each)
        self.heads_kv = draw.choice((1, 2))
        self.heads_q = self.heads_kv * draw.choice((1, 2, 3))
        self.head_dim = draw.choice(self.head_dims)
        self.keywords: dict[str, Any] = {"causal": draw.random() < 0.6, "backend": self.backend, "return_lse": True}
        self.keywords |= {"batch_invariant": True} | self.options
        if draw.random() < 0.3:
            self.keywords["window"] = (draw.randint(0, self.longest), draw.choice((None, 0, 5)))
        if draw.random() < 0.2:
            self.keywords["softcap"] = 5.0
        if draw.random() < 0.3:
            self.keywords["sink"] = torch.randn(self.heads_q, generator=self.generator).to(self.device)
        columns = self.columns and draw.random() < 0.3
        draw = self.random
        self.seqlen_k = draw.randint(1, self.longest)
        self.seqlen_q = draw.choice((self.seqlen_k, draw.randint(1, self.longest), 1))
        self.q, self.k, self.v = self.sequence(self.seqlen_q, self.seqlen_k)
        self.vectors = self.column_vectors(self.seqlen_q, self.seqlen_k) if columns else None

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def sequence(self, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor, Tensor]:
        keys = (seqlen_k, self.heads_kv, self.head_dim)
        return self.normal(seqlen_q, self.heads_q, self.head_dim), self.normal(*keys), self.normal(*keys)

    def column_vectors(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        """lts and lte of each key: rows that do not see it, in runs of columns."""
        runs = torch.randint(0, seqlen_q + 1, (2, 1, 1, seqlen_k // 40 + 1), generator=self.generator, dtype=torch.int32)
        return runs.sort(0).values.repeat_interleave(40, -1)[..., :seqlen_k].to(self.device)

    def masked(self, vectors: Tensor | None) -> dict[str, Any]:
        return {} if vectors is None else {"mask": masks.ColumnMask(vectors[0], vectors[1])}

    def alone(self) -> tuple[Tensor, Tensor]:
        """out (seqlen_q, heads, head_dim) and lse (heads, seqlen_q) of a batch of one."""
        q, k, v = (t[None] for t in (self.q, self.k, self.v))
        out, lse = warploom.attention(q, k, v, **self.masked(self.vectors), **self.keywords)
        return out[0], lse[0]

    def within(self, layout: str) -> tuple[Tensor, Tensor]:
        """The same of a batch of this layout with other sequences, whose numbers and lengths are drawn."""
        return self.dense() if layout == "dense" else self.packed(layout)

    def dense(self) -> tuple[Tensor, Tensor]:
        batch = self.random.randint(2, 5)
        at = self.random.randrange(batch)
        others = [self.sequence(self.seqlen_q, self.seqlen_k) for _ in range(batch)]
        others[at] = (self.q, self.k, self.v)
        others[at - 1][2].fill_(NAN)
        mask: dict[str, Any] = {}
        if self.vectors is not None:
            vectors = [self.column_vectors(self.seqlen_q, self.seqlen_k) for _ in range(batch)]
            vectors[at] = self.vectors
            mask = self.masked(torch.cat(vectors, 1))
        q, k, v = (torch.stack(t) for t in zip(*others, strict=True))
        if self.random.random() < 0.5:  # as slices of a larger buffer
            q, k, v = (torch.stack([t, t], 2)[:, :, 1] for t in (q, k, v))
        out, lse = warploom.attention(q, k, v, **mask, **self.keywords)
        return out[at], lse[at]

    def packed(self, layout: str) -> tuple[Tensor, Tensor]:
        """One after another; "used": with keys behind each sequence's; "paged": keys in pages."""
        count = self.random.randint(1, 6)
        at = self.random.randrange(count)
        lengths_q = [self.random.choice((0, 1, self.random.randint(1, 2 * self.longest))) for _ in range(count)]
        lengths_k = [self.random.choice((0, n, self.random.randint(1, 2 * self.longest))) for n in lengths_q]
        lengths_q[at], lengths_k[at] = self.seqlen_q, self.seqlen_k
        found = [self.sequence(n, m) for n, m in zip(lengths_q, lengths_k, strict=True)]
        found[at] = (self.q, self.k, self.v)
        cu_q = self.starts(lengths_q)
        mask: dict[str, Any] = {}
        longest: dict[str, Any] = {}
        if self.random.random() < 0.5:
            longest = {"max_seqlen_q": max(lengths_q) + self.random.randint(0, 3000), "max_seqlen_k": max(lengths_k) + 9}
        queries = torch.cat([q for q, _, _ in found])
        if layout == "paged" and self.vectors is None and (self.paged_windows or "window" not in self.keywords):
            k, v, where = self.pages(found, lengths_k)
            longest.pop("max_seqlen_k", None)
            out, lse = warploom.attention_varlen(queries, k, v, cu_q, **where, **longest, **self.keywords)
        else:
            behind = [self.random.randint(0, 70) if layout == "used" else 0 for _ in range(count)]
            k, v = (
                torch.cat([pad(each[i], (0, 0, 0, 0, 0, n), value=NAN) for each, n in zip(found, behind, strict=True)])
                for i in (1, 2)
            )
            if self.vectors is not None:
                vectors = [self.column_vectors(n, m) for n, m in zip(lengths_q, lengths_k, strict=True)]
                vectors[at] = self.vectors
                vectors = [pad(t, (0, n)) for t, n in zip(vectors, behind, strict=True)]
                mask = self.masked(torch.cat(vectors, -1))
            starts = self.starts([m + n for m, n in zip(lengths_k, behind, strict=True)])
            if any(behind):
                longest |= {"seqused_k": self.integers(lengths_k)}
            if "max_seqlen_k" in longest:
                longest["max_seqlen_k"] += 70
            out, lse = warploom.attention_varlen(queries, k, v, cu_q, starts, **longest, **mask, **self.keywords)
        rows = slice(sum(lengths_q[:at]), sum(lengths_q[: at + 1]))
        return out[rows], lse[:, rows]

    def pages(self, found: list[tuple[Tensor, Tensor, Tensor]], lengths: list[int]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Pools of pages, of a size that is drawn and in any order, and what says whose they are."""
        size = self.random.choice(self.page_sizes)
        counts = [-(-n // size) for n in lengths]
        pool = sum(counts) + self.random.randint(1, 4)
        order = self.random.sample(range(pool), pool)
        k, v = (self.normal(pool, size, self.heads_kv, self.head_dim).fill_(NAN) for _ in range(2))
        table = torch.zeros((len(lengths), max(*counts, 1) + self.random.randint(0, 2)), dtype=torch.int32)
        for n, (_, own_k, own_v) in enumerate(found):
            own = order[sum(counts[:n]) : sum(counts[: n + 1])]
            table[n, : counts[n]] = torch.tensor(own, dtype=torch.int32)
            for i, page in enumerate(own):
                rows = slice(i * size, min((i + 1) * size, lengths[n]))
                k[page, : rows.stop - rows.start], v[page, : rows.stop - rows.start] = own_k[rows], own_v[rows]
        return k, v, {"block_table": table.to(self.device), "seqused_k": self.integers(lengths)}

    def starts(self, lengths: list[int]) -> Tensor:
        return self.integers([sum(lengths[:n]) for n in range(len(lengths) + 1)])

    def integers(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def differences(self) -> list[str]:
        """The layouts in which some bit differs from the sequence alone."""
        want = self.alone()
        found = []
        for layout in self.layouts:
            got = self.within(layout)
            if not all(same(a, b) for a, b in zip(got, want, strict=True)):
                found.append(layout)
        return found

    def __str__(self) -> str:
        shape = f"{self.seqlen_q}x{self.seqlen_k} heads {self.heads_q}/{self.heads_kv} head_dim {self.head_dim}"
        keywords = {name: value for name, value in self.keywords.items() if name != "sink"}
        return f"seed {self.seed}: {shape}, columns {self.vectors is not None}, {keywords}"


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of floats have the same bits."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def check(seeds: range, backend: str, **options: Any) -> None:
    """Assert that no batch drawn from these seeds changes a bit."""
    for seed in seeds:
        batches = Batches(seed, backend, **options)
        found = batches.differences()
        assert not found, f"{found}: {batches}"


def differs(seeds: range, backend: str, **options: Any) -> int:
    """How many of the seeds have a batch that changes a bit."""
    return sum([bool(Batches(seed, backend, **options).differences()) for seed in seeds])
