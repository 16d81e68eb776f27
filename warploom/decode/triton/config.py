"""Tiles of the decode kernels. Nothing here depends on the batch or the cache's size, so neither do a sequence's bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from warploom.kernels.triton.widths import power_of_two

# Bytes of a row from which on all tiles are swizzled alike, as `warploom.kernels.triton.widths` has it.
_SWIZZLED = 128


@dataclass(frozen=True)
class Config:
    """One kernel variant's sizes."""

    block_m: int  # rows: queries × heads of a group, padded
    block_n: int  # keys of a tile
    split: int  # keys of a split, until max_splits are full
    max_splits: int
    warps: int
    stages: int
    group: int = 8  # splits that one program may take whole: fewer parts to store and merge
    full: int = 400  # groups of a launch from which on programs take whole ones, where no lengths decide (see `plan`)
    halved: int = 0  # keys of a sequence up to which its splits are halved; a multiple of the split
    crowd: int = 0  # splits of a launch from which on a program takes both halves of one


@cache
def config(rows: int, head_dim: int, head_dim_v: int, itemsize: int, heads_kv: int, pairs: bool = False) -> Config:
    """The variant for ``rows`` = T × group queries of a kv head; ``pairs``: over e4m3 numbers read in pairs."""
    # Triton's fp32 products of 64 rows spill, and read keys and values through descriptors that ptxas gets wrong. Pairs are
    # widened in registers, and products of 64 rows take keys and values from shared memory.
    block_m = min(max(power_of_two(rows), 16), 32 if itemsize == 4 or pairs else 64)
    row_blocks = -(-rows // block_m)
    width = max(power_of_two(head_dim), power_of_two(head_dim_v)) * itemsize
    # Wide tiles of four stages must fit 163 KiB of shared memory (fp32, head_dim 256, on an A100).
    block_n = 64 if width <= 256 else 32 if width <= 512 else 16
    # Of 64 rows 8 warps took 1.4 to 1.6 times as long as 4 to head_dim 128; at 256 4 warps spill.
    warps, stages = 8 if block_m == 64 and width > 256 else 4, 3
    if pairs and block_m == 32:
        # Nothing is spilled.
        block_n, warps, stages = 64, *((8, 4) if width > 256 else (4, 3))
    elif pairs:
        # As many bytes as a tile of the queries' type has. On an H200 104 us against 113 with half as many keys (head_dim 128,
        # 16 sequences of 8,192).
        block_n *= 2
    if block_m == 16 and itemsize == 2 and width <= 128 and not pairs:
        # As many bytes as wider tiles have: what a tile of 64 keys takes beside its products, barriers above all, counts twice.
        block_n = 128
    # From a single sequence about 256 splits over the kv heads and blocks of rows fill an H200, of 64 rows 64: their parts are
    # 32 KiB each, and take time to write and to read. On an H100, groups against single splits, 16 rows of bf16: 512 groups 356
    # against 362 us, 256 groups 187 against 184; of FP8 on an H200 256 groups 92 against 101.
    total, group, full = (64, 4, 100) if block_m == 64 else (256, 8, 250 if pairs else 400)
    # Where a sequence has few splits, halves of them, 16 to 64, keep more multiprocessors busy for half as long.
    halves = 0 if block_m == 64 else min(max(power_of_two(128 // (heads_kv * row_blocks)), 16), 64)
    return Config(
        block_m=block_m,
        block_n=block_n,
        split=512,
        max_splits=min(max(power_of_two(total // (heads_kv * row_blocks)), 16), 256),
        warps=warps,
        stages=stages,
        group=group,
        full=full,
        halved=halves * 256,
        crowd=128,
    )


def shared_blocks(c: Config, head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """Tiles of ``block_m`` rows that a program holds of sequences that share a prefix.

    As many as registers hold: with four of 16 rows and 128 columns a few words that no loop reads are spilled.
    """
    width = max(power_of_two(head_dim), power_of_two(head_dim_v)) * itemsize
    rows = (64 if width <= 256 else 32) // (2 if itemsize == 4 else 1)
    return max(rows // c.block_m, 1)


@cache
def latent_config(rows: int, itemsize: int, heads_kv: int) -> Config:
    """The variant for a latent cache, whose keys of up to 576 columns are values too."""
    block_m = min(max(power_of_two(rows), 16), 16 if itemsize == 4 else 64)
    row_blocks = -(-rows // block_m)
    return Config(
        block_m=block_m,
        block_n=16 if itemsize == 4 else 64 if block_m == 64 else 32,
        split=512,
        max_splits=min(max(power_of_two(256 // (heads_kv * row_blocks)), 32), 256),
        # A warp's share of an accumulator of 64 rows and 512 columns is 128 registers a thread.
        warps=8 if block_m == 64 else 4,
        stages=2 if block_m == 64 or itemsize == 4 else 3,
    )


def latent_widths(head_dim: int, head_dim_v: int, itemsize: int) -> tuple[int, int]:
    """Elements of a latent cache's two tiles: of the columns that are values, and of those behind them, 0 for none."""
    row = _SWIZZLED // itemsize
    rest = head_dim - head_dim_v
    return max(power_of_two(head_dim_v), row), max(power_of_two(rest), row) if rest else 0
