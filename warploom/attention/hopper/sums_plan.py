"""Which variant sums a call's columns, and the named set that `warploom build` prepares."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from warploom.attention.features import Features
from warploom.attention.hopper.sums_config import SumsConfig
from warploom.attention.problem import halves_refusal

if TYPE_CHECKING:
    from warploom.attention.problem import AttentionProblem

# By head_dim of the tile; smaller ones run in the next larger one by TMA bounds. At 64 the special function units are the
# limit, and a quarter of the exponentials are polynomials; at 128 the tensor cores are about as much.
TILES: dict[int, dict[str, Any]] = {
    64: {"share": 4},
    96: {"share": 3},
    128: {"k_slots": 3, "stages": 3, "share": 2},
    192: {"chunk": 64, "k_slots": 3, "stages": 3},
    256: {"chunk": 64, "k_slots": 2, "stages": 2},
}
DTYPES = (torch.float16, torch.bfloat16)
NAMED_DIMS = (64, 128)


def sums_dim(head_dim: int) -> int:
    """The smallest tile that holds a head dim."""
    return next(dim for dim in TILES if dim >= head_dim)


@cache
def sums_config(features: Features) -> SumsConfig:
    """The variant of a call's features."""
    head_dim = sums_dim(features.head_dim)
    tile = dict(TILES[head_dim])
    if features.left and head_dim == 128:  # whose limits need registers too
        tile["chunk"] = 96
    if features.softcap:  # whose exponentials are not shared out
        tile.pop("share", None)
    return SumsConfig(features.dtype_name, head_dim, **tile, **_flags(features))


def _flags(features: Features) -> dict[str, Any]:
    return {name: getattr(features, name) for name in ("right", "left", "softcap")}


def sums_refusal(problem: AttentionProblem) -> str | None:
    """What of a problem the kernel does not take, in words that follow the implementation's name, or None."""
    refused = halves_refusal(problem, widest=256)
    if refused is not None:
        return refused
    for present, name in (
        (problem.layout != "dense", "packed calls"),
        (problem.columns, "column masks"),
        (problem.bias, "biases"),
        (problem.q_offset, "query offsets"),
    ):
        if present:
            return f"has no column sums under {name}"
    return None


def sums_set() -> list[SumsConfig]:
    """The variants that `warploom build` prepares: full and causal calls without a softcap."""
    return [
        sums_config(Features(dtype, dim, dim, right=right)) for dtype, dim, right in product(DTYPES, NAMED_DIMS, (False, True))
    ]
