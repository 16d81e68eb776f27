"""Tiles of the linear attention kernels, and when a sequence is cut. Times are in docs/lab-notes/linear-triton.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from warploom.kernels.triton.widths import power_of_two


@dataclass(frozen=True)
class Tiling:
    """Sizes of one kernel variant."""

    chunk: int  # tokens of a chunk
    block: int  # columns of the state that a program holds: of M, in dq and dk of E
    warps: int
    stages: int
    columns: bool = False  # dq: z in sixteen columns, for want of registers


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
    # dK and dV together are programs of their own in one launch, each with a block of the state.
    paired: bool = False
    # Tokens of a segment where sequences are cut, a multiple of every chunk.
    segment: int = 1024
    # Sequences are cut where fewer programs than this share of the multiprocessors would walk whole ones.
    fill: float = 0.6
    # Tokens from which on sequences are cut in any case: tensor cores add to an accumulator by truncation, which lowers a
    # state by 5e-9 of itself a token (3e-4 after 64k, on an H200); sums over segments are rounded.
    longest: int = 16384
    # Segments find the states before them by looking back, not in launches of their own; they are so many times as long where
    # that leaves enough for the device.
    lookback: bool = True
    coarse: int = 1
    # With a decay: rows and columns of tokens by tokens are weighed apart, in place of every pair; sums of its logs
    # are single fp32 numbers, and operands pass fp16's range. Chunks of all kernels are then equal.
    by_rows: bool = False


def _same(t: Tiling, together: bool) -> Config:
    """One tiling for every kernel."""
    return Config(t, t, t, t if together else None, t, t)


# Measured on an H100, bf16, us; forward and backward of each were held against fp64 there. See docs/lab-notes/linear-triton.md.
def _hopper(width: int, normalize: bool, mapped: bool) -> Config:
    if width == 64:
        # A fourth chunk in flight: 45 against 48 at 8 × 16 heads of 2048 tokens, with a denominator 48 against 52. A map takes
        # its registers, and the room for a second program a multiprocessor.
        flat, deep = Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 4)
        return Config(
            forward=flat if mapped else deep,
            state=flat,
            # z in rows spills: 69 against 62 at 8 × 16 heads of 2048 tokens.
            dq=replace(flat, columns=not mapped) if normalize else flat if mapped else deep,
            # With a denominator one program has too few registers: at 8 × 16 heads of 2048 tokens 112 with four warps, 98 with
            # eight, 91 in pairs of four. The slope of a map takes more: 117 with eight, 153 in pairs.
            dkdv=Tiling(64, 64, 8, 3) if normalize and mapped else flat,
            dk=flat,
            dv=flat,
            paired=normalize and not mapped,
            # Twice as long, 81 against 96 at 16 heads of 16384 tokens: fewer states to wait for.
            coarse=2,
        )
    if width == 128:
        deep, flat = Tiling(64, 128, 8, 3), Tiling(64, 128, 8, 2)
        return Config(
            forward=deep,
            state=deep,
            # z in rows spills: 535 against 460 at 4 × 32 heads of 8192 tokens.
            dq=replace(deep, columns=normalize and not mapped),
            # With a denominator the two together have too few registers, 883 against 790 in two launches at 4 × 32 heads of
            # 8192 tokens; without they read less, 689 against 719.
            dkdv=None if normalize else flat,
            dk=deep,
            dv=deep,
            segment=2048,
        )
    return _same(Tiling(64, 64, 8, 2), together=False)


# With a decay, weighed by rows: tilings without one, but where what is left for the logs' gradient takes registers and room.
def _hopper_decay(width: int, normalize: bool, mapped: bool, logs_grad: bool) -> Config:
    plain = replace(_hopper(width, normalize, mapped), by_rows=True)
    if width == 64 and logs_grad:
        # With four warps dK and dV spill 82 words in a chunk's turn, and three chunks in flight leave room for one program.
        return replace(plain, dq=replace(plain.dq, stages=3), dkdv=Tiling(64, 64, 8, 3), paired=False)
    if width == 128:
        # dK and dV apart, 1063 us against 1106 at 4 × 32 heads of 8192 tokens. For the gradient of the logs, blocks of 64
        # columns: 2370 us against 3073 with 128, which spill.
        plain, narrow = replace(plain, dkdv=None), Tiling(64, 64, 8, 3)
        return replace(plain, dq=replace(narrow, columns=plain.dq.columns), dk=narrow) if logs_grad else plain
    if logs_grad:
        return replace(plain, dq=replace(plain.dq, stages=1), dk=replace(plain.dk, stages=1))
    return plain


# Elsewhere pairs are weighed, whose weights take registers and room beside the state.
def _hopper_pairs(width: int) -> Config:
    if width == 64:
        # 66 us against 75 with eight warps, 8 × 16 heads of 2048 tokens.
        deep, flat = Tiling(64, 64, 4, 3), Tiling(64, 64, 8, 2)
        # One program has too few registers for dK and dV: it spilled 216 bytes a thread, in pairs 56.
        return Config(deep, deep, flat, flat, flat, flat, paired=True, lookback=False)
    if width == 128:
        # 569 us against 942 in blocks of 64 columns and 627 with two stages, 4 × 32 heads of 8192 tokens.
        deep = Tiling(64, 128, 8, 3)
        return replace(_same(Tiling(64, 64, 8, 2), together=False), forward=deep, state=deep, lookback=False)
    return replace(_same(Tiling(64, 64, 8, 1), together=False), lookback=False)


def _unstaged(c: Config) -> Config:
    """The same without chunks in flight: what fades takes their room in shared memory."""
    once = [replace(t, stages=1) for t in (c.forward, c.state, c.dq, c.dk, c.dv)]
    together = None if c.dkdv is None else replace(c.dkdv, stages=1)
    return Config(once[0], once[1], once[2], together, once[3], once[4], lookback=False)


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
def config(
    dtype: torch.dtype,
    e: int,
    m: int,
    capability: int,
    normalize: bool,
    mapped: bool,
    decay: bool = False,
    logs_grad: bool = False,
    by_rows: bool = True,
) -> Config:
    """The variant for a dtype, dims of keys and values, a compute capability (90 for Hopper), a denominator, a map, a decay.

    ``logs_grad``: the decay's logs have a gradient; what the forward pass has does not depend on it. ``by_rows``: of a decay
    rows may be weighed, in place of pairs.
    """
    width = next(w for w in (64, 128, 256) if max(e, m) <= w)
    if dtype == torch.float32:
        return _unstaged(_FLOAT32[width]) if decay else _FLOAT32[width]
    if 90 <= capability < 120 and decay:
        rows = by_rows and dtype == torch.bfloat16
        return _hopper_decay(width, normalize, mapped, logs_grad) if rows else _hopper_pairs(width)
    if 90 <= capability < 120:
        return _hopper(width, normalize, mapped)
    return _unstaged(_AMPERE[width]) if decay else _AMPERE[width]


def padded(dim: int) -> int:
    """The smallest power of two that holds dim and is a warpgroup's rows: states narrower than that have no wgmma."""
    return max(64, power_of_two(dim))
