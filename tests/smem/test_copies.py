"""The rule of cp.async: cases by hand, what was counted on a GPU, and the command."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest

from warploom.attention.ampere.config import ForwardConfig
from warploom.attention.ampere.traffic import wavefronts as wavefronts_of_forward
from warploom.cli import main
from warploom.smem import Swizzle, Tile
from warploom.smem.copies import Place, count, ideal, wavefronts
from warploom.smem.device.kernels import gemm
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


COPIES = json.loads((Path(__file__).parents[2] / "benchmarks/results/banks-copies.json").read_text())


def test_every_pattern_counted_on_a_gpu() -> None:
    """Strides, halves, permutations and random places, 298 in all: what Nsight Compute counted for each."""
    assert len(COPIES["rows"]) == COPIES["kernels"] == 298
    for row in COPIES["rows"]:
        places = [None if at is None else (source, at) for source, at in zip(row["sources"], row["addresses"], strict=True)]
        moved = wavefronts(places)
        assert [0, moved, moved - ideal(places)] == row["measured"], row["pattern"]


def test_a_wavefront_turns_or_mirrors_the_sectors_of_a_line() -> None:
    whole = {order: wavefronts(pieces(*[(i, 2 * order[i // 2] + i % 2) for i in range(8)])) for order in permutations(range(4))}
    square = {tuple((turn + way * i) % 4 for i in range(4)) for turn in range(4) for way in (1, -1)}
    assert {order for order, moved in whole.items() if moved == 1} == square and len(square) == 8
    assert {moved for order, moved in whole.items() if order not in square} == {2}


def test_tiles() -> None:
    """Rows of whole lines cost nothing under a swizzle."""
    for cols in (64, 128, 256):
        tile = Tile(64, cols)
        found = design(tile, ["sts.128", "ldmatrix.x4"])
        assert count(tile).excess == count(found.best).excess == 0


# Of every cp.async of the large product, counted by Nsight Compute on an H100: tile that a warp's instructions of one kind
# fill, their wavefronts, and how often they ran. Tiles of A: 32 halves a row, a warp copies 8 rows; of B: 128 halves, 2 rows.
COUNTED = [
    (Tile(8, 32), 4_194_304, 524_288),
    (Tile(8, 32, swizzles=(Swizzle(2, 3, 3),)), 4_194_304, 524_288),
    (Tile(8, 32, pad=8), 7_864_320, 524_288),
    (Tile(8, 128), 2_097_152, 524_288),
    (Tile(8, 128, swizzles=(Swizzle(3, 3, 4),)), 2_097_152, 524_288),
    (Tile(8, 128, pad=8), 5_505_024, 524_288),
]


@pytest.mark.parametrize(("tile", "total", "times"), COUNTED, ids=str)
def test_as_counted_on_a_gpu(tile: Tile, total: int, times: int) -> None:
    found = count(tile)
    assert found.wavefronts * times == total * found.instructions
    assert found.ideal == 4 * found.instructions


def test_the_padded_forward_as_counted_on_a_gpu() -> None:
    """Of 3072 tokens and 16 heads on an H100: every copy of Q and of the first and last tiles, and those of the loop."""
    config = ForwardConfig("bfloat16", 128, 48, swizzle=False, pad=8, arch="sm_90a")
    blocks, key_tiles = 16 * 24, 64
    first, loop = 9_984, 628_992  # excess of an instruction, run by 4 warps of 384 blocks once and 64 times
    moved = wavefronts_of_forward(config, blocks, key_tiles)["cp.async.128"]
    assert moved[0] - moved[1] == (16 + 12) * first + 12 * loop
    # The last of the 64 reads nothing.
    assert loop == 63 * first


def test_the_large_product_as_counted_on_a_gpu() -> None:
    """Excess wavefronts of all instructions of 4096×4096×4096, tiles 64 deep."""
    counted = {"plain": 237_633_536, "padded": 27_262_976, "swizzled": 0}
    for layout, excess in counted.items():
        moved = gemm.wavefronts(gemm.GemmConfig(layout), 4096, 4096, 4096).values()
        assert sum(wavefronts - ideal for wavefronts, ideal in moved) == excess


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
