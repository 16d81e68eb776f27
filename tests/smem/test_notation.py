"""Layouts in CuTe's notation: offsets against strides multiplied out by hand, errors that point, tiles that they make."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product

import pytest

from warploom.smem import TMA_MODES, Swizzle, Tile, count
from warploom.smem.atoms import fragment, k_major, mn_major
from warploom.smem.laid import LaidTile
from warploom.smem.notation import Layout, compact, parse_layout


def leaves(tree: int | tuple) -> list[int]:
    return [tree] if isinstance(tree, int) else [leaf for one in tree for leaf in leaves(one)]


def multiplied(layout: Layout) -> list[int]:
    """Offsets in colexicographic order: all coordinates of the flattened layout, the first digit fastest."""
    digits = [range(extent) for extent in reversed(leaves(layout.shape))]
    strides, item = leaves(layout.stride), (layout.bits or 8) // 8
    found = []
    for digit in product(*digits):
        offset = layout.offset + sum(n * step for n, step in zip(reversed(digit), strides, strict=True))
        byte = offset * item
        for swizzle in reversed(layout.swizzles):
            source = byte >> (swizzle.m + swizzle.s)
            byte ^= source % 2**swizzle.b * 2**swizzle.m
        found.append(byte // item)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "(8,64):(64,1)",
        "((8,2),(8,8)):((8,512),(1,64))",
        "Swizzle<3,3,3> o (8,64):(64,1)",
        "S<3,4,3> o 0 o ((8,8),(64,2),(1,2)):((64,512),(1,4096),(0,8192))",
        "Sw<3,4,3> o smem_ptr[16b](unset) o (_8,_64):(_64,_1)",
        "S<2,1,3> o S<1,0,2> o 20 o ((2,(3,4)),5):((60,(20,5)),1)",
        "(4,(2,3))",
        " ( 4 , 3 , ) : ( 0 , 1 ) ",
        "24:3",
        "7",
    ],
)
def test_offsets(text: str) -> None:
    layout = parse_layout(text)
    assert [layout(n) for n in range(layout.size)] == multiplied(layout)
    assert parse_layout(str(layout)) == layout


def test_known_layouts() -> None:
    assert [parse_layout("(2,3):(3,1)")(n) for n in range(6)] == [0, 3, 1, 4, 2, 5]
    assert parse_layout("((2,4),3):((1,8),2)")(((1, 2), 1)) == 1 + 2 * 8 + 2
    assert parse_layout("((2,4),3):((1,8),2)")((5, 1)) == 1 + 2 * 8 + 2
    assert parse_layout("Swizzle<3,3,3> o (8,64):(64,1)")((1, 0)) == 64 + 8
    assert compact((4, (2, 3))) == (1, (4, 8))
    assert parse_layout("Swizzle<3,4,3> o smem_ptr[16b] o (8,64):(64,1)")((1, 0)) == 64 + 8
    # The offset comes before the swizzle.
    assert parse_layout("Swizzle<1,0,1> o 2 o 4:1")(0) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(8,64):(x64,1)", 'a number or "(" where ▸ stands: (8,64):(▸x64,1)'),
        ("((8,2),8", '"," or ")" where ▸ stands: ((8,2),8▸'),
        ("(8,64):64", "strides nested as the shape is where ▸ stands: (8,64):▸64"),
        ("(8,(2,4)):(8,(1,2,3))", "strides nested as the shape is where ▸ stands: (8,(2,4)):(8,▸(1,2,3))"),
        ("(8,64):(64,1) x", "nothing more where ▸ stands: (8,64):(64,1) ▸x"),
        ("(8,64) 64", '":" or nothing more where ▸ stands: (8,64) ▸64'),
        ("Swizzle<3,3> o 8:1", '"," where ▸ stands: Swizzle<3,3▸> o 8:1'),
        ("Swizzle<3,3,3> 8:1", '"o" where ▸ stands: Swizzle<3,3,3> ▸8:1'),
        ("Swizzle<3,3,-3> o 8:1", "a number where ▸ stands: Swizzle<3,3,▸-3> o 8:1"),
        ("S<3,30,3> o 8", "S from 1 and B + M + S up to 32 where ▸ stands: S<▸3,30,3> o 8"),
        ("smem_ptr[12b] o 8", "[8b], [16b], [32b] or [64b] where ▸ stands: smem_ptr▸[12b] o 8"),
        ("(8,0)", "sizes from 1 where ▸ stands: (8,▸0)"),
        ("(8,2000000)", "numbers up to 1048576 where ▸ stands: (8,▸2000000)"),
        ("(1025,1024)", "at most 1048576 elements where ▸ stands: ▸(1025,1024)"),
        ("(2,2):(1,1048576)", "offsets below 1048576 where ▸ stands: ▸(2,2):(1,1048576)"),
        ("", 'a number or "(" where ▸ stands: ▸'),
        ("(" * 40, f"at most 16 brackets within one another where ▸ stands: {'(' * 16}▸{'(' * 24}"),
        ("1" * 401, "up to 400 characters, got 401"),
    ],
)
def test_errors_point(text: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_layout(text)
    assert str(error.value) == f"layout takes {said}"


@pytest.mark.parametrize("access", ["ldmatrix.x4", "sts.128", "lds.32@columns", "sts.32@fragment", "lds.16"])
@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("(16,64):(64,1)", Tile(16, 64)),
        ("(16,64):(72,1)", Tile(16, 64, pad=8)),
        ("Swizzle<3,3,3> o (16,64):(64,1)", Tile(16, 64, swizzles=(Swizzle(3, 3, 3),))),
        ("Swizzle<3,4,3> o smem_ptr[16b] o (16,64):(64,1)", Tile(16, 64, swizzles=(Swizzle(3, 3, 3),))),
        (
            "Swizzle<3,3,5> o Swizzle<1,3,3> o (16,(64,4)):(256,(1,64))",
            Tile(16, 256, swizzles=(Swizzle(1, 3, 3), Swizzle(3, 3, 5))),
        ),
    ],
)
def test_a_layout_counts_as_the_tile_that_it_is(access: str, text: str, tile: Tile) -> None:
    laid = LaidTile.of(text, "f16", 1)
    assert (laid.rows, laid.cols, laid.itemsize) == (tile.rows, tile.cols, tile.itemsize)
    assert count(access, laid).to_dict() == count(access, tile).to_dict()


def test_columns_in_a_row_turn_for_wide_accesses_only() -> None:
    text = "(64,16):(1,64)"
    assert LaidTile.of(text, "f16", 16).turned and not LaidTile.of(text, "f16", 2).turned
    assert not LaidTile.of("(64,16):(16,1)", "f16", 16).turned
    turned = count("ldmatrix.x4", LaidTile.of(text, "f16", 16))
    assert turned.to_dict() == count("ldmatrix.x4", Tile(16, 64)).to_dict()


def test_one_mode_is_a_row_and_more_than_two_are_joined() -> None:
    row = LaidTile.of("64:1")
    assert (row.rows, row.cols) == (1, 64)
    staged = LaidTile.of("(8,64,2):(64,1,512)")
    assert (staged.rows, staged.cols, staged.size_bytes) == (8, 128, 2048)
    assert staged.address(1, 2 * 64, 2) == 2 * (512 + 64)


def test_one_word_for_all_lanes_is_one_wavefront() -> None:
    assert count("lds.32", LaidTile.of("(8,32):(0,0)", "f32", 4)).excess == 0


@pytest.mark.parametrize(
    ("text", "dtype", "access", "said"),
    [
        ("(8,8):(16,2)", "f16", "lds.32", "the 4 bytes of one lane from (0, 0) on do not lie together"),
        ("Swizzle<1,1,3> o (8,64):(64,1)", "f16", "lds.128", "the 16 bytes of one lane from (0, 16) on do not lie together"),
        ("(16,16):(20,1)", "f16", "ldmatrix.x4", "(1, 0) lies at byte 40, off the 16-byte alignment of the access"),
        ("1 o 64:1", "f16", "lds.32", "(0, 0) lies at byte 2, off the 4-byte alignment of the access"),
        ("smem_ptr[16b] o 64:1", "f32", "lds.32", "dtype takes the 16 bits of the layout's smem_ptr, got f32"),
        ("(16,16):(16,1)", "f16", "lds.32@32x8", "a view takes a tile of rows, and no layout"),
    ],
)
def test_accesses_that_do_not_fit(text: str, dtype: str, access: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        count(access, LaidTile.of(text, dtype, 4))


def test_the_dsl_lays_out_alike() -> None:
    """The CuTe DSL's own evaluation of layouts, and the operands of wgmma as its atoms tile them."""
    pytest.importorskip("cutlass")
    program = os.path.join(os.path.dirname(__file__), "dsl_layouts.py")
    run = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, env={**os.environ, "CUTE_DSL_ARCH": "sm_90a"}
    )
    assert run.returncode == 0, run.stderr
    offsets, atoms, fragments = run.stdout.splitlines()
    for line in offsets.split(";"):
        text, numbers = line.split("=")
        layout = parse_layout(text)
        assert [layout(n) for n in range(40)] == [int(one) for one in numbers.split()], text
    printed = dict(line.split("=") for line in atoms.split(";"))
    for mode in ("none", "32", "64", "128"):
        for major, ours in (("K", k_major(mode)), ("MN", mn_major(mode))):
            theirs, own = parse_layout(printed[f"{major}-{mode}"]), parse_layout(ours)
            assert [theirs.linear(n) for n in range(theirs.size)] == [own.linear(n) for n in range(own.size)]
            assert [one for one in theirs.swizzles if one.b] == list(own.swizzles)
            assert mode == "none" or own.swizzles == (TMA_MODES[f"SW{mode}"],)
    assert fragments.split(";") == [fragment(32), fragment(16)]
