"""What the roles of a walk share. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from typing import Any

from warploom.kernels.cute.basics import DTYPES
from warploom.kernels.cute.fields import Fields
from warploom.linear.hopper.config import COLUMNS, WalkConfig


class WalkShared(Fields):
    """A block's shared memory. Barriers are addresses of the first of a ring's."""

    a_full: Any
    a_empty: Any
    b_full: Any
    b_empty: Any
    c_full: Any
    c_empty: Any
    a: Any  # (chunk, head_dim, stage)
    b: Any
    boxes_a: Any  # the same as TMA fills it, (chunk, COLUMNS, box)
    boxes_b: Any
    c_start: Any  # addresses
    c: Any  # (chunk, COLUMNS, group and stage)
    p: Any
    p_start: Any
    out: Any  # (chunk, COLUMNS, group)
    out_start: Any
    # Of ``terms``: the ring of x as TMA fills it, its address, and x and c as left and right operands. Who has read a chunk of
    # a has read that of x.
    x_full: Any
    boxes_x: Any
    x_start: Any
    x: Any
    c_whole: Any
    sums: Any  # address
    logs: Any  # the same, of what fades, by stages of a: see ``walk_sums``


class WalkPart(Fields):
    """What a block works on."""

    shared: WalkShared
    block: Any  # which COLUMNS of c and out are its first
    head: Any
    batch: Any
    rank: Any  # in its cluster
    chunks: Any  # of the sequence, or of the segment
    first: Any  # the first of them
    segment: Any


class WalkBase:
    """Sizes of one configuration."""

    def __init__(self, config: WalkConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.boxes = config.head_dim // COLUMNS  # of a chunk of a or b

    def segments(self, states: Any) -> Any:
        """Into how many a sequence is cut."""
        return states.shape[2] if self.config.cut else 1

    def chunk_at(self, t: Any, given: WalkPart) -> Any:
        """The chunk of step ``t``."""
        n = given.chunks - 1 - t if self.config.reverse else t
        return given.first + n if self.config.cut or not self.config.reverse else n
