"""Column masks: builders of the masks in use, and ColumnMask for any other."""

from warploom.masks.columns import ColumnMask, Mask, ResolvedMask
from warploom.masks.tiles import TileClasses
from warploom.masks.zoo import (
    BidirectionalSpans,
    BlockDiffusion,
    Causal,
    CausalBlockwise,
    Chunked,
    Document,
    Full,
    GlobalWindow,
    Padding,
    PrefixDocument,
    PrefixLM,
    QKSparse,
    RandomEviction,
    SharedQuestion,
    SlidingWindow,
    Tree,
)

__all__ = [
    "BidirectionalSpans",
    "BlockDiffusion",
    "Causal",
    "CausalBlockwise",
    "Chunked",
    "ColumnMask",
    "Document",
    "Full",
    "GlobalWindow",
    "Mask",
    "Padding",
    "PrefixDocument",
    "PrefixLM",
    "QKSparse",
    "RandomEviction",
    "ResolvedMask",
    "SharedQuestion",
    "SlidingWindow",
    "TileClasses",
    "Tree",
]
