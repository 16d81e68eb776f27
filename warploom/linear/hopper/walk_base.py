"""What the roles of a walk share. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from warploom.kernels.cute.basics import DTYPES, KernelBase, Names
from warploom.linear.hopper.config import COLUMNS, WalkConfig


class WalkBase(KernelBase):
    """Sizes of one configuration, and helpers of all roles."""

    def __init__(self, config: WalkConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.boxes = config.head_dim // COLUMNS  # of a chunk of a or b

    @cute.jit
    def advance(self, stage, phase, stages):
        """The next stage of a ring; the phase flips when it wraps."""
        stage += 1
        if stage == stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    def chunk_at(self, t: Any, chunks: Any) -> Any:
        """The chunk of step ``t``."""
        return chunks - 1 - t if self.config.reverse else t

    def ring(self, atom: Any, shared: Any, tiles: Any) -> Names:
        """Shared and global boxes as the TMA copy takes them."""
        into, out_of = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return Names(atom=atom, into=into, out_of=out_of)
