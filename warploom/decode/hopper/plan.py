"""Which variant serves a call, and how many blocks share a sequence. Nothing here is a sequence's length."""

from __future__ import annotations

from functools import cache

import torch

from warploom.decode.hopper.config import DecodeConfig

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
LEAST = 256  # keys of a split, at least
MOST_ROWS = 16  # queries × heads of a group; past it Triton's kernel has the better tiles
LEAST_HEADS = 8  # of keys: of fewer the splits of one cluster leave multiprocessors without work
LEAST_BOX, MOST_BOX = 8, 16  # keys of a TMA box of pages
HEAD_DIMS = (64, 128)  # of tiles; smaller ones run in them by TMA bounds

# What there is. Each was compared with a reference on an H200; a combination joins when it has been.
VARIANTS = (
    DecodeConfig("bfloat16", 128),
    DecodeConfig("bfloat16", 128, box=16, paged=True),
    DecodeConfig("bfloat16", 128, box=8, paged=True),
    DecodeConfig("bfloat16", 128, sink=True),
    DecodeConfig("bfloat16", 128, box=16, paged=True, softcap=True),
    DecodeConfig("float16", 128),
    DecodeConfig("bfloat16", 64),
)


def page_size(keys: int | None, one: bool) -> int | None:
    """Of pages of so many keys what their variant depends on; ``one``: a sequence has one page. None: the keys are contiguous.

    A single page may have any size. It is read in boxes like those of large pages, and what lies past its end is not there.
    """
    if keys is None:
        return None
    return MOST_BOX if one or keys >= MOST_BOX else LEAST_BOX


def tile_dim(head_dim: int, head_dim_v: int) -> int:
    """The smallest tile that holds both head dims."""
    return next(dim for dim in HEAD_DIMS if max(head_dim, head_dim_v) <= dim)


@cache
def config(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, page_size: int | None, softcap: bool = False, sink: bool = False
) -> DecodeConfig:
    """The variant of a call, which VARIANTS may lack; ``page_size`` as the function of this name has it."""
    dim = tile_dim(head_dim, head_dim_v)
    plain = DecodeConfig(DTYPES[dtype], dim, softcap=softcap, sink=sink)
    return (
        plain if page_size is None else DecodeConfig(DTYPES[dtype], dim, box=page_size, paged=True, softcap=softcap, sink=sink)
    )


def cluster(variant: DecodeConfig, pairs: int, processors: int) -> int:
    """Blocks that share a sequence's keys, of so many sequences and key heads.

    As many as find room at once. Of clusters of four and eight not all do that there are processors for: where 128 blocks of
    an H200 were one for each, two sequences of 8192 keys took 31.0 us in eights, 25.1 in fours, four 48.8 in fours, 42.6 in
    pairs. Eight sequences of 4096 took 39.2 in pairs, 47.2 in single blocks.
    """
    return next((size for size in variant.clusters if size * pairs <= (processors if size <= 2 else processors // 2)), 1)


def named_set() -> list[DecodeConfig]:
    """The variants that `warploom build` prepares: all there are."""
    return list(VARIANTS)
