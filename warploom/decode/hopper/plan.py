"""How sequences are cut, and which variant serves a call."""

from __future__ import annotations

from functools import cache

import torch

from warploom.decode.hopper.config import DecodeConfig

LEAST = 4  # tiles of a split


@cache
def config(
    dtype: torch.dtype, head_dim: int, rows: int, page_size: int | None = None, softcap: bool = False, sink: bool = False
) -> DecodeConfig:
    dim = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    name = "bfloat16" if dtype == torch.bfloat16 else "float16"
    paged = page_size is not None
    return DecodeConfig(
        name, dim, 16 if rows <= 16 else 32 if rows <= 32 else 64, paged=paged, box=min(page_size, 16) if paged else 64,
        softcap=softcap, sink=sink,
    )


def cluster(variant: DecodeConfig, pairs: int, processors: int) -> int:
    """Blocks that share a sequence's keys, of so many sequences and key heads: as many as find room at once."""
    return next((size for size in variant.clusters if size * pairs <= processors), variant.clusters[-1])
