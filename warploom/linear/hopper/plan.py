"""Which walks serve a call, and the named set that `warploom build` prepares."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from warploom.linear.hopper.config import COLUMNS, WalkConfig

# By the head dim of the tile, the larger of a call's two; smaller ones run in it by TMA bounds. 4 × 8 heads
# of 4096 tokens: 256 in clusters of two 94 us, of four 161, in single blocks 108; 192 in single blocks 77, in threes 78.
# 128 has the whole state in two warpgroups of one block, which then fills a multiprocessor.
TILES: dict[int, dict[str, Any]] = {
    64: {"stages": 4, "c_stages": 4, "cluster": 1},
    128: {"stages": 4, "c_stages": 4, "cluster": 1, "groups": 2},
    192: {"stages": 4, "cluster": 1},
    256: {"stages": 3, "cluster": 2},
}
WIDTHS = tuple(TILES)
# Of walks that leave what the gradient of logs is made of, but for HALVES, with a block a head: a ring more. c has as many
# stages as a, since scores wait for both.
TERMS: dict[int, dict[str, Any]] = {64: {}, 128: {"stages": 3, "c_stages": 3}}
# Of them those whose walks of dk and dv run side by side where both find room at once: 64 heads of 4096 tokens on an H200, of
# one log a token, 344 us for 436; 128 heads of 2048 and of 8192 271 and 996 for 268 and 973.
PAIRED = frozenset({128})
# There the walk of dq has two blocks a head too, each with half of the columns.
HALVES: dict[str, Any] = {"stages": 4, "c_stages": 4, "cluster": 2, "groups": 1}
# Of the larger head dim: with a denominator, without one, and with a decay; and of the smaller one. Below, Triton holds the
# whole state. 8 × 16 heads of 2048 tokens on an H200: 128 dims 67 us, Triton 78; 64 dims 35 and 36, with a decay 35 and 44, as
# it costs Triton's chain of products a passage of the keys through registers and shared memory, the walks nothing that waits.
NARROWEST_NORMALIZED, NARROWEST, NARROWEST_FADING, LEAST = 136, 72, 64, 64
# Walks are taken from as many blocks as this share of the multiprocessors on, where sequences are cut otherwise: 8 heads, 32
# blocks, of 4096 tokens 76 us, cut 92; with a denominator 133 and 144, backward 346 and 393. Fewer are not measured.
FILL = 0.24
# Tokens up to which a sequence is walked in one pass: tensor cores add by truncation, 5e-9 of a state for each token.
LONGEST = 16384
# With a decay heads of 64 dims that would give less than a share of the multiprocessors a block are cut into segments,
# whose states are summed before; at the most so many, each of so many tokens. Triton cuts all by the same share.
CUT, MOST_SEGMENTS, LEAST_SEGMENT = 0.6, 16, 1024
# Of heads of 128 dims with one log each, ns of an H200, from 32 heads of 4096 tokens (98 us, Triton 129) and of 16384 (371,
# 268): a token takes a walk 22, and in Triton's segments 47 of a multiprocessor, after 75,000 that a walk does not need.
# Without a decay 17, 44 and 46,000, with logs of tokens 23, 57 and 103,000: of 32 heads walks win to 7100, 7300, 11100 tokens.
WALKED, IN_SEGMENTS, BEFORE_SEGMENTS = 22, 47, 75_000


def segments(programs: int, seqlen: int, processors: int) -> int:
    """Into how many a sequence is cut where ``programs`` would walk whole ones; 1 where it is not."""
    if not 0 < programs < CUT * processors:
        return 1
    return max(min(processors // programs, MOST_SEGMENTS, seqlen // LEAST_SEGMENT), 1)


def outwalks(programs: int, seqlen: int, processors: int) -> bool:
    """Whether ``programs`` walk whole sequences of 128 dims quicker than Triton, which cuts them where they are few."""
    if programs >= CUT * processors:
        return True
    return seqlen * (WALKED * processors - IN_SEGMENTS * programs) <= BEFORE_SEGMENTS * processors


def side_by_side(width: int, programs: int, processors: int) -> bool:
    """Whether walks of dk and dv of so many heads run at once, where the logs have a gradient."""
    return width in PAIRED and 2 * programs <= processors


def narrowest(normalize: bool, fading: bool) -> int:
    """The least that the larger head dim of such a call may be."""
    if fading:
        return NARROWEST_FADING
    return NARROWEST_NORMALIZED if normalize else NARROWEST


def width(head_dim: int, head_dim_v: int) -> int:
    """The smallest tile that holds both head dims."""
    for found in WIDTHS[:-1]:
        if head_dim <= found and head_dim_v <= found:
            return found
    return WIDTHS[-1]


def blocks(head_dim: int, head_dim_v: int) -> int:
    """Blocks of a head that the walk with the fewest has."""
    columns = TILES[width(head_dim, head_dim_v)].get("groups", 1) * COLUMNS
    return -(-min(head_dim, head_dim_v) // columns)


@cache
def config(width: int, *, halves: bool = False, **features: bool) -> WalkConfig:
    """The variant of a tile, with features by the names that WalkConfig has for them; in ``halves`` as HALVES has it."""
    tile = {**TILES[width], **(TERMS[width] if features.get("terms") else {}), **(HALVES if halves else {})}
    return replace(WalkConfig("bfloat16", width, width, **features), **tile)


@cache
def configs(
    width: int,
    normalize: bool,
    fading: bool = False,
    a_head: bool = False,
    cut: bool = False,
    logs: bool = False,
    paired: bool = False,
) -> tuple[WalkConfig, ...]:
    """All that a call may need: for out, dq, dk and dv.

    Of ``logs`` that ask for a gradient, where walks find it, that too, ``paired`` as `side_by_side` has it.
    """
    if not normalize:
        kind = {"fading": fading, "a_head": a_head, "cut": cut}
        forward, reverse = config(width, **kind), config(width, reverse=True, **kind)
        if logs and paired:
            of_keys = config(width, reverse=True, **kind, terms=True, paired=True)
            return forward, config(width, halves=True, **kind, terms=True), of_keys
        if logs and width in TERMS:
            of_keys, of_values = (config(width, reverse=True, **kind, **each) for each in ({"terms": True}, {"finds": True}))
            return forward, config(width, **kind, terms=True), of_keys, of_values
        return forward, forward, reverse, reverse
    reverse = config(width, reverse=True, weighted=True)
    return config(width, weighted=True), config(width, wide=True), replace(reverse, biased=True), reverse


def named_set() -> list[WalkConfig]:
    """The variants that `warploom build` prepares: all there are."""
    kinds: list[tuple[bool, ...]] = [(False, False), (True, False), (False, True), (False, True, True)]
    taken = [(width, kind) for width, kind in product(WIDTHS, kinds) if width >= narrowest(*kind[:2])]
    taken += [(WIDTHS[0], (False, True, a_head, True, logs)) for a_head in (False, True) for logs in (False, True)]
    taken += [(width, (False, True, a_head, False, True)) for width in TERMS for a_head in (False, True)]
    taken += [(width, (False, True, a_head, False, True, True)) for width in PAIRED for a_head in (False, True)]
    return list(dict.fromkeys(v for width, kind in taken for v in configs(width, *kind)))
