"""The barriers of the backward kernel, played through in Python: no order of warps hangs or races.

Written as the kernel has it, one step of a role for each wait. Warpgroups stand for their four warps, which arrive together.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from tests.attention.hopper.test_pipeline import Barrier
from warploom.attention.hopper.schedule import ring

WARPGROUPS = 2


class NamedBarrier:
    """bar.sync and bar.arrive of two parties, warpgroups or single warps: opens once both have come, then starts over."""

    def __init__(self) -> None:
        self.arrived, self.opened = 0, 0

    def passed(self, opened: int) -> bool:
        return self.opened > opened

    def arrive(self) -> int:
        """Come; returns what a party that stays waits for."""
        opened = self.opened
        self.arrived += 1
        assert self.arrived <= 2
        if self.arrived == 2:
            self.arrived, self.opened = 0, self.opened + 1
        return opened


# What a role waits for; None: nothing, but others may run.
Wait = tuple[Barrier | NamedBarrier, int] | None
Step = tuple[int, int]


class Turns:
    """The counters of one part of dQ, which blocks pass on; waited for by value. And who has added to what."""

    def __init__(self) -> None:
        self.count: dict[Step, int] = {}
        self.sums: dict[Step, list[int]] = {}

    def pass_on(self, step: Step, rank: int) -> None:
        self.count[step] = self.count.get(step, 0) + 1
        self.sums.setdefault(step, []).append(rank)


class Block:
    """One block: key block ``rank`` of its head, over query tiles [first, end) of ``members`` heads."""

    STAGES = DOUT_STAGES = SLOTS = 2
    PIECES = PARTS = 1  # in which dQ of a step leaves, and in which it is computed
    ALTERNATE = False  # whether a writer has every other step of both warpgroups, where blocks know their turns

    def __init__(
        self, first: int, end: int, members: int, rank: int = 0, turns: list[Turns] | None = None, rising: bool = False
    ) -> None:
        self.first, self.end, self.members, self.rank, self.turns = first, end, members, rank, turns
        self.rising = rising
        self.k_full, self.v_full = Barrier(1), Barrier(1)
        self.q_full, self.do_full = ([Barrier(1) for _ in range(n)] for n in (self.STAGES, self.DOUT_STAGES))
        self.q_empty, self.do_empty = ([Barrier(WARPGROUPS) for _ in range(n)] for n in (self.STAGES, self.DOUT_STAGES))
        self.ds_ready = NamedBarrier()
        self.dq_empty, self.dq_full = ([NamedBarrier() for _ in range(n * WARPGROUPS)] for n in (1, 2))
        self.q: list[object] = [None] * self.STAGES
        self.dout: list[object] = [None] * self.DOUT_STAGES
        self.ds: list[list[object]] = [[None] * WARPGROUPS for _ in range(self.SLOTS)]
        self.dq: list[object] = [None] * WARPGROUPS
        self.loads: list[Callable[[], None]] = []
        self.added: list[list[Step]] = [[] for _ in range(WARPGROUPS)]

    def steps(self) -> list[Step]:
        """(member, query tile): heads of the group one after the other, or all of them at a tile where blocks queue for dQ."""
        if self.turns:
            tiles = range(self.first, self.end)
            return [(member, m) for m in (tiles if self.rising else reversed(tiles)) for member in range(self.members)]
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
        for j, step in enumerate(self.steps()):
            stage, phase = ring(j, self.STAGES)
            yield self.q_empty[stage], phase ^ 1
            self.push(self.q, self.q_full[stage], stage, step)
            if j == 0:
                self.push(None, self.v_full, 0, None)
            stage, phase = ring(j, self.DOUT_STAGES)
            yield self.do_empty[stage], phase ^ 1
            self.push(self.dout, self.do_full[stage], stage, step)

    def turn(self, m: int) -> int:
        """How many blocks add to a tile before this one; rising blocks start with the last, whose first tile is 2 n."""
        return m // 2 - self.rank if self.rising else self.rank

    def writer(self, group: int) -> Iterator[Wait]:
        steps = self.steps()
        empty, full = self.dq_empty[group], self.dq_full[group]
        if steps:
            empty.arrive()
        for j, step in enumerate(steps):
            more = j + 1 < len(steps)
            for piece in range(self.PIECES):
                yield full, full.arrive()
                while self.turns and piece == 0 and self.turns[group].count.get(step, 0) != self.turn(step[1]):
                    yield None
                value = self.dq[group]
                assert value == (step, piece)
                yield None  # the copy is reading
                assert self.dq[group] == value, "dQ was overwritten while it left"
                if piece + 1 < self.PIECES:
                    empty.arrive()
            self.added[group].append(step)
            if more:
                empty.arrive()
            if self.turns:
                yield None  # the add has arrived
                self.turns[group].pass_on(step, self.rank)

    def alternate(self, parity: int) -> Iterator[Wait]:
        """A writer of every other step: one counter for both warpgroups."""
        assert self.turns
        steps = self.steps()
        if parity == 0 and steps:
            for empty in self.dq_empty:
                empty.arrive()
        for j, piece in itertools.product(range(parity, len(steps), 2), range(self.PIECES)):
            last = piece + 1 == self.PIECES
            for group in range(WARPGROUPS):
                full = self.dq_full[group + parity * WARPGROUPS]
                yield full, full.arrive()
                while group == piece == 0 and self.turns[0].count.get(steps[j], 0) != self.turn(steps[j][1]):
                    yield None
                assert self.dq[group] == (steps[j], piece)
            for group in range(WARPGROUPS):
                yield None  # the copy is reading
                assert self.dq[group] == (steps[j], piece), "dQ was overwritten while it left"
                if last:
                    self.added[group].append(steps[j])
                if not last or j + 1 < len(steps):
                    self.dq_empty[group].arrive()
            if not last:
                continue
            yield None  # the adds have arrived
            for part in self.turns:
                part.pass_on(steps[j], self.rank)

    def hand_over(self, group: int, step: Step, odd: int = 0, part: int = 0) -> Iterator[Wait]:
        full = self.dq_full[group + (odd * WARPGROUPS if self.turns and self.ALTERNATE else 0)]
        for piece in range(self.PIECES // self.PARTS):
            yield self.dq_empty[group], self.dq_empty[group].arrive()
            self.dq[group] = step, part * (self.PIECES // self.PARTS) + piece
            yield None
            full.arrive()

    def loaded(self, j: int, step: Step) -> Generator[Wait, None, tuple[int, int]]:
        """Wait for Q and dO of a step, before the first one for K and V too; the stages of Q and dO."""
        if j == 0:
            yield self.k_full, 0
            yield self.v_full, 0
        (stage, phase), (dout_stage, dout_phase) = ring(j, self.STAGES), ring(j, self.DOUT_STAGES)
        yield self.q_full[stage], phase
        assert self.q[stage] == step
        yield self.do_full[dout_stage], dout_phase
        assert self.dout[dout_stage] == step
        return stage, dout_stage

    def consumer(self, group: int) -> Iterator[Wait]:
        for j, step in enumerate(self.steps()):
            stage, dout_stage = yield from self.loaded(j, step)
            yield None
            slot = j % self.SLOTS
            self.ds[slot][group] = step
            yield self.ds_ready, self.ds_ready.arrive()
            assert self.ds[slot] == [step] * WARPGROUPS, "dQ reads dS of another step"
            yield None  # dQ and dK are running
            assert self.ds[slot] == [step] * WARPGROUPS, "dS was overwritten under dQ"
            assert self.dout[dout_stage] == step and self.q[stage] == step
            self.do_empty[dout_stage].arrive()
            yield from self.hand_over(group, step, j % 2)
            yield None
            assert self.q[stage] == step
            self.q_empty[stage].arrive()

    def roles(self) -> dict[str, Iterator[Wait]]:
        found = {"loader": self.loader()}
        for group in range(WARPGROUPS):
            writer = self.alternate if self.turns and self.ALTERNATE else self.writer
            found |= {f"writer {group}": writer(group), f"consumer {group}": self.consumer(group)}
        return found


class Alternating(Block):
    """A block of the narrow kernel, when deterministic."""

    ALTERNATE = True


class Roles(Block):
    """A block whose warpgroups keep dV and dK: P and dS through one slot each, dO in one stage, dQ in so many parts."""

    DOUT_STAGES = 1
    ALTERNATE = True
    AHEAD = False  # whether S of the next step is issued before the last part of dQ leaves

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.p_ready = NamedBarrier()
        self.p: list[object] = [None] * WARPGROUPS
        self.ds = [[None] * WARPGROUPS]

    def consumer(self, group: int) -> Iterator[Wait]:
        values, steps = group == 0, self.steps()
        for j, step in enumerate(steps):
            stage, dout_stage = yield from self.loaded(j, step)
            yield None  # S is there, and dK of the step before
            if values:
                assert self.q[stage] == step
                self.q_empty[stage].arrive()
            elif j > 0:
                before = ring(j - 1, self.STAGES)[0]
                assert self.ds[0] == [steps[j - 1]] * WARPGROUPS and self.q[before] == steps[j - 1], "dS was overwritten"
                self.q_empty[before].arrive()
            self.p[group] = step
            yield self.p_ready, self.p_ready.arrive()
            assert self.p == [step] * WARPGROUPS, "dV reads P of another step"
            yield None  # dP is there, dV is running
            assert self.dout[dout_stage] == step
            if not values:
                self.do_empty[dout_stage].arrive()
            assert self.q[stage] == step, "the statistics were overwritten"
            self.ds[0][group] = step
            yield self.ds_ready, self.ds_ready.arrive()
            assert self.ds[0] == [step] * WARPGROUPS, "dQ reads dS of another step"
            yield None  # dQ is running, dV has ended
            if values:
                assert self.p == [step] * WARPGROUPS and self.dout[dout_stage] == step, "P was overwritten under dV"
                self.do_empty[dout_stage].arrive()
            for part in range(self.PARTS):
                yield None
                assert self.ds[0] == [step] * WARPGROUPS, "dS was overwritten under dQ"
                if self.AHEAD and part + 1 == self.PARTS and j + 1 < len(steps):
                    following, phase = ring(j + 1, self.STAGES)
                    yield self.q_full[following], phase
                    assert self.q[following] == steps[j + 1]
                yield from self.hand_over(group, step, j % 2, part)


class Quarters(Roles):
    """Head dim 256: dQ in four products, each of which leaves at once, and S of the next step issued beside the last."""

    PARTS = PIECES = 4
    AHEAD = True


KINDS = [Block, Alternating, Roles, Quarters]


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("tiles", [(0, 0), (0, 1), (2, 4), (1, 6)])
def test_no_hang_and_no_race(tiles: tuple[int, int], members: int, kind: type[Block]) -> None:
    for seed in range(6):
        block = kind(*tiles, members)
        play([block], 1, random.Random(seed))
        assert block.added == [block.steps()] * WARPGROUPS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("order", ["full", "causal", "rising"])
@pytest.mark.parametrize("processors", [1, 2, 5])
def test_deterministic_blocks_add_in_their_order(processors: int, order: str, members: int, kind: type[Block]) -> None:
    for seed in range(2):
        turns = [Turns() for _ in range(WARPGROUPS)]
        numbers = [3, 2, 1, 0] if order == "rising" else [0, 1, 2, 3]
        blocks = [kind(0 if order == "full" else 2 * n, 8, members, n, turns, order == "rising") for n in numbers]
        play(blocks, processors, random.Random(seed))
        seen = {(h, m): [n for n in numbers if order == "full" or 2 * n <= m] for h in range(members) for m in range(8)}
        assert all(part.sums == seen and part.count == {s: len(x) for s, x in seen.items()} for part in turns)


def test_blocks_that_start_in_the_wrong_order_hang() -> None:
    """The simulation can fail: with too few processors a block waits for one that has not started."""
    turns = [Turns() for _ in range(WARPGROUPS)]
    blocks = [Block(0, 2, 1, n, turns) for n in (1, 0)]
    with pytest.raises(AssertionError, match=r"for ever|hangs"):
        play(blocks, 1, random.Random(0))


def test_one_slot_of_ds_would_race() -> None:
    class Single(Block):
        SLOTS = 1

    with pytest.raises(AssertionError, match="dS"):
        for seed in range(50):
            play([Single(0, 6, 1)], 1, random.Random(seed))


def test_p_would_race_where_do_does_not_wait_for_dv() -> None:
    class Unguarded(Roles):
        DOUT_STAGES = 2

    with pytest.raises(AssertionError, match="P "):
        for seed in range(200):
            play([Unguarded(0, 6, 1)], 1, random.Random(seed))
