"""What the parts of decode's kernels share: a block's shared memory, its call, and how sequences are cut.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from warploom.decode.hopper.config import DecodeConfig
from warploom.kernels.cute.basics import DTYPES, WARP, choose
from warploom.kernels.cute.fields import Fields

FAR = 1 << 30  # of a window that ends nowhere


class Shared(Fields):
    """A block's shared memory. Barriers are addresses of the first of the ring's."""

    full: Any
    empty: Any
    ring: Any  # (key, head_dim, box)
    start: Any  # its address
    exchange: Any  # what warps hand to the first of those with the same rows
    merged: Any  # of a block alone its sequence's state so far; of one of a cluster its part, which others read


class Call(Fields):
    """What all blocks work on."""

    q: Any
    out: Any
    lse: Any
    lengths: Any
    table: Any
    sink: Any
    multiplier: Any
    cap_in: Any
    left: Any
    right: Any
    capacity: Any
    page_shift: Any
    pages: Any
    least: Any  # tiles of a split
    queries: Any
    heads_q: Any
    group: Any  # query heads of a key head
    members: Any  # rows of a key head: queries · group
    cluster: int
    slots: int


class Place(Fields):
    """What a block works on at a time."""

    head: Any  # of keys
    batch: Any
    base: Any  # first row
    rank: Any  # of the block in its cluster


class Base:
    """Sizes of one configuration."""

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.tile_n, self.dim = config.tile_n, config.head_dim
        self.row_groups, self.key_groups = config.row_groups, config.key_groups
        self.threads = WARP * (config.warps + 1)

    @cute.jit
    def own_splits(self, call, place, splits):
        """The block's splits: the first, and the one behind its last."""
        each = self.config.splits // call.cluster
        return place.rank * each, cutlass.min(place.rank * each + each, splits)

    @cute.jit
    def cut(self, call, batch):
        """Of a sequence its length, the first tile, the end of its keys, how many tiles and how many splits there are.

        All by its own keys. Split s has tiles s, s + splits, s + 2 splits, …; there are as many splits as leave each
        ``call.least`` tiles, one at least.
        """
        length = cutlass.min(cutlass.max(call.lengths[batch], 0), call.capacity)
        start = cutlass.max(length - call.queries - call.left, 0) // self.tile_n
        last = cutlass.min(length, length + call.right)
        tiles = cutlass.max((last + self.tile_n - 1) // self.tile_n - start, 0)
        splits = cutlass.min(cutlass.max(tiles // call.least, choose(tiles > 0, 1, 0)), self.config.splits)
        return length, start, last, tiles, splits
