"""The barriers of two blocks that exchange dS, played through in Python: no order of their warps hangs or races.

Written as the kernel has it; warpgroups stand for their four warps, which arrive together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.attention.hopper.test_backward_pipeline import NamedBarrier, Wait, play
from tests.attention.hopper.test_pipeline import Barrier
from warploom.attention.hopper.schedule import ring

WARPGROUPS = PAIR = 2
VALUES, KEYS = 0, 1
PARTS = 1, 2  # in which each role hands over its dQ
READERS = 1 + 2 + WARPGROUPS  # of a pair's number, in each block


class Half:
    """One block's shared memory; Q and dO by the halves that each block's loader brings."""

    def __init__(self) -> None:
        self.k_full, self.v_full, self.came = (Barrier(2) for _ in range(3))  # who expects the bytes, and their arrival
        self.k_empty, self.v_empty = Barrier(WARPGROUPS), Barrier(1)
        self.q_full, self.q_empty = ([Barrier(n) for _ in range(2)] for n in (1 + PAIR, PAIR * WARPGROUPS))
        self.do_full, self.do_empty = Barrier(1 + PAIR), Barrier(PAIR * WARPGROUPS)
        self.taken = Barrier(WARPGROUPS + 1)
        self.block_full = Barrier(1)
        self.p_ready, self.p_taken, self.ds_ready = NamedBarrier(), NamedBarrier(), NamedBarrier()
        self.dq_empty, self.dq_full = ([NamedBarrier() for _ in range(n * WARPGROUPS)] for n in (1, 2))
        self.k: list[object] = [None]
        self.v: list[object] = [None]
        self.q: list[list[object]] = [[None] * PAIR for _ in range(2)]
        self.dout: list[object] = [None] * PAIR
        self.p: object = None
        self.ds: object = None
        self.other: object = None
        self.dq: list[object] = [None] * WARPGROUPS
        self.added: list[list[object]] = [[] for _ in range(WARPGROUPS)]
        self.number: int | None = None


class Pair:
    """Two blocks of one cluster; ``items`` are the steps of each pair of key blocks that it works on."""

    def __init__(
        self, items: list[int], skip: str = "", number: int = 0, turns: list[dict[int, list[int]]] | None = None
    ) -> None:
        self.items, self.skip = items, skip
        self.number, self.turns = number, turns  # deterministic: which pairs have added to each tile, for each block's half
        self.claims: dict[object, str] | None = None  # of quarters of tiles: "on its way", "there"
        self.blocks = [Half(), Half()]
        self.block_empty = Barrier(PAIR * READERS)  # the first block's
        self.loads: list[Callable[[], None]] = []

    def wait(self, name: str, barrier: Barrier, phase: int) -> Iterator[Wait]:
        yield None if name == self.skip else (barrier, phase)

    def push(self, memory: list[object], index: int, value: object, full: Barrier) -> None:
        memory[index] = "in flight"

        def land() -> None:
            memory[index] = value
            full.arrive()

        self.loads.append(land)

    def scheduler(self) -> Iterator[Wait]:
        for turn in range(len(self.items) + 1):
            yield from self.wait("block_empty", self.block_empty, turn & 1 ^ 1)
            for block in self.blocks:
                block.number = turn
                block.block_full.arrive()

    def each(self, rank: int, part: Callable[[int, int, int, int], Iterator[Wait]], late: bool = False) -> Iterator[Wait]:
        """A role's part of all pairs."""
        own, turn, base, loads = self.blocks[rank], 0, 0, 0
        while True:
            yield from self.wait("block_full", own.block_full, turn & 1)
            assert own.number == turn, "another pair's number"
            if turn == len(self.items):
                return
            steps = self.items[turn]
            if not late:
                self.block_empty.arrive()
            yield from part(rank, base, steps, loads)
            if late:
                self.block_empty.arrive()
            turn, base, loads = turn + 1, base + steps, loads + (steps > 0)

    def loader(self, rank: int, base: int, steps: int, loads: int) -> Iterator[Wait]:
        own = self.blocks[rank]
        for j in range(base, base + steps):
            stage, phase = ring(j, 2)
            yield from self.wait("q_empty", own.q_empty[stage], phase ^ 1)
            own.q_full[stage].arrive()
            yield None
            for block in self.blocks:
                self.push(block.q[stage], rank, j, block.q_full[stage])
            if j == base:
                yield from self.wait("v_empty", own.v_empty, loads & 1 ^ 1)
                own.v_full.arrive()
                self.push(own.v, 0, loads, own.v_full)
            yield from self.wait("do_empty", own.do_empty, j & 1 ^ 1)
            own.do_full.arrive()
            yield None
            for block in self.blocks:
                self.push(block.dout, rank, j, block.do_full)
            if j == base:
                yield from self.wait("k_empty", own.k_empty, loads & 1 ^ 1)
                own.k_full.arrive()
                self.push(own.k, 0, loads, own.k_full)

    def writer(self, role: int, rank: int, base: int, steps: int, loads: int) -> Iterator[Wait]:
        own = self.blocks[rank]
        empty, full = own.dq_empty[role], own.dq_full[role]
        if steps:
            empty.arrive()
        for j in range(base, base + steps):
            quarter, stores = (rank, role, j), False
            for part in range(PARTS[role]):
                yield full, full.arrive()
                assert own.dq[role] == (j, part)
                if self.claims is not None and part == 0:
                    stores = quarter not in self.claims
                    if stores:
                        self.claims[quarter] = "on its way"
                    while not stores and self.claims[quarter] != "there":
                        yield None
                yield None
                assert own.dq[role] == (j, part), "dQ was overwritten while it left"
                own.added[role].append((j, part))
                if part + 1 < PARTS[role] or j + 1 < base + steps:
                    empty.arrive()
            if stores and self.claims is not None:
                yield None  # the store has arrived
                self.claims[quarter] = "there"

    def alternate(self, parity: int, rank: int, base: int, steps: int, loads: int) -> Iterator[Wait]:
        """A writer of every other step, which waits for the pairs before this one."""
        assert self.turns
        own, turns = self.blocks[rank], self.turns[rank]
        if parity == 1 and steps:
            for empty in own.dq_empty:
                empty.arrive()
        for j in range(parity, steps, 2):
            for role in (KEYS, VALUES):
                full = own.dq_full[role + parity * WARPGROUPS]
                for part in range(PARTS[role]):
                    yield full, full.arrive()
                    while role == KEYS and part == 0 and len(turns.get(j, [])) != self.number:
                        yield None
                    assert own.dq[role] == (j, part)
                    yield None
                    assert own.dq[role] == (j, part), "dQ was overwritten while it left"
                    own.added[role].append((j, part))
                    if part + 1 < PARTS[role] or j + 1 < steps:
                        own.dq_empty[role].arrive()
            yield None  # the adds have arrived
            turns.setdefault(j, []).append(self.number)

    def release(self, name: str, stage: int | None = None) -> None:
        for block in self.blocks:
            barrier = getattr(block, name)
            (barrier if stage is None else barrier[stage]).arrive()

    def hand_over(self, own: Half, role: int, j: int) -> Iterator[Wait]:
        for part in range(PARTS[role]):
            yield own.dq_empty[role], own.dq_empty[role].arrive()
            own.dq[role] = j, part
            yield None
            own.dq_full[role + (j % 2 * WARPGROUPS if self.turns else 0)].arrive()

    def values(self, rank: int, base: int, steps: int, loads: int) -> Iterator[Wait]:
        own, past = self.blocks[rank], base + steps
        if steps:
            yield own.k_full, loads & 1
            stage, phase = ring(base, 2)
            yield own.q_full[stage], phase
        for j in range(base, past + (steps > 0)):
            stage, both = j % 2, [j] * PAIR
            if j > base:
                yield own.ds_ready, own.ds_ready.arrive()
                yield from self.wait("came", own.came, j & 1 ^ 1)
                assert own.ds == own.other == j - 1, "dQ reads another dS"
            if j < past:
                assert own.q[stage] == both and own.k == [loads], "S or its statistics are of another Q or K"
                yield None
                yield own.p_taken, own.p_taken.arrive()
                assert own.q[stage] == both, "the statistics were overwritten"
                self.release("q_empty", stage)
                own.p = j
                own.p_ready.arrive()
                yield from self.wait("do_full", own.do_full, j & 1)
                assert own.dout == both, "dV reads another dO"
                yield None
            if j > base:  # dQ has ended
                assert own.ds == own.other == j - 1 and own.k == [loads], "dS or K was overwritten under dQ"
                if j == past:
                    own.k_empty.arrive()
                self.release("taken")
                yield from self.hand_over(own, VALUES, j - 1)
            if j < past:
                if j + 1 < past:
                    yield own.q_full[stage ^ 1], j + 1 >> 1 & 1
                yield None
                assert own.dout == both, "dO was overwritten under dV"
                self.release("do_empty")
                yield None

    def keys(self, rank: int, base: int, steps: int, loads: int) -> Iterator[Wait]:
        own, peer, past = self.blocks[rank], self.blocks[rank ^ 1], base + steps
        if steps:
            yield own.v_full, loads & 1
            yield own.do_full, base & 1
            assert own.dout == [base] * PAIR and own.v == [loads]
            yield None
            self.release("do_empty")
            yield own.k_full, loads & 1
        for j in range(base, past):
            stage, both = j % 2, [j] * PAIR
            yield own.q_full[stage], j >> 1 & 1
            yield own.p_ready, own.p_ready.arrive()
            assert own.p == j and own.q[stage] == both
            if j + 1 == past:
                own.v_empty.arrive()
            own.p_taken.arrive()
            if j > 0:
                yield from self.wait("taken", own.taken, j & 1 ^ 1)
            own.ds = j
            own.ds_ready.arrive()
            own.came.arrive()
            yield None
            self.send(own, peer)
            yield from self.wait("came", own.came, j & 1)
            assert own.other == j, "dQ reads another dS"
            yield None  # dK and dQ are there
            assert own.ds == own.other == j and own.k == [loads], "dS or K was overwritten under dQ"
            assert own.q[stage] == both, "Q was overwritten under dK"
            peer.taken.arrive()
            self.release("q_empty", stage)
            yield from self.hand_over(own, KEYS, j)
            if j + 1 < past:
                yield from self.wait("do_full", own.do_full, j + 1 & 1)
                assert own.dout == [j + 1] * PAIR, "dP reads another dO"
            yield None
            if j + 1 < past:
                assert own.dout == [j + 1] * PAIR and own.v == [loads], "dO or V was overwritten under dP"
                self.release("do_empty")
        if steps:
            own.k_empty.arrive()

    def send(self, own: Half, peer: Half) -> None:
        """The copy reads its source at any time until it lands."""
        peer.other = "in flight"

        def land() -> None:
            peer.other = own.ds
            peer.came.arrive()

        self.loads.append(land)

    def roles(self) -> dict[str, Iterator[Wait]]:
        found = {"scheduler": self.scheduler()}
        for rank in range(PAIR):
            self.blocks[rank].p_taken.arrive()
            found[f"loader {rank}"] = self.each(rank, self.loader, late=True)
            found[f"values {rank}"], found[f"keys {rank}"] = self.each(rank, self.values), self.each(rank, self.keys)
            for role in (VALUES, KEYS):
                writer = self.alternate if self.turns else self.writer
                found[f"writer {rank} {role}"] = self.each(rank, partial(writer, role))
        return found


def run(items: list[int], seed: int, skip: str = "") -> Pair:
    pair: Any = Pair(items, skip)
    play([pair], 1, random.Random(seed))
    return pair


@pytest.mark.parametrize("items", [[], [0], [1], [5], [1, 0, 2, 1], [3, 4, 2], [0, 0, 3]])
def test_no_hang_and_no_race(items: list[int]) -> None:
    for seed in range(10):
        for block in run(items, seed).blocks:
            for role in (VALUES, KEYS):
                assert block.added[role] == [(j, part) for j in range(sum(items)) for part in range(PARTS[role])]


BARRIERS = ["q_empty", "do_empty", "do_full", "taken", "came", "k_empty", "v_empty", "block_full", "block_empty"]


@pytest.mark.parametrize("barrier", BARRIERS)
def test_each_barrier_is_needed(barrier: str) -> None:
    with pytest.raises(AssertionError):
        for seed in range(200):
            run([3, 1, 2], seed, barrier)


@pytest.mark.parametrize("processors", [1, 3])
def test_deterministic_pairs_add_in_their_order(processors: int) -> None:
    for seed in range(3):
        turns: list[dict[int, list[int]]] = [{}, {}]
        pairs: Any = [Pair([6], number=n, turns=turns) for n in range(4)]
        play(pairs, processors, random.Random(seed))
        assert turns == [{j: [0, 1, 2, 3] for j in range(6)}] * PAIR


@pytest.mark.parametrize("processors", [1, 3])
def test_pairs_that_claim_tiles_do_not_wait_for_each_other_for_ever(processors: int) -> None:
    for seed in range(5):
        claims: dict[object, str] = {}
        pairs: Any = [Pair([5]) for _ in range(4)]
        for pair in pairs:
            pair.claims = claims
        play(pairs, processors, random.Random(seed))
        assert len(claims) == PAIR * WARPGROUPS * 5 and set(claims.values()) == {"there"}
