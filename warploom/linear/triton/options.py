"""Constants that several kernels take of a variant and a tiling."""

from __future__ import annotations

from warploom.kernels.triton.feature_maps import MAPS
from warploom.linear.triton.call import Variant
from warploom.linear.triton.config import Tiling


def maps(variant: Variant) -> dict[str, int]:
    return {"MAP_Q": MAPS[variant.map_q], "MAP_K": MAPS[variant.map_k]}


def tile(tiling: Tiling) -> dict[str, int]:
    return {"C": tiling.chunk, "STAGES": tiling.stages, "num_warps": tiling.warps}


def kind(variant: Variant) -> dict[str, bool]:
    return {"CAUSAL": variant.causal, "NORMALIZE": variant.normalize}
