"""What the parts of the backward in pairs of blocks share: constants, and which pairs a cluster works on.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper.backward_base import WARPGROUPS, BackwardShared, Call, Work
from warploom.attention.hopper.backward_columns import RUNS, ColumnWalk
from warploom.attention.hopper.config import BackwardConfig
from warploom.kernels.cute.rings import release, release_other

VALUES, KEYS = 0, 1  # the warpgroup of S, P and dV, and that of dP, dS and dK
PAIR = 2  # blocks of a cluster
OWN, OTHER = 0, 1  # slots of dS: this block's, the other's
# Under a column mask: where a pair's steps, twice, and 1 if keys may be dead, stand behind its number; and of how many steps
# the tile's number is kept for the writer warps, which may be as many behind the loader as Q has stages, and two more.
STEPS_WORD, KEPT_TILES = 1, 8
# Parts in which a role hands over its quarter of dQ: a buffer holds one.
PARTS = 1, 2


class PairShared(BackwardShared):
    """Of a block of a pair."""

    came: Any  # the other block's dS is here
    taken: Any  # this block's dS has been used by the other one and by VALUES
    index: Any  # addresses: of the pair's number, of P
    p: Any
    other: Any  # half of the columns of the other block's K
    halves_q: Any  # tiles as TMA fills them
    halves_do: Any
    halves_k: Any
    words: Any  # from the pair's number on; under a column mask
    k_start: Any  # addresses
    v_start: Any
    q_start: Any
    do_start: Any
    other_start: Any


class PairCall(Call):
    """Of blocks in pairs."""

    rank: Any  # in the cluster


class PairWork(Work):
    """What a block works on of a pair."""

    rank: Any
    loads: Any  # pairs with steps before this one


class PairBase(ColumnWalk):
    """Sizes, the order of pairs, and releases that reach both blocks."""

    def __init__(self, config: BackwardConfig):
        super().__init__(config)
        self.registers_each = self.consumer_registers, self.consumer_registers  # of VALUES and KEYS
        if config.columns and config.deterministic:  # no more than 504 with the producer's
            self.registers_each, self.producer_registers = (240, 216), 48
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

    def share_of(self, given: Any, index: Any, base: Any, loads: Any) -> PairWork:
        """What this block works on of a pair, after ``base`` steps and ``loads`` pairs with steps."""
        work = self.describe(given, index)
        own = work.but(n_block=PAIR * work.n_block + given.rank, base=base)
        if self.config.columns:
            word = cute.arch.make_warp_uniform(given.shared.words[STEPS_WORD])
            own = own.but(bounds=(Int32(0), word & 1, Int32(0), word >> 1))
        return PairWork(**vars(own), rank=given.rank, loads=loads)

    @property
    def words_count(self) -> int:
        """Words behind the pair's number, itself one of them, that warps leave each other in shared memory."""
        return self.tiles_at + 2 * KEPT_TILES if self.config.columns else 4

    @property
    def tiles_at(self) -> int:
        """Where the numbers of the last steps' tiles, and their turns, begin."""
        return self.runs_at + RUNS

    def kept_tile(self, j: Any) -> Any:
        """Where those of a step stand, counted through all pairs."""
        return self.tiles_at + 2 * (j & KEPT_TILES - 1)

    @cute.jit
    def release_both(self, r, barrier):
        """As ``release``, to both blocks; to this one by an arrival within the block, which tools can follow."""
        release(barrier)
        release_other(barrier, r.rank)
