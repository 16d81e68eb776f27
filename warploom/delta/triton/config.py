"""Tiles of the gated delta rule's kernels, by registers and shared memory as compiled for sm_90. None has been timed."""

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
def config(dtype: torch.dtype, e: int, m: int, capability: int) -> Config:
    """The variant for a dtype, the dims of keys and values, and a compute capability (90 for Hopper)."""
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
    # Four warps spill in every walk of 128 dims, up to 128 bytes a thread; dk of one stage does too, 8 bytes.
    return Config(64, 64, Launches(4), Launches(8, 2), Launches(8, 2), Launches(8), Launches(8, 2))


def padded(dim: int) -> int:
    """The smallest power of two that holds dim and is a warpgroup's rows: states narrower than that have no wgmma."""
    return max(64, power_of_two(dim))
