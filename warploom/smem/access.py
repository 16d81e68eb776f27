"""The shared-memory instructions: bytes behind each lane's address and how their lanes group into phases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from warploom.runtime.suggest import meant

WARP = 32


@dataclass(frozen=True)
class Access:
    """One warp-wide shared-memory instruction.

    `width` is the bytes behind one lane's address, `lanes` how many lanes give an address, `phase_lanes` how many of them
    the hardware serves together, and `merges` whether pairs of lanes at one address may be served as one (wide loads).
    """

    name: str
    load: bool
    width: int
    lanes: int
    phase_lanes: int
    merges: bool = False

    @property
    def matrix(self) -> bool:
        """Whether this is ldmatrix or stmatrix, whose addresses are rows of 8×8 matrices."""
        return self.name.split(".")[0] in ("ldmatrix", "stmatrix")


def _table() -> dict[str, Access]:
    table = {}
    for family, load in (("lds", True), ("sts", False)):
        for bits in (8, 16, 32, 64, 128):
            # A phase moves at most 128 bytes: the whole warp up to 32 bits a lane, then half- and quarter-warps.
            phase_lanes = min(WARP, 128 * 8 // bits)
            name = f"{family}.{bits}"
            table[name] = Access(name, load, bits // 8, WARP, phase_lanes, merges=load and bits >= 64)
    for family, load in (("ldmatrix", True), ("stmatrix", False)):
        for count in (1, 2, 4):
            for suffix in ("", ".trans"):
                name = f"{family}.x{count}{suffix}"
                table[name] = Access(name, load, 16, 8 * count, 8)
    return table


ACCESSES = _table()


def access(name: str) -> Access:
    """The instruction of this name: lds.N and sts.N for N bits, ldmatrix.xN and stmatrix.xN, also with .trans."""
    if name not in ACCESSES:
        raise ValueError(f"access takes one of {', '.join(ACCESSES)}, got {name!r}{meant(name, ACCESSES)}")
    return ACCESSES[name]


ORDERS = {
    "rows": "lane after lane along each row, row after row",
    "columns": "lane after lane down each column, column after column",
    "fragment": "lane l at row l // 4, place l % 4 of each 8-row block: the accumulator of mma.m16n8",
    "matrices": "8×8 matrices, two down and two across for x4, two down for x2",
}


@dataclass(frozen=True)
class Pattern:
    """An instruction and the order in which its lanes walk over a tile, or over a `view` (rows, cols) of its memory.

    Attributes:
        access: the instruction.
        order: "rows", "columns", "fragment" or "matrices".
        view: another shape of the same memory, (rows, cols) in elements; None: the tile's.
    """

    access: Access
    order: str
    view: tuple[int, int] | None = None

    def __str__(self) -> str:
        canonical = "matrices" if self.access.matrix else "rows"
        text = self.access.name if self.order == canonical else f"{self.access.name}@{self.order}"
        return text if self.view is None else f"{text}@{self.view[0]}x{self.view[1]}"


@cache
def parse_pattern(text: str) -> Pattern:
    """Read `NAME[@ORDER][@ROWSxCOLS]`, as in ldmatrix.x4, lds.32@columns, sts.32@fragment or ldmatrix.x4@256x16.

    Raises:
        ValueError: a name or order that is unknown, or an order that the instruction does not have.
    """
    name, *rest = text.strip().split("@")
    which = access(name)
    order, view = "matrices" if which.matrix else "rows", None
    for part in rest:
        if shape := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part):
            view = int(shape[1]), int(shape[2])
        elif part in ORDERS:
            order = part
        else:
            raise ValueError(f"access takes NAME[@ORDER][@ROWSxCOLS] with an order of {', '.join(ORDERS)}, got {text!r}")
    if (order == "matrices") != which.matrix:
        raise ValueError(f"access {text!r}: the order 'matrices' is the one of ldmatrix and stmatrix, and of nothing else")
    return Pattern(which, order, view)
