"""Additive biases of attention scores: ALiBi, relative positions, one value a key.

A bias is added to the scaled and softcapped score, softcap(scale · q kᵀ) + bias, in fp32. `attention(bias=)` takes one of
these, or a tensor (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1) of any float dtype. Distances are p - j of query position
p = i + seqlen_k - seqlen_q and key j, within each sequence. Tensors that a bias is made of get gradients if they ask for them.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from warploom.runtime import arguments

__all__ = ["ALiBi", "Bias", "Key", "Relative"]

T5_MAX_DISTANCE = 128  # of transformers' T5 models, where their configuration names none
KEPT_DISTANCE = 1 << 12  # T5's buckets of up to so many distances either way are kept
KEPT_INDICES = 64


class Resolved(NamedTuple):
    """A bias as implementations are given it; `warploom.attention.problem.AttentionArgs` says what each kind is."""

    values: Tensor
    kind: str  # "tensor", "alibi" or "distance"
    origin: int = 0


class Bias:
    """A bias that is described by less than a value an element; an immutable pytree node that moves with ``.to(device)``."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _register(cls)

    def resolve(self, heads_q: int, dtype: torch.dtype) -> Resolved:
        """What implementations read, for ``heads_q`` heads, with numbers of slopes and tables in ``dtype``."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Those that it is made of."""
        return [value for name in self._fields if isinstance(value := getattr(self, name), Tensor)]

    def to(self, device: torch.device | str) -> Self:
        """The same bias with its tensors on a device."""
        moved = {name: getattr(self, name) for name in self._fields}
        return _rebuild(type(self), {n: v.to(device) if isinstance(v, Tensor) else v for n, v in moved.items()})

    def __repr__(self) -> str:
        values = [(name, getattr(self, name)) for name in self._fields]
        words = [f"{n}={arguments.describe(v) if isinstance(v, Tensor) else repr(v)}" for n, v in values if v is not None]
        return f"{type(self).__name__}({', '.join(words)})"


def _rebuild(cls: Any, values: dict[str, Any]) -> Any:
    bias = object.__new__(cls)
    for name, value in values.items():
        setattr(bias, name, value)
    return bias


def _register(cls: type) -> None:
    """Makes a bias a pytree node: tensors are children, everything else is context."""

    def split(bias: Any) -> tuple[list[str], tuple[Any, ...]]:
        values = [(name, getattr(bias, name)) for name in bias._fields]
        names = [name for name, value in values if value is not None and not isinstance(value, (bool, int, str))]
        return names, (tuple(names), tuple((name, value) for name, value in values if name not in names))

    def flatten(bias: Any) -> tuple[list[Any], Any]:
        names, context = split(bias)
        return [getattr(bias, name) for name in names], context

    def flatten_with_keys(bias: Any) -> tuple[list[tuple[Any, Any]], Any]:
        names, context = split(bias)
        return [(_pytree.GetAttrKey(name), getattr(bias, name)) for name in names], context

    def unflatten(children: Any, context: Any) -> Any:
        names, others = context
        return _rebuild(cls, {**dict(zip(names, children, strict=True)), **dict(others)})

    torch.serialization.add_safe_globals([cls])
    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"warploom.bias.{cls.__name__}",
        to_dumpable_context=lambda context: [list(context[0]), [list(pair) for pair in context[1]]],
        from_dumpable_context=lambda data: (tuple(data[0]), tuple((name, value) for name, value in data[1])),
        flatten_with_keys_fn=flatten_with_keys,
    )


class ALiBi(Bias):
    """-slope · |p - j| for each head: attention with linear biases (Press et al., arXiv 2108.12409), as flash-attn has it.

    Args:
        slopes: (heads_q,) or (batch, heads_q), any float dtype; of packed calls the batch is that of sequences.

    Raises:
        TypeError, ValueError: slopes are no such tensor.
    """

    _fields = ("slopes",)

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = _floats("slopes", slopes)
        if slopes.ndim not in (1, 2):
            raise ValueError(f"slopes must have shape (heads,) or (batch, heads), got {tuple(slopes.shape)}")

    @classmethod
    def standard(cls, heads: int, device: torch.device | str | None = None) -> Self:
        """The paper's slopes.

        2^(-8 (h + 1) / heads) where ``heads`` is a power of two; else those of the next lower one, and then every other one of
        twice as many heads.
        """
        heads, device = arguments.integer("heads", heads, minimum=1), arguments.device("device", device)
        lower = 1 << (heads.bit_length() - 1)
        powers = [-8.0 * (h + 1) / lower for h in range(lower)]
        powers += [-4.0 * (h + 1) / lower for h in range(0, 2 * (heads - lower), 2)]
        return cls(torch.tensor([2.0**power for power in powers], dtype=torch.float32, device=device))

    def resolve(self, heads_q: int, dtype: torch.dtype) -> Resolved:
        slopes = self.slopes if self.slopes.ndim == 2 else self.slopes[None]
        if slopes.shape[1] != heads_q:
            raise ValueError(f"bias has slopes of {slopes.shape[1]} heads, {_shape(self.slopes)}, but q has {heads_q} heads")
        return Resolved(slopes.to(dtype).contiguous(), "alibi")


class Relative(Bias):
    """A value for each head and distance, or bucket of distances, read from a table: no seqlen² matrix, nor in its gradient.

    Without ``buckets`` the table has an entry for each distance, and entries[max_distance + p - j] is read for p - j clamped to
    ±max_distance. ``bidirectional=False`` leaves negative distances out: entries[p - j] is read for p - j clamped to
    0 … max_distance. With ``buckets="t5"`` it has one for each of T5's buckets (Raffel et al., arXiv 1910.10683), as
    ``relative_attention_bias.weight.T`` of transformers' models. With a tensor of integers it is read at
    buckets[max_distance + p - j], clamped likewise (buckets[p - j] with ``bidirectional=False``).

    Args:
        table: (heads_q|1, entries), any float dtype.
        max_distance: distances beyond it count as it; default: what the table or the buckets hold, 128 for T5.
        buckets: None, "t5", or integers (2 · max_distance + 1,), or (max_distance + 1,) with ``bidirectional=False``.
        bidirectional: whether keys after the query have entries of their own; decoders' T5 buckets have none.

    Raises:
        TypeError, ValueError: the shapes do not fit each other; a bucket is no entry of the table (CPU tensors, and any under
            WARPLOOM_CHECK=1; elsewhere it is clamped).
    """

    _fields = ("table", "max_distance", "buckets", "bidirectional")

    def __init__(
        self,
        table: Tensor,
        max_distance: int | None = None,
        *,
        buckets: str | Tensor | None = None,
        bidirectional: bool = True,
    ) -> None:
        self.table = _floats("table", table)
        self.bidirectional = arguments.flag("bidirectional", bidirectional)
        if table.ndim != 2 or not table.shape[1]:
            raise ValueError(f"table must have shape (heads, entries), with an entry at least, got {tuple(table.shape)}")
        self.buckets = buckets
        given = arguments.integer("max_distance", max_distance, minimum=0, maximum=1 << 24, optional=True)
        if isinstance(buckets, str):
            if buckets != "t5":
                raise ValueError(f"buckets must be None, 't5' or a tensor of integers, got {buckets!r}")
            self.max_distance = T5_MAX_DISTANCE if given is None else given
            exact = (table.shape[1] // (2 if self.bidirectional else 1)) // 2
            if exact < 1 or self.max_distance <= exact:
                raise ValueError(
                    f"T5's buckets of max_distance {self.max_distance} must be at least {4 if self.bidirectional else 2}, and "
                    f"those of small distances fewer than it, but table has {table.shape[1]}"
                )
            return
        if buckets is None:
            entries, holder = table.shape[1], "table"
        else:
            if not isinstance(buckets, Tensor) or buckets.dtype not in arguments.INTEGERS:
                raise TypeError(f"buckets must be None, 't5' or a tensor of integers, got {arguments.describe(buckets)}")
            if buckets.ndim != 1 or not buckets.shape[0]:
                raise ValueError(f"buckets must have shape (distances,), with one at least, got {tuple(buckets.shape)}")
            if arguments.strided("buckets", buckets).device != table.device:
                raise ValueError(f"buckets are on {buckets.device} but table is on {table.device}")
            if arguments.readable(buckets) and not bool(((buckets >= 0) & (buckets < table.shape[1])).all()):
                most = table.shape[1] - 1
                raise ValueError(f"buckets must be from 0 to {most}, entries of table, got {buckets.tolist()!r:.80}")
            entries, holder = buckets.shape[0], "buckets"
        found = (entries - 1) // 2 if self.bidirectional else entries - 1
        self.max_distance = found if given is None else given
        wanted = 2 * self.max_distance + 1 if self.bidirectional else self.max_distance + 1
        if entries != wanted:
            rule = "2 · max_distance + 1" if self.bidirectional else "max_distance + 1"
            given_or_found = f"max_distance {self.max_distance}"
            raise ValueError(f"{holder} has {entries} distances; with {given_or_found} it takes {rule} = {wanted}")

    def resolve(self, heads_q: int, dtype: torch.dtype) -> Resolved:
        if self.table.shape[0] not in (1, heads_q):
            heads = f"{self.table.shape[0]} heads, {_shape(self.table)}"
            raise ValueError(f"bias has a table of {heads}, but q has {heads_q} heads")
        entries = narrowed(self.table, dtype)
        index = None if self.buckets is None else self._index()
        origin = 0
        if self.bidirectional:  # of T5's distances those past the last bucket are left out
            origin = self.max_distance if index is None else index.shape[0] // 2
        if index is not None and torch.is_grad_enabled() and entries.requires_grad:
            # An embedding's gradient sums what one entry was read for in a fixed order, which that of an index does not.
            entries = F.embedding(index, entries.t()).t()
        elif index is not None:
            entries = entries.index_select(1, index)  # whose rows are heads at once
        return Resolved(entries.expand(heads_q, -1).contiguous(), "distance", origin)

    def _index(self) -> Tensor:
        """The entry of each distance, from the lowest one."""
        if isinstance(self.buckets, Tensor):
            return self.buckets.long().clamp(0, self.table.shape[1] - 1)
        form = self.table.device, self.table.shape[1], self.max_distance, self.bidirectional
        return _kept_t5_index(*form) if arguments.plain(self.table) else _t5_index(*form)


class Key(Bias):
    """A value for each key, which all queries share.

    Args:
        values: (batch|1, heads_q|1, seqlen_k), any float dtype; of packed calls (sequences|1, heads_q|1, max_seqlen_k or more),
            with keys counted from each sequence's first.

    Raises:
        TypeError, ValueError: values are no such tensor.
    """

    _fields = ("values",)

    def __init__(self, values: Tensor) -> None:
        self.values = _floats("values", values)
        if values.ndim != 3:
            raise ValueError(f"values must have shape (batch, heads, keys), got {tuple(values.shape)}")

    def resolve(self, heads_q: int, dtype: torch.dtype) -> Resolved:
        return Resolved(self.values[:, :, None], "tensor")


def narrowed(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` in ``dtype``, in which a finite number, however low, does not become -inf: that hides."""
    found = t.to(dtype)
    if t.dtype == torch.float64 and dtype != torch.float64:
        found = torch.where((found == -math.inf) & (t != -math.inf), torch.finfo(dtype).min, found)
    return found


def t5_buckets(distance: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """T5's bucket of each distance p - j, int64: small ones have their own, larger ones share by their logarithm."""
    first = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = (distance < 0) * buckets
        distance = distance.abs()
    else:
        distance = distance.clamp(min=0)
    exact = buckets // 2
    # As transformers computes it, in fp32: another order of operations would round a bucket's edge to another side.
    share = torch.log(distance.float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    large = exact + share.clamp(min=0).to(torch.int64)
    return first + torch.where(distance < exact, distance, large.clamp(max=buckets - 1))


def _t5_reach(buckets: int, max_distance: int, bidirectional: bool) -> int:
    """A distance from which on all are in T5's last bucket: the next but one to its edge, on whatever side that is rounded."""
    buckets = buckets // 2 if bidirectional else buckets
    exact = buckets // 2
    edge = exact * (max_distance / exact) ** ((buckets - 1 - exact) / (buckets - exact))
    return min(max_distance, math.ceil(edge) + 1)


def _t5_index(device: torch.device, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """T5's bucket of each distance up to ``_t5_reach``, from the lowest one."""
    reach = _t5_reach(buckets, max_distance, bidirectional)
    distance = torch.arange(-reach if bidirectional else 0, reach + 1, device=device)
    return t5_buckets(distance, buckets, max_distance, bidirectional)


def _kept_t5_index(*form: Any) -> Tensor:
    """The same, which depends on no values: computed once. Twenty small kernels in each call took as long as some calls."""
    found = _t5_indices.get(form)
    if found is not None:
        return found
    with torch.inference_mode(False):  # autograd keeps no inference tensor
        found = _t5_index(*form)
    device, _, max_distance, _ = form
    if max_distance > KEPT_DISTANCE or len(_t5_indices) >= KEPT_INDICES or not arguments.plain(found):
        return found  # the last of these where a mode such as FakeTensorMode makes tensors of its own
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return found  # in memory of the graph, and not computed yet
        torch.cuda.current_stream(device).synchronize()  # other streams may read it
    _t5_indices[form] = found
    return found


_t5_indices: dict[Any, Tensor] = {}


def _shape(t: Tensor) -> str:
    return f"shape {tuple(t.shape)}"


def _floats(name: str, t: Any) -> Tensor:
    if not isinstance(t, Tensor) or t.dtype not in arguments.FLOATS:
        raise TypeError(f"{name} must be a floating point tensor, got {arguments.describe(t)}")
    found: Tensor = arguments.strided(name, t)
    return found
