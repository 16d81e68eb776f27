"""Charts: whole SVG, lengths as numbers are, readable on a phone."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from warploom.bench import svg
from warploom.bench.svg import Chart, Curves

NAME = "{http://www.w3.org/2000/svg}"


def drawn(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def bars(root: ElementTree.Element) -> list[ElementTree.Element]:
    """Our bars, without the legend's."""
    found = [each for each in root.iter(f"{NAME}rect") if each.get("class") == "f0"]
    return found[1:]


def test_bars_are_as_long_as_their_numbers() -> None:
    rows = [("one", {"warploom": 100.0, "cuDNN": 400.0}), ("two", {"cuDNN": 100.0}), ("three", {"warploom": 400.0})]
    root = drawn(svg.bars(Chart("Title", "unit", rows)))
    first, third = (float(each.attrib["width"]) for each in bars(root))
    assert third == pytest.approx(4 * first, abs=0.5)
    marks = [float(each.attrib["cx"]) for each in root.iter(f"{NAME}circle")][1:]
    assert marks[0] - svg.EDGE == pytest.approx(third, abs=0.5) and marks[1] - svg.EDGE == pytest.approx(first, abs=0.5)


def test_roof_stands_inside() -> None:
    root = drawn(svg.bars(Chart("Title", "unit", [("one", {"warploom": 100.0})], roof=("product", 800.0))))
    roof = [each.attrib["d"] for each in root.iter(f"{NAME}path") if each.get("class") == "roof"][-1]
    where = re.match(r"M([\d.]+)", roof)
    assert where is not None and float(where[1]) == svg.WIDTH - svg.EDGE - svg.VALUE


def test_logarithmic_marks_stand_by_their_ratio() -> None:
    rows = [("one", {"warploom": 1.0, "a": 10.0}), ("two", {"warploom": 10.0, "a": 100.0})]
    root = drawn(svg.bars(Chart("Title", "ms", rows, logarithmic=True)))
    ours = [float(each.attrib["x"]) + 4 for each in root.iter(f"{NAME}rect") if each.get("class") == "f0 mark"]
    theirs = [float(each.attrib["cx"]) for each in root.iter(f"{NAME}circle")][1:]
    assert theirs[0] == pytest.approx(ours[1], abs=0.2)
    assert theirs[1] - theirs[0] == pytest.approx(ours[1] - ours[0], abs=0.2)


def test_peers_differ_by_shape_and_colour() -> None:
    names = ["cuDNN", "FlashAttention-4", *(f"peer {n}" for n in range(9))]
    chart = Chart("Title", "unit", [("one", dict.fromkeys(["warploom", *names], 1.0))])
    assert chart.slots["cuDNN"] == 1 and chart.slots["FlashAttention-4"] == 3  # in every chart
    assert len(set(chart.slots.values())) == len(names)
    looks = {re.sub(r'c?[xyd]="M?[\d.]+ ?[\d.]*"?', "", svg._mark(slot, 0, 0)) for slot in chart.slots.values()}
    assert len(looks) == len(names)


def test_text_is_escaped_and_large_enough_on_a_phone() -> None:
    text = svg.bars(Chart("a < b & c", "unit", [("x < y", {"warploom": 1.0, "p & q": 2.0})]))
    words = [each.text for each in drawn(text).iter(f"{NAME}text")]
    assert "a < b & c" in words and "x < y" in words and "p & q" in words
    size = re.search(r"font-size:(\d+)px", text)
    assert size is not None and int(size[1]) * 343 / svg.WIDTH > 11  # a page 390 wide leaves so much, scroll bar included


def test_charts_have_a_background_and_colours_for_dark_pages() -> None:
    text = svg.curves(Curves("Title", [("loss", {"a": [2.0, 1.0]}), ("apart", {"b": [-0.1, 0.1]})], "step"))
    light, dark = text.split("@media (prefers-color-scheme:dark)")
    for part in (light, dark):
        assert ".card{fill:" in part and "text{" in part and ".s1{" in part


def test_curves_fall_with_their_numbers() -> None:
    root = drawn(svg.curves(Curves("Title", [("loss", {"a": [4.0, 3.0, 1.0]}), ("apart", {"a": [0.0, 0.1, 0.2]})], "step")))
    above, below = (
        [float(each.split(",")[1]) for each in line.attrib["points"].split()] for line in root.iter(f"{NAME}polyline")
    )
    assert above[0] < above[1] < above[2] and above[2] - above[1] == pytest.approx(
        2 * (above[1] - above[0]), abs=0.3
    )  # a decimal is drawn
    assert below[0] > below[1] > below[2] > above[2]


def test_a_flat_line_is_drawn() -> None:
    assert "polyline" in svg.curves(Curves("Title", [("loss", {"a": [1.0, 1.0]})], "step"))


def test_long_titles_break() -> None:
    root = drawn(svg.bars(Chart("word " * 20, "unit", [("one", {"warploom": 1.0})])))
    assert sum(each.get("class") == "title" for each in root.iter(f"{NAME}text")) == 3
