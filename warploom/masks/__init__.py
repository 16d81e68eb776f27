"""Column masks: builders of the masks in use, and ColumnMask for any other."""

from warploom.masks.columns import ColumnMask, Mask, ResolvedMask
from warploom.masks.tiles import TileClasses
from warploom.masks.zoo import (
    Causal,
    Chunked,
    Document,
    Full,
    Padding,
    PrefixDocument,
    PrefixLM,
    SlidingWindow,
)

__all__ = [
    "Causal",
    "Chunked",
    "ColumnMask",
    "Document",
    "Full",
    "Mask",
    "Padding",
    "PrefixDocument",
    "PrefixLM",
    "ResolvedMask",
    "SlidingWindow",
    "TileClasses",
]
