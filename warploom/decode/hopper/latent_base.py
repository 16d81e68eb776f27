"""What the parts of the kernel of latent caches share: a block's shared memory, its call, and how sequences are cut.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warploom.decode.hopper.latent_config import TILE, LatentConfig
from warploom.kernels.cute.basics import DTYPES, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import highest_bit

EVEN, ODD = 0, 1  # tiles of a split, and the warpgroups that score them
RADIX_LOG = 2  # 2^this totals are added up, one after the other, to one of the next level
LEVELS = 3  # of them: 64 splits
OWN, OTHER = 0, 1  # of a tile what the warpgroup reads that scored it, and what the other one does


class Shared(Fields):
    """A block's shared memory. Barriers are addresses of the first."""

    q_full: Any
    q_empty: Any
    full: Any  # of each slot a barrier for each piece
    empty: Any  # and two: OWN is free again, OTHER is
    q: Any
    k: Any  # (key, column, slot): a slot for even tiles and one for odd ones
    v: Any  # (column, key, slot), of the columns that are values
    p: Any  # (row, key, slot): P takes the place of a tile's last columns, which only its scores need
    weights: Any  # P's address where rows are few: it lies behind Q
    exchange: Any  # and fp32 behind it, what each warpgroup gives to the other one
    loads: Any  # K in boxes, as TMA fills it
    q_loads: Any  # Q in boxes
    start: Any  # K's address
    references: Any  # of each slot's P: a row's
    sums: Any  # (row, warpgroup, turn)
    totals: Any  # (row, warpgroup, level, reference or sum)


class Call(Fields):
    """What all blocks work on."""

    lengths: Any
    table: Any
    left: Any
    right: Any
    capacity: Any
    page_shift: Any
    pages: Any
    queries: Any
    heads: Any
    rows: Any  # queries · heads
    row_blocks: Any
    least: Any  # tiles of a split
    most_log: Any  # a sequence has up to 2^this splits
    blocks_log: Any  # and 2^this blocks
    parts_log: Any  # which leave up to 2^this parts, where they are several


class Place(Fields):
    """What a block works on at a time."""

    batch: Any
    block: Any  # of those of the sequence
    row_block: Any


class Cut(Fields):
    """How a sequence is cut, by its own keys: 2^log splits, as even as they can be."""

    length: Any
    start: Any  # first tile
    last: Any  # end of the keys
    tiles: Any
    log: Any
    each_log: Any  # a block has 2^this splits, if any
    part_log: Any  # and adds up 2^this of them: all, if it has the sequence alone


class LatentBase:
    """Sizes of one configuration, and where everything is."""

    def __init__(self, config: LatentConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.rows = config.rows

    @cute.jit
    def cut(self, call, batch):
        length = cutlass.min(cutlass.max(call.lengths[batch], 0), call.capacity)
        start = cutlass.max(length - call.queries - call.left, 0) // TILE
        last = cutlass.min(length, length + call.right)
        tiles = cutlass.max((last + TILE - 1) // TILE - start, 0)
        log = cutlass.min(highest_bit(cutlass.max(tiles // call.least, 1)), call.most_log)
        each_log, part_log = self.logs(call, log)
        return Cut(length=length, start=start, last=last, tiles=tiles, log=log, each_log=each_log, part_log=part_log)

    @cute.jit
    def logs(self, call, log):
        """Of a sequence of 2^log splits how many a block has, and how many make a part of it: 2^this."""
        each_log = cutlass.max(log - call.blocks_log, 0)
        return each_log, choose(call.blocks_log == 0, each_log, each_log // RADIX_LOG * RADIX_LOG)

    def place(self, call: Any, item: Any) -> Place:
        """The item's place: the blocks of rows that read the same keys are neighbours."""
        unit = item // call.row_blocks
        batch = unit >> call.blocks_log
        return Place(batch=batch, block=unit - (batch << call.blocks_log), row_block=item - unit * call.row_blocks)

    def first_split(self, cut: Cut, place: Place) -> Any:
        return place.block << cut.each_log

    @cute.jit
    def has_part(self, cut, place):
        """Whether the block has something to store; where a sequence has no keys, its first block does."""
        return choose(self.first_split(cut, place) < (Int32(1) << cut.log), 1, 0)

    def split(self, cut: Cut, index: Any) -> tuple[Any, Any]:
        """The tiles of a split: its first, and the one behind its last."""
        return cut.start + (index * cut.tiles >> cut.log), cut.start + ((index + 1) * cut.tiles >> cut.log)
