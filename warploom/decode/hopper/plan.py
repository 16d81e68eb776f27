"""How sequences are cut, and which variant serves a call."""

from __future__ import annotations

from functools import cache

import torch

from warploom.decode.hopper.config import DecodeConfig

LEAST = 4  # tiles of a split
ALONE = 96  # pairs


@cache
def config(dtype: torch.dtype, head_dim: int, rows: int, paged: bool, softcap: bool, sink: bool) -> DecodeConfig:
    dim = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    name = "bfloat16" if dtype == torch.bfloat16 else "float16"
    return DecodeConfig(name, dim, 16 if rows <= 16 else 32 if rows <= 32 else 64, paged=paged, softcap=softcap, sink=sink)
