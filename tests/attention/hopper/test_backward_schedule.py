"""The order of backward blocks: each once, older key blocks of a head first, busy processors to the end."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import pairwise, product

import pytest

from warploom.attention.hopper.schedule import (
    FEWEST_QUERIES,
    L2_BYTES,
    MOST_ABREAST,
    PIECES,
    PROCESSORS,
    abreast,
    guided_pieces,
    handed_out,
    in_turns,
    in_waves,
    section,
    sections,
    stream_k,
    waves,
)


def choose(condition: bool, a: int, b: int) -> int:
    return a if condition else b


@pytest.mark.parametrize(("n_blocks", "heads", "width"), list(product((1, 3, 32), (1, 5, 12), (1, 2, 5, 12))))
def test_every_block_once_and_in_order(n_blocks: int, heads: int, width: int) -> None:
    found = [sections(i, n_blocks, heads, min(width, heads), choose) for i in range(n_blocks * heads)]
    assert set(found) == set(product(range(n_blocks), range(heads)))
    for head in range(heads):  # deterministic blocks wait for those before them
        assert [n for n, h in found if h == head] == list(range(n_blocks))


@pytest.mark.parametrize(("n_blocks", "heads", "width"), list(product((1, 3, 32), (1, 5, 12), (1, 2, 5, 12))))
@pytest.mark.parametrize("waves", [False, True])
def test_blocks_in_turns_start_before_those_that_wait_for_them(n_blocks: int, heads: int, width: int, waves: bool) -> None:
    """Each once; in waves a head's blocks begin in their order, else the other way around where tiles rise."""
    width = min(width, heads)
    found = [in_turns(i, n_blocks, heads, -width if waves else width, 7, choose) for i in range(n_blocks * heads)]
    assert {block[:2] for block in found} == set(product(range(n_blocks), range(heads)))
    for head in range(heads):
        own = [(n, rising) for n, h, rising in found if h == head]
        if waves:
            assert [n for n, _ in own] == list(range(n_blocks))
        else:
            last = head >= (heads - 1) // width * width
            assert own == [(n if last else n_blocks - 1 - n, 1 - last) for n in range(n_blocks)]
    if waves:
        sizes = [width * n_blocks] * (heads // width) + [heads % width * n_blocks]
        assert [rising for *_, rising in found] == [i // 7 % 2 for size in sizes for i in range(size)]


@pytest.mark.parametrize("heads", range(1, 70))
def test_sections_in_waves_are_even(heads: int) -> None:
    """No more heads than share tiles among enough blocks, and no more sections than that takes."""
    width = abreast(heads)
    sections = -(-heads // width)
    assert width <= MOST_ABREAST and sections == -(-heads // MOST_ABREAST) and 0 <= sections * width - heads < sections


@pytest.mark.parametrize(
    ("seqlen", "heads"), [(1024, 256), (2048, 128), (4096, 64), (4096, 16), (8192, 16), (8192, 8), (16384, 16), (32768, 8)]
)
def test_causal_blocks_keep_132_processors_busy(seqlen: int, heads: int) -> None:
    n_blocks, m_blocks, prologue = seqlen // 128, seqlen // 64, 6
    width = section(heads, n_blocks, seqlen * 4 * 256)
    busy = [0] * 132
    total = 0
    for i in range(n_blocks * heads):
        n, _ = sections(i, n_blocks, heads, width, choose)
        cost = m_blocks - 2 * n + prologue
        total += cost
        heapq.heapreplace(busy, busy[0] + cost)
    assert total / 132 / max(busy) > 0.95


@pytest.mark.parametrize("heads", [1, 2, 7, 16, 131, 300])
def test_a_section_is_no_larger_than_all_heads(heads: int) -> None:
    for n_blocks, shared in product((1, 8, 32, 500), (1, 1 << 22, 1 << 30)):
        assert 1 <= section(heads, n_blocks, shared) <= heads


# Key blocks and steps of a block: heads of 16384 tokens by 2048 channels, and smaller calls.
CALLS = [(2048, 13), (2048, 52), (2048, 205), (4096, 8), (4096, 32), (4096, 128), (1024, 412), (132, 10), (32, 64), (133, 7)]


@pytest.mark.parametrize(("blocks", "steps"), CALLS)
def test_shares_hold_every_step_once_and_wait_only_for_what_came_before(blocks: int, steps: int) -> None:
    split, each = stream_k(blocks, steps, 132, 263)
    whole = blocks - split
    done = [0] * blocks
    for index in range(whole - (-split * steps // each)):
        for slot, first, end in (handed_out(index, i, whole, split, each, steps, choose) for i in range(PIECES)):
            if first < end:
                assert done[whole + slot] == first
                done[whole + slot] += end - first
    assert done == [steps] * blocks


@pytest.mark.parametrize(("blocks", "steps"), CALLS)
def test_shares_of_the_last_round_end_together(blocks: int, steps: int) -> None:
    """Handed out to whoever is free first, each piece waits for what it adds to; 2 steps for a piece, 1 for each sum."""

    def makespan(split: int, each: int) -> float:
        free, whole = [(0.0, p) for p in range(132)], blocks - split
        done: dict[tuple[int, int], float] = {}
        heapq.heapify(free)
        for index in range(whole - (-split * steps // each)):
            now, processor = heapq.heappop(free)
            for slot, first, end in (handed_out(index, i, whole, split, each, steps, choose) for i in range(PIECES)):
                if first < end:
                    now = now + 2 + end - first
                    if first > 0:
                        now = max(now, done[slot, first]) + 1
                    if end < steps:
                        now = done[slot, end] = now + 1
            heapq.heappush(free, (now, processor))
        return max(free)[0]

    split, each = stream_k(blocks, steps, 132, 263)
    even = blocks * (steps + 2) / 132
    assert makespan(split, each) <= makespan(0, 1)
    assert makespan(split, each) - even <= 14 or blocks < 132


def test_one_long_block_does_not_outlast_the_others() -> None:
    """A column that all queries see, first in its head: whole it took longer than all else shared out."""
    blocks = [4096, *[120] * 255] * 8

    def makespan(cut: bool) -> float:
        left, pieces, mean = 0, [], sum(blocks) // len(blocks)
        for steps in reversed(blocks):
            left += steps
            pieces.append(guided_pieces(steps, left, mean, 132, 64, choose) if cut else 1)
        free = [(0.0, p) for p in range(132)]
        for steps, count in zip(blocks, reversed(pieces), strict=True):
            done = 0.0
            for _ in range(count):
                now, processor = heapq.heappop(free)
                done = max(now + 2.5 + steps / count, done) + 2 * (count > 1)
                heapq.heappush(free, (done, processor))
        return max(free)[0]

    even = sum(blocks) / 132
    assert makespan(cut=False) > 1.5 * even and makespan(cut=True) < 1.15 * even


@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize("left", [1, 100, 10**6, 2**31 - 1])
def test_short_blocks_stay_whole(left: int, tile_m: int) -> None:
    fewest = FEWEST_QUERIES // tile_m
    assert guided_pieces(fewest, left, 1, 132, tile_m, choose) == guided_pieces(0, left, 0, 132, tile_m, choose) == 1


# Key heads and blocks of each: sections and waves.
WAVES = {
    (16, 64): (8, 1), (32, 32): (8, 1), (4, 256): (4, 2), (16, 50): (2, 3), (8, 96): (2, 3), (8, 80): (1, 5), (8, 192): (4, 3),
    (8, 56): (1, 3), (32, 24): (6, 1), (1, 64): (0, 0), (2, 100): (0, 0), (8, 1000): (0, 0), (40000, 128): (40000, 1),
}  # fmt: skip


@pytest.mark.parametrize(("heads", "n_blocks"), WAVES)
def test_waves_are_what_processors_do_at_a_time(heads: int, n_blocks: int) -> None:
    assert waves(heads, n_blocks) == WAVES[heads, n_blocks]


@pytest.mark.parametrize(("heads", "n_blocks"), [(16, 64), (16, 50), (8, 96), (5, 7), (1, 3)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_waves_hold_every_block_once_and_alternate(heads: int, n_blocks: int, count: int) -> None:
    for cuts in {1, 2, 3, heads} & set(range(1, heads + 1)):
        found = [in_waves(i, n_blocks, heads, cuts, count) for i in range(n_blocks * heads)]
        assert {block[:2] for block in found} == set(product(range(n_blocks), range(heads)))
        turns = 1 + sum(a[2] != b[2] for a, b in pairwise(found))
        assert found[0][2] == 0 and turns == cuts * count
        for head in range(heads):
            assert [n for n, h, _ in found if h == head] == list(range(n_blocks))


class Cache:
    """Of the last 400 tiles that steps used: 32 MB of Q, dO and dQ of head_dim 128."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.recent: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def misses(self, tile: tuple[int, ...]) -> bool:
        """Use a tile: whether it was used before and is not there any more."""
        missed = tile not in self.recent and tile in self.seen
        self.seen.add(tile)
        self.recent[tile] = None
        self.recent.move_to_end(tile)
        if len(self.recent) > 400:
            self.recent.popitem(last=False)
        return missed


@pytest.mark.parametrize(("n_blocks", "heads", "group"), [(32, 16, 4), (64, 8, 4), (48, 8, 8), (96, 4, 4), (256, 1, 3)])
def test_tiles_of_waves_stay_in_cache(n_blocks: int, heads: int, group: int) -> None:
    """Causal blocks handed out to 132 processors of one speed: how often a step's Q, dO and dQ are not among the last 400 that
    steps used, 32 MB of head_dim 128, though they were used before; in waves and, as without, head after head.
    """
    width, (cuts, count) = section(heads, n_blocks, L2_BYTES), waves(heads, n_blocks)
    assert count

    def walk(index: int, together: bool) -> list[tuple[int, int, int]]:
        if not together:
            n, head = sections(index, n_blocks, heads, width, choose)
            return list(product([head], range(group), range(2 * n, 2 * n_blocks)))
        n, head, rising = in_waves(index, n_blocks, heads, cuts, count)
        tiles = range(2 * n, 2 * n_blocks)
        return [(head, member, m) for m in (tiles if rising else reversed(tiles)) for member in range(group)]

    def missed(together: bool) -> float:
        cache, misses, steps = Cache(), 0, 0
        running = [(0.0, p, iter(())) for p in range(132)]
        index = 0
        while running:
            now, p, walking = heapq.heappop(running)
            tile = next(walking, None)
            if tile is None:
                if index < n_blocks * heads:
                    heapq.heappush(running, (now + 2, p, iter(walk(index, together))))
                    index += 1
                continue
            steps += 1
            misses += cache.misses(tile)
            heapq.heappush(running, (now + 1, p, walking))
        return misses / steps

    assert missed(True) < 0.08 and missed(True) < missed(False) / 2


@pytest.mark.parametrize(("n_blocks", "heads", "group"), [(64, 8, 4), (32, 16, 4), (128, 4, 8)])
def test_tiles_of_blocks_in_turns_stay_in_cache(n_blocks: int, heads: int, group: int) -> None:
    """As above, of blocks that add to a tile one after the other, each a step behind the one before: in waves and without."""

    def played(section: int) -> tuple[float, float]:
        """How often a tile is not in the cache, and how much longer than its steps the call takes."""
        blocks = [in_turns(i, n_blocks, heads, section, PROCESSORS, choose) for i in range(n_blocks * heads)]
        waiting: dict[tuple[int, ...], tuple[int, int, list[tuple[int, int]]]] = {}
        cache, done, steps, misses, end = Cache(), set(), 0, 0, 0
        events: list[tuple[int, int, int, list[tuple[int, int]]]] = []

        def begin(now: int) -> None:
            if unstarted:
                n, _, rising = blocks[unstarted[-1]]
                tiles = range(2 * n, 2 * n_blocks)
                walk = list(product(tiles if rising else reversed(tiles), range(group)))[::-1]
                heapq.heappush(events, (now + 3, unstarted.pop(), now, walk))

        unstarted = list(range(n_blocks * heads))[::-1]
        for _ in range(PROCESSORS):
            begin(0)
        while events:
            now, index, _, walk = heapq.heappop(events)
            n, head, rising = blocks[index]
            m, member = walk[-1]
            last = rising == 1 and section > 0  # the eldest is the last one that sees the tile
            elder = n + 1 if last else n - 1
            if 0 <= elder <= m // 2 and (elder, head, m, member) not in done:
                waiting[elder, head, m, member] = index, now, walk
                continue
            walk.pop()
            tile = head, m, member
            steps += 1
            misses += cache.misses(tile)
            done.add((n, *tile))
            end = now
            if (n, *tile) in waiting:
                other, since, rest = waiting.pop((n, *tile))
                heapq.heappush(events, (max(now + 1, since), other, 0, rest))
            if walk:
                heapq.heappush(events, (now + 1, index, 0, walk))
            else:
                begin(now + 1)
        return misses / steps, end * PROCESSORS / steps

    (missed, time), (without, _) = played(-abreast(heads)), played(section(heads, n_blocks, L2_BYTES))
    assert missed < 0.15 and missed < without / 4 and time < 1.25
