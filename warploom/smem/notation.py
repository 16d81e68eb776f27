"""CuTe's notation of layouts, read from text: `(8,64):(64,1)`, `Swizzle<3,3,3> o 0 o ((8,2),8):((8,128),1)`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from warploom.smem.layout import LARGEST, Swizzle

Tree = int | tuple["Tree", ...]

LONGEST = 400  # characters of a text
DEEPEST = 16  # brackets within brackets


@dataclass(frozen=True)
class Layout:
    """A function from coordinates to offsets: Swizzle o ... o Swizzle o offset o shape:stride, applied from the right.

    `shape` and `stride` are numbers or nested tuples of them, nested alike. `bits` is the width of an element where the text
    names one by `smem_ptr[16b]`; its swizzles are then of byte addresses, otherwise of the offsets themselves.
    """

    shape: Tree
    stride: Tree
    offset: int = 0
    swizzles: tuple[Swizzle, ...] = ()
    bits: int | None = None

    @property
    def modes(self) -> tuple[tuple[Tree, Tree], ...]:
        """Shape and stride of each of the outermost modes."""
        if isinstance(self.shape, int) or isinstance(self.stride, int):
            return ((self.shape, self.stride),)
        return tuple(zip(self.shape, self.stride, strict=True))

    @property
    def size(self) -> int:
        return size(self.shape)

    def linear(self, coordinate: Tree) -> int:
        """The offset of a coordinate before the swizzles; a number counts through the modes, the first one fastest."""
        return self.offset + inner(coordinate, self.shape, self.stride)

    def __call__(self, coordinate: Tree) -> int:
        """The offset of a coordinate, in elements; a byte within one, where a swizzle of bytes moves to it, is left out."""
        unit = 1 if self.bits is None else self.bits // 8
        moved = self.linear(coordinate) * unit
        for swizzle in reversed(self.swizzles):
            moved = swizzle(moved)
        return moved // unit

    def __str__(self) -> str:
        between = [f"Swizzle{one}" for one in self.swizzles]
        between += [] if self.bits is None else [f"smem_ptr[{self.bits}b]"]
        between += [str(self.offset)] if self.offset else []
        return " o ".join([*between, f"{_written(self.shape)}:{_written(self.stride)}"])


def size(shape: Tree) -> int:
    return shape if isinstance(shape, int) else prod(map(size, shape))


def inner(coordinate: Tree, shape: Tree, stride: Tree) -> int:
    """The inner product of a coordinate with the strides. A number for a tuple is taken apart colexicographically."""
    if isinstance(shape, int):
        assert isinstance(coordinate, int) and isinstance(stride, int)
        return coordinate * stride
    assert not isinstance(stride, int)
    if not isinstance(coordinate, int):
        return sum(map(inner, coordinate, shape, stride))
    total, rest = 0, coordinate
    for one, step in zip(shape[:-1], stride[:-1], strict=True):
        total += inner(rest % size(one), one, step)
        rest //= size(one)
    return total + inner(rest, shape[-1], stride[-1])


def compact(shape: Tree, start: int = 1) -> Tree:
    """The strides of a shape that is written without any: the first mode fastest, without gaps."""
    if isinstance(shape, int):
        return start
    strides = []
    for one in shape:
        strides.append(compact(one, start))
        start *= size(one)
    return tuple(strides)


def parse_layout(text: str) -> Layout:
    """Read a layout as CuTe writes and prints it; an error says in one sentence what is missing, and where.

    Args:
        text: such as "Swizzle<3,3,3> o (64,64):(64,1)". Swizzles are `Swizzle<B,M,S>`, `Sw<B,M,S>` or `S<B,M,S>`, sizes `8`
            or `_8`; strides may be left out.

    Returns:
        The layout, a function of coordinates.

    Raises:
        ValueError: what is wrong, with ▸ at its place.
    """
    if len(text) > LONGEST:
        raise ValueError(f"layout takes up to {LONGEST} characters, got {len(text)}")
    return _Reader(text).layout()


@dataclass(frozen=True)
class _Node:
    """A number or a tuple of nodes, and where it stands in the text."""

    at: int
    value: int | tuple[_Node, ...]

    @property
    def tree(self) -> Tree:
        return self.value if isinstance(self.value, int) else tuple(one.tree for one in self.value)


class _Reader:
    """The text and how far it has been read."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def layout(self) -> Layout:
        swizzles, offset, bits = [], 0, None
        while self.take(r"(Swizzle|Sw|S)(?![A-Za-z])"):
            swizzles.append(self.swizzle())
            self.need("[o∘]", '"o"')
        if self.take(r"smem_ptr"):
            bits = int(self.need(r"\[(8|16|32|64)b\]", "[8b], [16b], [32b] or [64b]")[1])
            self.take(r"\([A-Za-z0-9_]*\)")
            self.need("[o∘]", '"o"')
        if re.compile(r"[ \t\n]*_?[0-9]+[ \t\n]*[o∘]").match(self.text, self.at):
            offset = self.number()
            self.need("[o∘]", '"o"')
        shape = self.tree()
        self.check_sizes(shape)
        if self.take(":"):
            stride = self.tree()
            self.check_nesting(shape, stride)
            strides = stride.tree
            self.need(r"$", "nothing more")
        else:
            self.need(r"$", '":" or nothing more')
            strides = compact(shape.tree)
        found = Layout(shape.tree, strides, offset, tuple(swizzles), bits)
        if found.size > LARGEST:
            self.fail(f"at most {LARGEST} elements", shape.at)
        if found.linear(found.size - 1) >= LARGEST:
            self.fail(f"offsets below {LARGEST}", shape.at)
        return found

    def swizzle(self) -> Swizzle:
        self.need("<", '"<"')
        start = self.skip()
        b = self.number()
        self.need(",", '","')
        m = self.number()
        self.need(",", '","')
        s = self.number()
        self.need(">", '">"')
        if s < 1 or b + m + s > 32:
            self.fail("S from 1 and B + M + S up to 32", start)
        return Swizzle(b, m, s)

    def tree(self, depth: int = 0) -> _Node:
        start = self.skip()
        if not self.take(r"\("):
            return _Node(start, self.number('a number or "("'))
        if depth == DEEPEST:
            self.fail(f"at most {DEEPEST} brackets within one another", start)
        parts = [self.tree(depth + 1)]
        while not self.take(r"\)"):
            self.need(",", '"," or ")"')
            if self.take(r"\)"):
                break
            parts.append(self.tree(depth + 1))
        return _Node(start, tuple(parts))

    def number(self, what: str = "a number") -> int:
        start = self.skip()
        found = int(self.need(r"_?([0-9]{1,9})(?![0-9])", what)[1])
        if found > LARGEST:
            self.fail(f"numbers up to {LARGEST}", start)
        return found

    def check_sizes(self, shape: _Node) -> None:
        if isinstance(shape.value, int):
            if not shape.value:
                self.fail("sizes from 1", shape.at)
        else:
            for one in shape.value:
                self.check_sizes(one)

    def check_nesting(self, shape: _Node, stride: _Node) -> None:
        if isinstance(shape.value, int) and isinstance(stride.value, int):
            return
        if isinstance(shape.value, int) or isinstance(stride.value, int) or len(shape.value) != len(stride.value):
            self.fail("strides nested as the shape is", stride.at)
        for one, other in zip(shape.value, stride.value, strict=True):
            self.check_nesting(one, other)

    def skip(self) -> int:
        while self.at < len(self.text) and self.text[self.at] in " \t\n":
            self.at += 1
        return self.at

    def take(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern).match(self.text, self.skip())
        if found:
            self.at = found.end()
        return found

    def need(self, pattern: str, what: str) -> re.Match[str]:
        return self.take(pattern) or self.fail(what, self.at)

    def fail(self, what: str, at: int) -> NoReturn:
        raise ValueError(f"layout takes {what} where ▸ stands: {self.text[:at]}▸{self.text[at:]}")


def _written(tree: Tree) -> str:
    return str(tree) if isinstance(tree, int) else f"({','.join(map(_written, tree))})"
