"""The barriers of the backward kernel, played through in Python: no order of warps hangs or races.

Written as the kernel has it, one step of a role for each wait. Warpgroups stand for their four warps, which arrive together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from tests.attention.hopper.test_pipeline import Barrier
from warploom.attention.hopper.schedule import PIECES, handed_out, ring

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


class Claims:
    """What is there of one part of dQ (0: nothing, 1: it is on its way, 2: it), and who has added to it."""

    def __init__(self) -> None:
        self.state: dict[Step, int] = {}
        self.sums: dict[Step, list[int]] = {}


@dataclass(frozen=True)
class Work:
    """Key block ``rank`` of its head, over query tiles [first, end); of a persistent block the ``turn``-th, after ``base``."""

    rank: int
    first: int
    end: int
    turn: int = 0
    base: int = 0


class Block:
    """One block, over query tiles of ``members`` heads."""

    STAGES = DOUT_STAGES = SLOTS = 2

    def __init__(
        self, first: int, end: int, members: int, rank: int = 0, turns: list[Turns] | None = None, rising: bool = False
    ) -> None:
        self.work, self.members, self.turns = Work(rank, first, end), members, turns
        self.rising = rising
        self.claims: list[Claims] | None = None
        self.k_full, self.v_full = Barrier(1), Barrier(1)
        self.q_full, self.do_full = ([Barrier(1) for _ in range(n)] for n in (self.STAGES, self.DOUT_STAGES))
        self.q_empty, self.do_empty = ([Barrier(WARPGROUPS) for _ in range(n)] for n in (self.STAGES, self.DOUT_STAGES))
        self.ds_ready = NamedBarrier()
        self.turn_to_issue = [NamedBarrier() for _ in range(WARPGROUPS)]
        self.turn_to_issue[0].arrive()
        self.issued: list[int] = []
        self.dq_empty, self.dq_full = ([NamedBarrier() for _ in range(n * WARPGROUPS)] for n in (1, 2))
        self.q: list[object] = [None] * self.STAGES
        self.dout: list[object] = [None] * self.DOUT_STAGES
        self.ds: list[list[object]] = [[None] * WARPGROUPS for _ in range(self.SLOTS)]
        self.dq: list[object] = [None] * WARPGROUPS
        self.loads: list[Callable[[], None]] = []
        self.added: list[list[Step]] = [[] for _ in range(WARPGROUPS)]

    def steps(self, work: Work | None = None) -> list[Step]:
        """(member, query tile): heads of the group one after the other, or all of them at a tile where blocks queue for dQ."""
        work = work or self.work
        tiles = range(work.first, work.end)
        if self.turns:
            return [(member, m) for m in (tiles if self.rising else reversed(tiles)) for member in range(self.members)]
        return [(member, m) for member in range(self.members) for m in tiles]

    def push(self, memory: list[object] | None, full: Barrier, stage: int, value: object) -> None:
        def land() -> None:
            if memory is not None:
                memory[stage] = value
            full.arrive()

        if memory is not None:
            memory[stage] = "in flight"
        self.loads.append(land)

    def loader(self, work: Work) -> Iterator[Wait]:
        if work.first < work.end:
            self.push(None, self.k_full, 0, None)
        yield from self.load_queries(work)

    def load_queries(self, work: Work) -> Iterator[Wait]:
        for j, step in enumerate(self.steps(work)):
            stage, phase = ring(work.base + j, self.STAGES)
            yield self.q_empty[stage], phase ^ 1
            self.push(self.q, self.q_full[stage], stage, step)
            if j == 0:
                self.push_values(work)
            stage, phase = ring(work.base + j, self.DOUT_STAGES)
            yield self.do_empty[stage], phase ^ 1
            self.push(self.dout, self.do_full[stage], stage, step)
            if j == 0:
                yield from self.load_keys(work)

    def push_values(self, work: Work) -> None:
        self.push(None, self.v_full, 0, None)

    def load_keys(self, work: Work) -> Iterator[Wait]:
        """Nothing: they came first."""
        yield from ()

    def turn(self, work: Work, m: int) -> int:
        """How many blocks add to a tile before this one; rising blocks start with the last, whose first tile is 2 n."""
        return m // 2 - work.rank if self.rising else work.rank

    def writer(self, group: int, work: Work) -> Iterator[Wait]:
        steps = self.steps(work)
        empty, full = self.dq_empty[group], self.dq_full[group]
        if steps:
            empty.arrive()
        for j, step in enumerate(steps):
            more = j + 1 < len(steps)
            stores = False
            yield full, full.arrive()
            if self.claims:
                state = self.claims[group].state
                stores = state.get(step, 0) == 0
                if stores:
                    state[step] = 1
                while not stores and state[step] != 2:
                    yield None
            assert self.dq[group] == step
            yield None  # the copy is reading
            assert self.dq[group] == step, "dQ was overwritten while it left"
            self.added[group].append(step)
            if more:
                empty.arrive()
            if self.claims:
                claims = self.claims[group]
                assert stores or claims.state[step] == 2, "added to what was not there"
                if stores:
                    yield None  # the store has arrived
                    assert step not in claims.sums, "stored over what had been added"
                    claims.state[step] = 2
                claims.sums.setdefault(step, []).append(work.rank)

    def alternate(self, parity: int, work: Work) -> Iterator[Wait]:
        """A writer of every other step: one counter for both warpgroups."""
        assert self.turns
        steps = self.steps(work)
        ahead = work.base + parity & 1
        if ahead == 1 and steps:
            for empty in self.dq_empty:
                empty.arrive()
        for j in range(ahead, len(steps), 2):
            for group in range(WARPGROUPS):
                full = self.dq_full[group + parity * WARPGROUPS]
                yield full, full.arrive()
                while group == 0 and self.turns[0].count.get(steps[j], 0) != self.turn(work, steps[j][1]):
                    yield None
                assert self.dq[group] == steps[j]
            for group in range(WARPGROUPS):
                yield None  # the copy is reading
                assert self.dq[group] == steps[j], "dQ was overwritten while it left"
                self.added[group].append(steps[j])
                if j + 1 < len(steps):
                    self.dq_empty[group].arrive()
            yield None  # the adds have arrived
            for part in self.turns:
                part.pass_on(steps[j], work.rank)

    def hand_over(self, group: int, step: Step, odd: int = 0) -> Iterator[Wait]:
        yield self.dq_empty[group], self.dq_empty[group].arrive()
        self.dq[group] = step
        yield None
        self.dq_full[group + (odd * WARPGROUPS if self.turns else 0)].arrive()

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

    def consumer(self, group: int, work: Work) -> Iterator[Wait]:
        if work.first < work.end:
            yield self.k_full, 0
            yield self.v_full, 0
        yield from self.compute(group, work)

    def compute(self, group: int, work: Work) -> Iterator[Wait]:
        steps = self.steps(work)
        for j, step in enumerate(steps):
            last = j + 1 == len(steps)
            stage, phase = ring(work.base + j, self.STAGES)
            yield self.q_full[stage], phase
            assert self.q[stage] == step
            yield self.turn_to_issue[group], self.turn_to_issue[group].arrive()
            self.issued.append(group)
            yield self.do_full[stage], phase
            assert self.dout[stage] == step
            self.check_keys(work)
            self.turn_to_issue[group ^ 1].arrive()
            yield None  # S and dP are there
            self.check_keys(work)
            if last:
                self.release_values()
            slot = (work.base + j) % self.SLOTS
            self.ds[slot][group] = step
            yield self.ds_ready, self.ds_ready.arrive()
            assert self.ds[slot] == [step] * WARPGROUPS, "dQ reads dS of another step"
            yield None  # dQ and dK are running
            assert self.ds[slot] == [step] * WARPGROUPS, "dS was overwritten under dQ"
            assert self.dout[stage] == step and self.q[stage] == step
            self.do_empty[stage].arrive()
            self.check_keys(work, values=False)
            if last:
                self.release_keys()
            yield from self.hand_over(group, step, (work.base + j) % 2)
            yield None
            assert self.q[stage] == step
            self.q_empty[stage].arrive()

    def check_keys(self, work: Work, values: bool = True) -> None:
        """K, and V, are what they should be: nobody overwrites them."""

    def release_values(self) -> None:
        """V has been read for the last time; nobody waits for it."""

    def release_keys(self) -> None:
        """So has K."""

    def roles(self) -> dict[str, Iterator[Wait]]:
        found = {"loader": self.loader(self.work)}
        for group in range(WARPGROUPS):
            writer = self.alternate if self.turns else self.writer
            found |= {f"writer {group}": writer(group, self.work), f"consumer {group}": self.consumer(group, self.work)}
        return found


class Persistent(Block):
    """A block that takes key blocks from a queue that all share. K and V are loaded for each of them, with steps or without."""

    WORDS = 1  # key blocks of which it is known what they are

    def __init__(
        self, queue: Iterator[tuple[int, int, int]], members: int, turns: list[Turns] | None = None, **options: Any
    ) -> None:
        super().__init__(0, 0, members, 0, turns, **options)
        self.queue = queue
        self.k_empty, self.v_empty = Barrier(WARPGROUPS), Barrier(WARPGROUPS)
        self.block_full, self.block_empty = Barrier(1), Barrier(1 + 2 * WARPGROUPS)
        self.words: list[tuple[int, int, int] | None] = [None] * self.WORDS
        self.k: list[object] = [None]
        self.v: list[object] = [None]

    def scheduler(self) -> Iterator[Wait]:
        turn, words = 0, None
        while turn == 0 or words:
            yield self.block_empty, turn & 1 ^ 1
            words = self.words[turn % self.WORDS] = next(self.queue, None)
            self.block_full.arrive()
            turn += 1

    def each(self, part: Callable[[Work], Iterator[Wait]]) -> Iterator[Wait]:
        """A role's part of all blocks."""
        turn, base = 0, 0
        while True:
            yield self.block_full, turn & 1
            words = self.words[turn % self.WORDS]
            if words is None:
                return
            work = Work(*words, turn, base)
            yield from part(work)
            turn, base = turn + 1, base + len(self.steps(work))

    def loader(self, work: Work) -> Iterator[Wait]:
        if work.first >= work.end:
            yield from self.load_keys(work)
        yield from self.load_queries(work)
        self.block_empty.arrive()

    def push_values(self, work: Work) -> None:
        """After dO."""

    def load_keys(self, work: Work) -> Iterator[Wait]:
        phase = work.turn & 1 ^ 1
        yield self.v_empty, phase
        self.push(self.v, self.v_full, 0, work.turn)
        yield self.k_empty, phase
        self.push(self.k, self.k_full, 0, work.turn)

    def check_keys(self, work: Work, values: bool = True) -> None:
        assert self.k == [work.turn] and (not values or self.v == [work.turn]), "K or V was overwritten"

    def release_values(self) -> None:
        self.v_empty.arrive()

    def release_keys(self) -> None:
        self.k_empty.arrive()

    def consumer(self, group: int, work: Work) -> Iterator[Wait]:
        self.block_empty.arrive()
        yield self.k_full, work.turn & 1
        yield self.v_full, work.turn & 1
        self.check_keys(work)
        if work.first >= work.end:
            self.release_values()
            self.release_keys()
        yield from self.compute(group, work)
        yield None  # dK and dV leave

    def written(self, group: int, work: Work) -> Iterator[Wait]:
        self.block_empty.arrive()
        yield from (self.alternate if self.turns else self.writer)(group, work)

    def roles(self) -> dict[str, Iterator[Wait]]:
        found = {"scheduler": self.scheduler(), "loader": self.each(self.loader)}
        for group in range(WARPGROUPS):
            found[f"writer {group}"] = self.each(partial(self.written, group))
            found[f"consumer {group}"] = self.each(partial(self.consumer, group))
        return found


@dataclass
class Sums:
    """dK and dV of a key block that is shared out: how many steps its pieces have summed up, and which, of each warpgroup."""

    count: list[int]
    steps: list[list[Step]]


class Parted(Persistent):
    """As the queue's blocks are dealt out by their steps: a piece waits for the sums of those before it and adds its own."""

    WORDS = 2  # read again after a piece's steps
    TILES = 4

    def __init__(self, pieces: Iterator[list[tuple[int, int, int]]], members: int, blocks: int) -> None:
        super().__init__(iter(()), members)
        self.pieces, self.all_steps = pieces, members * self.TILES
        self.sums = [Sums([0] * WARPGROUPS, [[] for _ in range(WARPGROUPS)]) for _ in range(blocks)]
        self.stored: list[tuple[int, int, list[Step]]] = []

    def steps(self, work: Work | None = None) -> list[Step]:
        work = work or self.work
        return [divmod(step, self.TILES) for step in range(work.first, work.end)]

    def scheduler(self) -> Iterator[Wait]:
        turn = 0
        found: list[tuple[int, int, int]] | None = []
        while found is not None:
            yield self.block_empty, turn & 1 ^ 1
            found = next(self.pieces, None)
            for words in [None] if found is None else found:
                yield self.block_empty, turn & 1 ^ 1
                self.words[turn % self.WORDS] = words
                self.block_full.arrive()
                turn += 1

    def consumer(self, group: int, work: Work) -> Iterator[Wait]:
        yield from super().consumer(group, work)
        assert self.words[work.turn % self.WORDS] == (work.rank, work.first, work.end), "the words were overwritten"
        sums, own = self.sums[work.rank], self.steps(work)
        if work.first > 0:
            yield from self.wait_for_sums(sums, group, work)
            own = sums.steps[group] + own
        if work.end < self.all_steps:
            yield None
            sums.steps[group] = own
            sums.count[group] += work.end - work.first
        else:
            self.stored.append((work.rank, group, own))

    def wait_for_sums(self, sums: Sums, group: int, work: Work) -> Iterator[Wait]:
        while sums.count[group] != work.first:
            yield None


class Roles(Block):
    """A block whose warpgroups keep dV and dK: P and dS through one slot each, dO in one stage."""

    DOUT_STAGES = 1

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.p_ready = NamedBarrier()
        self.p: list[object] = [None] * WARPGROUPS
        self.ds = [[None] * WARPGROUPS]

    def consumer(self, group: int, work: Work) -> Iterator[Wait]:
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
            yield None
            assert self.ds[0] == [step] * WARPGROUPS, "dS was overwritten under dQ"
            yield from self.hand_over(group, step, j % 2)


KINDS = [Block, Roles]


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


def persistent(
    kind: type[Persistent], draw: random.Random, processors: int = 3, deterministic: bool = False, order: str = "full"
) -> tuple[list[tuple[int, int, int]], list[Persistent]]:
    """Key blocks of one head, some without steps, and the persistent blocks that have played them through."""
    numbers = list(range(9)) if order != "rising" else list(reversed(range(4)))
    end = 8
    items = [(n, min({"full": 0, "causal": n, "rising": 2 * n}[order], end), end) for n in numbers]
    if order == "full":
        items = [(n, first, first if n in (3, 4, 8) else 1 + n % 3) for n, first, _ in items]
    queue = iter(items)
    turns = [Turns() for _ in range(WARPGROUPS)] if deterministic else None
    blocks = [kind(queue, 2, turns, rising=order == "rising") for _ in range(processors)]
    claims = [Claims() for _ in range(WARPGROUPS)]
    for block in blocks:
        block.claims = None if deterministic else claims
    play(list(blocks), processors, draw)
    return items, blocks


@pytest.mark.parametrize("order", ["full", "causal"])
@pytest.mark.parametrize("processors", [1, 3])
def test_persistent_blocks(processors: int, order: str) -> None:
    for seed in range(6):
        items, blocks = persistent(Persistent, random.Random(seed), processors, order=order)
        want = {(h, m): sorted(n for n, first, end in items if first <= m < end) for h in range(2) for m in range(8)}
        for group in range(WARPGROUPS):
            claims = blocks[0].claims
            assert claims and {s: sorted(x) for s, x in claims[group].sums.items()} == {s: x for s, x in want.items() if x}
            assert sum(len(block.added[group]) for block in blocks) == sum(map(len, want.values()))
        assert all(block.issued == [0, 1] * len(block.added[0]) for block in blocks)


@pytest.mark.parametrize("order", ["causal", "rising"])
@pytest.mark.parametrize("processors", [1, 3])
def test_persistent_blocks_add_in_their_order(processors: int, order: str) -> None:
    for seed in range(3):
        items, blocks = persistent(Persistent, random.Random(seed), processors, True, order)
        turns = blocks[0].turns
        assert turns
        want = {(h, m): [n for n, first, end in items if first <= m < end] for h in range(2) for m in range(8)}
        assert all(part.sums == want for part in turns)


def parted(kind: type[Parted], draw: random.Random, processors: int, each: int = 5) -> list[Parted]:
    """Six key blocks, of which the last four are cut into shares of so many steps."""
    blocks, split, members = 6, 4, 2
    steps, whole = members * kind.TILES, 2

    def deal() -> Iterator[list[tuple[int, int, int]]]:
        for index in range(whole - (-split * steps // each)):
            found = [handed_out(index, i, whole, split, each, steps, lambda c, a, b: a if c else b) for i in range(PIECES)]
            yield [(whole + slot, first, end) for slot, first, end in found if first < end]

    queue = deal()
    found = [kind(queue, members, blocks) for _ in range(processors)]
    for block in found:
        block.sums = found[0].sums
    play(list(found), processors, draw)
    return found


@pytest.mark.parametrize("each", [3, 5, 8, 15])
@pytest.mark.parametrize("processors", [1, 3, 7])
def test_pieces_of_blocks_add_up(processors: int, each: int) -> None:
    for seed in range(5):
        blocks = parted(Parted, random.Random(seed), processors, each)
        stored = {(rank, group): steps for block in blocks for rank, group, steps in block.stored}
        assert sum(len(block.stored) for block in blocks) == len(stored) == 6 * WARPGROUPS
        assert all(steps == [divmod(step, Parted.TILES) for step in range(2 * Parted.TILES)] for steps in stored.values())


def test_a_piece_that_does_not_wait_for_those_before_it_is_seen() -> None:
    class Hasty(Parted):
        def wait_for_sums(self, sums: Sums, group: int, work: Work) -> Iterator[Wait]:
            yield from ()

    with pytest.raises(AssertionError, match="lack"):
        for seed in range(20):
            blocks = parted(Hasty, random.Random(seed), 3)
            assert all(len(steps) == 2 * Parted.TILES for block in blocks for *_, steps in block.stored), "steps lack"


def test_words_of_one_block_would_be_overwritten() -> None:
    class Single(Parted):
        WORDS = 1

    with pytest.raises(AssertionError, match="words"):
        for seed in range(50):
            parted(Single, random.Random(seed), 2)


def skipping(name: str) -> type[Persistent]:
    """Persistent blocks one of whose barriers lets everybody pass."""

    class Skipping(Persistent):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            getattr(self, name).passed = lambda phase: True

    return Skipping


@pytest.mark.parametrize("name", ["k_empty", "v_empty", "k_full", "v_full", "block_full", "block_empty"])
def test_each_barrier_of_persistent_blocks_is_needed(name: str) -> None:
    with pytest.raises((AssertionError, TypeError)):
        for seed in range(100):
            persistent(skipping(name), random.Random(seed))


def test_phases_that_start_over_in_each_block_would_race() -> None:
    class Forgetful(Persistent):
        def each(self, part: Callable[[Work], Iterator[Wait]]) -> Iterator[Wait]:
            return super().each(lambda work: part(replace(work, base=0)))

    with pytest.raises(AssertionError):
        for seed in range(20):
            persistent(Forgetful, random.Random(seed))


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
