"""The barriers of a walk's cluster, played through in Python: no order of its warps hangs or races.

Written as the kernel has it; warpgroups stand for their four warps, which arrive together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.attention.hopper.test_backward_pipeline import NamedBarrier, Wait, play
from tests.attention.hopper.test_pipeline import Barrier, advance
from warploom.linear.hopper.config import C_STAGES

CONSUMERS = 2


class Block:
    """One block's shared memory; chunks of a and b by the boxes that each block's loader brings."""

    def __init__(self, stages: int, cluster: int) -> None:
        # Who expects the bytes, and their arrival.
        self.a_full, self.b_full = ([Barrier(1 + cluster) for _ in range(stages)] for _ in "ab")
        self.a_empty, self.b_empty = ([Barrier(CONSUMERS * cluster) for _ in range(stages)] for _ in "ab")
        self.c_full, self.c_empty = ([Barrier(n) for _ in range(C_STAGES)] for n in (2, 1))
        self.p_ready, self.p_taken = NamedBarrier(), NamedBarrier()
        self.a, self.b = ([[None] * cluster for _ in range(stages)] for _ in "ab")
        self.c: list[object] = [None] * C_STAGES
        self.p: object = None
        self.out: list[int] = []


class Cluster:
    """The blocks of a head that share what they load."""

    def __init__(self, chunks: int, stages: int, cluster: int, skip: str = "") -> None:
        self.chunks, self.stages, self.cluster, self.skip = chunks, stages, cluster, skip
        self.blocks = [Block(stages, cluster) for _ in range(cluster)]
        self.loads: list[Callable[[], None]] = []

    def wait(self, block: Block, name: str, stage: int, phase: int) -> Iterator[Wait]:
        yield None if name == self.skip else (getattr(block, name)[stage], phase)

    def meet(self, name: str, barrier: NamedBarrier) -> Iterator[Wait]:
        opened = barrier.arrive()
        yield None if name == self.skip else (barrier, opened)

    def push(self, memory: Any, index: int, value: object, full: Barrier) -> None:
        memory[index] = "in flight"

        def land() -> None:
            memory[index] = value
            full.arrive()

        self.loads.append(land)

    def release(self, name: str, stage: int) -> None:
        for block in self.blocks:
            getattr(block, name)[stage].arrive()

    def loader(self, rank: int) -> Iterator[Wait]:
        own = self.blocks[rank]
        stage, phase, c_stage, c_phase = 0, 1, 0, 1
        for t in range(self.chunks):
            for name in "ab":
                yield from self.wait(own, f"{name}_empty", stage, phase)
                getattr(own, f"{name}_full")[stage].arrive()
                yield None
                for block in self.blocks:
                    self.push(getattr(block, name)[stage], rank, t, getattr(block, f"{name}_full")[stage])
            yield from self.wait(own, "c_empty", c_stage, c_phase)
            own.c_full[c_stage].arrive()
            self.push(own.c, c_stage, t, own.c_full[c_stage])
            stage, phase = advance(stage, phase, self.stages)
            c_stage, c_phase = advance(c_stage, c_phase, C_STAGES)

    def scores(self, rank: int) -> Iterator[Wait]:
        own = self.blocks[rank]
        stage, phase = 0, 0
        for t in range(self.chunks):
            whole = [t] * self.cluster
            for name in "ab":
                yield from self.wait(own, f"{name}_full", stage, phase)
            assert own.a[stage] == own.b[stage] == whole, "scores of another chunk"
            yield None
            assert own.a[stage] == own.b[stage] == whole, "a or b was overwritten under the scores"
            self.release("a_empty", stage)
            self.release("b_empty", stage)
            yield from self.meet("p_taken", own.p_taken)
            own.p = t
            yield None
            own.p_ready.arrive()
            stage, phase = advance(stage, phase, self.stages)
        yield from self.meet("p_taken", own.p_taken)

    def state(self, rank: int) -> Iterator[Wait]:
        own = self.blocks[rank]
        stage, phase, c_stage, c_phase = 0, 0, 0, 0
        own.p_taken.arrive()
        for t in range(self.chunks):
            whole = [t] * self.cluster
            yield from self.wait(own, "a_full", stage, phase)
            assert own.a[stage] == whole, "a of another chunk meets the state"
            yield from self.wait(own, "c_full", c_stage, c_phase)
            yield from self.meet("p_ready", own.p_ready)
            yield from self.wait(own, "b_full", stage, phase)
            assert own.c[c_stage] == own.p == t and own.b[stage] == whole
            yield None
            assert own.p == t, "P was overwritten"
            assert own.a[stage] == whole, "a was overwritten"
            own.p_taken.arrive()
            self.release("a_empty", stage)
            own.out.append(t)
            yield None
            assert own.b[stage] == whole and own.c[c_stage] == t, "b or c was overwritten under the state's update"
            self.release("b_empty", stage)
            own.c_empty[c_stage].arrive()
            stage, phase = advance(stage, phase, self.stages)
            c_stage, c_phase = advance(c_stage, c_phase, C_STAGES)

    def roles(self) -> dict[str, Iterator[Wait]]:
        parts = (self.loader, self.scores, self.state)
        return {f"{part.__name__} {rank}": part(rank) for rank in range(self.cluster) for part in parts}


def run(chunks: int, stages: int, cluster: int, seed: int, skip: str = "") -> Cluster:
    found: Any = Cluster(chunks, stages, cluster, skip)
    play([found], 1, random.Random(seed))
    return found


@pytest.mark.parametrize("cluster", [1, 3, 4])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3, 9])
def test_no_hang_and_no_race(chunks: int, stages: int, cluster: int) -> None:
    for seed in range(5):
        for block in run(chunks, stages, cluster, seed).blocks:
            assert block.out == list(range(chunks))
            assert block.p_taken.arrived == block.p_ready.arrived == 0


@pytest.mark.parametrize("barrier", ["a_full", "c_full", "a_empty", "b_empty", "c_empty", "p_ready", "p_taken"])
def test_each_barrier_is_needed(barrier: str) -> None:
    """Except the state's wait for b, which has arrived where P of it has."""
    with pytest.raises(AssertionError):
        for seed in range(200):
            run(9, 3, 2, seed, barrier)
