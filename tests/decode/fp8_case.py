"""Cases over FP8 caches, judged against what the numbers in the cache stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.decode.harness import Case, prefill_rows
from warploom import KVCache, PagedKVCache, decode
from warploom.attention.judge import judge
from warploom.kernels.e4m3 import E4M3, rotate

SEED = 5


@dataclass
class Fp8Case(Case):
    """A case whose keys and values are those that an FP8 cache makes of the drawn ones, and whose queries are rotated.

    Scales of a head or tensor are powers of two: what e4m3 numbers stand for then is exact in half precision too.
    """

    granularity: Any = "token"

    def straight(self) -> Tensor:
        """The queries as a user gives them."""
        return super().q()

    def q(self) -> Tensor:
        return rotate(self.straight(), SEED).to(self.dtype)

    def cache(self, poison: float = float("nan")) -> KVCache | PagedKVCache:
        drawn, longest = super().sequences(), max(self.lengths)
        options = {"head_dim_v": drawn[0][1].shape[-1], "dtype": E4M3, "granularity": self.granularity, "hadamard_seed": SEED}
        sizes = (len(drawn), longest, self.heads_kv, self.head_dim)
        if self.page_size is None:
            cache: Any = KVCache.allocate(*sizes, device=self.device, **options)
        else:
            cache = PagedKVCache.allocate(*sizes, page_size=self.page_size, device=self.device, **options)
        if self.granularity != "token":
            cache.k_scale.fill_(2.0**-6)
            cache.v_scale.copy_(2.0 ** -torch.arange(5, 5 + len(cache.v_scale)))
        k, v = (torch.nn.utils.rnn.pad_sequence([pair[n] for pair in drawn], batch_first=True) for n in (0, 1))
        cache.append(k, v)
        cache.lengths.copy_(torch.tensor(self.lengths))
        if isinstance(cache, KVCache) and self.granularity == "token":
            for b, length in enumerate(self.lengths):
                cache.k_scale[b, length:] = cache.v_scale[b, length:] = poison
        return cache

    def sequences(self) -> list[tuple[Tensor, Tensor]]:
        cache: Any = self.cache()
        if isinstance(cache, KVCache):
            scaled = [t.float() * s[..., None] for t, s in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))]
        else:
            pairs = ((cache.k_pages, cache.k_scale), (cache.v_pages, cache.v_scale))
            scaled = [(t.float() * s[..., None])[cache.block_table.long()].flatten(1, 2) for t, s in pairs]
        return [(scaled[0][b, :n].to(self.dtype), scaled[1][b, :n].to(self.dtype)) for b, n in enumerate(self.lengths)]


def check_fp8(case: Fp8Case, backend: str) -> None:
    """Assert that out and lse pass the judge's criterion."""
    options: dict[str, Any] = {"sink": case.sinks(), "tree": case.parents(), "bias": case.bias_given(), **case.keywords}
    out, lse = decode(case.straight(), case.cache(), return_lse=True, backend=backend, **options)
    rows = prefill_rows(case)
    wanted = [torch.stack([r[n] for r in rows]) for n in range(4)]
    for name, got, want, low in (("out", out, wanted[0], wanted[2]), ("lse", lse, wanted[1], wanted[3])):
        verdict = judge(name, got, want, low, case.dtype)
        assert verdict.passed, f"{backend}: {verdict}\n{case}"
