"""The base of every mask: resolving with a cache, pytree registration, and what one mask can do by itself."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils import _pytree

from warploom.masks import intervals as iv
from warploom.masks.arguments import describe, integer, summary
from warploom.masks.intervals import ResolvedMask, finish
from warploom.masks.kept import Kept
from warploom.masks.startend import startend
from warploom.masks.tiles import TileClasses
from warploom.masks.visible import visible
from warploom.runtime.arguments import checked
from warploom.runtime.limits import LONGEST

_CACHED_SIZES = 8  # resolved forms one mask object keeps; a model uses one or two (prefill and decode)


class BaseMask:
    """A description of a mask, which resolves to a band and column intervals once the sequence lengths are known.

    Masks are immutable, hold tensors on any device, are pytree nodes and move with `.to(device)`. A tensor that a mask
    was built from may be changed in place: the next call sees the new values. `warploom.masks.intersect.Mask`, the class
    that builders extend, adds `&`.
    """

    _fields: ClassVar[tuple[str, ...]] = ()
    _columns: ClassVar[bool] = True  # whether it may resolve to column vectors

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _register(cls)

    # What a builder provides.

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        raise NotImplementedError

    def _resolve_with_starts(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> tuple[ResolvedMask, Tensor | None]:
        """As ``_resolve``, and the ``documents`` of `Kept`."""
        return self._resolve(seqlen_q, seqlen_k, device), None

    def _documents(self, seqlen_q: int, seqlen_k: int) -> int | None:
        """How many documents follow each other from position 0 on, if it hides nothing but those of others, and a band.

        None: it is no such mask, or does not say where they start.
        """
        return None

    def _extent(self) -> int | None:
        """seqlen_k where the mask itself determines it."""
        return None

    # What every mask has.

    def resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device | str | None = None) -> ResolvedMask:
        """Band and column vectors for one pair of lengths.

        It never synchronises with the device and has no data-dependent shapes. The result is kept by sizes, device and
        tensor versions, and by the stream, except while torch compiles or a CUDA graph is captured.

        Args:
            seqlen_q, seqlen_k: lengths of the call.
            device: where the vectors go; default: where the mask's tensors are.

        Raises:
            ValueError: the mask does not fit the lengths, or a capture would have to copy host data.
        """
        if torch.compiler.is_compiling():
            where = self.device if device is None else _device(device)
            return finish(self._resolve(seqlen_q, seqlen_k, where))
        if not (type(seqlen_q) is int and type(seqlen_k) is int and seqlen_q >= 0 and seqlen_k >= 0):
            seqlen_q, seqlen_k = (
                integer("seqlen_q", seqlen_q, minimum=0),
                integer("seqlen_k", seqlen_k, minimum=0),
            )
        where = self.device if device is None else device if type(device) is torch.device else _device(device)
        return self.kept(seqlen_q, seqlen_k, where if where.index is not None else _indexed(where)).resolved

    def kept(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> Kept:
        """As ``resolve`` outside of torch.compile, of lengths that are ints and a device whose index is known."""
        own = self.__dict__
        held: list[Tensor] | None = own.get("_held")
        state = self._state() if held is None else tuple([t._version for t in held])
        cache: dict[Any, Kept] | None = own.get("_cache")
        if cache is None:
            cache = own["_cache"] = {}
        kind, stream = (seqlen_q, seqlen_k, device, state, checked()), None
        if device.type == "cuda":
            stream = torch._C._cuda_getCurrentRawStream(device.index)  # which waits for none that made the same vectors
        found = cache.get((kind, stream))
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if all([t.device.type == "cuda" for t in self._tensors()]):
                return self._made(seqlen_q, seqlen_k, device, False)
            for (same, _), made in list(cache.items()):
                if same == kind:  # on any stream: a graph is replayed later than all that was launched before its capture
                    own.setdefault("_captured", {})[kind] = made  # whose addresses the graph keeps
                    return Kept(made.resolved, False, made.documents)
            raise ValueError(
                f"{type(self).__name__} holds host data, which no CUDA graph capture can copy: call "
                "it once before the capture with the same lengths, or move it with .to(device) first"
            )
        if found is not None:
            return found
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # kept vectors must be usable by autograd later
                made = self._made(seqlen_q, seqlen_k, device, state is not None)
        else:
            made = self._made(seqlen_q, seqlen_k, device, state is not None)
        if made.prepared is not None:
            if len(cache) >= _CACHED_SIZES:
                for oldest in list(cache)[:1]:  # a copy: another thread may add one
                    cache.pop(oldest, None)
            cache[kind, stream] = made
        return made

    def _made(self, seqlen_q: int, seqlen_k: int, device: torch.device, lasts: bool) -> Kept:
        if self._columns and (seqlen_q > LONGEST or seqlen_k > LONGEST):
            _check_longest(seqlen_q, seqlen_k)
        resolved, documents = self._resolve_with_starts(seqlen_q, seqlen_k, device)
        return Kept(finish(resolved), lasts, documents)

    def dense(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Tensor:
        """The whole matrix, for tests and small masks: bool (batch|1, heads|1, seqlen_q, seqlen_k), True = visible."""
        q, k = self._sizes(seqlen_q, seqlen_k)
        rows, columns = torch.arange(q, device=self.device), torch.arange(k, device=self.device)
        return visible(self.resolve(q, k), rows, columns, k - q)

    def density(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> float:
        """Visible fraction of the matrix over all batch entries and heads, in O(seqlen_k) from the intervals."""
        q, k = self._sizes(seqlen_q, seqlen_k)
        shown = iv.visible_per_column(self.resolve(q, k), q, k, self.device)
        cells = (shown.numel() // k) * q * k if k else 0
        return int(shown.sum()) / cells if cells else 0.0

    def tiles(self, block_m: int, block_n: int, seqlen_q: int | None = None, seqlen_k: int | None = None) -> TileClasses:
        """Which tiles of block_m queries by block_n keys are hidden, partial or full; see `TileClasses`."""
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
        """Draws the mask's tiles to an .svg or .png file, and its elements too up to 64 x 64; needs matplotlib.

        Args:
            path: the file; its suffix picks the format.
            seqlen_q, seqlen_k: lengths; a mask of known length needs none.
            block_m, block_n: tile size in queries and keys; default: a size that gives a readable picture.
            batch, head: which one is drawn.
        """
        from warploom.masks.draw import draw

        q, k = self._sizes(seqlen_q, seqlen_k)
        draw(self, path, q, k, block_m=block_m, block_n=block_n, batch=batch, head=head)

    def to(self, device: torch.device | str) -> Self:
        """The same mask with its tensors on `device`."""
        device = _device(device)
        values = {name: getattr(self, name) for name in self._fields}
        return rebuild(
            type(self),
            {name: value.to(device) if isinstance(value, (Tensor, BaseMask)) else value for name, value in values.items()},
        )

    @property
    def device(self) -> torch.device:
        """Where the mask's tensors are; the CPU for a mask without any."""
        for tensor in self._tensors():
            return tensor.device
        return torch.device("cpu")

    def to_startend_row_indices(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> tuple[Tensor, bool]:
        """Paddle's flashmask_attention bounds: int32 (batch|1, heads|1, seqlen_k, n), and its `causal` flag.

        With causal, n=1 is LTS and n=2 is LTS, LTE. Without, n=2 is LTS, UTE and n=4 is all four. The result has the
        smallest n that the mask's structure allows; a band other than causal is folded into the intervals.

        Args:
            seqlen_q: rows; defaults to seqlen_k. An interval to the end is written as ending there.
            seqlen_k: columns; a mask of known length needs none.

        Raises:
            ValueError: a column would need more than two intervals.
        """
        q, k = self._sizes(seqlen_q, seqlen_k)
        return startend(self, q, k)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={summary(getattr(self, name))}" for name in self._fields)
        return f"{type(self).__name__}({fields})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_cache", "_captured", "_held")}

    def _tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for name in self._fields:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, BaseMask):
                found.extend(value._tensors())
        return found

    def _state(self) -> tuple[int, ...] | None:
        """Versions of the tensors, which it holds from now on; None where they have none, and nothing may be kept."""
        held = self._tensors()
        for t in held:
            if type(t) is not Tensor or t.is_inference():
                return None
        self.__dict__["_held"] = held
        return tuple([t._version for t in held])

    def _sizes(self, seqlen_q: int | None, seqlen_k: int | None) -> tuple[int, int]:
        if seqlen_k is None:
            extent = self._extent()
            seqlen_k = seqlen_q if extent is None else extent
        if seqlen_k is None:
            raise ValueError(f"{type(self).__name__} fits any length: give seqlen_q and seqlen_k")
        sizes = integer("seqlen_q", seqlen_k if seqlen_q is None else seqlen_q, 0), integer("seqlen_k", seqlen_k, 0)
        _check_longest(*sizes)
        return sizes

    def _check_length(self, what: str, length: int, seqlen_k: int) -> None:
        if length != seqlen_k:
            raise ValueError(f"{type(self).__name__}: {what} has length {length}, but the keys have seqlen_k {seqlen_k}")


def _check_longest(seqlen_q: int, seqlen_k: int) -> None:
    for name, length in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if length > LONGEST:
            raise ValueError(f"{name} must be at most {LONGEST}, as rows are counted in 32 bits, got {length}")


def rebuild(cls: type, values: dict[str, Any]) -> Any:
    mask: Any = object.__new__(cls)
    for name, value in values.items():
        setattr(mask, name, value)
    return mask


def _register(cls: type) -> None:
    """Makes a mask a pytree node: tensors and inner masks are children, everything else is context.

    Masks hold nothing but tensors and plain values, so weights_only loading may make them.
    """

    def split(mask: Any) -> tuple[list[str], tuple[Any, ...]]:
        values = [(name, getattr(mask, name)) for name in mask._fields]
        children = [name for name, value in values if value is not None and not isinstance(value, (bool, int, str))]
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
        return rebuild(cls, {**dict(zip(names, children, strict=True)), **dict(static)})

    torch.serialization.add_safe_globals([cls])
    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"warploom.masks.{cls.__name__}",
        to_dumpable_context=lambda context: [list(context[0]), [list(pair) for pair in context[1]]],
        from_dumpable_context=lambda data: (tuple(data[0]), tuple((name, value) for name, value in data[1])),
        flatten_with_keys_fn=flatten_with_keys,
    )


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device takes a device such as 'cpu' or 'cuda', got {describe(device)}") from None


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
