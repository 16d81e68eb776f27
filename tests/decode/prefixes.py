"""Batches whose neighbours begin alike, in pages or rows, for tests of decode's ``prefix``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from warploom.decode.api import decode
from warploom.decode.cache import KVCache, PagedKVCache


@dataclass
class Alike:
    """Sequences of ``lengths`` keys; sequence b begins with ``common[b]`` keys of b - 1, the first of them with 0."""

    seed: int
    lengths: list[int]
    common: list[int]
    page_size: int | None = 16
    queries: int = 1
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    device: str = "cpu"
    keywords: dict[str, Any] = field(default_factory=dict)

    def q(self) -> Tensor:
        shape = (len(self.lengths), self.queries, self.heads_q, self.head_dim)
        return torch.randn(shape, generator=self._generator(0)).to(self.device, self.dtype)

    def cache(self) -> KVCache | PagedKVCache:
        """NaN in every slot that no sequence holds; pages in random order, and any page behind a sequence's last."""
        dtype = self.cache_dtype or self.dtype
        batch, longest = len(self.lengths), max(*self.lengths, 1)
        rows = [torch.randn(2, longest, self.heads_kv, self.head_dim, generator=self._generator(b + 1)) for b in range(batch)]
        for b in range(1, batch):
            rows[b][:, : self.common[b]] = rows[b - 1][:, : self.common[b]]
        held = torch.tensor(self.lengths, dtype=torch.int32)
        if self.page_size is None:
            kv = torch.stack(rows, 1)
            kv[:, torch.arange(longest) >= held[:, None]] = float("nan")
            return KVCache(*kv.to(self.device, dtype), held.to(self.device))
        size, each = self.page_size, -(-longest // self.page_size)
        order = torch.randperm(batch * each, generator=self._generator(0)).view(batch, each).to(torch.int32)
        pool = torch.full((2, batch * each, size, self.heads_kv, self.head_dim), float("nan"))
        for b, length in enumerate(self.lengths):
            if b:
                order[b, : self.common[b] // size] = order[b - 1, : self.common[b] // size]
            for n in range(-(-length // size)):
                part = rows[b][:, n * size : min((n + 1) * size, length)]
                pool[:, order[b, n], : part.shape[1]] = part
        return PagedKVCache(*pool.to(self.device, dtype), order.to(self.device), held.to(self.device))

    def run(self, prefix: Any, backend: str = "triton", cache: KVCache | PagedKVCache | None = None) -> tuple[Tensor, Tensor]:
        held = self.cache() if cache is None else cache
        return decode(self.q(), held, return_lse=True, backend=backend, prefix=prefix, **self.keywords)

    def hint(self, cache: KVCache | PagedKVCache) -> Any:
        """The prefix found in a table, and the least that all rows have in common of a contiguous cache."""
        return cache.shared_prefix() if isinstance(cache, PagedKVCache) else min(self.common[1:], default=0)

    def _generator(self, n: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + n)


def check_bits(c: Alike) -> None:
    """With its prefix the call has the bits that it has without, and the reference agrees."""
    cache = c.cache()
    want, got = c.run(None, cache=cache), c.run(c.hint(cache), cache=cache)
    for name, a, b in zip(("out", "lse"), want, got, strict=True):
        assert torch.equal(a, b), (name, c)
    exact = c.run(c.hint(cache), "reference", cache=cache)
    close = 1e-4 if c.dtype == torch.float32 and c.cache_dtype is None else 2e-2
    for name, a, b in zip(("out", "lse"), exact, got, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=close, atol=close), (name, c)
