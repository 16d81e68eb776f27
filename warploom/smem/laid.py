"""A tile whose elements lie where a CuTe layout puts them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from warploom.smem.layout import DTYPES, Swizzle
from warploom.smem.notation import Layout, Tree, inner, parse_layout, size


@dataclass(frozen=True)
class LaidTile:
    """A tile in shared memory under a layout of CuTe, its offset 0 at an address that is a multiple of 1024.

    Rows are the layout's first mode and columns all others, the second one fastest; a layout of one mode is one row. With
    `turned` they change places: for accesses that take several elements which lie together along the first mode. With
    `swizzle_bytes` the swizzles are of byte addresses, as they are wherever the layout names a `smem_ptr`.
    """

    layout: Layout
    dtype: str = "f16"
    swizzle_bytes: bool = False
    turned: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype takes one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.layout.bits not in (None, 8 * self.itemsize):
            raise ValueError(f"dtype takes the {self.layout.bits} bits of the layout's smem_ptr, got {self.dtype}")

    @classmethod
    def of(cls, text: str, dtype: str = "f16", width: int = 1, swizzle_bytes: bool = False) -> LaidTile:
        """The layout written in `text`, seen as an access of `width` bytes sees it: turned where that alone fits."""
        tile = cls(parse_layout(text), dtype, swizzle_bytes)
        rows, cols = tile._modes
        return replace(tile, turned=width > tile.itemsize and not _together(cols) and _together(rows))

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def rows(self) -> int:
        return size(self._modes[self.turned][0])

    @property
    def cols(self) -> int:
        return size(self._modes[not self.turned][0])

    @property
    def row_bytes(self) -> int:
        return self.cols * self.itemsize

    @property
    def size_bytes(self) -> int:
        """From the first byte to the end of the last element in use."""
        return int(self.bytes.max()) + self.itemsize

    @property
    def swizzles(self) -> tuple[Swizzle, ...]:
        return self.layout.swizzles

    @property
    def in_bytes(self) -> bool:
        """Whether the swizzles are of byte addresses."""
        return self.swizzle_bytes or self.layout.bits is not None

    def plain(self) -> LaidTile:
        """The same tile without its swizzles."""
        return replace(self, layout=replace(self.layout, swizzles=()))

    @cached_property
    def bytes(self) -> Tensor:
        """The byte address of every element: int64 (rows, cols)."""
        down, across = (
            torch.tensor([inner(n, shape, stride) for n in range(size(shape))], dtype=torch.int64)
            for shape, stride in self._modes
        )
        table = self.layout.offset + down[:, None] + across
        if self.in_bytes:
            table = table * self.itemsize
        for one in reversed(self.swizzles):
            table = table ^ ((table >> one.s >> one.m & (1 << one.b) - 1) << one.m)
        if not self.in_bytes:
            table = table * self.itemsize
        return table.T if self.turned else table

    def address(self, row: int, byte: int, width: int) -> int:
        """Where the `width` bytes from `byte` of a row lie; an error where they do not lie together or aligned."""
        column, rest = divmod(byte, self.itemsize)
        first = int(self.bytes[row, column]) + rest
        where = f"({column}, {row})" if self.turned else f"({row}, {column})"
        for n in range(column + 1, column + width // self.itemsize):
            if int(self.bytes[row, n]) != first + (n - column) * self.itemsize:
                raise ValueError(f"layout {self.layout}: the {width} bytes of one lane from {where} on do not lie together")
        if first % width:
            raise ValueError(
                f"layout {self.layout}: {where} lies at byte {first}, off the {width}-byte alignment of the access"
            )
        return first

    def __str__(self) -> str:
        turned = ", rows along its second mode" if self.turned else ""
        unit = ", swizzled in bytes" if self.swizzle_bytes and self.swizzles and self.layout.bits is None else ""
        return f"{self.layout} {self.dtype}{unit}{turned}"

    @cached_property
    def _modes(self) -> tuple[tuple[Tree, Tree], tuple[Tree, Tree]]:
        """Shape and stride of rows and columns, not turned."""
        first, *others = self.layout.modes
        if not others:
            return (1, 0), first
        if len(others) == 1:
            return first, others[0]
        return first, (tuple(shape for shape, _ in others), tuple(stride for _, stride in others))


def _together(mode: tuple[Tree, Tree]) -> bool:
    """Whether a mode's first two elements are neighbours."""
    return size(mode[0]) > 1 and inner(1, *mode) == 1
