"""Which walks serve a call, and the named set that `warploom build` prepares."""

from __future__ import annotations

from functools import cache
from itertools import product

from warploom.linear.hopper.config import COLUMNS, WalkConfig

# Head dims of the tile, the larger of a call's two, and how many blocks share what they load of it; smaller head dims run in
# it by TMA bounds. 4 × 8 heads of 4096 tokens, head_dim 256: by two 94 us, by four 161, alone 108; 192: alone 77, by three 78.
CLUSTERS = {192: 1, 256: 2}
WIDTHS = tuple(CLUSTERS)
NARROWEST, LEAST = 136, 64  # of the larger head dim, and of the smaller one: below, Triton holds the whole state
# Walks are taken from as many blocks as this share of the multiprocessors on; fewer would walk long, and sequences are cut.
FILL = 0.6
# Tokens up to which a sequence is walked in one pass: tensor cores add by truncation, 5e-9 of a state for each token.
LONGEST = 16384


def width(head_dim: int, head_dim_v: int) -> int:
    """The smallest tile that holds both head dims."""
    for found in WIDTHS[:-1]:
        if head_dim <= found and head_dim_v <= found:
            return found
    return WIDTHS[-1]


def blocks(head_dim: int, head_dim_v: int) -> int:
    """Blocks of a head that the walk with the fewest has."""
    return -(-min(head_dim, head_dim_v) // COLUMNS)


@cache
def config(width: int, reverse: bool, weighted: bool, wide: bool) -> WalkConfig:
    """The variant of a tile."""
    return WalkConfig(
        "bfloat16", width, width, reverse, weighted, wide, stages=3 if width == 256 else 4, cluster=CLUSTERS[width]
    )


@cache
def configs(width: int, normalize: bool) -> tuple[WalkConfig, ...]:
    """All that a call may need, forward and backward."""
    forward, plain = config(width, False, False, False), config(width, True, False, False)
    return (forward, config(width, True, True, False), config(width, False, False, True)) if normalize else (forward, plain)


def named_set() -> list[WalkConfig]:
    """The variants that `warploom build` prepares: all there are."""
    return list(dict.fromkeys(v for width, normalize in product(WIDTHS, (False, True)) for v in configs(width, normalize)))
