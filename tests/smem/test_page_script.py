"""The page's script computes what the Python model computes: counts, searches, and every layout written as text."""

from __future__ import annotations

import random
from typing import Any

from tests.smem.page_script import evaluate
from warploom.smem import ACCESSES, Swizzle, Tile, count, design, parse_pattern
from warploom.smem.laid import LaidTile
from warploom.smem.layout import parse_swizzles
from warploom.smem.notation import parse_layout
from warploom.smem.page import DTYPES

ORDERS = ("rows", "columns", "fragment")
CUTS = "()<>:,o S_19x"
SAMPLES = 60  # coordinates of each layout


def patterns(chance: random.Random) -> tuple[str, str]:
    """An access and the order of its lanes."""
    name = chance.choice(list(ACCESSES))
    return name, "matrices" if ACCESSES[name].matrix else chance.choice(ORDERS)


def totals(pattern: tuple[str, str], tile: Tile | LaidTile) -> dict[str, Any]:
    name, order = pattern
    one = count(parse_pattern(name if order in ("rows", "matrices") else f"{name}@{order}"), tile)
    return {"phases": one.phases, "wavefronts": one.wavefronts, "excess": one.excess}


def test_counts_of_tiles() -> None:
    chance = random.Random(1)
    inputs, expected = [], []
    for _ in range(120):
        rows, cols = chance.choice([8, 16, 24, 32, 40]), chance.choice([8, 16, 20, 32, 64, 128])
        swizzle = chance.choice(["", "", "1,3,3", "2,3,3", "3,3,3", "3,3,4", "2,2,3", "1,3,3+3,3,5", "3,0,5"])
        pad, dtype, pattern = chance.choice([0, 0, 1, 4, 8]), chance.choice(list(DTYPES)), patterns(chance)
        inputs.append([{"rows": rows, "cols": cols, "dtype": dtype, "pad": pad, "swizzle": swizzle}, *pattern])
        try:
            expected.append(totals(pattern, Tile(rows, cols, dtype, pad, parse_swizzles(swizzle) if swizzle else ())))
        except ValueError:
            expected.append(None)
    found = evaluate(f"{COUNTED}(countTile(patternOf(input[1], input[2]), rowTile(input[0])))", inputs)
    assert [None if "error" in one else one for one in found] == expected
    assert sum(one is not None for one in expected) > 60 and None in expected


COUNTED = "(({ phases, wavefronts, excess }) => ({ phases, wavefronts, excess }))"


def test_the_button_finds_what_design_finds() -> None:
    chance = random.Random(2)
    inputs, expected = [], []
    while len(inputs) < 20:
        rows, cols = chance.choice([8, 16, 24, 32]), chance.choice([16, 20, 32, 64, 128, 256])
        dtype, chosen = chance.choice(list(DTYPES)), [patterns(chance) for _ in range(chance.choice([1, 2]))]
        try:
            best = design(Tile(rows, cols, dtype), [n if o in ("rows", "matrices") else f"{n}@{o}" for n, o in chosen])
        except ValueError:
            continue
        inputs.append([{"rows": rows, "cols": cols, "dtype": dtype, "pad": 0, "swizzle": ""}, chosen])
        expected.append(
            {
                "before": best.before,
                "swizzle": best.swizzle and [best.swizzle.b, best.swizzle.m, best.swizzle.s],
                "excess": best.excess,
                "searched": best.searched,
                "byBits": {str(bits): least for bits, least in best.by_bits.items() if bits},
                "pad": {"pad": best.pad, "excess": best.pad_excess},
            }
        )
    found = evaluate(
        "((tile, chosen) => ({ ...findSwizzle(tile, chosen), pad: findPadding(tile, chosen) }))"
        "(rowTile(input[0]), input[1].map(one => patternOf(...one)))",
        inputs,
    )
    for one, other in zip(found, expected, strict=True):
        # Where nothing is left to remove, the search in Python does not look at swizzles that leave more.
        assert one["byBits"].keys() >= other["byBits"].keys()
        assert all(one["byBits"][bits] == least for bits, least in other.pop("byBits").items())
        one.pop("byBits")
    assert found == expected
    assert sum(one["swizzle"] is not None for one in expected) > 5


def tree(chance: random.Random, depth: int, leaf: Any) -> Any:
    if depth == 0 or chance.random() < 0.4:
        return leaf()
    return [tree(chance, depth - 1, leaf) for _ in range(chance.choice([1, 2, 2, 3]))]


def written(one: Any, chance: random.Random) -> str:
    if isinstance(one, list):
        return (
            "(" + chance.choice([",", ", ", " ,"]).join(written(part, chance) for part in one) + chance.choice(["", ","]) + ")"
        )
    return chance.choice(["", "_"]) + str(one)


def texts(chance: random.Random, many: int) -> list[str]:
    """Layouts of all kinds, and half of them with a character lost, doubled or another in its place."""
    found = []
    for _ in range(many):
        shape = tree(chance, 3, lambda: chance.choice([1, 2, 3, 4, 8]))

        def strides(one: Any) -> Any:
            return list(map(strides, one)) if isinstance(one, list) else chance.choice([0, 1, 2, 8, 16, 64, 72])

        text = written(shape, chance)
        if chance.random() < 0.8:
            text += chance.choice([":", " : "]) + written(strides(shape), chance)
        if chance.random() < 0.3:
            text = f"{chance.choice([0, 4, 16])} o {text}"
        if chance.random() < 0.2:
            text = f"smem_ptr[16b]{chance.choice(['', '(unset)'])} o {text}"
        for _ in range(chance.choice([0, 0, 1, 1, 2])):
            numbers = f"{chance.randrange(4)},{chance.randrange(5)},{chance.randrange(1, 6)}"
            text = f"{chance.choice(['Swizzle', 'Sw', 'S'])}<{numbers}> {chance.choice('o∘')} {text}"
        if chance.random() < 0.5:
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(["", text[at] * 2, chance.choice(CUTS)]) + text[at + 1 :]
        found.append(text)
    return found


def test_texts_are_read_alike_and_refused_alike() -> None:
    inputs = texts(random.Random(3), 1500)
    inputs += ["", "(" * 17 + "1" + ")" * 17, "1" * 401, "(1025,1024)", "(2,2):(1,1048575)", "0 o S<1,1,1> o 8", "S<1,2,0> o 8"]
    expected: list[Any] = []
    for text in inputs:
        try:
            layout = parse_layout(text)
            expected.append([layout(n * layout.size // SAMPLES) for n in range(SAMPLES)])
        except ValueError as error:
            expected.append({"error": str(error)})
    found = evaluate(
        "(({ shape, stride, offset, swizzles, bits }, count) => Array.from({ length: count }, (_, n) => {"
        " const unit = (bits || 8) / 8, linear = offset + inner(Math.floor(n * sizeOf(shape) / count), shape, stride);"
        " return Math.floor(swizzles.reduceRight(swizzled, linear * unit) / unit); }))"
        f"(parseLayout(input), {SAMPLES})",
        inputs,
    )
    for text, one, other in zip(inputs, found, expected, strict=True):
        assert one == other, text
    refused = sum(isinstance(one, dict) for one in expected)
    assert 300 < refused < 900


def test_counts_of_layouts() -> None:
    chance = random.Random(4)
    shapes = ["(16,64):(64,1)", "(64,16):(1,64)", "((8,2),(8,8)):((8,512),(1,64))", "(8,(8,4)):(8,(1,64))", "(16,64):(72,1)"]
    shapes += ["((8,2),(64,2)):((64,512),(1,1024))", "64:1", "(16,32,2):(32,1,512)", "(32,32):(0,1)", "(32,32):(1,0)"]
    inputs, expected = [], []
    for _ in range(120):
        text = chance.choice(["", "Swizzle<3,3,3> o ", "Swizzle<2,3,3> o ", "Swizzle<3,4,3> o "]) + chance.choice(shapes)
        pattern, dtype, unit = patterns(chance), chance.choice(list(DTYPES)), chance.random() < 0.5
        inputs.append([{"layout": text, "dtype": dtype, "swizzle_bytes": unit}, *pattern])
        try:
            tile = LaidTile.of(text, dtype, ACCESSES[pattern[0]].width, unit)
            expected.append({**totals(pattern, tile), "size": tile.size_bytes, "turned": tile.turned})
        except ValueError:
            expected.append(None)
    found = evaluate(
        "((pattern, config) => (tile => ({ ..."
        f"{COUNTED}(countTile(pattern, tile)), size: tile.size, turned: tile.turned"
        "}))(laidTile(config, pattern.access.width)))(patternOf(input[1], input[2]), input[0])",
        inputs,
    )
    assert [None if "error" in one else one for one in found] == expected
    assert sum(one is not None for one in expected) > 30 and None in expected


def test_swizzles_of_every_width() -> None:
    chance = random.Random(5)
    inputs = []
    for _ in range(300):
        b, m = chance.randrange(12), chance.randrange(12)
        inputs.append([chance.randrange(1 << 24), [b, m, chance.randrange(1, 33 - b - m)]])
    assert evaluate("swizzled(...input)", inputs) == [Swizzle(*numbers)(offset) for offset, numbers in inputs]
