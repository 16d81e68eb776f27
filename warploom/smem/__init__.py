"""The shared-memory laboratory: bank conflicts predicted without a GPU, swizzles designed, both proved by counters."""

from warploom.smem.access import ACCESSES, Access, Pattern, access, parse_pattern
from warploom.smem.laid import LaidTile
from warploom.smem.layout import TMA_MODES, Swizzle, Tile, tma_refusals
from warploom.smem.model import Phase, Prediction, predict
from warploom.smem.notation import Layout, parse_layout
from warploom.smem.swizzle import Design, design
from warploom.smem.walk import TileCount, count

__all__ = [
    "ACCESSES",
    "TMA_MODES",
    "Access",
    "Design",
    "LaidTile",
    "Layout",
    "Pattern",
    "Phase",
    "Prediction",
    "Swizzle",
    "Tile",
    "TileCount",
    "access",
    "count",
    "design",
    "parse_layout",
    "parse_pattern",
    "predict",
    "tma_refusals",
]
