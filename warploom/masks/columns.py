"""Column masks: each key column hides at most two intervals of query rows, next to a band around the
diagonal.

The representation is FlashMask's (arXiv 2410.01359): O(seqlen) memory where a dense mask takes O(seqlen^2),
and tiles are skipped or left unmasked by comparing a few numbers. Builders of common masks are in
`warploom.masks.zoo`; all share `Mask` below.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree

from warploom.masks import intervals as iv
from warploom.masks.arguments import describe, integer, summary
from warploom.masks.intervals import ResolvedMask

if TYPE_CHECKING:
    from warploom.masks.tiles import TileClasses

__all__ = ["ColumnMask", "Intersection", "Mask", "ResolvedMask"]

_CACHED_SIZES = 8  # resolved forms one mask object keeps; a model uses one or two (prefill and decode)


def _rebuild(cls: type, values: dict[str, Any]) -> Any:
    mask: Any = object.__new__(cls)
    for name, value in values.items():
        setattr(mask, name, value)
    return mask


def _register(cls: type) -> None:
    """Makes a mask a pytree node: tensors and inner masks are children, everything else is context."""

    def split(mask: Any) -> tuple[list[str], tuple[Any, ...]]:
        values = [(name, getattr(mask, name)) for name in mask._fields]
        children = [
            name for name, value in values if value is not None and not isinstance(value, (bool, int, str))
        ]
        return children, (
            tuple(children),
            tuple((name, value) for name, value in values if name not in children),
        )

    def flatten(mask: Any) -> tuple[list[Any], Any]:
        names, context = split(mask)
        return [getattr(mask, name) for name in names], context

    def flatten_with_keys(mask: Any) -> tuple[list[tuple[Any, Any]], Any]:
        names, context = split(mask)
        return [(_pytree.GetAttrKey(name), getattr(mask, name)) for name in names], context

    def unflatten(children: Any, context: Any) -> Any:
        names, static = context
        return _rebuild(cls, {**dict(zip(names, children, strict=True)), **dict(static)})

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"warploom.masks.{cls.__name__}",
        to_dumpable_context=lambda context: [list(context[0]), [list(pair) for pair in context[1]]],
        from_dumpable_context=lambda data: (tuple(data[0]), tuple((name, value) for name, value in data[1])),
        flatten_with_keys_fn=flatten_with_keys,
    )


class Mask:
    """Base of every mask: a description that resolves to a band and column intervals for given sequence
    lengths.

    Masks are immutable, hold tensors on any device, are pytree nodes, move with `.to(device)` and intersect
    with `&`. Changing a tensor in place that a mask was built from is allowed: the next call sees it.
    """

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _register(cls)

    # What a builder provides.

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        raise NotImplementedError

    def _extent(self) -> int | None:
        """seqlen_k where the mask itself determines it."""
        return None

    # What every mask has.

    def resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device | str | None = None) -> ResolvedMask:
        """Band and column vectors for one pair of lengths, on `device` (default: where the mask's tensors
        are).

        Never synchronises with the device and has no data-dependent shapes. Kept per sizes, device and tensor
        versions, except while compiling or capturing a CUDA graph.
        """
        if torch.compiler.is_compiling():
            where = self.device if device is None else torch.device(device)
            return _finish(self._resolve(seqlen_q, seqlen_k, where))
        seqlen_q, seqlen_k = (
            integer("seqlen_q", seqlen_q, minimum=0),
            integer("seqlen_k", seqlen_k, minimum=0),
        )
        where = _indexed(self.device if device is None else torch.device(device))
        state = self._state()
        cache: dict[Any, ResolvedMask] = self.__dict__.setdefault("_cache", {})
        key = (seqlen_q, seqlen_k, where, state, os.environ.get("WARPLOOM_CHECK"))
        if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if all(t.device.type == "cuda" for t in self._tensors()):
                return _finish(self._resolve(seqlen_q, seqlen_k, where))
            if key in cache:
                return cache[key]
            raise ValueError(
                f"{type(self).__name__} holds host data, which no CUDA graph capture can copy: call "
                "it once before the capture with the same lengths, or move it with .to(device) first"
            )
        if state is not None and key in cache:
            return cache[key]
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # kept vectors must be usable by autograd later
                resolved = _finish(self._resolve(seqlen_q, seqlen_k, where))
        else:
            resolved = _finish(self._resolve(seqlen_q, seqlen_k, where))
        if state is not None and all(type(t) is Tensor for t in resolved[2:] if t is not None):
            if len(cache) >= _CACHED_SIZES:
                cache.pop(next(iter(cache)))
            cache[key] = resolved
        return resolved

    def dense(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Tensor:
        """The whole matrix: bool (batch|1, heads|1, seqlen_q, seqlen_k), True = visible. For tests and small
        masks.
        """
        q, k = self._sizes(seqlen_q, seqlen_k)
        return iv.dense(self.resolve(q, k), q, k, self.device)

    def density(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> float:
        """Visible fraction of the matrix over all batch entries and heads, from the intervals, in
        O(seqlen_k).
        """
        q, k = self._sizes(seqlen_q, seqlen_k)
        shown = iv.visible_per_column(self.resolve(q, k), q, k, self.device)
        cells = (shown.numel() // k) * q * k if k else 0
        return int(shown.sum()) / cells if cells else 0.0

    def tiles(
        self, block_m: int, block_n: int, seqlen_q: int | None = None, seqlen_k: int | None = None
    ) -> TileClasses:
        """Which tiles of block_m queries by block_n keys are hidden, partial or full; see `TileClasses`."""
        from warploom.masks.tiles import TileClasses

        q, k = self._sizes(seqlen_q, seqlen_k)
        return TileClasses.of(self.resolve(q, k), q, k, block_m, block_n, device=self.device)

    def draw(
        self,
        path: Any,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        *,
        block_m: int | None = None,
        block_n: int | None = None,
        batch: int = 0,
        head: int = 0,
    ) -> None:
        """Draws the mask's tiles to an .svg or .png file, and its elements too up to 64 x 64. Needs
        matplotlib.

        Args:
            path: the file; its suffix picks the format.
            seqlen_q, seqlen_k: lengths; a mask of known length needs none.
            block_m, block_n: tile size in queries and keys; default: a size that gives a readable picture.
            batch, head: which one is drawn.
        """
        from warploom.masks.draw import draw

        q, k = self._sizes(seqlen_q, seqlen_k)
        draw(self, path, q, k, block_m=block_m, block_n=block_n, batch=batch, head=head)

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on `device`."""
        values = {name: getattr(self, name) for name in self._fields}
        return _rebuild(
            type(self),
            {
                name: value.to(device) if isinstance(value, (Tensor, Mask)) else value
                for name, value in values.items()
            },
        )

    @property
    def device(self) -> torch.device:
        """Where the mask's tensors are; the CPU for a mask without any."""
        for tensor in self._tensors():
            return tensor.device
        return torch.device("cpu")

    def __and__(self, other: Mask) -> Mask:
        """What both show. Bands give a band, column intervals unite.

        Raises ValueError, here or when the lengths are known, where a column would need more than two
        intervals.
        """
        if not isinstance(other, Mask):
            if isinstance(other, Tensor):
                raise TypeError(
                    f"& takes another mask, got {describe(other)}; turn a dense mask into one with "
                    "ColumnMask.from_dense"
                )
            return NotImplemented
        return _intersect(self, other)

    def to_startend_row_indices(
        self, seqlen_q: int | None = None, seqlen_k: int | None = None
    ) -> tuple[Tensor, bool]:
        """Paddle's flashmask_attention bounds: int32 (batch|1, heads|1, seqlen_k, n), and its `causal` flag.

        causal: n=1 is LTS, n=2 is LTS, LTE. Not causal: n=2 is LTS, UTE, n=4 all. The smallest n that holds
            the mask by its
        structure is taken; a band other than causal is folded into the intervals.

        Args:
            seqlen_q: rows; defaults to seqlen_k. An interval to the end is written as ending there.
            seqlen_k: columns; a mask of known length needs none.

        Raises:
            ValueError: a column would need more than two intervals.
        """
        q, k = self._sizes(seqlen_q, seqlen_k)
        return _startend(self, q, k)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={summary(getattr(self, name))}" for name in self._fields)
        return f"{type(self).__name__}({fields})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_cache"}

    def _tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for name in self._fields:
            value = getattr(self, name)
            if isinstance(value, Mask):
                found.extend(value._tensors())
            elif isinstance(value, Tensor):
                found.append(value)
        return found

    def _state(self) -> tuple[int, ...] | None:
        """Versions of the tensors; None where they have none, and nothing may be kept."""
        tensors = self._tensors()
        if any(t.is_inference() or type(t) is not Tensor for t in tensors):
            return None
        return tuple(t._version for t in tensors)

    def _sizes(self, seqlen_q: int | None, seqlen_k: int | None) -> tuple[int, int]:
        if seqlen_k is None:
            extent = self._extent()
            seqlen_k = seqlen_q if extent is None else extent
        if seqlen_k is None:
            raise ValueError(f"{type(self).__name__} fits any length: give seqlen_q and seqlen_k")
        return integer("seqlen_q", seqlen_k if seqlen_q is None else seqlen_q, 0), integer(
            "seqlen_k", seqlen_k, 0
        )

    def _check_length(self, what: str, length: int, seqlen_k: int) -> None:
        if length != seqlen_k:
            raise ValueError(
                f"{type(self).__name__}: {what} has length {length}, but the keys have seqlen_k {seqlen_k}"
            )


class ColumnMask(Mask):
    """A mask given by its vectors: key column j hides query rows [lts_j, lte_j) and [uts_j, ute_j).

    Rows are those of the call the mask is used in, never shifted; values outside [0, seqlen_q] act as if
    clamped to it.

    Args:
        lts: int32 (batch|1, heads|1, seqlen_k), or (seqlen_k,); first hidden row of the lower interval. None:
            no lower interval.
        lte: its end, exclusive; None: seqlen_q.
        uts: first hidden row of the upper interval; None: row 0.
        ute: its end, exclusive; None: no upper interval.
        causal: adds the bottom-right aligned causal band, key j <= i + seqlen_k - seqlen_q.

    Raises:
        TypeError, ValueError: a vector of another dtype, rank, length or device, or an interval given by
            half.
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
        if not isinstance(causal, bool):
            raise TypeError(f"causal takes a bool, got {describe(causal)}")
        self.lts, self.lte = _vector("lts", lts), _vector("lte", lte)
        self.uts, self.ute = _vector("uts", uts), _vector("ute", ute)
        self.left: int | None = None
        self.right: int | None = 0 if causal else None
        given = {
            name: getattr(self, name)
            for name in ("lts", "lte", "uts", "ute")
            if getattr(self, name) is not None
        }
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
        t = startend_row_indices
        if not isinstance(t, Tensor) or t.ndim != 4:
            raise ValueError(
                f"startend_row_indices takes an int32 tensor (batch, heads, seqlen_k, n), got {describe(t)}"
            )
        n = t.shape[-1]
        vectors = [t[..., i] for i in range(n)]
        if causal and n in (1, 2):
            return cls(*vectors, causal=True)
        if not causal and n == 2:
            return cls(vectors[0], ute=vectors[1])
        if not causal and n == 4:
            return cls(*vectors)
        raise ValueError(
            f"startend_row_indices has n={n} with causal={causal}; causal takes n=1 (LTS) or 2 (LTS, LTE), else "
            "n=2 (LTS, UTE) or 4 (LTS, LTE, UTS, UTE)"
        )

    @classmethod
    def from_dense(cls, visible: Tensor) -> ColumnMask:
        """The column mask of a dense one, exactly.

        Args:
            visible: bool (seqlen_q, seqlen_k) or (batch|1, heads|1, seqlen_q, seqlen_k), True = visible.

        Raises:
            ValueError: some column hides more than two runs of rows; the first such batch, head and column is
                named.
        """
        from warploom.masks.from_dense import column_intervals

        lts, lte, uts, ute, causal = column_intervals(visible)
        return cls(lts, lte, uts, ute, causal=causal)

    def _extent(self) -> int | None:
        vector = self.lts if self.lts is not None else self.ute
        assert vector is not None
        return vector.shape[-1]

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        extent = self._extent()
        assert extent is not None
        self._check_length("the mask", extent, seqlen_k)
        vectors = [None if v is None else v.to(device) for v in (self.lts, self.lte, self.uts, self.ute)]
        return ResolvedMask(self.left, self.right, *vectors)

    def _intervals(self) -> list[iv.Interval]:
        return iv.intervals_of(ResolvedMask(self.left, self.right, self.lts, self.lte, self.uts, self.ute))

    def __repr__(self) -> str:
        parts = [
            f"{name}={summary(getattr(self, name))}"
            for name in ("lts", "lte", "uts", "ute")
            if getattr(self, name) is not None
        ]
        if self.causal:
            return f"ColumnMask({', '.join(parts)}, causal=True)"
        band = (
            "" if self.left is None and self.right is None else f" & SlidingWindow({self.left}, {self.right})"
        )
        return f"ColumnMask({', '.join(parts)}){band}"


class Intersection(Mask):
    """What `a & b` shows, for two masks whose columns are known once the lengths are."""

    _fields = ("a", "b")

    def __init__(self, a: Mask, b: Mask) -> None:
        self.a, self.b = a, b

    def _extent(self) -> int | None:
        extent = self.a._extent()
        return self.b._extent() if extent is None else extent

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        a, b = (m._resolve(seqlen_q, seqlen_k, device) for m in (self.a, self.b))
        band = iv.intersect_bands((a.left, a.right), (b.left, b.right))
        _check_broadcast(self, [t for r in (a, b) for t in r[2:] if t is not None])
        return _united(self, band, iv.intervals_of(a) + iv.intervals_of(b), seqlen_q, seqlen_k)

    def __repr__(self) -> str:
        return f"{self.a!r} & {self.b!r}"


def _vector(name: str, value: Any) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} takes an int32 tensor (batch|1, heads|1, seqlen_k), got {describe(value)}")
    if value.dtype == torch.bool:
        raise TypeError(
            f"{name} takes an int32 tensor of row numbers, got {describe(value)}; for a dense mask use "
            "ColumnMask.from_dense"
        )
    if value.dtype != torch.int32:
        raise TypeError(
            f"{name} takes an int32 tensor (batch|1, heads|1, seqlen_k), got {describe(value)}; "
            "use .to(torch.int32)"
        )
    if value.ndim == 1:
        return value.view(1, 1, -1)
    if value.ndim != 3:
        raise ValueError(
            f"{name} takes shape (batch|1, heads|1, seqlen_k) or (seqlen_k,), got {describe(value)}"
        )
    return value


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _finish(mask: ResolvedMask) -> ResolvedMask:
    """Vectors as kernels take them: int32, contiguous, one shape."""
    present = [t for t in mask[2:] if t is not None]
    if not present:
        return mask
    batch, heads, length = torch.broadcast_shapes(*[t.shape for t in present])
    ready = [
        None if t is None else t.to(torch.int32).expand(batch, heads, length).contiguous() for t in mask[2:]
    ]
    return ResolvedMask(mask.left, mask.right, *ready)


def _check_broadcast(mask: Intersection, vectors: list[Tensor]) -> None:
    for dim, what in ((0, "batch entries"), (1, "heads")):
        sizes = sorted({int(t.shape[dim]) for t in vectors} - {1})
        if len(sizes) > 1:
            raise ValueError(f"cannot intersect masks of {sizes[0]} and {sizes[1]} {what}: {mask!r}")


def _intersect(a: Mask, b: Mask) -> Mask:
    from warploom.masks.zoo.bands import Band, band

    if isinstance(a, Band) and isinstance(b, Band):
        return band(*iv.intersect_bands((a.left, a.right), (b.left, b.right)))
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Band) and one.left is None and one.right is None:
            return other
        if isinstance(one, ColumnMask) and isinstance(other, Band):
            return _column_mask(
                *iv.intersect_bands((one.left, one.right), (other.left, other.right)), one._intervals()
            )
    both = Intersection(a, b)
    if not (isinstance(a, ColumnMask) and isinstance(b, ColumnMask)):
        return both
    length = a._extent()
    assert length is not None
    b._check_length("the mask", length, b._extent() or 0)
    vectors = both._tensors()
    _check_broadcast(both, vectors)
    limits = iv.intersect_bands((a.left, a.right), (b.left, b.right))
    united = iv.merge_by_structure(a._intervals() + b._intervals())
    if len(united) <= 2:
        return _column_mask(*limits, united)
    if (
        all(v.device.type == "cpu" and v.numel() for v in vectors)
        and not torch.compiler.is_compiling()
        and limits == (None, None)
    ):
        # More rows never unite intervals: a column that needs three within the rows named so far needs three
        # for good.
        _united(both, limits, united, max(int(v.max()) for v in vectors), length)
    return both


def _united(
    mask: Mask,
    band: tuple[int | None, int | None],
    intervals: list[iv.Interval],
    seqlen_q: int,
    seqlen_k: int,
) -> ResolvedMask:
    """Band and intervals as a ResolvedMask, exactly, or ValueError."""
    united = iv.merge_by_structure(intervals)
    if len(united) <= 2:
        return iv.pack(*band, united)
    if torch.compiler.is_compiling():
        raise ValueError(
            f"{mask!r} needs its values to see whether two intervals per column do, which a compiled region "
            "cannot: intersect outside of it and pass the result of .resolve() as a ColumnMask"
        )
    merged, needed = iv.merge_by_value(band, united, seqlen_q, seqlen_k)
    if bool((needed > 2).any()):
        batch, head, column = (needed > 2).nonzero()[0].tolist()
        raise ValueError(
            f"{mask!r} is not a column mask: column {column} (batch {batch}, head {head}) hides "
            f"{int(needed[batch, head, column])} separate intervals of rows, and a column has two"
        )
    return iv.pack(*band, merged)


def _column_mask(left: int | None, right: int | None, intervals: list[iv.Interval]) -> ColumnMask:
    """A ColumnMask with any band."""
    packed = iv.pack(left, right, intervals)
    return _rebuild(ColumnMask, packed._asdict())


def _startend(mask: Mask, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, bool]:
    resolved = mask.resolve(seqlen_q, seqlen_k)
    hidden = iv.intervals_of(resolved)
    causal = resolved.right == 0
    if causal:  # the left limit, if any, becomes the end of each column's rows
        within = iv.merge_by_structure(
            hidden + iv.band_as_intervals(resolved.left, None, seqlen_q, seqlen_k, mask.device)
        )
        causal = len(within) <= 1 and all(start is not None for start, _ in within)
    if not causal:
        within = hidden + iv.band_as_intervals(resolved.left, resolved.right, seqlen_q, seqlen_k, mask.device)
    folded = _finish(_united(mask, (None, None), within, seqlen_q, seqlen_k))
    shape = next((t.shape for t in folded[2:] if t is not None), torch.Size((1, 1, seqlen_k)))

    def rows(vector: Tensor | None, default: int) -> Tensor:
        return torch.full(shape, default, dtype=torch.int32, device=mask.device) if vector is None else vector

    lts = rows(folded.lts, seqlen_q)
    if causal:
        return torch.stack([lts] if folded.lte is None else [lts, folded.lte], dim=-1), True
    if folded.lte is None and folded.uts is None:
        return torch.stack([lts, rows(folded.ute, 0)], dim=-1), False
    return torch.stack(
        [lts, rows(folded.lte, seqlen_q), rows(folded.uts, 0), rows(folded.ute, 0)], dim=-1
    ), False
