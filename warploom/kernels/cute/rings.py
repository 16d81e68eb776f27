"""Rings of stages in shared memory: their barriers, and who waits for whom.

A barrier "full" ends a phase once a stage's bytes have landed, a barrier "empty" once every warp has read them.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.kernels.cute.basics import choose


class Mbarriers:
    """Hands out the barriers of a block, one range after the other."""

    def __init__(self, start: Any) -> None:
        self.start, self.count = start, 0

    def take(self, count: int = 1) -> Any:
        """The first of the next ``count``."""
        first = self.start + self.count if self.count else self.start
        self.count += count
        return first


def init_rings(stages: int, *rings: tuple[Any, Any, int], loads: int = 1) -> None:
    """The barriers (full, empty, releases) of rings, whose stages so many warps fill, and are free after so many releases."""
    for i in range(stages):
        for full, empty, releases in rings:
            cute.arch.mbarrier_init(full + i, loads)
            cute.arch.mbarrier_init(empty + i, releases)


@cute.jit
def advance(stage, phase, stages):
    """The next stage of a ring; the phase flips when it wraps."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def next_in_ring(number, stages):
    """A ring's stage and phase as one number, for warps of few registers: the one behind ``number``."""
    return choose(number == 2 * stages - 1, 0, number + 1)


@cute.jit
def place_in_ring(number, stages):
    """Stage and phase of such a number."""
    wrapped = number >= stages
    return choose(wrapped, number - stages, number), choose(wrapped, 1, 0)


@cute.jit
def expect(barriers, size, index=0):
    """The phase of the ``index``-th barrier ends once so many bytes have landed."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barriers + index, size)


@cute.jit
def release(barrier):
    """This warp has read what the barrier guards."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def release_other(barrier, rank):
    """As ``release``, to the other block of a cluster of two, in which this one is ``rank``."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier, rank ^ 1)


@cute.jit
def release_everywhere(barrier, blocks):
    """As ``release``, to all ``blocks`` of the cluster."""
    if const_expr(blocks == 1):
        release(barrier)
    else:
        lane = cute.arch.lane_idx()
        if lane < blocks:
            cute.arch.mbarrier_arrive(barrier, lane)


@cute.jit
def publish(target, start, words, barriers, index=0):
    """One thread writes words into shared memory from a coordinate on, for those who wait at the ``index``-th barrier."""
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(len(words)):
            target[_past(start, i)] = words[i]
        cute.arch.mbarrier_arrive(barriers + index)


def _past(start: Any, count: int) -> Any:
    """The coordinate so many further on in its first mode."""
    return (start[0] + count, *start[1:]) if isinstance(start, tuple) else start + count


@cute.jit
def meet(blocks):
    """All threads of this block, or of its cluster of so many ``blocks``, are here."""
    if const_expr(blocks > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
