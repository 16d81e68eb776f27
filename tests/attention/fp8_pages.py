"""Packed calls over FP8 pages, judged against what their numbers stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import warploom
from tests.attention.packed import Packed
from warploom import PagedKVCache
from warploom.kernels.e4m3 import E4M3, quantized, rotate, scales_of

SEED = 5


@dataclass
class Fp8Pages(Packed):
    """A paged call whose pages hold e4m3 of the drawn keys and values, and whose queries are rotated.

    Scales of a head or tensor are powers of two, those of tokens too: what e4m3 numbers stand for is then exact in half
    precision, which the model that judges computes with. Slots and scales that no sequence uses are NaN.
    """

    granularity: str = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.page_size is not None
        self.straight = self.q
        self.q = rotate(self.q, SEED).to(self.dtype)
        found = {}
        for name, pages in (("k", self.k_pages), ("v", self.v_pages)):
            turned = rotate(pages, SEED) if name == "k" else pages.float()
            if self.granularity == "token":
                scale = torch.exp2(scales_of(turned).log2().ceil())
            else:
                scale = torch.full((self.heads_kv if self.granularity == "head" else 1,), 2.0**-6, device=self.device)
                scale = scale * 2.0 ** -torch.arange(len(scale), device=self.device)
            found[name] = quantized(turned, scale), scale
        (k, k_scale), (v, v_scale) = found["k"], found["v"]
        used = torch.tensor(self.seen, dtype=torch.int32, device=self.device)
        self.cache = PagedKVCache(k, v, self.table, used, k_scale, v_scale, SEED)
        # What is judged against: the numbers that the pages stand for, packed as ``Packed`` has them.
        size, first = self.page_size, 0
        for n, length in enumerate(self.keys):
            for j in range(self.seen[n]):
                at = int(self.table[n, j // size]), j % size
                for own, (data, scale) in ((self.k, found["k"]), (self.v, found["v"])):
                    own[first + j] = data[at].float() * (scale[at] if scale.ndim > 1 else scale)[..., None]
            first += length

    def results(self, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Out and lse, of the pages or, in another dtype, of the numbers that they stand for."""
        if dtype is not None:
            wide = super().results(backend, dtype)
            return {name: wide[name].detach() for name in ("out", "lse")}
        keywords: dict[str, Any] = {**self.keywords, "sink": self.sinks, "cu_seqlens_q": self._starts(self.lengths_q)}
        out, lse = warploom.attention_varlen(self.straight, self.cache, return_lse=True, backend=backend, **keywords)
        assert self.cache.k_pages.dtype == E4M3 and out.dtype == self.dtype
        return {"out": out, "lse": lse}


def same_bits(backend: str, dtype: torch.dtype, keys: int, chunks: bool) -> None:
    """Under batch_invariant: a sequence has the bits that it has alone, and a row those that any chunk gives it."""
    torch.manual_seed(keys)
    k, v, q = torch.randn(2, keys, 1, 16), torch.randn(2, keys, 1, 16), torch.randn(2, keys, 2, 16).to(dtype)
    cache = PagedKVCache.allocate(2, keys, 1, 16, page_size=8, dtype=E4M3, hadamard_seed=SEED)
    cache.append(k, v)

    def rows(begin: int, *ends: int) -> Tensor:
        """Out of the first sequence's queries from begin on; of each sequence those up to its end, and as many keys."""
        lengths = torch.tensor([0, *(end - begin for end in ends)], dtype=torch.int32)
        held = cache.block_table[: len(ends)], torch.tensor(ends, dtype=torch.int32)
        pages = PagedKVCache(cache.k_pages, cache.v_pages, *held, cache.k_scale, cache.v_scale, SEED)
        given = torch.cat([q[n, begin:end] for n, end in enumerate(ends)])
        starts = lengths.cumsum(0, dtype=torch.int32)
        out = warploom.attention_varlen(
            given, pages, cu_seqlens_q=starts, causal=True, batch_invariant=True, backend=backend
        )  # fmt: skip
        return out[: ends[0] - begin]

    alone, middle = rows(0, keys), keys // 2 + 3
    assert torch.equal(rows(0, keys, keys - 20), alone)
    if chunks:
        assert torch.equal(rows(middle, keys, keys - 20), alone[middle:])
        assert torch.equal(rows(0, middle, middle - 5), alone[:middle])


# Pages smaller than a tile of keys, as large, and larger; the last of no power of two.
CASES: dict[str, dict[str, Any]] = {
    "token, pages of 8": {
        "lengths_q": [40, 0, 1, 7], "lengths_k": [90, 5, 70, 0], "page_size": 8, "heads_q": 7, "keywords": {"causal": True},
    },
    "token, pages of 64, window, softcap": {
        "lengths_q": [40, 3], "lengths_k": [200, 64], "page_size": 64, "keywords": {"window": (50, 0), "softcap": 3.0},
    },
    "head, pages of 16, sink": {
        "lengths_q": [40, 20], "lengths_k": [90, 61], "page_size": 16, "granularity": "head", "heads_q": 4, "heads_kv": 2,
        "sink": True, "keywords": {"causal": True},
    },
    "tensor, pages of 1": {
        "lengths_q": [5, 3], "lengths_k": [21, 3], "page_size": 1, "granularity": "tensor", "keywords": {"causal": True},
    },
    "token, one page a sequence": {"lengths_q": [20], "lengths_k": [90], "page_size": 100, "heads_kv": 2},
}  # fmt: skip
