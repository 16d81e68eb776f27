"""The shapes of the decode suite, their inputs, and the check of a result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from warploom import KVCache, PagedKVCache
from warploom.bench.reference import distance

FURTHEST, FURTHEST_FP8 = 1e-2, 0.08  # e4m3 keys and values of normal numbers are 0.04 away (docs/decode.md)


@dataclass(frozen=True)
class Shape:
    batch: int
    keys: int
    heads: int
    heads_kv: int
    head_dim: int = 128
    queries: int = 1

    @property
    def name(self) -> str:
        keys = f"{self.keys // 1024}k" if self.keys % 1024 == 0 else str(self.keys)
        dim = "" if self.head_dim == 128 else f" D{self.head_dim}"
        return f"B{self.batch} KV{keys} {self.heads}/{self.heads_kv}{dim}" + (
            f", {self.queries} queries" if self.queries > 1 else ""
        )

    @property
    def numbers(self) -> int:
        """Of keys and values."""
        return 2 * self.batch * self.keys * self.heads_kv * self.head_dim

    def draw(self, device: torch.device) -> tuple[Tensor, KVCache]:
        """Queries, and a cache that is full."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        q = torch.randn(self.batch, self.queries, self.heads, self.head_dim, device=device, dtype=dtype)
        held = (self.batch, self.keys, self.heads_kv, self.head_dim)
        k, v = (torch.randn(held, device=device, dtype=dtype) for _ in range(2))
        return q, KVCache(k, v, torch.full((self.batch,), self.keys, dtype=torch.int32, device=device))


# One query a sequence and more; what a serving machine sees, from one user to a full batch, and models' heads.
SHAPES = (
    *(Shape(1, keys, 32, 8) for keys in (2048, 4000, 4096, 8192, 16384, 65536, 131072)),
    *(Shape(4, keys, 32, 8) for keys in (1024, 8192, 32768)),
    *(Shape(16, keys, 32, 8) for keys in (1024, 8192, 32768)),
    *(Shape(32, keys, 40, 8) for keys in (4096,)),
    *(Shape(64, keys, 32, 8) for keys in (1024, 4096)),
    *(Shape(128, keys, 32, 8) for keys in (1024, 8192)),
    *(Shape(batch, keys, 8, 1) for batch, keys in ((1, 8192), (16, 8192), (128, 32768))),
    *(Shape(batch, keys, 64, 1) for batch, keys in ((2, 16384), (16, 4096), (64, 8192))),
    *(Shape(batch, keys, 16, 2) for batch, keys in ((1, 16384), (8, 8192))),
    *(Shape(batch, keys, 40, 8) for batch, keys in ((1, 8192), (4, 16384))),
    Shape(8, 32768, 64, 8),
    *(Shape(batch, keys, 32, 8, 64) for batch, keys in ((1, 8192), (16, 8192))),
    Shape(8, 8192, 16, 2, 64),
    *(Shape(batch, keys, 16, 8, 256) for batch, keys in ((1, 8192), (4, 8192), (16, 8192))),
    Shape(4, 8192, 32, 8, queries=4),
)
# FP8 caches beside bf16.
FP8_SHAPES = tuple(
    Shape(batch, keys, heads, 8, head_dim)
    for batch, keys in ((1, 65536), (16, 8192))
    for heads, head_dim in ((32, 128), (16, 256))
)
# Of latent caches with DeepSeek's 576 columns, the first 512 of them values: batch, keys, query heads.
LATENT_SHAPES = ((1, 8192, 128), (64, 4096, 128), (1, 65536, 128), (1, 8192, 16), (64, 8192, 16))
LATENT, ROTATED, LATENT_SCALE = 512, 64, 192**-0.5  # 192: the key's columns before its projection is absorbed
# Chunks of prompts over pages: batch, queries, keys with them.
PREFILL_SHAPES = ((1, 512, 16384), (16, 16, 8192), (1, 1024, 16384), (4, 2048, 8192))


def latent_inputs(batch: int, keys: int, heads: int, latent: int, rotated: int, device: torch.device) -> tuple[Tensor, KVCache]:
    """Queries and a full latent cache."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(batch, 1, heads, latent + rotated, device=device, dtype=dtype)
    k = torch.randn(batch, keys, 1, latent + rotated, device=device, dtype=dtype)
    return q, KVCache(k, k[..., :latent], torch.full((batch,), keys, dtype=torch.int32, device=device))


def in_pages(cache: KVCache, page_size: int) -> PagedKVCache:
    """The same keys in pages of random order; a latent cache's pages are latent."""
    batch, keys = cache.k.shape[:2]
    order = torch.randperm(batch * keys // page_size, device=cache.k.device)
    table = order.view(batch, -1).int()

    def paged(t: Tensor) -> Tensor:
        pages = torch.empty((len(order), page_size, *t.shape[2:]), device=t.device, dtype=t.dtype)
        pages[order] = t.view(-1, page_size, *t.shape[2:])
        return pages

    k = paged(cache.k)
    v = k[..., : cache.v.shape[3]] if cache.latent else paged(cache.v)
    return PagedKVCache(k, v, table, cache.lengths)


def check(q: Tensor, cache: KVCache, out: Tensor, furthest: float = FURTHEST, scale: float | None = None) -> float:
    """The largest error over some sequences, against fp32 arithmetic; query t of T sees all but the last T - 1 - t keys."""
    errors = []
    queries = q.shape[1]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    for b in sorted({0, q.shape[0] // 2, q.shape[0] - 1}):
        length = int(cache.lengths[b])
        k, v = (t[b, :length].float() for t in (cache.k, cache.v))
        rows = q[b].float().unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("thgd,nhd->thgn", rows, k) * scale
        seen = torch.ones(queries, length, dtype=torch.bool, device=q.device).tril(length - queries)
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        want = torch.einsum("thgn,nhd->thgd", weights, v).flatten(1, 2)
        errors.append(distance("out", out[b], want, furthest))
    return max(errors)
