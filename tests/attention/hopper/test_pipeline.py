"""The barriers of the forward kernel, played through in Python: warps run in drawn orders and must neither hang nor race.

Each role is written as the kernel has it: which barrier it waits for, with which phase, what it reads and writes, which barrier
it arrives at. A stage of shared memory remembers which tile it holds; a reader that finds another tile has raced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest


class Barrier:
    """An mbarrier: the phase flips when ``count`` arrivals and all bytes are in; a wait is for the end of a phase."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.phase = count, count, 0

    def arrive(self) -> None:
        self.pending -= 1
        assert self.pending >= 0
        if self.pending == 0:
            self.phase, self.pending = self.phase ^ 1, self.count

    def passed(self, phase: int) -> bool:
        return self.phase != phase


# What a role waits for; None: nothing, but others may run.
Wait = tuple[Barrier, int] | None


Tile = tuple[int, list[tuple[int, int]]]


def advance(stage: int, phase: int, stages: int) -> tuple[int, int]:
    return (stage + 1, phase) if stage + 1 < stages else (0, phase ^ 1)


class Block:
    """Shared memory and roles of one block.

    ``tiles`` are the query tiles: how many key tiles, and for each warpgroup those that its rows see, [first, end).
    """

    def __init__(self, tiles: list[Tile], stages: int, warpgroups: int, turns: bool = False) -> None:
        self.tiles: list[Tile | None] = [*tiles, None]
        # Named barriers: the four warps whose turn it is and the four that pass it on. The last warpgroup passes one at first.
        self.turns = [Barrier(8) for _ in range(warpgroups)] if turns else []
        self.issued: list[int] = []
        self.stages, self.warpgroups = stages, warpgroups
        consumers = 4 * warpgroups
        self.q_full, self.q_empty = ([Barrier(n) for _ in range(warpgroups)] for n in (1, 4))
        self.k_full, self.k_empty, self.v_full, self.v_empty = (
            [Barrier(n) for _ in range(stages)] for n in (1, consumers, 1, consumers)
        )
        # Every lane says that it has read a tile's words.
        self.tile_full, self.tile_empty = ([Barrier(n) for _ in range(2)] for n in (1, 32 * (consumers + 1)))
        self.q: list[object] = [None] * warpgroups
        self.k: list[object] = [None] * stages
        self.v: list[object] = [None] * stages
        self.slots: list[object] = [None, None]
        self.loads: list[Callable[[], None]] = []  # TMA in flight, finishing in any order
        self.done = [0] * consumers

    def scheduler(self) -> Iterator[Wait]:
        stage, phase = 0, 1
        for index, tile in enumerate(self.tiles):
            yield self.tile_empty[stage], phase
            self.slots[stage] = (index, tile)
            self.tile_full[stage].arrive()
            stage, phase = advance(stage, phase, 2)

    def take(self, stage: int, phase: int) -> Iterator[Wait]:
        yield self.tile_full[stage], phase
        found = self.slots[stage]
        for _ in range(32):
            self.tile_empty[stage].arrive()
        return found  # type: ignore[return-value]

    def push(self, memory: list[object], full: list[Barrier], stage: int, value: object) -> None:
        def land() -> None:
            memory[stage] = value
            full[stage].arrive()

        memory[stage] = "in flight"
        self.loads.append(land)

    def loader(self) -> Iterator[Wait]:
        q_phase = 1
        k_at, v_at, tile_at = (0, 1), (0, 1), (0, 0)
        while True:
            index, tile = yield from self.take(*tile_at)
            if tile is None:
                return
            count, _ = tile
            if count:
                yield self.k_empty[k_at[0]], k_at[1]
                self.push(self.k, self.k_full, k_at[0], (index, count - 1))
                k_at = advance(*k_at, self.stages)
                for i in range(self.warpgroups):
                    yield self.q_empty[i], q_phase
                    self.push(self.q, self.q_full, i, index)
                q_phase ^= 1
                for n in range(count - 2, -1, -1):
                    yield self.k_empty[k_at[0]], k_at[1]
                    self.push(self.k, self.k_full, k_at[0], (index, n))
                    k_at = advance(*k_at, self.stages)
                    yield self.v_empty[v_at[0]], v_at[1]
                    self.push(self.v, self.v_full, v_at[0], (index, n + 1))
                    v_at = advance(*v_at, self.stages)
                yield self.v_empty[v_at[0]], v_at[1]
                self.push(self.v, self.v_full, v_at[0], (index, 0))
                v_at = advance(*v_at, self.stages)
            tile_at = advance(*tile_at, 2)

    def take_turn(self, group: int, taken: list[int]) -> Iterator[Wait]:
        if self.turns:
            self.turns[group].arrive()
            yield self.turns[group], taken[0]
            taken[0] ^= 1
            self.issued.append(group)

    def pass_turn(self, group: int) -> None:
        if self.turns:
            self.turns[(group + 1) % self.warpgroups].arrive()

    def consumer(self, warp: int) -> Iterator[Wait]:
        group = warp // 4
        taken = [0]
        if group == self.warpgroups - 1:
            self.pass_turn(group)
        q_phase, at, tile_at = 0, (0, 0), (0, 0)
        while True:
            index, tile = yield from self.take(*tile_at)
            if tile is None:
                return
            count, (first, end) = tile[0], tile[1][group]
            if count:
                for n in range(count - 1, end - 1, -1):
                    yield from self.take_turn(group, taken)
                    self.pass_turn(group)
                    at = yield from self.skip(index, n, at)
                yield self.q_full[group], q_phase
                assert self.q[group] == index
                if first < end:
                    yield self.k_full[at[0]], at[1]
                    assert self.k[at[0]] == (index, end - 1)
                    yield from self.take_turn(group, taken)
                    self.pass_turn(group)
                    self.k_empty[at[0]].arrive()
                    if end - 1 == first:
                        self.q_empty[group].arrive()
                    for n in range(end - 2, first - 1, -1):
                        v_at, at = at, advance(*at, self.stages)
                        yield self.k_full[at[0]], at[1]
                        assert self.q[group] == index and self.k[at[0]] == (index, n)
                        yield from self.take_turn(group, taken)
                        yield self.v_full[v_at[0]], v_at[1]
                        self.pass_turn(group)
                        assert self.v[v_at[0]] == (index, n + 1)
                        yield None
                        assert self.q[group] == index
                        self.k_empty[at[0]].arrive()
                        if n == first:
                            self.q_empty[group].arrive()
                        yield None
                        assert self.v[v_at[0]] == (index, n + 1)
                        self.v_empty[v_at[0]].arrive()
                q_phase ^= 1
                if first >= end:
                    self.q_empty[group].arrive()
                else:
                    yield self.v_full[at[0]], at[1]
                    assert self.v[at[0]] == (index, first)
                    self.v_empty[at[0]].arrive()
                    at = advance(*at, self.stages)
                for n in range(first - 1, -1, -1):
                    yield from self.take_turn(group, taken)
                    self.pass_turn(group)
                    at = yield from self.skip(index, n, at)
            self.done[warp] += 1
            tile_at = advance(*tile_at, 2)

    def skip(self, index: int, n: int, at: tuple[int, int]) -> Iterator[Wait]:
        yield self.k_full[at[0]], at[1]
        assert self.k[at[0]] == (index, n)
        self.k_empty[at[0]].arrive()
        yield self.v_full[at[0]], at[1]
        assert self.v[at[0]] == (index, n)
        self.v_empty[at[0]].arrive()
        return advance(*at, self.stages)

    def play(self, draw: random.Random) -> None:
        roles = {"scheduler": self.scheduler(), "loader": self.loader()}
        roles |= {f"warp {i}": self.consumer(i) for i in range(4 * self.warpgroups)}
        waiting: dict[str, Wait] = {name: next(role) for name, role in roles.items()}
        while waiting:
            ready = [name for name, wait in waiting.items() if wait is None or wait[0].passed(wait[1])]
            assert ready or self.loads, f"hangs: {sorted(waiting)}"
            if self.loads and (not ready or draw.random() < 0.3):
                self.loads.pop(draw.randrange(len(self.loads)))()
                continue
            name = draw.choice(ready)
            try:
                waiting[name] = next(roles[name])
            except StopIteration:
                del waiting[name]


def drawn(draw: random.Random, warpgroups: int) -> list[Tile]:
    """Up to six query tiles; a warpgroup may see all of the key tiles, some at one end or in between, or none."""
    tiles = []
    for _ in range(draw.randrange(1, 7)):
        count = draw.choice([0, 1, 1, 2, 3, 5])
        ends = [sorted(draw.choices(range(count + 1), k=2)) for _ in range(warpgroups)]
        whole = draw.random() < 0.4
        tiles.append((count, [(0, count) if whole else (first, end) for first, end in ends]))
    return tiles


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("warpgroups", [1, 2, 3, 4])
def test_no_hang_and_no_race(warpgroups: int, stages: int) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        tiles = drawn(draw, warpgroups)
        block = Block(tiles, stages, warpgroups)
        block.play(draw)
        assert block.done == [len(tiles)] * (4 * warpgroups), (seed, tiles)


@pytest.mark.parametrize("warpgroups", [2, 3])
def test_warpgroups_take_turns(warpgroups: int) -> None:
    """Whatever their rows see, all pass as many turns, one after the other."""
    for seed in range(30):
        draw = random.Random(seed)
        tiles = drawn(draw, warpgroups)
        block = Block(tiles, 3, warpgroups, turns=True)
        block.play(draw)
        turns = sum(count for count, _ in tiles)
        assert block.done == [len(tiles)] * (4 * warpgroups), (seed, tiles)
        assert block.issued == [group for _ in range(turns) for group in range(warpgroups) for _ in range(4)], (seed, tiles)


def test_a_wrong_phase_is_noticed() -> None:
    """The simulation can fail: consumers that start at phase 1 read before anything arrived."""
    block = Block([(2, [(0, 2), (0, 2)])], 2, 2)
    for barrier in (*block.k_full, *block.v_full):
        barrier.phase = 1
    with pytest.raises(AssertionError):
        for seed in range(20):
            block.play(random.Random(seed))
