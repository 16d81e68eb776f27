"""Tiles of the gated delta rule's kernels. Times are in docs/lab-notes/delta-triton.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from warploom.kernels.triton.widths import power_of_two


@dataclass(frozen=True)
class Launches:
    """Warps and stages of one kernel."""

    warps: int
    stages: int = 1


@dataclass(frozen=True)
class Config:
    """The kernels of one width and dtype."""

    chunk: int  # tokens: 16, 32 or 64
    block: int  # value columns that a program holds of a state
    prepare: Launches
    walk: Launches
    back: Launches
    dq: Launches
    dk: Launches


@cache
def config(dtype: torch.dtype, e: int, m: int, capability: int, backward: bool) -> Config:
    """The variant for a dtype, the dims of keys and values, a compute capability (90 for Hopper) and a pass."""
    if dtype == torch.float32:
        # Operands are three TF32 products through registers: at 128 dims chunks of 32 spill 0.6 to 2 KB a thread, of 16 0.4.
        chunk = 32 if max(e, m) <= 64 else 16
        return Config(chunk, 32, Launches(8), Launches(4), Launches(4), Launches(8), Launches(8))
    if not 90 <= capability < 120:
        # 99 KiB of shared memory a block (sm_86, sm_89, sm_120).
        return Config(32 if e <= 128 else 16, 32, Launches(4), Launches(4), Launches(4), Launches(8), Launches(8))
    if e > 128:
        # dk of 256 dims spills 9 KB a thread with eight warps, 1.6 KB with sixteen.
        return Config(32, 64, Launches(4), Launches(8), Launches(8), Launches(8), Launches(16))
    # H200, bf16, 128 dims. Forward, 16/64 heads, 1 × 32k and 4 × 8k tokens: 2.8 and 2.4 ms; in chunks of 64 the walk takes 1.4
    # in place of 1.5, but what is prepared 2.5 in place of 1.2. Backward, 16/32 heads, 8k: 2.3 ms, in chunks of 32 2.8.
    if not backward:
        return Config(32, 64, Launches(2), Launches(4, 3), Launches(4, 3), Launches(4, 2), Launches(4, 2))
    return Config(64, 32, Launches(4), Launches(4, 2), Launches(4, 2), Launches(8, 3), Launches(8, 3))


def padded(dim: int) -> int:
    """The smallest power of two that holds dim and is a warpgroup's rows: states narrower than that have no wgmma."""
    return max(64, power_of_two(dim))
