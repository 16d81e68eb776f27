"""Builders of the masks in use, each a `Mask`; their vectors are listed in the user page docs/masks.md."""

from warploom.masks.zoo.bands import Causal, Chunked, Full, Padding, SlidingWindow
from warploom.masks.zoo.branches import CausalBlockwise, SharedQuestion, Tree
from warploom.masks.zoo.documents import Document, PrefixDocument
from warploom.masks.zoo.prefixes import BidirectionalSpans, PrefixLM
from warploom.masks.zoo.sparse import BlockDiffusion, GlobalWindow, QKSparse, RandomEviction

__all__ = [
    "BidirectionalSpans",
    "BlockDiffusion",
    "Causal",
    "CausalBlockwise",
    "Chunked",
    "Document",
    "Full",
    "GlobalWindow",
    "Padding",
    "PrefixDocument",
    "PrefixLM",
    "QKSparse",
    "RandomEviction",
    "SharedQuestion",
    "SlidingWindow",
    "Tree",
]
