"""Where a tile's elements lie in shared memory: pitch, padding, swizzles, and what TMA allows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

DTYPES = {
    **dict.fromkeys(("f64", "fp64", "i64"), 8),
    **dict.fromkeys(("f32", "fp32", "tf32", "i32"), 4),
    **dict.fromkeys(("f16", "fp16", "bf16", "i16"), 2),
    **dict.fromkeys(("f8", "fp8", "e4m3", "e5m2", "i8"), 1),
}
LARGEST = 1 << 20  # elements of a tile: more than shared memory holds, and still quick to count


@dataclass(frozen=True, order=True)
class Swizzle:
    """Bits [m, m+b) of an offset are XORed with bits [m+s, m+s+b): CuTe's Swizzle<B, M, S>, s ≥ 1.

    An involution whenever s ≥ b, and a permutation always: the source bits lie above the bits they change.
    """

    b: int
    m: int
    s: int

    def __post_init__(self) -> None:
        if self.b < 0 or self.m < 0 or self.s < 1 or self.b + self.m + self.s > 32:
            raise ValueError(f"swizzle takes B ≥ 0, M ≥ 0, S ≥ 1 with B + M + S ≤ 32, got {self}")

    def __call__(self, offset: int) -> int:
        return offset ^ (((offset >> self.s) >> self.m & ((1 << self.b) - 1)) << self.m)

    def __str__(self) -> str:
        return f"<{self.b},{self.m},{self.s}>"

    def in_bytes(self, itemsize: int) -> Swizzle:
        """The same permutation on byte offsets, for elements of `itemsize` bytes."""
        return Swizzle(self.b, self.m + itemsize.bit_length() - 1, self.s)


# The swizzles of TMA and wgmma descriptors, on byte offsets: 16-byte pieces within 32, 64 or 128 bytes.
TMA_MODES = {"SW32": Swizzle(1, 4, 3), "SW64": Swizzle(2, 4, 3), "SW128": Swizzle(3, 4, 3)}


def parse_swizzles(text: str) -> tuple[Swizzle, ...]:
    """Read `B,M,S`, or several joined by `+`, applied from the left."""
    swizzles = []
    for part in text.split("+"):
        numbers = re.fullmatch(r"\s*<?\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*>?\s*", part)
        if not numbers:
            raise ValueError(f"swizzle takes B,M,S or several joined by +, got {text!r}")
        swizzles.append(Swizzle(*map(int, numbers.groups())))
    return tuple(swizzles)


def join(swizzles: Iterable[Swizzle]) -> str:
    return " + ".join(map(str, swizzles)) or "none"


@dataclass(frozen=True)
class Tile:
    """A row-major tile in shared memory, its first byte at an address that is a multiple of 1024.

    Attributes:
        rows, cols: in elements.
        dtype: of an element: f64, f32, tf32, f16, bf16, f8, e4m3 and the like.
        pad: elements after each row.
        swizzles: they permute offsets of elements, the first one first.
    """

    rows: int
    cols: int
    dtype: str = "f16"
    pad: int = 0
    swizzles: tuple[Swizzle, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rows", "cols"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} takes a number from 1, got {getattr(self, name)}")
        if self.rows * self.cols > LARGEST:
            raise ValueError(f"rows × cols takes at most {LARGEST}, got {self.rows} × {self.cols}")
        if self.pad < 0:
            raise ValueError(f"pad takes a number of elements from 0, got {self.pad}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype takes one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.cols * self.itemsize

    @property
    def pitch_bytes(self) -> int:
        return (self.cols + self.pad) * self.itemsize

    @property
    def size_bytes(self) -> int:
        """From the first byte to the end of the last row's padding."""
        return self.rows * self.pitch_bytes

    def address(self, row: int, byte: int, width: int) -> int:
        """Where the `width` bytes from `byte` of a row lie; an error where a swizzle takes them apart."""
        start = row * self.pitch_bytes + byte
        if start % width:
            raise ValueError(
                f"pad {self.pad}: rows of {self.pitch_bytes} bytes put row {row} off the {width}-byte alignment of the access"
            )
        first = self.moved(start)
        if any(self.moved(start + n) != first + n for n in range(self.itemsize, width, self.itemsize)):
            raise ValueError(f"swizzle {join(self.swizzles)}: the {width} bytes of one lane at row {row} do not stay together")
        return first

    def moved(self, offset: int) -> int:
        """The byte offset after the swizzles of a byte offset before them."""
        element, rest = divmod(offset, self.itemsize)
        for swizzle in self.swizzles:
            element = swizzle(element)
        return element * self.itemsize + rest

    def __str__(self) -> str:
        pad = f" + {self.pad}" if self.pad else ""
        swizzle = f", swizzle {join(self.swizzles)}" if self.swizzles else ""
        return f"{self.rows}×{self.cols}{pad} {self.dtype}{swizzle}"


def tma_refusals(tile: Tile) -> dict[str, str | None]:
    """For every swizzle mode of TMA, why it cannot write this tile as one box, or None where it can.

    CUDA driver API, cuTensorMapEncodeTiled: the box's inner dimension spans at most the swizzle's bytes, box dimensions are
    at most 256, and inner bytes are a multiple of 16. The hardware's own swizzle is the only permutation there is.
    """
    refusals: dict[str, str | None] = {}
    for name, swizzle in TMA_MODES.items():
        span = 16 << swizzle.b
        ours = tuple(one.in_bytes(tile.itemsize) for one in tile.swizzles)
        if tile.rows > 256 or tile.cols > 256:
            refusals[name] = f"a box has at most 256 elements a side, the tile is {tile.rows}×{tile.cols}"
        elif tile.row_bytes % 16:
            refusals[name] = f"rows take a multiple of 16 bytes, these have {tile.row_bytes}"
        elif tile.row_bytes > span:
            pieces = -(-tile.row_bytes // span)
            refusals[name] = f"rows of {tile.row_bytes} bytes exceed its {span}; store the tile as {pieces} panels"
        elif tile.pad:
            refusals[name] = "TMA writes rows without padding"
        elif ours and ours != (swizzle,):
            refusals[name] = f"its swizzle is {swizzle} on bytes, the tile's is {join(ours)}"
        else:
            refusals[name] = None
    return refusals
