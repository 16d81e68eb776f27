"""Builders of the masks in use, each a `Mask`; their vectors are derived in the user page docs/masks.md."""

from warploom.masks.zoo.bands import Causal, Chunked, Full, Padding, SlidingWindow
from warploom.masks.zoo.documents import Document, PrefixDocument
from warploom.masks.zoo.prefixes import PrefixLM

__all__ = ["Causal", "Chunked", "Document", "Full", "Padding", "PrefixDocument", "PrefixLM", "SlidingWindow"]
