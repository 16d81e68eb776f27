"""Which modules serve a call, and the named set that `warploom build` prepares."""

from __future__ import annotations

from functools import cache
from itertools import product

from warploom.delta.hopper.config import PrepareConfig, WalkConfig

WIDTHS = (64, 128)  # of the tile of keys
DTYPES = ("bfloat16",)
LONGEST = 2**24 - 1  # tokens of a sequence, as TMA is told of its end


@cache
def prepare(dtype: str, e: int) -> PrepareConfig:
    """The variant for a dtype and keys of ``e`` dims."""
    return PrepareConfig(dtype, width(e))


@cache
def walk(dtype: str, e: int) -> WalkConfig:
    """The variant for a dtype and keys of ``e`` dims."""
    return WalkConfig(dtype, width(e))


def width(e: int) -> int:
    """The smallest tile that holds keys of ``e`` dims."""
    return min(w for w in WIDTHS if w >= e)


def named_set() -> list[PrepareConfig | WalkConfig]:
    """The variants that `warploom build` prepares: all there are."""
    return [kind(dtype, e) for kind, dtype, e in product((prepare, walk), DTYPES, WIDTHS)]
