"""A mask for one pair of lengths, as a mask object remembers it: resolved, and with what callers found out of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from warploom.masks.intervals import ResolvedMask


class Kept:
    """A mask resolved for one pair of lengths, on one stream, with what is found out of it once.

    Attributes:
        kind: all of it but its vectors' contents; None where these are not plain tensors.
        prepared: what others made of the vectors, by keys of theirs; None where nothing may be kept.
        documents: of a mask that is nothing but documents in a row, and a band, where they start: int32 (documents + 1,), as
            cu_seqlens. None: it is not, or does not say.
    """

    __slots__ = ("documents", "kind", "prepared", "resolved")

    def __init__(self, resolved: ResolvedMask, lasts: bool, documents: Tensor | None = None) -> None:
        self.resolved = resolved
        self.documents = documents
        self.kind = _kind(resolved)
        if self.kind is not None and documents is not None:
            self.kind += (documents.shape,)
        self.prepared: dict[Any, Any] | None = {} if lasts and self.kind is not None else None


def _kind(mask: ResolvedMask) -> tuple[Any, ...] | None:
    left, right, lts, lte, uts, ute = mask
    some = lts if lts is not None else ute
    if some is None:
        return left, right
    for t in (lts, lte, uts, ute):
        if t is not None and type(t) is not Tensor:
            return None
    # They have one shape, and are contiguous.
    return left, right, some.shape, some.device, lts is None, lte is None, uts is None, ute is None
