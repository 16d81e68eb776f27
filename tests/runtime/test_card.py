"""The card of pictures as SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from warploom.runtime import card


def drawn(title: str = "a < b & c") -> str:
    rules = card.style(".mine{fill:#123456}", ".mine{fill:#abcdef}")
    return card.whole(title, rules, [card.text(3, 20, "x < y & z", "mine", "middle")], 40)


def test_it_is_xml_whatever_the_words() -> None:
    root = ElementTree.fromstring(drawn())
    space = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{space}title") == "a < b & c" and root.findtext(f"{space}text") == "x < y & z"
    (text,) = root.iter(f"{space}text")
    assert text.attrib == {"x": "3", "y": "20", "class": "mine", "text-anchor": "middle"}
    assert root.attrib["viewBox"] == f"0 0 {card.WIDTH} 40"


def test_words_and_card_have_colours_for_light_and_dark() -> None:
    light, dark = drawn().split("@media (prefers-color-scheme:dark)")
    for part, mine in ((light, "#123456"), (dark, "#abcdef")):
        rules = dict(re.findall(r"(text|\.card|\.quiet|\.mine)\{[^}]*?fill:(#[0-9a-f]+)", part))
        assert rules[".mine"] == mine and len(set(rules.values())) == 4
