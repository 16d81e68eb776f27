"""Hopper's fixed layouts as pictures: the swizzle atoms of TMA, the operands of wgmma in shared memory and in registers.

Every picture is evaluated from a layout in CuTe's notation. Sources: PTX ISA, sections on the tensor map's swizzle modes and
on `wgmma` register fragments, shared-memory matrix layouts and the matrix descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from warploom.runtime.suggest import meant
from warploom.smem.access import access
from warploom.smem.laid import LaidTile
from warploom.smem.layout import TMA_MODES
from warploom.smem.model import BANK_BYTES, BANKS, predict
from warploom.smem.notation import parse_layout

PIECE = 16  # bytes that a swizzle keeps together: a row of a core matrix
LINE = BANKS * BANK_BYTES
HALVES = PIECE // 2  # 16-bit elements of a piece
CORE = 8  # rows of a core matrix
WIDTHS = {"none": 0, "32": 1, "64": 2, "128": 3}  # bits that each mode swizzles
MODE_BITS = {"none": 0, "128": 1, "64": 2, "32": 3}  # bits 62 and 63 of a matrix descriptor
OPERAND = 64  # rows and depth of the K-major operand: one wgmma's A, four steps of K


@dataclass(frozen=True)
class Cell:
    """A cell of a picture: what stands in it, its colour (0 to 7) and what it means in words."""

    label: str
    color: int
    tip: str


@dataclass(frozen=True)
class Picture:
    """A table of cells with the layout that it shows and what is to be seen in it. `facts` are its numbers by name."""

    name: str
    title: str
    layout: str
    down: str
    across: str
    row_names: tuple[str, ...]
    col_names: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    facts: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "atom": self.name,
            "title": self.title,
            "layout": self.layout,
            "rows": list(self.row_names),
            "columns": list(self.col_names),
            "cells": [[cell.label for cell in row] for row in self.cells],
            "notes": list(self.notes),
            **self.facts,
        }


def picture(name: str) -> Picture:
    """The picture of this name, one of `ATOMS`."""
    if name not in ATOMS:
        raise ValueError(f"atom takes one of {', '.join(ATOMS)}, got {name!r}{meant(name, ATOMS)}")
    return ATOMS[name](name)


def _swizzle(mode: str) -> str:
    return f"Swizzle{TMA_MODES[f'SW{mode}']} o " if mode != "none" else ""


def _tma(mode: str, name: str) -> Picture:
    """Eight lines of shared memory, and which piece of which row of the box lies where."""
    width = PIECE << (WIDTHS[mode] or 3)
    rows, across = CORE * LINE // width, width // PIECE
    text = f"{_swizzle(mode)}smem_ptr[8b] o ({rows},{width}):({width},1)"
    box = LaidTile.of(text, "i8")
    places = {box.address(row, PIECE * piece, PIECE): (row, piece) for row in range(rows) for piece in range(across)}
    cells = []
    for start in range(0, CORE * LINE, LINE):
        line = []
        for address in range(start, start + LINE, PIECE):
            row, piece = places[address]
            tip = f"byte {address}: row {row} of the box, its bytes {PIECE * piece} to {PIECE * piece + PIECE - 1}"
            line.append(Cell(f"{row}.{piece}", piece, tip))
        cells.append(tuple(line))
    column = predict(access("ldmatrix.x1"), [box.address(row, 0, PIECE) for row in range(CORE)]).wavefronts
    step = LINE // width
    source = "r" if step == 1 else f"(r / {step})"
    moved = f"Piece c of row r lies in place c XOR {source} mod {across} of its row's {width} bytes."
    if mode == "none":
        moved = "Rows lie one after the other as they are."
    served = "1 wavefront" if column == 1 else f"{column} wavefronts"
    notes = (moved, f"Eight rows of one column, as ldmatrix and wgmma read them, take {served}.")
    title = f"TMA, no swizzle, rows of {width} bytes" if mode == "none" else f"TMA's {mode}-byte swizzle"
    banks = tuple(f"{bank}-{bank + 3}" for bank in range(0, BANKS, PIECE // BANK_BYTES))
    lines = tuple(str(n) for n in range(CORE))
    return Picture(
        name, title, text, "line of 128 bytes", "banks", lines, banks, tuple(cells), notes, {"wavefronts_of_a_column": column}
    )


def k_major(mode: str) -> str:
    """The layout of a K-major operand of 64 rows and 64 deep: atoms of 8 rows by the swizzle's width, down first."""
    span = HALVES << WIDTHS[mode]
    groups, panels = OPERAND // CORE, OPERAND // span
    down = f"((8,{groups}),({span},{panels}))"
    return f"{_swizzle(mode)}smem_ptr[16b] o {down}:(({span},{CORE * span}),(1,{OPERAND * span}))"


def mn_major(mode: str) -> str:
    """The layout of an operand of 16 deep whose M or N is contiguous: atoms of the swizzle's width by 8, along MN first."""
    span = HALVES << WIDTHS[mode]
    blocks = max(2, 64 // span)
    return f"{_swizzle(mode)}smem_ptr[16b] o (({span},{blocks}),(8,2)):((1,{CORE * span}),({span},{CORE * span * blocks}))"


def offsets(major: str, mode: str) -> tuple[int, int]:
    """Leading and stride byte offset of the operand's matrix descriptor, the distances that PTX defines for it.

    K-major: the stride offset goes from 8 rows to the next 8; the leading one from a core matrix to the next along K without a
    swizzle, and is not used with one (given as 16, an encoded 1). MN-major: with a swizzle, leading from one swizzle's width
    of MN to the next and stride from 8 of K to the next 8; without one, the other way round.
    """
    tile = LaidTile.of(k_major(mode) if major == "k" else mn_major(mode), "f16")

    def at(row: int, column: int) -> int:
        return int(tile.bytes[row, column])

    if major == "k":
        return (at(0, HALVES) if mode == "none" else PIECE), at(CORE, 0)
    along_mn, along_k = at(HALVES << WIDTHS[mode], 0), at(0, CORE)
    return (along_k, along_mn) if mode == "none" else (along_mn, along_k)


def descriptor(major: str, mode: str) -> int:
    """The 64 bits of the operand's matrix descriptor, but for its start address (bits 0 to 13)."""
    leading, stride = offsets(major, mode)
    return leading // PIECE << 16 | stride // PIECE << 32 | MODE_BITS[mode] << 62


def _operand(major: str, mode: str, name: str) -> Picture:
    """An operand as the mathematics sees it, and in which 16 bytes of shared memory each row of a core matrix lies."""
    text = k_major(mode) if major == "k" else mn_major(mode)
    # Both as rows of pieces: the contiguous dimension goes across.
    tile = LaidTile.of(text, "f16", PIECE)
    shown = min(tile.rows, 2 * CORE)
    names = ("row of M or N", "K") if major == "k" else ("K", "M or N")
    cells = []
    for row in range(shown):
        line = []
        for column in range(0, tile.cols, HALVES):
            address = tile.address(row, 2 * column, PIECE)
            bank = address % LINE // BANK_BYTES
            where = f"{names[0]} {row}, {names[1]} {column} to {column + HALVES - 1}"
            line.append(Cell(str(address // PIECE), bank // 4, f"{where}: byte {address}, banks {bank} to {bank + 3}"))
        cells.append(tuple(line))
    leading, stride = offsets(major, mode)
    used = "not used" if major == "k" and mode != "none" else f"{leading} bytes"
    if major == "k":
        begins = [str(int(tile.bytes[0, column])) for column in range(0, OPERAND, 2 * HALVES)]
        further = f"The steps of 16 along K begin at bytes {', '.join(begins[:-1])} and {begins[-1]}."
    else:
        further = f"The next 16 of K begin {2 * (leading if mode == 'none' else stride)} bytes further on."
    notes = (
        "A cell is 8 elements of 16 bits, a core matrix 8 cells in a column. "
        "Its number counts 16 bytes of shared memory, its colour is the four banks in which it lies.",
        f"Matrix descriptor: leading byte offset {used}, stride byte offset {stride} bytes, swizzle mode {MODE_BITS[mode]}; "
        f"{descriptor(major, mode):#018x} with the start address 0.",
        further,
    )
    swizzle = "no swizzle" if mode == "none" else f"{mode}-byte swizzle"
    return Picture(
        name,
        f"wgmma {'K' if major == 'k' else 'MN'}-major, {swizzle}",
        text,
        *names,
        tuple(map(str, range(shown))),
        tuple(map(str, range(0, tile.cols, HALVES))),
        tuple(cells),
        notes,
        {"leading_byte_offset": leading, "stride_byte_offset": stride, "descriptor": descriptor(major, mode)},
    )


def fragment(columns: int) -> str:
    """(thread, register) to row + 64 × column: an accumulator of m64 with so many columns, or 16-bit A in registers."""
    return f"((4,8,4),(2,2,{columns // 8})):((128,1,16),(64,8,512))"


def _registers(letter: str, what: str, notes: Sequence[str], name: str) -> Picture:
    """The first warp's 16 rows of a matrix that lies in registers."""
    columns = 16
    text = fragment(columns)
    layout = parse_layout(text)
    held = {layout((thread, value)): (thread, value) for thread in range(128) for value in range(columns // 2)}
    cells = []
    for row in range(2 * CORE):
        line = []
        for column in range(columns):
            thread, value = held[row + 64 * column]
            tip = f"row {row}, column {column}: thread {thread}, element {letter}{value}"
            line.append(Cell(f"{thread}:{value}", value // 2, tip))
        cells.append(tuple(line))
    every = tuple(map(str, range(columns)))
    where = f"A cell is thread:element, 5:3 the {letter}3 of thread 5. Warp w of the four holds rows 16w to 16w + 15 alike."
    return Picture(name, what, text, "row", "column", every, every, tuple(cells), (where, *notes), {"threads": 128})


_ACCUMULATOR = partial(
    _registers,
    "d",
    "wgmma accumulator D, m64n16, warp 0",
    (
        "Wider ones go on the same way: 8 columns more are 4 elements more a thread.",
        "The four threads of a row are neighbours, so a row's maximum takes two shuffles.",
    ),
)
_LEFT = partial(
    _registers,
    "a",
    "wgmma A in registers, m64k16, warp 0",
    (
        "Elements have 16 bits: two make one register, a colour is one register.",
        "An accumulator's 16 columns lie in the same threads in the same order: rounded to 16 bits they are an A operand.",
    ),
)

ATOMS: dict[str, Callable[[str], Picture]] = {
    **{f"tma-{mode}": partial(_tma, mode) for mode in WIDTHS},
    **{f"wgmma-k-{mode}": partial(_operand, "k", mode) for mode in WIDTHS},
    **{f"wgmma-mn-{mode}": partial(_operand, "mn", mode) for mode in WIDTHS},
    "wgmma-accumulator": _ACCUMULATOR,
    "wgmma-a": _LEFT,
}


def describe(shown: Picture) -> str:
    """The picture as text."""
    width = max(len(cell.label) for row in shown.cells for cell in row)
    width = max(width, *map(len, shown.col_names))
    left = max(map(len, shown.row_names))
    lines = [shown.title, f"layout    {shown.layout}", f"down      {shown.down}", f"across    {shown.across}"]
    lines.append(" " * (left + 2) + " ".join(name.rjust(width) for name in shown.col_names))
    for name, row in zip(shown.row_names, shown.cells, strict=True):
        lines.append(f"{name.rjust(left)}  " + " ".join(cell.label.rjust(width) for cell in row))
    return "\n".join([*lines, *shown.notes])
