"""Hopper's layouts as pictures, against the formulas of the PTX ISA written out here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from warploom.cli import main
from warploom.smem.atom_svg import COLORS, svg
from warploom.smem.atoms import ATOMS, descriptor, offsets, picture

SPANS = {"none": 16, "32": 32, "64": 64, "128": 128}  # bytes that a mode swizzles among themselves


def xored(mode: str, address: int) -> int:
    """Bits 4 and up of an address XOR bits 7 and up, as many as the mode has."""
    pieces = SPANS[mode] // 16
    return address // SPANS[mode] * SPANS[mode] + (address % SPANS[mode] // 16 ^ address // 128 % pieces) * 16 + address % 16


@pytest.mark.parametrize("mode", SPANS)
def test_tma(mode: str) -> None:
    shown = picture(f"tma-{mode}")
    width = 128 if mode == "none" else SPANS[mode]
    for row in range(1024 // width):
        for piece in range(width // 16):
            address = xored(mode, row * width + 16 * piece)
            cell = shown.cells[address // 128][address % 128 // 16]
            assert (cell.label, cell.color) == (f"{row}.{piece}", piece)
            assert cell.tip.startswith(f"byte {address}: row {row} of the box")
    assert shown.facts["wavefronts_of_a_column"] == (8 if mode == "none" else 1)
    sentence = re.match(r"Piece c of row r lies in place c XOR (r|\(r / \d\)) mod (\d) ", shown.notes[0])
    assert (sentence is None) == (mode == "none")
    if sentence:
        shift, pieces = int(sentence[1][5:-1] if "/" in sentence[1] else 1), int(sentence[2])
        where = {cell.label: 8 * line + n for line, cells in enumerate(shown.cells) for n, cell in enumerate(cells)}
        for label, place in where.items():
            row, piece = map(int, label.split("."))
            assert place == row * pieces + (piece ^ row // shift % pieces)


@pytest.mark.parametrize("mode", SPANS)
def test_k_major_operand(mode: str) -> None:
    """Core matrices of 8 rows: one swizzle's width wide and 64 rows high, then the next."""
    span = SPANS[mode]
    for row, line in enumerate(picture(f"wgmma-k-{mode}").cells):
        for piece, cell in enumerate(line):
            panel, inside = divmod(16 * piece, span)
            address = xored(mode, panel * 64 * span + row * span + inside)
            assert (int(cell.label), cell.color) == (address // 16, address // 16 % 8)
    assert offsets("k", mode) == (1024 if mode == "none" else 16, 8 * span)


@pytest.mark.parametrize("mode", SPANS)
def test_mn_major_operand(mode: str) -> None:
    """Atoms of one swizzle's width along M or N by 8 of K; along M or N first, then along K."""
    span, across = SPANS[mode], 256 if mode == "128" else 128
    for k, line in enumerate(picture(f"wgmma-mn-{mode}").cells):
        assert len(line) == across // 16
        for piece, cell in enumerate(line):
            atom, inside = divmod(16 * piece, span)
            address = xored(mode, k // 8 * 8 * across + atom * 8 * span + k % 8 * span + inside)
            assert (int(cell.label), cell.color) == (address // 16, address // 16 % 8)
    assert sorted(offsets("mn", mode)) == sorted((8 * span, 8 * across))
    assert (offsets("mn", mode)[0] == 8 * span) == (mode != "none")


@pytest.mark.parametrize("mode", SPANS)
@pytest.mark.parametrize("major", ["k", "mn"])
def test_core_matrices_are_free_of_conflicts_where_swizzled(major: str, mode: str) -> None:
    """Eight cells in a column are a core matrix: eight colours are eight times four banks."""
    cells = picture(f"wgmma-{major}-{mode}").cells
    for top in (0, 8):
        for column in range(len(cells[0])):
            assert len({cells[top + row][column].color for row in range(8)}) == 8


@pytest.mark.parametrize("mode", SPANS)
@pytest.mark.parametrize("major", ["k", "mn"])
def test_descriptor(major: str, mode: str) -> None:
    bits, (leading, stride) = descriptor(major, mode), offsets(major, mode)
    assert bits & 0x3FFF == 0 and bits >> 16 & 0x3FFF == leading >> 4 and bits >> 32 & 0x3FFF == stride >> 4
    assert bits >> 49 & 7 == 0 and bits >> 62 == {"none": 0, "128": 1, "64": 2, "32": 3}[mode]


@pytest.mark.parametrize("name", ["wgmma-accumulator", "wgmma-a"])
def test_registers(name: str) -> None:
    """Row: lane / 4, and 8 more for elements 2, 3, 6, 7. Column: 2 (lane mod 4) + i mod 2, and 8 more from element 4 on."""
    shown = picture(name)
    for thread in range(32):
        for element in range(8):
            row = thread // 4 + 8 * (element // 2 % 2)
            column = 8 * (element // 4) + 2 * (thread % 4) + element % 2
            cell = shown.cells[row][column]
            assert (cell.label, cell.color) == (f"{thread}:{element}", element // 2)


@pytest.mark.parametrize("name", ATOMS)
def test_svg(name: str) -> None:
    shown = picture(name)
    root = ElementTree.fromstring(svg(shown))
    space = "{http://www.w3.org/2000/svg}"
    cells = [cell for row in shown.cells for cell in row]
    groups = root.findall(f"{space}g")
    assert [group.findtext(f"{space}text") for group in groups] == [cell.label for cell in cells]
    assert [group.findtext(f"{space}title") for group in groups] == [cell.tip for cell in cells]
    assert [group.find(f"{space}path").get("class") for group in groups] == [f"c{cell.color}" for cell in cells]
    assert max(cell.color for cell in cells) < len(COLORS)
    assert "prefers-color-scheme:dark" in root.findtext(f"{space}style")
    assert float(root.get("viewBox").split()[2]) <= 620, "to be read on a phone"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "atom.svg"
    assert main(["banks", "--atom", "tma-128", "--draw", str(path)]) == 0
    printed = capsys.readouterr().out
    assert path.read_text() == svg(picture("tma-128"))
    assert "1    1.1   1.0   1.3   1.2   1.5   1.4   1.7   1.6" in printed and f"drawn     {path}" in printed
    assert main(["banks", "--atom", "wgmma-mn-64", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["leading_byte_offset"], result["stride_byte_offset"]) == (512, 1024)
    assert result["cells"][2][:4] == ["9", "8", "11", "10"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--atom tma-256", "atom takes one of tma-none"),
        ("--atom tma-64 --rows 8", "--atom takes no --rows"),
        ("--atom tma-64 --layout 8:1 --access lds.32", "--atom takes no --layout and no --access"),
        ("--atom tma-64 --draw x.png", "--draw takes a name ending in .svg for an atom"),
    ],
)
def test_refusals(line: str, said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["banks", *line.split()]) == 2
    assert said in capsys.readouterr().err
