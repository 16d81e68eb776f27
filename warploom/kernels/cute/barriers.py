"""Named barriers, at which warps of a block meet: the numbers of every kernel, in one place.

A block has sixteen; 0 is its own. Kernels that never run in one block may use the same numbers. Imports the CuTe DSL.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Any

import cutlass.cute as cute


class NamedBarriers(IntEnum):
    """Each member is the first of ``count`` consecutive barriers, one of each warpgroup where there are several."""

    count: int

    def __new__(cls, first: int, count: int = 1) -> NamedBarriers:
        member = int.__new__(cls, first)
        member._value_ = first
        member.count = count
        return member


@unique
class ForwardBarrier(NamedBarriers):
    """Of attention's forward."""

    PING_PONG = 1, 4  # a warpgroup's turn to issue its products
    CLEARED = 5, 4  # values of keys that a warpgroup's tile does not see are 0


@unique
class BackwardBarrier(NamedBarriers):
    """Of attention's backward, in all its forms."""

    DS_READY = 1  # both warpgroups have written their dS
    DQ_EMPTY = 2, 2  # a warpgroup's dQ buffer may be written
    DQ_FULL = 4, 2  # it may be read
    CLEARED = 10  # what stands for nothing in keys, values, queries and dO is 0
    DQ_FULL_ODD = 12, 2  # the same in odd steps when deterministic


@unique
class StepBarrier(NamedBarriers):
    """Of the backward whose warpgroups compute the same, each of its own keys."""

    PING_PONG = 6, 2  # a warpgroup's turn to issue S and dP


@unique
class RolesBarrier(NamedBarriers):
    """Of the backward whose warpgroups keep one gradient each."""

    P_READY = 6  # both have written their P
    STAGED = 8, 2  # a warpgroup has staged its gradient


@unique
class PairBarrier(NamedBarriers):
    """Of the backward in pairs of blocks."""

    P_READY = 6  # P is there
    P_TAKEN = 7  # P has been read
    DS_WRITTEN = 8  # the warpgroup of dK has written dS
    SCORED = 9  # the warpgroup of dV has its S, of queries some of which it is to clear


@unique
class WalkBarrier(NamedBarriers):
    """Of the walk of linear attention."""

    P_READY = 1  # the scores of a chunk are there
    P_TAKEN = 2  # they have been read
    OUT_FREE = 3  # the tile of out may be written
    OUT_WRITTEN = 4  # it may be read


@unique
class DecodeBarrier(NamedBarriers):
    """Of decode: each one of two warps with the same rows, of which there are up to eight."""

    TURN = 1, 7  # a warp may hand over what it has
    HANDED = 8, 7  # it has


@unique
class LatentBarrier(NamedBarriers):
    """Of decode over latent caches."""

    SCORED = 1, 2  # a warpgroup's warps have their scores, or have cleared what nobody sees
    P_READY = 3, 2  # a warpgroup's P is there for the other one
    SUMMED = 5  # both have left their sums


@unique
class DeltaBarrier(NamedBarriers):
    """Of the walk of the gated delta rule."""

    OUT_FREE = 1, 2  # a warpgroup's tile of out may be written
    OUT_WRITTEN = 3, 2  # it may be read
    # Of the gradients' kernel, whose tile of dq is the first of those above.
    ROWS = 5  # what is summed over rows has been written
    KEYS_TAKEN = 6  # what reading gives to dk has been read
    KEYS_WRITTEN = 7  # the tile of dk may be read


def wait(barrier: Any, threads: int, index: Any = 0) -> None:
    """Wait until all ``threads`` have come to the ``index``-th of the member's barriers."""
    cute.arch.barrier(barrier_id=barrier + index, number_of_threads=threads)


def arrive(barrier: Any, threads: int, index: Any = 0) -> None:
    """Come to it without waiting."""
    cute.arch.barrier_arrive(barrier_id=barrier + index, number_of_threads=threads)
