"""Which modules serve a call, and the named set that `warploom build` prepares."""

from __future__ import annotations

from functools import cache
from itertools import product

from warploom.delta.hopper.config import COLUMNS, PrepareConfig, WalkConfig

WIDTHS = (64, 128)  # of the tile of keys
DTYPES = ("bfloat16",)
WIDEST = WIDTHS[-1]
LONGEST = 2**24 - 1  # tokens of a sequence, as TMA is told of its end


@cache
def prepare(dtype: str, e: int) -> PrepareConfig:
    """The variant for a dtype and keys of ``e`` dims."""
    return PrepareConfig(dtype, width(e))


@cache
def walk(dtype: str, e: int, m: int, heads: int, processors: int) -> WalkConfig:
    """The variant for a dtype, keys and values of ``e`` and ``m`` dims, and so many value heads of all sequences.

    Two warpgroups of a block share what it loads and keep a multiprocessor's tensor cores busy; one alone takes less time for
    its chunk, which counts where a wave holds all blocks. H200, 64 value heads of 1 × 32k tokens: one 0.58 ms, two 0.79; of
    4 × 8k 0.58 and 0.46. A second warpgroup without columns is nothing that TMA loads for.
    """
    tiles = -(-m // COLUMNS)
    alone = tiles % 2 == 1 or heads * tiles <= processors
    return WalkConfig(dtype, width(e), 1 if alone else 2)


def width(e: int) -> int:
    """The smallest tile that holds keys of ``e`` dims."""
    return WIDTHS[0] if e <= WIDTHS[0] else WIDTHS[1]


def modules_of(dtype: str, e: int) -> tuple[PrepareConfig | WalkConfig, ...]:
    """All that calls of a dtype and keys of ``e`` dims may need."""
    return prepare(dtype, e), *(WalkConfig(dtype, width(e), warpgroups) for warpgroups in (1, 2))


def named_set() -> list[PrepareConfig | WalkConfig]:
    """The variants that `warploom build` prepares: all there are."""
    return [variant for dtype, e in product(DTYPES, WIDTHS) for variant in modules_of(dtype, e)]
