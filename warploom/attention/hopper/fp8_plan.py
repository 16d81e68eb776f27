"""Which calls of FP8 numbers have a kernel, which variant serves one, and the named set that `warploom build` prepares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from warploom.attention.features import Features
from warploom.attention.hopper.fp8_config import Fp8ForwardConfig
from warploom.attention.hopper.plan import BANDS

if TYPE_CHECKING:
    from warploom.attention.problem import AttentionProblem

OUT_DTYPES = (torch.bfloat16, torch.float16)
STEP = 16  # of head dims: TMA steps by 16 bytes
MOST_KEYS = (1 << 24) - 256  # tokens of k, which the views of packed sequences reach with what they round up


@dataclass(frozen=True)
class Fp8Tiling:
    """How calls of one tile's head dims run: 64 query rows a warpgroup by 128 keys, in ping-pong."""

    warpgroups: int
    stages: int
    overlap: bool = False  # of calls without a softcap, and sums of two levels without a window, which need the registers
    pv_columns: int = 0


# (head_dim, head_dim_v) of the tile, smaller head dims run in the next larger one. 16384 keys full and causal, TFLOP/s:
TILINGS = {
    (64, 64): Fp8Tiling(3, 4, overlap=True),  # 643 and 629 on an H100; without overlap 604 and 598 on an H200
    (96, 96): Fp8Tiling(3, 4),  # not timed, nor are 192 columns: fewer products than in the next larger tile
    (128, 128): Fp8Tiling(3, 3),  # 1034 and 1003 under a load that leaves 1.8 GHz; two warpgroups with overlap 859 and 945
    (192, 192): Fp8Tiling(2, 3, pv_columns=96),
    (256, 256): Fp8Tiling(2, 2, pv_columns=128),  # 1252 and 1198
}


def problem_refusal(problem: AttentionProblem) -> str | None:
    """What keeps a call of FP8 numbers from the kernel, by its shapes and features, or None."""
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not STEP <= dim <= 256 or dim % STEP:
            return f"takes FP8 with {name} from {STEP} to 256 in steps of {STEP}, not {dim}"
    if problem.layout == "paged" or problem.q_offset:
        return "takes no FP8 in pages, or with query offsets"
    if problem.batch_invariant:
        return "promises no batch invariance in FP8"
    packed_mask = problem.columns and problem.layout != "dense"
    for there, what in ((packed_mask, "a packed column mask"), (problem.dropout, "dropout"), (problem.bias, "a bias")):
        if there:
            return f"has no FP8 kernel with {what}"
    return None


def tile_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The smallest tile that holds both head dims."""
    return next(dims for dims in sorted(TILINGS) if dims[0] >= head_dim and dims[1] >= head_dim_v)


@cache
def fp8_config(features: Features, out: torch.dtype, fast: bool = False) -> Fp8ForwardConfig:
    """The variant for a call's features and the dtype of its result; ``fast``: sums of one level."""
    dims = tile_dims(features.head_dim, features.head_dim_v)
    tiling = TILINGS[dims]
    return Fp8ForwardConfig(
        str(out).removeprefix("torch."),
        *dims,
        128,
        warpgroups=tiling.warpgroups,
        stages=tiling.stages,
        pv_wait="pingpong",
        split=not (features.varlen or features.columns),
        overlap=tiling.overlap and not (features.softcap or (features.left and not fast)),
        pv_columns=0 if fast else tiling.pv_columns,
        fast=fast,
        **features.flags(Fp8ForwardConfig),
    )


def fp8_set() -> list[Fp8ForwardConfig]:
    """The variants that `warploom build` prepares, in bf16, of usual head dims.

    Full, causal and windows, dense, packed or under a column mask.
    """
    e4m3 = torch.float8_e4m3fn
    extras: tuple[dict[str, Any], ...] = ({}, {"varlen": True}, {"columns": True})
    return [
        fp8_config(Features(e4m3, dim, dim, **extra | band), torch.bfloat16)
        for dim, extra, band in product((64, 128, 256), extras, BANDS)
    ]
