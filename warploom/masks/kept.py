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
    """

    __slots__ = ("kind", "prepared", "resolved")

    def __init__(self, resolved: ResolvedMask, lasts: bool) -> None:
        self.resolved = resolved
        self.kind = _kind(resolved)
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
