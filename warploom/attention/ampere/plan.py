"""Which variant serves a call, and the named set that `warploom build` prepares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from warploom.attention.ampere.config import ForwardConfig
from warploom.attention.features import Features

if TYPE_CHECKING:
    from warploom.attention.problem import AttentionProblem

DTYPES = (torch.float16, torch.bfloat16)
# Compute capability -> what it compiles for. Code for 8.0 runs on all of 8.x; Hopper runs it to show what Hopper's own gains.
ARCHS = {(8, 0): "sm_80", (8, 6): "sm_80", (8, 7): "sm_80", (8, 9): "sm_80", (9, 0): "sm_90a"}
SMALL = ((8, 6), (8, 9))  # 100 KiB of shared memory a multiprocessor instead of 164 or more


@dataclass(frozen=True)
class Tiling:
    """Shape of the work of a block; docs/smem.md has the measurements."""

    tile_n: int
    softcap: int  # tile_n under a softcap, which costs registers
    warps: int = 4
    atoms: int = 2
    blocks: int = 2
    q_registers: bool = False


# head_dim of the tile -> tiling: of 32 rows a warp, as 16 would read K and V from shared memory twice as often. Two blocks
# of four warps run a multiprocessor's tensor cores and special function units at once better than one of eight.
TILINGS = {
    "sm_80": {64: Tiling(64, 64, q_registers=True), 128: Tiling(48, 32)},  # two blocks of 80 KiB fit 164
    # Reasoned, not measured.
    "small": {64: Tiling(64, 64, q_registers=True), 128: Tiling(48, 48, warps=8, atoms=1, blocks=1, q_registers=True)},
    "sm_90a": {64: Tiling(64, 64, q_registers=True), 128: Tiling(48, 32)},
}


def tile_dim(head_dim: int, head_dim_v: int) -> int:
    """The smallest tile that holds both head dims: rounded here and nowhere else."""
    return 64 if max(head_dim, head_dim_v) <= 64 else 128


@cache
def config(capability: tuple[int, int], features: Features) -> ForwardConfig:
    """The variant for a call's features on a device of this compute capability."""
    dim = tile_dim(features.head_dim, features.head_dim_v)
    arch = ARCHS[capability]
    tiling = TILINGS["small" if capability in SMALL else arch][dim]
    return ForwardConfig(
        features.dtype_name,
        dim,
        tiling.softcap if features.softcap else tiling.tile_n,
        warps=tiling.warps,
        atoms=tiling.atoms,
        blocks=tiling.blocks,
        q_registers=tiling.q_registers,
        arch=arch,
        **features.flags(ForwardConfig),
    )


def config_for(problem: AttentionProblem, capability: tuple[int, int]) -> ForwardConfig:
    """The variant that runs a problem."""
    return config(capability, Features.of(problem))


def named_set(capability: tuple[int, int] = (8, 0)) -> list[ForwardConfig]:
    """The variants that `warploom build` prepares for a device: any band, with at most one of softcap and sink."""
    flags = (False, True)
    extras: tuple[dict[str, Any], ...] = ({}, {"sink": True}, {"softcap": True})
    found: dict[ForwardConfig, None] = {}
    for extra, dim, right, left, dtype in product(extras, (64, 128), flags, flags, DTYPES):
        found[config(capability, Features(dtype, dim, dim, right, left, **extra))] = None
    return list(found)
