"""Which modules serve a call, and the named set that `warploom build` prepares."""

from __future__ import annotations

from functools import cache
from itertools import product

from warploom.delta.hopper.config import COLUMNS, BackConfig, ForwardConfig, GradientConfig, KeepConfig, PrepareConfig

Config = PrepareConfig | ForwardConfig | KeepConfig | BackConfig | GradientConfig

WIDTHS = (64, 128)  # of the tile of keys
DTYPES = ("bfloat16",)
WIDEST = WIDTHS[-1]
LONGEST = 2**24 - 1  # tokens of a sequence, as TMA is told of its end


@cache
def prepare(dtype: str, e: int) -> PrepareConfig:
    """The variant for a dtype and keys of ``e`` dims that a backward pass begins with."""
    return PrepareConfig(dtype, width(e), gradients=True)


@cache
def forward(dtype: str, e: int, m: int, heads: int, processors: int) -> ForwardConfig:
    """The variant for a dtype, keys and values of ``e`` and ``m`` dims, and so many value heads of all sequences.

    Two warpgroups of a walk's block share what it loads and keep a multiprocessor's tensor cores busy; one alone takes less
    time for its chunk, which counts where a wave holds all blocks. H200, 64 value heads of 1 × 32k tokens: one 0.58 ms, two
    0.79; of 4 × 8k 0.58 and 0.46. A second warpgroup without columns is nothing that TMA loads for.
    """
    return ForwardConfig(dtype, width(e), warpgroups(m, heads, processors))


@cache
def keep(dtype: str, e: int, m: int, heads: int, processors: int, again: bool = False) -> KeepConfig:
    """As ``forward``, of the walk that leaves states for gradients, or of one that does so ``again``."""
    return KeepConfig(dtype, width(e), warpgroups(m, heads, processors), again)


@cache
def back(dtype: str, e: int, m: int, heads: int, processors: int) -> BackConfig:
    """As ``forward``, of the walk back."""
    return backs(dtype, width(e))[warpgroups(m, heads, processors) - 1]


@cache
def gradients(dtype: str, e: int) -> GradientConfig:
    """The variant for a dtype and keys of ``e`` dims."""
    return GradientConfig(dtype, width(e))


def backs(dtype: str, width: int) -> tuple[BackConfig, BackConfig]:
    """Walks back of one warpgroup and of two, whose stages of what both load fill shared memory."""
    return BackConfig(dtype, width), BackConfig(dtype, width, 2, 2)


def warpgroups(m: int, heads: int, processors: int) -> int:
    """How many a block of a walk has: see ``forward``."""
    tiles = -(-m // COLUMNS)
    return 1 if tiles % 2 == 1 or heads * tiles <= processors else 2


def width(e: int) -> int:
    """The smallest tile that holds keys of ``e`` dims."""
    return WIDTHS[0] if e <= WIDTHS[0] else WIDTHS[1]


def modules_of(dtype: str, e: int) -> tuple[Config, ...]:
    """All that forward passes of a dtype and keys of ``e`` dims may need."""
    return tuple(ForwardConfig(dtype, width(e), warpgroups) for warpgroups in (1, 2))


def back_modules_of(dtype: str, e: int) -> tuple[Config, ...]:
    """All that backward passes may need."""
    keeps = (KeepConfig(dtype, width(e), warpgroups, again) for warpgroups in (1, 2) for again in (False, True))
    return prepare(dtype, e), *keeps, *backs(dtype, width(e)), gradients(dtype, e)


def named_set() -> list[Config]:
    """The variants that `warploom build` prepares: all there are."""
    return [variant for dtype, e in product(DTYPES, WIDTHS) for of in (modules_of, back_modules_of) for variant in of(dtype, e)]
