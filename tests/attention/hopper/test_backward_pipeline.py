"""The barriers of the backward kernel, played through in Python: no order of warps hangs or races.

Written as the kernel has it, one step of a role for each wait. Warpgroups stand for their four warps, which arrive together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from tests.attention.hopper.test_pipeline import Barrier, advance

WARPGROUPS, STAGES, SLOTS = 2, 2, 2


class NamedBarrier:
    """bar.sync and bar.arrive of two warpgroups: opens once both have come, then starts over."""

    def __init__(self) -> None:
        self.arrived, self.opened = 0, 0

    def passed(self, opened: int) -> bool:
        return self.opened > opened

    def arrive(self) -> None:
        self.arrived += 1
        assert self.arrived <= 2
        if self.arrived == 2:
            self.arrived, self.opened = 0, self.opened + 1


# What a role waits for; None: nothing, but others may run.
Wait = tuple[Barrier | NamedBarrier, int] | None


class Turns:
    """The counters of one part of dQ, which blocks pass on; waited for by value."""

    def __init__(self) -> None:
        self.count: dict[tuple[int, int], int] = {}


class Block:
    """One block: key block ``rank`` of its head, over query tiles [first, end) of ``members`` heads."""

    def __init__(self, first: int, end: int, members: int, rank: int = 0, turns: list[Turns] | None = None) -> None:
        self.first, self.end, self.members, self.rank, self.turns = first, end, members, rank, turns
        self.k_full, self.v_full = Barrier(1), Barrier(1)
        self.q_full, self.do_full = ([Barrier(1) for _ in range(STAGES)] for _ in range(2))
        self.q_empty, self.do_empty = ([Barrier(WARPGROUPS) for _ in range(STAGES)] for _ in range(2))
        self.ds_ready = NamedBarrier()
        self.dq_empty, self.dq_full = ([NamedBarrier() for _ in range(WARPGROUPS)] for _ in range(2))
        self.q: list[object] = [None] * STAGES
        self.dout: list[object] = [None] * STAGES
        self.ds: list[list[object]] = [[None] * WARPGROUPS for _ in range(SLOTS)]
        self.dq: list[object] = [None] * WARPGROUPS
        self.loads: list[Callable[[], None]] = []
        self.added: list[list[object]] = [[] for _ in range(WARPGROUPS)]

    def steps(self) -> list[tuple[int, int]]:
        """(member, query tile): heads of the group one after the other, or all of them at a tile where blocks queue for dQ."""
        if self.turns:
            return [(member, m) for m in reversed(range(self.first, self.end)) for member in range(self.members)]
        return [(member, m) for member in range(self.members) for m in range(self.first, self.end)]

    def push(self, memory: list[object] | None, full: Barrier, stage: int, value: object) -> None:
        def land() -> None:
            if memory is not None:
                memory[stage] = value
            full.arrive()

        if memory is not None:
            memory[stage] = "in flight"
        self.loads.append(land)

    def loader(self) -> Iterator[Wait]:
        if self.first < self.end:
            self.push(None, self.k_full, 0, None)
        stage, phase = 0, 1
        for index, step in enumerate(self.steps()):
            yield self.q_empty[stage], phase
            self.push(self.q, self.q_full[stage], stage, step)
            if index == 0:
                self.push(None, self.v_full, 0, None)
            yield self.do_empty[stage], phase
            self.push(self.dout, self.do_full[stage], stage, step)
            stage, phase = advance(stage, phase, STAGES)

    def writer(self, group: int) -> Iterator[Wait]:
        for tile in self.steps():
            self.dq_empty[group].arrive()
            opened = self.dq_full[group].opened
            self.dq_full[group].arrive()
            yield self.dq_full[group], opened
            if self.turns:
                while self.turns[group].count.get(tile, 0) != self.rank:
                    yield None
            value = self.dq[group]
            yield None  # the copy is reading
            assert self.dq[group] == value, "dQ was overwritten while it left"
            self.added[group].append(value)
            if self.turns:
                self.turns[group].count[tile] = self.rank + 1

    def consumer(self, group: int) -> Iterator[Wait]:
        stage, phase, slot = 0, 0, 0
        if self.first < self.end:
            yield self.k_full, 0
            yield self.v_full, 0
        for step in self.steps():
            yield self.q_full[stage], phase
            assert self.q[stage] == step
            yield self.do_full[stage], phase
            assert self.dout[stage] == step
            yield None
            self.ds[slot][group] = step
            opened = self.ds_ready.opened
            self.ds_ready.arrive()
            yield self.ds_ready, opened
            assert self.ds[slot] == [step] * WARPGROUPS, "dQ reads dS of another step"
            yield None  # dQ and dK are running
            assert self.ds[slot] == [step] * WARPGROUPS, "dS was overwritten under dQ"
            assert self.dout[stage] == step and self.q[stage] == step
            self.do_empty[stage].arrive()
            opened = self.dq_empty[group].opened
            self.dq_empty[group].arrive()
            yield self.dq_empty[group], opened
            self.dq[group] = step
            yield None
            self.dq_full[group].arrive()
            yield None
            assert self.q[stage] == step
            self.q_empty[stage].arrive()
            stage, phase = advance(stage, phase, STAGES)
            slot ^= 1

    def roles(self) -> dict[str, Iterator[Wait]]:
        found = {"loader": self.loader()}
        for group in range(WARPGROUPS):
            found |= {f"writer {group}": self.writer(group), f"consumer {group}": self.consumer(group)}
        return found


class Wide(Block):
    """A block of the wide kernel: P through one of two slots, dS through one, dQ from registers when it is the block's turn."""

    def __init__(self, first: int, end: int, members: int, rank: int = 0, turns: list[Turns] | None = None) -> None:
        super().__init__(first, end, members, rank, turns)
        self.p_ready = NamedBarrier()
        self.p: list[list[object]] = [[None] * WARPGROUPS for _ in range(SLOTS)]
        self.ds = [[None] * WARPGROUPS]

    def writer(self, group: int) -> Iterator[Wait]:
        for tile in self.steps() if self.turns else []:
            assert self.turns
            while self.turns[group].count.get(tile, 0) != self.rank:
                yield None
            self.dq_empty[group].arrive()
            opened = self.dq_full[group].opened
            self.dq_full[group].arrive()
            yield self.dq_full[group], opened
            self.turns[group].count[tile] = self.rank + 1

    def consumer(self, group: int) -> Iterator[Wait]:
        stage, phase, slot = 0, 0, 0
        if self.first < self.end:
            yield self.k_full, 0
            yield self.v_full, 0
        for step in self.steps():
            yield self.q_full[stage], phase
            assert self.q[stage] == step
            yield self.do_full[stage], phase
            assert self.dout[stage] == step
            yield None
            self.p[slot][group] = step
            opened = self.p_ready.opened
            self.p_ready.arrive()
            yield self.p_ready, opened
            assert self.p[slot] == [step] * WARPGROUPS, "dV reads P of another step"
            yield None  # dV is running
            self.ds[0][group] = step
            opened = self.ds_ready.opened
            self.ds_ready.arrive()
            yield self.ds_ready, opened
            assert self.ds[0] == [step] * WARPGROUPS, "dQ reads dS of another step"
            yield None  # dQ and dK are issued, dV and dQ end
            assert self.p[slot] == [step] * WARPGROUPS, "P was overwritten under dV"
            assert self.ds[0] == [step] * WARPGROUPS and self.dout[stage] == step, "dS was overwritten under dQ"
            self.do_empty[stage].arrive()
            if self.turns:
                opened = self.dq_empty[group].opened
                self.dq_empty[group].arrive()
                yield self.dq_empty[group], opened
                assert self.turns[group].count.get(step, 0) == self.rank, "added out of turn"
            self.added[group].append(step)
            yield None
            if self.turns:
                self.dq_full[group].arrive()
            assert self.ds[0] == [step] * WARPGROUPS and self.q[stage] == step, "dS was overwritten under dK"
            self.q_empty[stage].arrive()
            stage, phase = advance(stage, phase, STAGES)
            slot ^= 1


def play(blocks: list[Block], processors: int, draw: random.Random) -> None:
    """Run blocks on so many processors: they start in order, the next one when one has ended."""
    waiting: dict[tuple[int, str], Wait] = {}
    roles: dict[tuple[int, str], Iterator[Wait]] = {}
    started = 0
    idle = 0
    while waiting or started < len(blocks):
        while started < len(blocks) and len({block for block, _ in waiting}) < processors:
            for name, role in blocks[started].roles().items():
                first = next(role, "ended")
                if first != "ended":
                    roles[started, name] = role
                    waiting[started, name] = first  # type: ignore[assignment]
            started += 1
        ready = [key for key, wait in waiting.items() if wait is None or wait[0].passed(wait[1])]
        loads = [block.loads for block in blocks[:started] if block.loads]
        assert ready or loads or not waiting, f"hangs: {sorted(waiting)}"
        idle += 1
        assert idle < 500_000, "waits for ever"
        if loads and (not ready or draw.random() < 0.3):
            some = draw.choice(loads)
            some.pop(draw.randrange(len(some)))()
        elif ready:
            key = draw.choice(ready)
            found = next(roles[key], "ended")
            if found == "ended":
                del waiting[key]
            else:
                waiting[key] = found  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Block, Wide])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("tiles", [(0, 0), (0, 1), (2, 4), (1, 6)])
def test_no_hang_and_no_race(tiles: tuple[int, int], members: int, kind: type[Block]) -> None:
    for seed in range(15):
        block = kind(*tiles, members)
        play([block], 1, random.Random(seed))
        assert block.added == [block.steps()] * WARPGROUPS


@pytest.mark.parametrize("kind", [Block, Wide])
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("processors", [1, 2, 5])
def test_deterministic_blocks_add_in_their_order(processors: int, causal: bool, members: int, kind: type[Block]) -> None:
    for seed in range(3):
        turns = [Turns() for _ in range(WARPGROUPS)]
        blocks = [kind(2 * n if causal else 0, 8, members, n, turns) for n in range(4)]
        play(blocks, processors, random.Random(seed))
        for part in turns:
            assert part.count == {(h, m): m // 2 + 1 if causal else 4 for h in range(members) for m in range(8)}


def test_blocks_that_start_in_the_wrong_order_hang() -> None:
    """The simulation can fail: with too few processors a block waits for one that has not started."""
    turns = [Turns() for _ in range(WARPGROUPS)]
    blocks = [Block(0, 2, 1, n, turns) for n in (1, 0)]
    with pytest.raises(AssertionError, match=r"for ever|hangs"):
        play(blocks, 1, random.Random(0))


def test_one_slot_of_ds_would_race(monkeypatch: pytest.MonkeyPatch) -> None:
    class Single(Block):
        def consumer(self, group: int) -> Iterator[Wait]:
            self.ds = [self.ds[0], self.ds[0]]
            return super().consumer(group)

    with pytest.raises(AssertionError, match="dS"):
        for seed in range(50):
            play([Single(0, 6, 1)], 1, random.Random(seed))


def test_one_slot_of_p_would_race() -> None:
    class Single(Wide):
        def consumer(self, group: int) -> Iterator[Wait]:
            self.p = [self.p[0], self.p[0]]
            return super().consumer(group)

    with pytest.raises(AssertionError, match="P was overwritten"):
        for seed in range(50):
            play([Single(0, 6, 1)], 1, random.Random(seed))
