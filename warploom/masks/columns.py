"""Column masks: each key column hides at most two intervals of query rows, besides a band around the diagonal.

The representation is FlashMask's (arXiv 2410.01359). It takes O(seqlen) memory where a dense mask takes O(seqlen^2), and
a few comparisons tell which tiles to skip and which to leave unmasked. Builders of common masks are in
`warploom.masks.zoo`; all share the base class `Mask`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warploom.masks import intervals as iv
from warploom.masks.arguments import boolean, describe, saturated, strided, summary, with_values
from warploom.masks.base import rebuild
from warploom.masks.intersect import Intersection, Mask, check_broadcast
from warploom.masks.intervals import ResolvedMask, finish
from warploom.masks.united import united
from warploom.masks.zoo.bands import Band
from warploom.runtime.arguments import INTEGERS

__all__ = ["ColumnMask", "Mask", "ResolvedMask"]


class ColumnMask(Mask):
    """A mask given by its vectors: key column j hides query rows [lts_j, lte_j) and [uts_j, ute_j).

    Rows are those of the call the mask is used in, never shifted; values outside [0, seqlen_q] act as if
    clamped to it.

    Args:
        lts: int32 (batch|1, heads|1, seqlen_k), or (seqlen_k,); first hidden row of the lower interval. None:
            no lower interval. Vectors of another integer dtype are copied to int32, whose limits stand for values past them.
        lte: its end, exclusive; None: seqlen_q.
        uts: first hidden row of the upper interval; None: row 0.
        ute: its end, exclusive; None: no upper interval.
        causal: adds the bottom-right aligned causal band, key j <= i + seqlen_k - seqlen_q.

    Raises:
        TypeError, ValueError: a vector of another dtype, rank, length or device, or one half of an interval.
    """

    _fields = ("lts", "lte", "uts", "ute", "left", "right")

    def __init__(
        self,
        lts: Tensor | None,
        lte: Tensor | None = None,
        uts: Tensor | None = None,
        ute: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> None:
        if lts is None and lte is not None:
            raise ValueError("lte ends the interval that lts begins: give lts too")
        if ute is None and uts is not None:
            raise ValueError("uts begins the interval that ute ends: give ute too")
        if lts is None and ute is None:
            raise ValueError("ColumnMask takes lts, ute or both; without any, use Full() or Causal()")
        causal = boolean("causal", causal)
        self.lts, self.lte = _vector("lts", lts), _vector("lte", lte)
        self.uts, self.ute = _vector("uts", uts), _vector("ute", ute)
        self.left: int | None = None
        self.right: int | None = 0 if causal else None
        given = {name: getattr(self, name) for name in ("lts", "lte", "uts", "ute") if getattr(self, name) is not None}
        (first, head), *rest = given.items()
        for name, vector in rest:
            if vector.device != head.device:
                raise ValueError(f"{name} is on {vector.device} but {first} is on {head.device}")
            sizes = list(zip(vector.shape, head.shape, strict=True))
            if sizes[2][0] != sizes[2][1] or any(a != b and 1 not in (a, b) for a, b in sizes[:2]):
                raise ValueError(
                    f"{name} has shape {tuple(vector.shape)} but {first} has {tuple(head.shape)}; both are "
                    "(batch|1, heads|1, seqlen_k)"
                )

    @property
    def causal(self) -> bool:
        """Whether the band is exactly causal."""
        return self.left is None and self.right == 0

    @classmethod
    def from_startend_row_indices(cls, startend_row_indices: Tensor, causal: bool) -> ColumnMask:
        """From Paddle's flashmask_attention bounds: int32 (batch|1, heads|1, seqlen_k, n).

        causal: n=1 is LTS, n=2 is LTS, LTE. Not causal: n=2 is LTS, UTE, n=4 is LTS, LTE, UTS, UTE.
        """
        t, causal = startend_row_indices, boolean("causal", causal)
        if not isinstance(t, Tensor) or t.ndim != 4:
            raise ValueError(f"startend_row_indices takes an int32 tensor (batch, heads, seqlen_k, n), got {describe(t)}")
        with_values("startend_row_indices", strided("startend_row_indices", t))
        n = t.shape[-1]
        vectors = [t[..., i] for i in range(n)]
        if causal and n in (1, 2):
            return cls(*vectors, causal=True)
        if not causal and n == 2:
            return cls(vectors[0], ute=vectors[1])
        if not causal and n == 4:
            return cls(*vectors)
        raise ValueError(
            f"startend_row_indices has n={n}, causal={causal}; causal takes n=1 (LTS) or 2 (LTS, LTE); else "
            "n=2 (LTS, UTE) or 4 (LTS, LTE, UTS, UTE)"
        )

    @classmethod
    def from_dense(cls, visible: Tensor) -> ColumnMask:
        """The column mask of a dense one, exactly.

        Args:
            visible: bool (seqlen_q, seqlen_k) or (batch|1, heads|1, seqlen_q, seqlen_k), True = visible.

        Raises:
            ValueError: some column hides more than two runs of rows, besides a band; the first such batch entry, head
                and column is named.
        """
        from warploom.masks.from_dense import from_dense

        return rebuild(cls, finish(from_dense(visible))._asdict())

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        seqlen_q: int,
        seqlen_k: int,
        *,
        batch: int | None = None,
        heads: int | None = None,
        device: torch.device | str | None = None,
    ) -> ColumnMask:
        """The column mask of FlexAttention's mask_mod, exactly, for one pair of lengths.

        Every pair of positions is evaluated once, in blocks: time is O(seqlen_q · seqlen_k), memory that of the vectors and
        of one block. Make it once and keep it. A terminal shows progress after two seconds.

        Args:
            mask_mod: `mask_mod(b, h, q_idx, kv_idx)` -> bool, True = visible. It is called as FlexAttention calls it,
                under torch.vmap with one index each, and may index tensors that it captures. `q_idx` is the row of the
                call: `q_idx >= kv_idx` is aligned top-left, `causal=True` of `warploom.attention` bottom-right.
            seqlen_q, seqlen_k: lengths of the call.
            batch, heads: batch entries and heads that it tells apart, as B and H of `create_block_mask`; None: it uses no
                b, or h, and the mask is one for all.
            device: where indices are and vectors go; default: the accelerator if there is one, as with
                `create_block_mask`.

        Raises:
            TypeError: no function of four arguments, or one that returns no bool.
            ValueError: some column hides more than two runs of rows, besides a band; the first such batch entry, head
                and column is named. Or the function fails under torch.vmap.
        """
        from warploom.masks.from_mask_mod import from_mask_mod

        found = from_mask_mod(mask_mod, seqlen_q, seqlen_k, batch, heads, device)
        return rebuild(cls, finish(found)._asdict())

    @property
    def device(self) -> torch.device:
        """Where the vectors are."""
        return self._some.device

    @property
    def _some(self) -> Tensor:
        vector = self.lts if self.lts is not None else self.ute
        assert vector is not None
        return vector

    def _extent(self) -> int | None:
        return self._some.shape[-1]

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        some = self._some
        self._check_length("the mask", some.shape[-1], seqlen_k)
        vectors: tuple[Tensor | None, ...] = (self.lts, self.lte, self.uts, self.ute)
        if some.device != device:
            vectors = tuple([None if v is None else v.to(device) for v in vectors])
        return ResolvedMask(self.left, self.right, *vectors)

    def _and(self, other: Mask) -> Mask | None:
        if isinstance(other, Band):
            limits = iv.intersect_bands((self.left, self.right), (other.left, other.right))
            return column_mask(*limits, self._hidden_intervals())
        return self._and_columns(other) if isinstance(other, ColumnMask) else None

    def _and_columns(self, other: ColumnMask) -> Mask:
        """What both show; refuses where the vectors alone tell that no lengths will do."""
        both = Intersection(self, other)
        length = self._extent()
        assert length is not None
        other._check_length("the mask", length, other._extent() or 0)
        vectors = both._tensors()
        check_broadcast("intersect", both, vectors)
        limits = iv.intersect_bands((self.left, self.right), (other.left, other.right))
        merged = iv.merge_by_structure(self._hidden_intervals() + other._hidden_intervals())
        if len(merged) <= 2:
            return column_mask(*limits, merged)
        if (
            all(v.device.type == "cpu" and v.numel() for v in vectors)
            and not torch.compiler.is_compiling()
            and limits == (None, None)
        ):
            # Refuses now where no length can help: with more rows a column never needs fewer intervals.
            rows = min(length, max(int(v.max()) for v in vectors))
            united(both, limits, merged, rows, length, any_band=True)
        return both

    def _hidden_intervals(self) -> list[iv.Interval]:
        return iv.intervals_of(ResolvedMask(self.left, self.right, self.lts, self.lte, self.uts, self.ute))

    def __repr__(self) -> str:
        parts = [
            f"{name}={summary(getattr(self, name))}" for name in ("lts", "lte", "uts", "ute") if getattr(self, name) is not None
        ]
        if self.causal:
            return f"ColumnMask({', '.join(parts)}, causal=True)"
        band = "" if self.left is None and self.right is None else f" & SlidingWindow({self.left}, {self.right})"
        return f"ColumnMask({', '.join(parts)}){band}"


def column_mask(left: int | None, right: int | None, intervals: list[iv.Interval]) -> ColumnMask:
    """A ColumnMask with any band."""
    packed = iv.pack(left, right, intervals)
    return rebuild(ColumnMask, packed._asdict())


def _vector(name: str, value: Any) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} takes an int32 tensor (batch|1, heads|1, seqlen_k), got {describe(value)}")
    if value.dtype == torch.bool:
        raise TypeError(
            f"{name} takes an int32 tensor of row numbers, got {describe(value)}; for a dense mask use ColumnMask.from_dense"
        )
    if value.dtype not in INTEGERS:
        raise TypeError(
            f"{name} takes an int32 tensor (batch|1, heads|1, seqlen_k), got {describe(value)}; use .to(torch.int32)"
        )
    with_values(name, strided(name, value))
    if value.ndim not in (1, 3):
        raise ValueError(f"{name} takes shape (batch|1, heads|1, seqlen_k) or (seqlen_k,), got {describe(value)}")
    value = saturated(value)
    return value[None, None] if value.ndim == 1 else value
