"""How tensors lie in memory: slices, transposes, expansions, overlaps, odd addresses; and building them from values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.fuzz.problem import spec

KINDS = (
    "contiguous",
    "transposed",  # memory in the order (…, heads, rows, dim)
    "packed_qkv",  # a third of each row, as of one projection; amount: which
    "packed_kv",  # half of each row
    "sliced_rows",  # every amount-th row, from the second on
    "sliced_heads",  # every amount-th head, from the second on
    "padded_rows",  # rows amount elements further apart than they need
    "padded_heads",  # heads amount elements further apart
    "padded_batch",  # batch entries amount elements further apart
    "expanded_batch",  # all batch entries are one, by a stride of 0
    "expanded_heads",  # all heads are one
    "expanded_rows",  # all rows are one
    "overlapping_rows",  # rows begin amount elements apart, fewer than they hold
    "overlapping_heads",  # heads begin amount elements apart, fewer than they hold
    "last_dim_strided",  # every other element
)
ALIASED = ("expanded_batch", "expanded_heads", "expanded_rows", "overlapping_rows", "overlapping_heads")
# Kinds whose strides can be multiples of 8 elements.
EVEN = tuple(k for k in KINDS if k != "last_dim_strided")


@spec
@dataclass(frozen=True)
class View:
    """A tensor's place in a buffer of its own.

    offset: elements from the buffer's start, which is aligned to 16 bytes, to the place where a plain tensor would begin.
    """

    kind: str = "contiguous"
    amount: int = 0
    offset: int = 0

    @property
    def aliased(self) -> bool:
        """Whether elements may share memory."""
        return self.kind in ALIASED

    def strides(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Strides in elements, and the first element's place. ``shape`` is (…, rows, heads, dim), at least these three."""
        *lead, rows, heads, dim = shape
        step, head, row, first = 1, dim, heads * dim, 0
        kind, amount = self.kind, self.amount
        if kind == "transposed":
            head, row = rows * dim, dim
        elif kind == "packed_qkv":
            row, first = 3 * heads * dim, amount * heads * dim
        elif kind == "packed_kv":
            row, first = 2 * heads * dim, amount * heads * dim
        elif kind == "sliced_rows":
            row, first = amount * heads * dim, heads * dim
        elif kind == "sliced_heads":
            head, row, first = amount * dim, amount * heads * dim, dim
        elif kind == "padded_rows":
            row += amount
        elif kind == "padded_heads":
            head, row = dim + amount, heads * (dim + amount)
        elif kind == "expanded_heads":
            head, row = 0, dim
        elif kind == "expanded_rows":
            row = 0
        elif kind == "overlapping_rows":
            row = amount
        elif kind == "overlapping_heads":
            head, row = amount, heads * amount
        elif kind == "last_dim_strided":
            step, head, row = 2, 2 * dim, 2 * heads * dim
        elif kind not in ("contiguous", "padded_batch", "expanded_batch"):
            raise ValueError(f"there is no view {kind!r}")
        extent = rows * row if kind != "transposed" else heads * rows * dim
        if kind == "expanded_rows":
            extent = heads * dim
        if kind == "padded_batch":
            extent += amount
        strides = [0] * len(lead)
        for n in range(len(lead) - 1, -1, -1):
            strides[n] = 0 if kind == "expanded_batch" and n == 0 else extent
            extent *= lead[n]
        return (*strides, row, head, step), first + self.offset


PLAIN = View()


@dataclass(frozen=True)
class Placed:
    """A tensor and all the memory it was given: what is around it must not change either."""

    tensor: Tensor
    buffer: Tensor


def place(
    values: Tensor,
    view: View,
    hidden: Tensor | None = None,
    hostile: str = "nan",
    device: torch.device | str = "cpu",
) -> Placed:
    """Lay a tensor as the view says, on the device.

    Memory that no visible element has (gaps, margins, hidden elements) holds `hostile`. Elements that share memory hold some
    of the values: the result's contents count, not `values`.

    Args:
        values: CPU, (…, rows, heads, dim).
        hidden: bool, broadcastable to it: elements that nothing may depend on; None: none.
        hostile: 'nan', 'inf', '-inf', 'mixed' (all three) or '' (large ordinary numbers).
    """
    shape = tuple(values.shape)
    strides, first = view.strides(shape)
    last = sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True)) if values.numel() else 0
    margin = 24
    size = first + last + 1 + margin
    buffer = filling(size, values.dtype, hostile)
    if values.numel():
        if hidden is not None:
            hidden = hidden.to("cpu").expand(shape)
        if view.aliased:
            _fill_shared(buffer, values, hidden, shape, strides, first)
        else:
            target = buffer.as_strided(shape, strides, first)
            if hidden is None:
                target.copy_(values)
            else:
                target.copy_(torch.where(hidden, filling(1, values.dtype, hostile), values))
                if hostile == "mixed":
                    target.masked_scatter_(hidden, filling(int(hidden.sum()), values.dtype, hostile))
    buffer = buffer.to(device)
    return Placed(buffer.as_strided(shape, strides, first), buffer)


def _fill_shared(
    buffer: Tensor, values: Tensor, hidden: Tensor | None, shape: tuple[int, ...], strides: tuple[int, ...], first: int
) -> None:
    """Numbers wherever some visible element lies."""
    places = torch.arange(buffer.numel()).as_strided(shape, strides, first)
    seen = torch.zeros(buffer.numel(), dtype=torch.bool)
    seen[(places if hidden is None else places[~hidden]).reshape(-1)] = True
    count = int(seen.sum())
    flat = values.reshape(-1)
    if flat.numel() < count:
        flat = flat.repeat(-(-count // flat.numel()))
    buffer[seen] = flat[:count]


def filling(size: int, dtype: torch.dtype, hostile: str) -> Tensor:
    """What hidden memory holds."""
    if hostile == "mixed":
        pattern = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=dtype)
        return pattern.repeat(-(-size // 3))[:size].clone()
    return torch.full((size,), float(hostile) if hostile else 300.0, dtype=dtype)


def checksum(buffers: list[Tensor]) -> list[Tensor]:
    """Copies of buffers, to compare after a call."""
    return [b.clone() for b in buffers]


def bits(t: Tensor) -> Tensor:
    """The same memory as integers, for which NaN equals itself."""
    if not t.is_floating_point():
        return t
    return t.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])
