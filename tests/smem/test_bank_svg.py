"""The SVG of banks: every lane in its banks, every conflict framed, on a card that a phone can show."""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from warploom.runtime.card import WIDTH
from warploom.smem import Swizzle, Tile, count
from warploom.smem.bank_svg import BANK_COLORS, COLORS, EDGE, svg
from warploom.smem.laid import LaidTile
from warploom.smem.model import BANKS
from warploom.smem.shown import shown
from warploom.smem.walk import AnyTile

NAME = "{http://www.w3.org/2000/svg}"
SWIZZLED = Tile(16, 16, swizzles=(Swizzle(1, 3, 3),))


def drawn(tile: AnyTile, *patterns: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg(shown([count(pattern, tile) for pattern in patterns])))


def blocks(root: ElementTree.Element) -> Counter[str]:
    """How many rectangles of each class."""
    return Counter(each.get("class", "") for each in root.iter(f"{NAME}rect"))


def words(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{NAME}text")]


def test_words_and_conflicts_are_counted() -> None:
    root = drawn(SWIZZLED, "ldmatrix.x4")
    said = words(root)
    assert "ldmatrix.x4 on 16×16 f16, swizzle <1,3,3>" in said
    assert "8 wavefronts, 4 ideal, 4 excess" in said and "4 wavefronts, 4 ideal, 0 excess" in said
    found = blocks(root)
    for n in range(len(COLORS)):
        # 8 lanes a phase, before and after; 16 banks in use before and 32 after.
        assert found[f"p{n} hit"] == 8 + 16
        assert found[f"p{n}"] == 8 + 32
    numbers = [each.text for each in root.iter(f"{NAME}text") if each.get("class") == "n"]
    assert Counter(numbers)["31"] == 2 and Counter(numbers)["2"] == 2 + 4 * 16 and Counter(numbers)["1"] == 2 + 4 * 32


def test_lanes_stand_over_their_banks() -> None:
    root = drawn(Tile(16, 16, pad=8), "sts.128")
    ticks = {each.text: float(each.attrib["x"]) for each in root.iter(f"{NAME}text") if each.get("text-anchor") == "middle"}
    cell = (ticks["28"] - ticks["0"]) / 28
    numbers = [each for each in root.iter(f"{NAME}text") if each.get("class") == "n"]
    start = 32 + 4 * 32  # past the plain tile's lanes and its words in each bank
    for lane in range(32):
        bank = 12 * (lane // 2) + 4 * (lane % 2)  # rows of 48 bytes, two lanes a row
        (at,) = [each.attrib["x"] for each in numbers[start : start + 32] if each.text == str(lane)]
        assert float(at) == pytest.approx(ticks["0"] + (bank % BANKS + 1.5) * cell, abs=0.1)


def test_lines_that_are_not_touched_are_left_out() -> None:
    for tile, lines, caption in (
        (Tile(16, 128), list(range(0, 32, 2)), "lanes by bank and line of 128 bytes (16 of 32)"),
        (Tile(16, 16), list(range(4)), "lanes by bank and line of 128 bytes"),
    ):
        root = drawn(tile, "ldmatrix.x4")
        labels = [each.text for each in root.iter(f"{NAME}text") if each.get("text-anchor") == "end"]
        assert labels == list(map(str, lines)) and caption in words(root)


def test_several_instructions_are_named() -> None:
    said = words(drawn(Tile(32, 32, "f32"), "lds.32@columns"))
    assert "31 excess" in " ".join(said) and "992 excess over the tile" in said
    assert "instruction 0 of 32" in " ".join(said)


@pytest.mark.parametrize(
    ("pattern", "tile"),
    [
        ("lds.32@columns", Tile(256, 64, "f32", swizzles=(Swizzle(3, 2, 6),))),
        ("lds.8", Tile(1, 3, "f8")),
        ("ldmatrix.x4@256x16", Tile(16, 256)),
        ("lds.64", LaidTile.of("(8,32):(0,1)", "f32", 8)),
        ("ldmatrix.x4", LaidTile.of("Swizzle<3,3,3> o (8,64):(64,1)", "f16", 16)),
        ("lds.32", LaidTile.of("(3,1000):(1000,1)", "f32", 4)),
    ],
    ids=str,
)
def test_everything_stands_on_the_card(pattern: str, tile: AnyTile) -> None:
    root = drawn(tile, pattern)
    height = float(root.attrib["height"])
    for each in root.iter(f"{NAME}rect"):
        x, y, wide, tall = (float(each.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0.5 and x + wide <= WIDTH and y >= 0.5 and y + tall <= height
        assert each.get("class") == "card" or x + wide <= WIDTH - EDGE + 0.1
    for each in root.iter(f"{NAME}text"):
        assert each.text and float(each.attrib["y"]) < height
        squeezed = float(each.get("textLength", 0))
        assert not squeezed or squeezed / len(each.text) > 5, "too narrow to read"


def test_numbers_are_as_wide_as_their_banks() -> None:
    """A number of two digits is drawn narrower in one bank, and as its font has it in four."""
    for pattern, squeezed in (("lds.32", True), ("lds.128", False)):
        root = drawn(Tile(32, 32, "f32"), pattern)
        (last,) = [each for each in root.iter(f"{NAME}text") if each.get("class") == "n" and each.text == "31"]
        assert (last.get("textLength") is not None) == squeezed


def test_text_is_large_enough_on_a_phone_in_light_and_dark() -> None:
    text = svg(shown([count("ldmatrix.x4", SWIZZLED)]))
    light, dark = text.split("@media (prefers-color-scheme:dark)")
    for part in (light, dark):
        assert all(f"{rule}{{" in part for rule in ("text", ".card", ".quiet", ".empty", ".cut", ".hit"))
    (size,) = set(re.findall(r"font-size:(\d+)px", text))
    assert int(size) * 343 / WIDTH > 11


def test_layouts_are_shown_in_their_coordinates() -> None:
    root = drawn(LaidTile.of("Swizzle<3,3,3> o (8,64):(64,1)", "f16", 16), "ldmatrix.x4")
    said = words(root)
    assert {str(offset) for offset in range(512)} <= set(said)
    assert "columns 0 to 15" in said and "columns 48 to 63" in said
    large = drawn(LaidTile.of("(64,64):(64,1)", "f16", 16), "ldmatrix.x4")
    assert "columns 0 to 63" in words(large) and "4095" not in words(large)
    for each in (root, large):
        assert {path.get("fill") for path in each.iter(f"{NAME}path")} - {None} == set(BANK_COLORS)


def test_colours_of_elements_are_those_of_their_banks() -> None:
    """Column 0 of a row-major tile whose rows are 128 bytes is bank 0, all in one colour."""
    root = drawn(LaidTile.of("(64,64):(64,1)", "f16", 16), "ldmatrix.x4")
    first = next(path for path in root.iter(f"{NAME}path") if path.get("fill") == BANK_COLORS[0])
    cells = re.findall(r"M(\d+) (\d+)h(\d+)v1", first.attrib["d"])
    assert [(int(x), int(y), int(wide)) for x, y, wide in cells] == [(0, y, 2) for y in range(64)]
