"""How sequences are cut, and which variant serves a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from warploom.decode.hopper.config import DecodeConfig


@dataclass(frozen=True)
class Cut:
    """How the keys of every sequence are cut into splits; nothing here depends on the batch or the cache's size."""

    shift: int  # log2 of the splits of a long sequence
    least: int  # keys of a split


def cut(heads_kv: int, row_blocks: int, tile_n: int) -> Cut:
    fill = max(min(FILL // (heads_kv * row_blocks), 128), 4)
    return Cut(fill.bit_length() - 1, max(LEAST, tile_n))


FILL = 128
LEAST = 128


@cache
def config(dtype: torch.dtype, head_dim: int, rows: int, paged: bool, softcap: bool, sink: bool) -> DecodeConfig:
    dim = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    name = "bfloat16" if dtype == torch.bfloat16 else "float16"
    return DecodeConfig(name, dim, 16 if rows <= 16 else 32 if rows <= 32 else 64, paged=paged, softcap=softcap, sink=sink)
