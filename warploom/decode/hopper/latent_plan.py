"""Which variant serves a call over a latent cache, and how many blocks share a sequence; no length counts."""

from __future__ import annotations

from functools import cache

import torch

from warploom.decode.hopper.latent_config import FEW_ROWS, ROWS, THREADS, TILE, TOTAL_FLOATS, LatentConfig
from warploom.decode.hopper.plan import DTYPES

# Tiles of a split, at least. Many sequences would rather have few splits, one sequence many. On an H200, of 128 heads, 8, 12
# and 16 take 160, 141 and 141 us for 64 sequences of 4096 keys, 214, 214 and 194 of 6144, 617, 538 and 526 for 128 of 8192;
# 30, 42 and 42 for one of 8192, 35, 35 and 53 of 6144. FlashInfer takes 141 for 64 of 4096 and 30 for one of 8192.
LEAST = 8
# With few rows, where a split's end costs no global memory. Of 16 heads on an H200, 2, 4 and 8 take 18.6, 19.0 and 22.1 us for
# one sequence of 8192 keys, 162, 156 and 155 for 64, and 205, 181 and 176 for 64 of 4096 to 12160, where Triton takes 186. With
# fewer instructions 2 and 4 take 15.5 and 17.5, 150 and 151, 206 and 180, and 22.1 and 17.9 for 16 of 1024.
FEW_LEAST = 4
MOST_LOG = 6  # a sequence has up to 2^6 splits
LEAST_BOX = 8  # keys of a page, at least
BOXES = (64, 16, 8)


@cache
def config(dtype: torch.dtype, page_size: int | None, one: bool, pair: bool = False, few: bool = False) -> LatentConfig:
    """The variant of a call; ``page_size`` None: the keys are contiguous, ``one``: a sequence has one page, of any size.

    ``pair``: blocks of rows come in pairs; ``few``: a sequence has few rows.
    """
    most = TILE // 2 if pair else TILE
    if page_size is None:
        return LatentConfig(DTYPES[dtype], most, False, pair, few)
    box = most if one else min(next(box for box in BOXES if box <= page_size), most)
    return LatentConfig(DTYPES[dtype], box, True, pair, few)


def row_blocks(queries: int, heads: int) -> int:
    """Blocks of rows of a sequence."""
    return -(-queries * heads // ROWS)


def pairs(queries: int, heads: int) -> bool:
    """Whether blocks of rows come in pairs, and a tile of keys is read once for two."""
    return True if row_blocks(queries, heads) % 2 == 0 else False  # noqa: SIM210 - a tracer's symbols make no constant


def few(queries: int, heads: int) -> bool:
    """Whether a sequence's rows are the columns of products, of which wgmma takes as few as there are."""
    return True if queries * heads <= FEW_ROWS else False  # noqa: SIM210 - as above


def blocks_log(units: int, tiles: int, processors: int) -> int:
    """2^this blocks share the splits of each of so many ``units``, rows of sequences of up to so many tiles.

    The fewest that take a tenth less rounds of a whole unit's time than fewer do: parts cost time too.
    """
    best, least = 0, float("inf")
    for log in range(splits_log(tiles) + 1):
        rounds = -(-(units << log) // processors) / (1 << log)
        if rounds < 0.9 * least:
            best, least = log, rounds
    return best


def splits_log(tiles: int) -> int:
    """2^this splits has a sequence of so many tiles."""
    return min(max(tiles // LEAST, 1).bit_length() - 1, MOST_LOG)


def parts_log(tiles: int, log: int) -> int:
    """2^log blocks leave up to 2^this parts of a unit: a block of an odd power of two of splits leaves two."""
    return min(log + 1, splits_log(tiles)) if log else 0


def levels(tiles: int, log: int) -> int:
    """Of totals that a block keeps while it adds up its splits, four to one of the next level."""
    each = max(splits_log(tiles) - log, 0)
    return each // 2 if log else -(-each // 2)


def kept_floats(tiles: int, log: int, blocks: int) -> int:
    """Of what so many ``blocks`` keep while they add up splits: a total of each level."""
    return levels(tiles, log) * TOTAL_FLOATS * THREADS * blocks


def named_set() -> list[LatentConfig]:
    """The variants that `warploom build` prepares: all there are."""
    sizes = (None, *BOXES)
    kinds = ((False, False), (True, False), (False, True))
    return [config(dtype, size, False, *kind) for dtype in DTYPES for size in sizes for kind in kinds]
