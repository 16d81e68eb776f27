"""Tiles of the linear attention kernels, and when a sequence is cut. Times in docs/lab-notes.md, "Linear attention"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Tiling:
    """Sizes of one kernel variant."""

    chunk: int  # tokens of a chunk
    block: int  # columns of the state that a program holds: of M, in dq and dk of E
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    """The kernels of one width and dtype."""

    forward: Tiling
    state: Tiling
    dq: Tiling
    # dK and dV together where the whole state fits a program's registers, else None and one after the other.
    dkdv: Tiling | None
    dk: Tiling
    dv: Tiling
    # Tokens of a segment where sequences are cut, a multiple of every chunk.
    segment: int = 1024
    # Sequences are cut where fewer programs than this share of the multiprocessors would walk whole ones.
    fill: float = 0.6


def _same(t: Tiling, together: bool) -> Config:
    """One tiling for every kernel."""
    return Config(t, t, t, t if together else None, t, t)


# Measured on an H200, bf16, without maps or normalization unless said, us; see the lab notes.
_HOPPER = {
    64: _same(Tiling(64, 64, 4, 3), together=True),
    128: Config(
        forward=Tiling(64, 128, 8, 3),
        state=Tiling(64, 128, 8, 3),
        dq=Tiling(64, 128, 8, 3),
        dkdv=Tiling(64, 128, 8, 2),
        dk=Tiling(64, 64, 8, 2),
        dv=Tiling(64, 64, 8, 2),
        segment=2048,
    ),
    256: _same(Tiling(64, 64, 8, 2), together=False),
}
# Tensor cores of the generation before (A100), and 99 KiB of shared memory a block (sm_86, sm_89, sm_120). Compiled, not
# timed.
_AMPERE = {
    64: _same(Tiling(64, 64, 4, 2), together=True),
    128: Config(
        forward=Tiling(32, 64, 4, 2),
        state=Tiling(64, 64, 4, 2),
        dq=Tiling(32, 128, 8, 1),
        dkdv=None,
        dk=Tiling(32, 64, 8, 1),
        dv=Tiling(32, 64, 8, 1),
    ),
    256: Config(
        forward=Tiling(32, 32, 8, 1),
        state=Tiling(32, 64, 8, 1),
        dq=Tiling(32, 32, 8, 1),
        dkdv=None,
        dk=Tiling(32, 32, 8, 1),
        dv=Tiling(32, 32, 8, 1),
    ),
}
# fp32 operands are three TF32 products through registers: small tiles.
_FLOAT32 = {
    64: _same(Tiling(32, 64, 4, 2), together=True),
    128: _same(Tiling(32, 64, 8, 1), together=False),
    256: _same(Tiling(16, 32, 8, 1), together=False),
}


@cache
def config(dtype: torch.dtype, e: int, m: int, capability: int) -> Config:
    """The variant for a dtype, the dims of keys and values, and a compute capability (90 for Hopper)."""
    width = next(w for w in (64, 128, 256) if max(e, m) <= w)
    if dtype == torch.float32:
        return _FLOAT32[width]
    return (_HOPPER if 90 <= capability < 120 else _AMPERE)[width]


def padded(dim: int) -> int:
    """The smallest power of two that holds dim and is a warpgroup's rows: states narrower than that have no wgmma."""
    return max(64, 1 << (dim - 1).bit_length())
