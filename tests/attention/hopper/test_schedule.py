"""The order in which persistent blocks take tiles: every tile once, loads even, neighbours in time near in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.attention.hopper.schedule import (
    L2_BYTES,
    NOTHING,
    SMALLEST_PIECE,
    cut_first,
    cut_last,
    heads_in_pairs,
    in_order,
    pack_gqa_row,
    paired,
    piece,
    pieces,
    share,
    share_piece,
    tile_heads,
    tiles_to_split,
)

H100 = 132


def choose(condition: bool, a: int, b: int) -> int:
    return a if condition else b


def causal(block: int, blocks: int, m_blocks: int, heads: int, shared: int = 0) -> Iterator[tuple[int, int]]:
    """(m_block, head) of one block in order, half pairs left out."""
    pair_heads = heads_in_pairs(m_blocks, heads, blocks, shared)
    turn = 0
    while True:
        m_block, head = paired(turn, block, blocks, m_blocks, heads, pair_heads, choose)
        if head >= heads:
            return
        if m_block != NOTHING:
            yield m_block, head
        turn += 1


def full(block: int, blocks: int, m_blocks: int, heads: int) -> Iterator[tuple[int, int]]:
    turn = 0
    while True:
        m_block, head = in_order(turn, block, blocks, m_blocks, choose)
        if head >= heads:
            return
        yield m_block, head
        turn += 1


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 140))
def test_every_tile_once(m_blocks: int, heads: int, blocks: int) -> None:
    blocks = min(blocks, m_blocks * heads)
    everything = sorted((m, h) for m in range(m_blocks) for h in range(heads))
    for order in (causal, partial(causal, shared=L2_BYTES + 1), full):
        assert sorted(t for b in range(blocks) for t in order(b, blocks, m_blocks, heads)) == everything


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 140), st.sampled_from([0, L2_BYTES + 1]))
def test_half_a_pair_is_no_end(m_blocks: int, heads: int, blocks: int, shared: int) -> None:
    """NOTHING comes with a head that exists, and the end with a query tile that does: the kernel tests either alone."""
    pair_heads = heads_in_pairs(m_blocks, heads, blocks, shared)
    for block in range(min(blocks, 5)):
        for turn in range(2 * m_blocks * heads // blocks + 6):
            m_block, head = paired(turn, block, blocks, m_blocks, heads, pair_heads, choose)
            assert head >= 0 and m_block < m_blocks
            assert (m_block == NOTHING) <= (head < heads)


# 16k tokens of hidden size 2048: (seqlen, batch x heads), tiles of 128 queries.
BENCHMARKED = [(1024, 256), (2048, 128), (4096, 64), (8192, 32), (16384, 16), (8192, 64), (4096, 128), (16384, 8)]


@pytest.mark.parametrize("dims", [256, 512])
@pytest.mark.parametrize(("seqlen", "heads"), BENCHMARKED)
def test_causal_load_is_even(seqlen: int, heads: int, dims: int) -> None:
    """The busiest block has at most 3 % more than its share; a tile costs its key tiles and 1.2 for its ends."""
    m_blocks = seqlen // 128
    loads = [sum(m + 1 + 1.2 for m, _ in causal(b, H100, m_blocks, heads, 2 * seqlen * dims)) for b in range(H100)]
    assert max(loads) <= 1.03 * sum(loads) / H100


def test_heads_that_end_a_call_fit_into_l2() -> None:
    """Of 1024 keys, 58 heads of head_dim 128 and 29 of 256; but not where blocks would be less even."""
    assert [heads - heads_in_pairs(8, heads, H100, 1024 * 4 * dim) for heads, dim in ((256, 128), (128, 256))] == [58, 29]
    assert heads_in_pairs(8, 110, H100, 2**21) == heads_in_pairs(8, 110, H100, 0)


@pytest.mark.parametrize("m_blocks", [4, 8, 9, 16, 17, 32])
def test_a_call_whose_end_fits_into_l2_is_as_even(m_blocks: int) -> None:
    for heads in range(400 // m_blocks + 1, 1200 // m_blocks, 3):
        loads = [
            max(sum(m + 1 + 2.5 for m, _ in causal(b, H100, m_blocks, heads, shared)) for b in range(H100))
            for shared in (0, L2_BYTES)
        ]
        assert loads[1] <= 1.05 * loads[0], heads


@pytest.mark.parametrize(("seqlen", "heads"), [(1024, 512), (4096, 128), (500, 528), (1000, 400), (3000, 300)])
def test_a_short_last_tile_is_spread_without_a_mask(seqlen: int, heads: int) -> None:
    """Tiles of 192 queries: the blocks that take most short ones take one or two more than those that take fewest."""
    m_blocks = -(-seqlen // 192)
    short = [sum(m == m_blocks - 1 for m, _ in full(b, H100, m_blocks, heads)) for b in range(H100)]
    assert max(short) - min(short) <= 2


@pytest.mark.parametrize("seqlen", [1000, 1024, 1100, 2048])
def test_a_short_last_tile_is_spread(seqlen: int) -> None:
    """Tiles of three warpgroups, the last one partly past the queries: no block gets all of those."""
    m_blocks, heads = -(-seqlen // 192), 512

    def cost(m: int) -> float:
        groups = [row for row in range(192 * m, 192 * m + 192, 64) if row < seqlen]
        return sum(-(-min(row + 64, seqlen) // 128) for row in groups) / 3 + 0.8

    loads = [sum(cost(m) for m, _ in causal(b, H100, m_blocks, heads)) for b in range(H100)]
    assert max(loads) <= 1.08 * sum(loads) / H100


@pytest.mark.parametrize(("seqlen", "heads"), BENCHMARKED)
def test_keys_stay_in_l2(seqlen: int, heads: int) -> None:
    """But for the call's end, what runs at one time spans few heads: those of a round, and of the one before it."""
    m_blocks = seqlen // 128
    per_head = m_blocks // 2
    pair_heads = heads_in_pairs(m_blocks, heads, H100, 0)
    orders = [list(causal(b, H100, m_blocks, heads)) for b in range(H100)]
    for turn in range(2 * (pair_heads * per_head // H100)):
        spanned = {order[turn][1] for order in orders}
        assert max(spanned) - min(spanned) <= -(-H100 // per_head)


@settings(max_examples=200)
@given(st.integers(1, 140), st.integers(1, 140), st.integers(1, 300))
def test_split_tiles_are_dealt_out_whole(blocks: int, tiles: int, n_blocks: int) -> None:
    """Every key tile of every tile in one piece, two pieces a block at most, even loads; the merge finds them all, in order."""
    tiles = min(tiles, blocks)
    n_blocks = max(n_blocks, -(-blocks // tiles))
    found: dict[int, list[tuple[int, int, int]]] = {}
    loads = []
    for block in range(blocks):
        parts = [piece(part, block, blocks, tiles, n_blocks, choose) for part in range(3)]
        assert parts[2][1] == parts[2][2]
        for part, (tile, first, end) in enumerate(parts[:2]):
            if first < end:
                found.setdefault(tile, []).append((first, end, 2 * block + part))
        loads.append(sum(end - first for _, first, end in parts))
    assert max(loads) - min(loads) <= 1 and min(loads) >= 1 and sorted(found) == list(range(tiles))
    for tile, slots in found.items():
        assert [first for first, _, _ in slots] == [0, *(end for _, end, _ in slots[:-1])] and slots[-1][1] == n_blocks
        first, last, part = pieces(tile, blocks, tiles, n_blocks)
        assert [slot for _, _, slot in slots] == [2 * first + part, *(2 * b for b in range(first + 1, last + 1))]


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("tile_m", [128, 192, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 20, 33])
def test_tiles_that_hold_several_heads_hold_all_queries_once(group: int, tile_m: int, rows: int) -> None:
    heads_per_tile, past, kv = tile_m // rows, 10**6, 3
    found = [
        pack_gqa_row(head, local, rows, heads_per_tile, group, past, choose)
        for head in range(kv * tile_heads(group, heads_per_tile))
        for local in range(tile_m)
    ]
    held = sorted((head, query) for query, head in found if query != past)
    assert held == [(head, query) for head in range(kv * group) for query in range(rows)]


def test_what_is_split() -> None:
    assert tiles_to_split(2048, 128, H100, 16) == (2048 % H100, H100) == (68, H100)
    assert tiles_to_split(2112, 128, H100, 16)[0] == 0  # whole rounds
    assert tiles_to_split(132 * 3 + 131, 128, H100, 16)[0] == 0  # one block idle
    assert tiles_to_split(2048, 8, H100, 16)[0] == 0  # short tiles
    assert tiles_to_split(16, 128, H100, 16) == (16, H100)  # fewer tiles than blocks
    assert tiles_to_split(1, 100, H100, 16) == (1, 50)  # pieces of two key tiles
    assert tiles_to_split(7, 1, H100, 16) == (0, 7)
    assert tiles_to_split(68, 2**19, H100, 16)[0] == 0  # past 32 bits
    assert tiles_to_split(2048, 128, H100, 16, alike=False)[0] == 0
    assert tiles_to_split(16, 128, H100, 16, alike=False) == (16, H100)


@settings(max_examples=200)
@given(st.integers(1, 140), st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_shares_of_tiles_of_any_lengths_are_dealt_out_whole(blocks: int, tiles: list[int]) -> None:
    """As pieces of tiles that are all as long, and a block says which tile's second piece it takes, and which is its last."""
    each = share(sum(tiles), 10**6, blocks, 1, choose)
    assert each == max(-(-sum(tiles) // blocks), SMALLEST_PIECE)
    found: dict[int, list[tuple[int, int, int]]] = {}
    merged = {}
    for block in range(blocks):
        at, tile, begins = block * each, 0, 0
        while tile < len(tiles) and begins + tiles[tile] <= at:
            begins, tile = begins + tiles[tile], tile + 1
        while tile < len(tiles) and at < (block + 1) * each:
            first = at - begins
            end, slot = share_piece(first, tiles[tile], (block + 1) * each - at, block, choose)
            if cut_first(first, each):
                merged[tile] = block, cut_last(first, tiles[tile], each, block)
            found.setdefault(tile, []).append((first, end, slot))
            at, begins, tile = at + end - first, begins + tiles[tile], tile + 1
    slots = [slot for parts in found.values() for _, _, slot in parts if slot >= 0]
    assert len(slots) == len(set(slots)) and max(slots, default=0) < 2 * blocks
    assert sorted(found) == list(range(len(tiles)))
    for tile, parts in found.items():
        assert [first for first, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])] and parts[-1][1] == tiles[tile]
        if len(parts) == 1:
            assert parts[0][2] < 0 and tile not in merged
        else:
            second, last = merged[tile]
            assert [slot for _, _, slot in parts] == [2 * second - 1, *(2 * b for b in range(second, last + 1))]


def test_what_is_shared_out() -> None:
    """Calls whose longest tile is by its cost longer than a block's share."""
    assert share(64 * 256, 256, H100, 16, choose) == 125
    assert share(128 * 64, 64, H100, 16, choose) == 0  # nearly all blocks have a tile
    assert share(1000 * 8 + 8 * 512, 512, H100, 16, choose) == 92  # a long sequence among short ones
    assert share(64 * 256, 256, H100, 0, choose) == 0
    assert share(24, 24, H100, 16, choose) == SMALLEST_PIECE
