"""Combining masks: `Mask`, which adds `&` and `|` to `BaseMask`, and what they make where no simpler mask serves."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.masks import intervals as iv
from warploom.masks.arguments import describe
from warploom.masks.base import BaseMask
from warploom.masks.intervals import ResolvedMask
from warploom.masks.overlap import overlap
from warploom.masks.united import united


class Mask(BaseMask):
    """The base of every mask: a description, which resolves to a band and column intervals once lengths are known.

    Masks are immutable, hold tensors on any device, are pytree nodes, move with `.to(device)`, intersect with `&`
    and unite with `|`. A tensor that a mask was built from may be changed in place: the next call sees the new values.
    """

    def __and__(self, other: Mask) -> Mask:
        """What both masks show; two bands give a band, and column intervals unite.

        Raises:
            ValueError: a column would need more than two intervals; raised here, or later once the lengths are known.
        """
        if not _is_mask("&", other):
            return NotImplemented
        plainer = self._and(other)
        if plainer is None:
            plainer = other._and(self)
        return Intersection(self, other) if plainer is None else plainer

    def _and(self, other: Mask) -> Mask | None:
        """What both masks show, or None where this kind of mask cannot tell without lengths; their order does not matter."""
        return None

    def __or__(self, other: Mask) -> Mask:
        """What either mask shows; two bands that meet give a band.

        Raises:
            ValueError: once the lengths are known, a column would need more than two intervals.
        """
        if not _is_mask("|", other):
            return NotImplemented
        plainer = self._or(other)
        if plainer is None:
            plainer = other._or(self)
        return Union(self, other) if plainer is None else plainer

    def _or(self, other: Mask) -> Mask | None:
        """What either mask shows, or None where this kind of mask cannot tell without lengths; their order does not matter."""
        return None


def _is_mask(operator: str, other: object) -> bool:
    if isinstance(other, Tensor):
        raise TypeError(
            f"{operator} takes another mask, got {describe(other)}; turn a dense mask into one with ColumnMask.from_dense"
        )
    return isinstance(other, Mask)


class _Pair(Mask):
    """Two masks whose columns are known once the lengths are."""

    _fields = ("a", "b")
    _verb = ""

    def __init__(self, a: Mask, b: Mask) -> None:
        self.a, self.b = a, b

    def _extent(self) -> int | None:
        extent = self.a._extent()
        return self.b._extent() if extent is None else extent

    def _resolve_both(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> tuple[ResolvedMask, ResolvedMask]:
        a, b = (m._resolve(seqlen_q, seqlen_k, device) for m in (self.a, self.b))
        check_broadcast(self._verb, self, [t for r in (a, b) for t in r.vectors if t is not None])
        return a, b


class Intersection(_Pair):
    """What `a & b` shows."""

    _verb = "intersect"

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        a, b = self._resolve_both(seqlen_q, seqlen_k, device)
        band = iv.intersect_bands((a.left, a.right), (b.left, b.right))
        return united(self, band, iv.intervals_of(a) + iv.intervals_of(b), seqlen_q, seqlen_k, any_band=True)

    def __repr__(self) -> str:
        a, b = (f"({m!r})" if isinstance(m, Union) else repr(m) for m in (self.a, self.b))
        return f"{a} & {b}"


class Union(_Pair):
    """What `a | b` shows."""

    _verb = "unite"

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        a, b = self._resolve_both(seqlen_q, seqlen_k, device)
        return overlap(self, a, b, seqlen_q, seqlen_k, device)

    def __repr__(self) -> str:
        return f"{self.a!r} | {self.b!r}"


def check_broadcast(verb: str, mask: Mask, vectors: list[Tensor]) -> None:
    """ValueError where the two masks' batch entries or heads differ in number."""
    if torch.compiler.is_compiling():
        return  # broadcasting itself will tell, and symbolic sizes stay symbolic
    for dim, what in ((0, "batch entries"), (1, "heads")):
        sizes = sorted({int(t.shape[dim]) for t in vectors} - {1})
        if len(sizes) > 1:
            if what == "heads" and all(sizes[-1] % size == 0 for size in sizes):
                continue  # of key heads and of query heads
            raise ValueError(f"cannot {verb} masks of {sizes[0]} and {sizes[-1]} {what}: {mask!r}")
