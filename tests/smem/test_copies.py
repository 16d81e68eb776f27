"""The rule of cp.async: cases by hand, a colouring found by search, and the command."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from warploom.cli import main
from warploom.smem import Tile
from warploom.smem.copies import Place, count, ideal, wavefronts
from warploom.smem.swizzle import design


def pieces(*pairs: tuple[int, int]) -> list[Place]:
    """Lanes that copy 16-byte pieces, by their numbers in global and in shared memory."""
    return [(16 * source, 16 * shared) for source, shared in pairs]


LINE = [
    ("a line to a line", [(i, i) for i in range(8)], 1),
    ("permuted within sectors", [(i, i ^ 1) for i in range(8)], 1),
    ("sectors permuted", [(i, i ^ 6) for i in range(8)], 1),
    ("to the halves of two lines", [(i, i + 4) for i in range(8)], 2),
    ("a sector further on", [(i, i + 2) for i in range(8)], 2),
    ("a piece further on: sectors straddle, and so does the line", [(i, i + 1) for i in range(8)], 3),
    ("three pieces further on", [(i, i + 3) for i in range(8)], 4),
    ("half a line, within one", [(i, i + 1) for i in range(4)], 2),
    ("half a line, its sectors whole", [(i, i + 2) for i in range(4)], 1),
    ("two lines to one", [(8 * (i // 4) + i % 4, i) for i in range(8)], 2),
    ("a column of lines", [(i, 8 * i) for i in range(8)], 8),
    ("nothing", [], 0),
]


@pytest.mark.parametrize(("pairs", "expected"), [case[1:] for case in LINE], ids=[case[0] for case in LINE])
def test_lines_and_sectors(pairs: list[tuple[int, int]], expected: int) -> None:
    assert wavefronts([*pieces(*pairs), None]) == expected
    assert ideal([None, *pieces(*pairs)]) == -(-len(pairs) // 8)


def colours(pairs: set[tuple[int, int]]) -> int:
    """The fewest groups in which no sector of either side occurs twice, by trying all."""
    edges = sorted(pairs)
    for many in range(1, len(edges) + 1):
        for colouring in itertools.product(range(many), repeat=len(edges) - 1):
            groups = [[e for e, c in zip(edges, (0, *colouring), strict=True) if c == n] for n in range(many)]
            if all(len(set(side)) == len(group) for group in groups if group for side in zip(*group, strict=True)):
                return many
    return 0


@pytest.mark.parametrize("seed", range(20))
def test_as_many_wavefronts_as_a_colouring_needs(seed: int) -> None:
    draw = random.Random(seed)
    pairs = list(zip(draw.sample(range(8), 6), draw.sample(range(8), 6), strict=True))
    assert wavefronts(pieces(*pairs)) == colours({(source // 2, shared // 2) for source, shared in pairs})


def test_tiles() -> None:
    """Rows of whole lines cost nothing under a swizzle; the measured copies of padded ones."""
    for cols in (64, 128, 256):
        tile = Tile(64, cols)
        found = design(tile, ["sts.128", "ldmatrix.x4"])
        assert count(tile).excess == count(found.best).excess == 0
    padded = count(Tile(8, 128, pad=8))  # four instructions of two rows, counted on an H100: 10.5 each
    assert (padded.instructions, padded.wavefronts, padded.ideal) == (4, 42, 16)
    halves = count(Tile(8, 32, pad=8))  # one instruction, counted: 15
    assert (halves.instructions, halves.wavefronts, halves.ideal) == (1, 15, 4)
    assert (count(Tile(8, 32)).wavefronts, count(design(Tile(8, 32), ["sts.128", "ldmatrix.x4"]).best).wavefronts) == (8, 8)


def test_the_command(capsys: pytest.CaptureFixture) -> None:
    line = "--access cp.async.128 --access ldmatrix.x4 --rows 64 --cols 128 --pad 8"
    assert main(["banks", *line.split(), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(one["access"], one["wavefronts"], one["excess"]) for one in result["accesses"]] == [
        ("cp.async.128", 336, 208),
        ("ldmatrix.x4", 128, 0),
    ]
    assert result["excess"] == 208
    assert main(["banks", *line.split()]) == 0
    assert "cp.async.128, 32 instructions, each row from a line" in capsys.readouterr().out
    assert main(["banks", "--design", "--access", "cp.async.128", "--rows", "8", "--cols", "64"]) == 2
    assert "depends on global memory too" in capsys.readouterr().err


def test_a_design_says_what_its_padding_costs_a_copy(capsys: pytest.CaptureFixture) -> None:
    assert main(["banks", *["--design", "--rows", "64", "--cols", "64", "--access", "sts.128", "--access", "ldmatrix.x4"]]) == 0
    assert "no smaller padding does as well, but filled by cp.async.128 it costs 104 more" in capsys.readouterr().out
