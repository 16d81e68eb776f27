"""Which variant serves a call, how sequences are cut, and how many blocks share one. Nothing here is a sequence's length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import torch

from warploom.decode.hopper.config import DecodeConfig

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
LEAST = 256  # keys of a split, at least
MOST_ROWS = 16  # queries × heads of a group; of more Triton's kernel has the better tiles
MOST_BOX = 16  # keys of a box of pages
LEAST_HEADS = 8  # of keys: of fewer the splits of one cluster leave multiprocessors without work


@dataclass(frozen=True)
class Tiling:
    """Shape of the work of a block."""

    tile_n: int
    warps: int


# head_dim of the tile -> tiling. A warp has 16 keys of a tile. On an H200 64 blocks of four warps with 64 keys read no more than
# 52 GB a second each, of head_dim 128. O of head_dim 256 takes the registers of eight warps.
TILINGS = {64: Tiling(128, 8), 128: Tiling(128, 8), 256: Tiling(64, 4)}


def tile_dim(head_dim: int, head_dim_v: int) -> int:
    """The smallest tile that holds both head dims: rounded here and nowhere else."""
    return next((dim for dim in TILINGS if max(head_dim, head_dim_v) <= dim), max(TILINGS))


def page_size(keys: int | None, one: bool) -> int | None:
    """Of pages of so many keys what their variant depends on; ``one``: a sequence has one page. None: the keys are contiguous.

    A single page may have any size. It is read in boxes like those of large pages, and what lies past its end is not there.
    """
    if keys is None:
        return None
    return MOST_BOX if one else min(keys, MOST_BOX)


@cache
def config(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, page_size: int | None, softcap: bool = False, sink: bool = False
) -> DecodeConfig:
    """The variant of a call; ``page_size`` as the function of this name has it."""
    dim = tile_dim(head_dim, head_dim_v)
    tiling = TILINGS[dim]
    box = page_size or tiling.tile_n
    return DecodeConfig(
        DTYPES[dtype],
        dim,
        tile_n=tiling.tile_n,
        warps=tiling.warps,
        box=box,
        paged=page_size is not None,
        softcap=softcap,
        sink=sink,
    )


def cluster(variant: DecodeConfig, pairs: int, processors: int) -> int:
    """Blocks that share a sequence's keys, of so many sequences and key heads."""
    return next((size for size in variant.clusters if size * pairs <= processors), variant.clusters[-1])


def named_set() -> list[DecodeConfig]:
    """The variants that `warploom build` prepares: contiguous keys and pages of 16 or more, with at most one of softcap and sink."""
    extras = ({}, {"sink": True}, {"softcap": True})
    found = product(extras, TILINGS, (None, MOST_BOX), DTYPES)
    return [config(dtype, dim, dim, page_size, **extra) for extra, dim, page_size, dtype in found]
