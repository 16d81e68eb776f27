"""What the parts of the backward in pairs of blocks share: constants, and which pairs a cluster works on.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import const_expr

from warploom.attention.hopper.backward_base import WARPGROUPS, BackwardBase
from warploom.attention.hopper.config import BackwardConfig
from warploom.kernels.cute.basics import WARPGROUP, Names

VALUES, KEYS = 0, 1  # the warpgroup of S, P and dV, and that of dP, dS and dK
# Named barriers: P is there, P has been read, KEYS has written dS.
P_READY, P_TAKEN, DS_WRITTEN = 6, 7, 8
BOTH = WARPGROUPS * WARPGROUP
PAIR = 2  # blocks of a cluster
OWN, OTHER = 0, 1  # slots of dS: this block's, the other's
# Parts in which a role hands over its quarter of dQ: a buffer holds one.
PARTS = 1, 2


class PairBase(BackwardBase):
    """Sizes, the order of pairs, and releases that reach both blocks."""

    def __init__(self, config: BackwardConfig):
        super().__init__(config)
        self.keys_first = False
        self.half = config.head_dim // PAIR
        self.quarter = self.tile_m * config.head_dim // (PAIR * WARPGROUPS)  # elements of dQ of a warpgroup and step

    @cute.jit
    def next_pair(self, given, turn):
        """Number of a cluster's ``turn``-th pair; all have been dealt with where there is none of that number."""
        index = cute.arch.block_idx()[0] // PAIR
        if const_expr(self.config.persistent):
            cute.arch.mbarrier_wait(given.shared.block_full, turn & 1)
            index = cute.arch.make_warp_uniform(given.shared.index.load())
        else:
            index += turn * (cute.arch.grid_dim()[0] // PAIR)
        return index

    @cute.jit
    def take(self, given):
        """This warp needs the pair's number no more: every lane, since each has read it."""
        if const_expr(self.config.persistent):
            cute.arch.mbarrier_arrive(given.shared.block_empty, 0)

    def share_of(self, given: Any, index: Any, base: Any, loads: Any) -> Names:
        """What this block works on of a pair, after ``base`` steps and ``loads`` pairs with steps."""
        work = self.describe(given, index)
        return work.but(n_block=PAIR * work.n_block + given.rank, rank=given.rank, base=base, loads=loads)

    @cute.jit
    def release_both(self, r, barrier):
        """As ``release``, to both blocks; to this one by an arrival within the block, which tools can follow."""
        self.release(barrier)
        self.release_other(r, barrier)

    @cute.jit
    def release_other(self, r, barrier):
        """As ``release``, to the other block."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier, r.rank ^ 1)
