"""Tiles of the linear attention kernels, and when a sequence is cut. Times in docs/lab-notes.md, "Linear attention"."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    # Tokens from which on sequences are cut in any case: tensor cores add to an accumulator by truncation, which lowers a
    # state by 5e-9 of itself a token (3e-4 after 64k, on an H200); sums over segments are rounded.
    longest: int = 16384


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


# With a denominator dK and dV of 64 columns need more registers (116 us against 175 at 8 × 16 heads of 2048 tokens), and of
# 128 columns more than there are (1173 us against 1319 in one launch at 4 × 32 heads of 8192).
_HOPPER_NORMALIZED = {
    **_HOPPER,
    64: replace(_HOPPER[64], dkdv=Tiling(64, 64, 8, 3)),
    128: replace(_HOPPER[128], dkdv=None, dk=Tiling(64, 128, 8, 2), dv=Tiling(64, 128, 8, 2)),
}


@cache
def config(dtype: torch.dtype, e: int, m: int, capability: int, normalize: bool) -> Config:
    """The variant for a dtype, the dims of keys and values, a compute capability (90 for Hopper) and a denominator or none."""
    width = next(w for w in (64, 128, 256) if max(e, m) <= w)
    if dtype == torch.float32:
        return _FLOAT32[width]
    if 90 <= capability < 120:
        return (_HOPPER_NORMALIZED if normalize else _HOPPER)[width]
    return _AMPERE[width]


def padded(dim: int) -> int:
    """The smallest power of two that holds dim and is a warpgroup's rows: states narrower than that have no wgmma."""
    return max(64, 1 << (dim - 1).bit_length())
