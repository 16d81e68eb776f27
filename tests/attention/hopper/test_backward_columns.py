"""The compiled backward under column masks played through: every visible tile is multiplied once and nothing hangs or races.

And the arithmetic of its walk and of its bits, in the kernel's own text, against masks element by element.
"""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.hopper.played import COUNTERS, SUMS, backward, before, choose, chunk_of, cut_table, fine_and_coarse
from tests.attention.hopper.test_backward_barriers import multiplied
from tests.compiled import Built, machine_code
from tests.plain import plain
from tests.sm90.core import Run
from tests.sm90.lanes import LANES, UNKNOWN, Value, lane
from tests.sm90.machine import Machine
from tests.sm90.ptx import Instruction
from tests.sm90.state import HangError, Warp
from warploom import masks
from warploom.attention.features import Features
from warploom.attention.hopper.config import FIRST_BLOCKS, LAST_BLOCKS, LONGEST, TABLE
from warploom.attention.hopper.plan import backward_config
from warploom.attention.hopper.schedule import guided_pieces, sections
from warploom.masks import Mask, tiles
from warploom.runtime import modules

builds = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

FP16, BF16 = torch.float16, torch.bfloat16
COLUMNS = {
    "head_dim 128": backward_config(Features(BF16, 128, 128, columns=True), short=False),
    "head_dim 128, causal": backward_config(Features(BF16, 128, 128, columns=True, right=True), short=False),
    "head_dim 64, causal": backward_config(Features(FP16, 64, 64, columns=True, right=True), short=False),
    "head_dim 96, window": backward_config(Features(FP16, 96, 96, columns=True, right=True, left=True), short=False),
    "head_dim 128, causal, deterministic": backward_config(
        Features(BF16, 128, 128, columns=True, right=True, deterministic=True), short=False
    ),
    "head_dim 64, window, deterministic": backward_config(
        Features(FP16, 64, 64, columns=True, right=True, left=True, deterministic=True), short=False
    ),
    "head_dim 64, causal, softcap": backward_config(
        Features(BF16, 64, 64, columns=True, right=True, softcap=True), short=False
    ),
    "head_dim 192": backward_config(Features(BF16, 192, 192, columns=True), short=False),
    "head_dims 192 and 128, window": backward_config(
        Features(FP16, 192, 128, columns=True, right=True, left=True), short=False
    ),
    "head_dim 192, causal, deterministic": backward_config(
        Features(FP16, 192, 192, columns=True, right=True, deterministic=True), short=False
    ),
    "head_dims 192 and 128, causal, deterministic": backward_config(
        Features(BF16, 192, 128, columns=True, right=True, deterministic=True), short=False
    ),
    "head_dim 256": backward_config(Features(FP16, 256, 256, columns=True), short=False),
    "head_dim 256, window": backward_config(Features(BF16, 256, 256, columns=True, right=True, left=True), short=False),
    "head_dim 256, causal, deterministic": backward_config(
        Features(BF16, 256, 256, columns=True, right=True, deterministic=True), short=False
    ),
    "head_dim 192, causal, softcap": backward_config(
        Features(BF16, 192, 192, columns=True, right=True, softcap=True), short=False
    ),
    "head_dims 192 and 128, causal, dropout, deterministic": backward_config(
        Features(FP16, 192, 128, columns=True, right=True, dropout=True, deterministic=True), short=False
    ),
    "head_dim 128, causal, dropout": backward_config(
        Features(BF16, 128, 128, columns=True, right=True, dropout=True), short=False
    ),
    "head_dim 96, causal, dropout, deterministic": backward_config(
        Features(BF16, 96, 96, columns=True, right=True, dropout=True, deterministic=True), short=False
    ),
    "head_dim 256, causal, dropout": backward_config(
        Features(BF16, 256, 256, columns=True, right=True, dropout=True), short=False
    ),
    "head_dim 64, causal, chunks": backward_config(
        Features(BF16, 64, 64, columns=True, right=True, q_offset=True), short=False
    ),
    "head_dim 128, window, chunks": backward_config(
        Features(BF16, 128, 128, columns=True, right=True, left=True, q_offset=True), short=False
    ),
    "head_dim 128, causal, chunks, deterministic": backward_config(
        Features(BF16, 128, 128, columns=True, right=True, q_offset=True, deterministic=True), short=False
    ),
    "head_dim 64, causal, chunks, deterministic": backward_config(
        Features(FP16, 64, 64, columns=True, right=True, q_offset=True, deterministic=True), short=False
    ),
    "head_dim 192, causal, chunks": backward_config(
        Features(BF16, 192, 192, columns=True, right=True, q_offset=True), short=False
    ),
    "head_dim 256, window, chunks": backward_config(
        Features(BF16, 256, 256, columns=True, right=True, left=True, q_offset=True), short=False
    ),
}
QUERIES, KEYS, LEFT = 230, 300, 110
OFFSETS = (-5, 0, 1, 64, 100, 200, 270, 350, 1 << 29, 2**31 - 1)  # of chunks


def drawn(heads: int, seqlen_q: int, seqlen_k: int, causal: bool, generator: torch.Generator) -> Mask:
    """Intervals that differ a little from key to key and hide whole tiles of some blocks; some keys that nobody sees."""
    block, count = torch.arange(seqlen_k) // 128, -(-seqlen_k // 128)
    vectors = []
    for _ in range(2):
        low = torch.randint(-50, seqlen_q, (heads, count), generator=generator)[:, block]
        high = low + torch.randint(0, seqlen_q, (heads, count), generator=generator)[:, block]
        vectors += [t + torch.randint(0, 20, t.shape, generator=generator) for t in (low, high)]
    dead = torch.rand(seqlen_k, generator=generator) < 0.1
    vectors[0][:, dead], vectors[1][:, dead] = 0, seqlen_q
    return masks.ColumnMask(*(t[None].int() for t in vectors), causal=causal)


class Agreeing(Machine):
    """Warps that look at the same row statistics find the same: by the seed in every masked tile queries to clear, or none."""

    def __init__(self, kernel: Any, launch: Any, seed: int, *more: Any) -> None:
        self.cleared = bool(random.Random(seed).getrandbits(1))
        super().__init__(kernel, launch, seed, *more)

    def _vote(self, x: Instruction) -> Run:
        run, target = super()._vote(x), str(x.operands[0])

        def vote(warp: Warp, mask: int) -> bool:
            run(warp, mask)
            if self.value(warp, target) is UNKNOWN:
                self.set(warp, target, self.cleared, mask)
            return True

        return vote


class Noting(Machine):
    """Keeps what is stored where the launch watches."""

    def __init__(self, *args: Any) -> None:
        self.noted: dict[int, Value] = {}
        super().__init__(*args)

    def _st_global(self, x: Instruction) -> Run:
        def store(warp: Warp, mask: int) -> bool:
            where = self.address(warp, str(x.operands[0]))
            for i in range(LANES):
                if mask >> i & 1 and lane(where, i) in self.launch.watched:
                    self.noted[lane(where, i)] = lane(self.value(warp, str(x.operands[1])), i)
            return True

        return store


class Adding(Agreeing):
    """Keeps in which order a warp reads sums of pieces."""

    def __init__(self, kernel: Any, launch: Any, seed: int, blocks: int, floats: int) -> None:
        self.read: dict[str, list[int]] = defaultdict(list)
        self.floats = floats  # of a piece
        super().__init__(kernel, launch, seed, blocks)

    def _taken(self, warp: Warp, at: int) -> None:
        super()._taken(warp, at)
        piece, pieces = (at - SUMS) // (4 * self.floats), self.read[warp.name]
        if pieces[-1:] != [piece]:
            pieces.append(piece)


class Clearing(Agreeing):
    """Who adds to a part of so many bytes, from the first that is not zero at the beginning on, comes after all its zeros."""

    def __init__(self, kernel: Any, launch: Any, seed: int, blocks: int, first: int, size: int) -> None:
        self.first, self.size = first, size
        super().__init__(kernel, launch, seed, blocks)

    def _global(self, warp: Warp, target: int, kind: str) -> None:
        for at in range(target, target + self.size, 16) if target >= self.first else ():
            self._taken(warp, at)
        super()._global(warp, target, kind)


class Turning(Agreeing):
    """Keeps what counters in global memory come to, one after the other."""

    def __init__(self, *args: Any) -> None:
        self.turns: dict[int, list[int]] = defaultdict(list)
        super().__init__(*args)

    def _release(self, warp: Warp, at: int) -> None:
        super()._release(warp, at)
        self.turns[at].append(self.words[at])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(COLUMNS, "sm_90a", tmp_path_factory)


def masked(name: str, heads: int, seed: int) -> tuple[Any, Tensor, dict[str, int]]:
    """The resolved mask of a variant, its bounds, and what else its launch takes.

    With offsets those are what a chunk of a whole's rows sees of its mask.
    """
    config, generator = COLUMNS[name], torch.Generator().manual_seed(seed)
    offset = OFFSETS[seed % len(OFFSETS)] if config.q_offset else 0
    mask = drawn(heads, QUERIES + min(max(offset, 0), 350), KEYS, config.right, generator)
    resolved, options = mask.resolve(QUERIES, KEYS), {"offset": offset} if config.q_offset else {}
    if config.left:
        resolved, options = resolved._replace(left=LEFT), options | {"left": LEFT}
    if config.q_offset:
        print(f"offset {offset}")
        resolved = chunk_of(resolved, offset, QUERIES, KEYS)
    return resolved, fine_and_coarse(resolved, QUERIES, KEYS), options


def span_of(config: Any) -> int:
    """Keys of a block, or of a pair."""
    return int(config.tile_n * (2 if config.pair else 1))


def touched_bounds(resolved: Any, seqlen_q: int, seqlen_k: int, span: int) -> Tensor:
    """Extrema of all blocks of bounds that so many keys touch."""
    fine = tiles.column_bounds(resolved, seqlen_q, seqlen_k, 64)
    touched = [fine[:, :, n // 64 : -(-(n + span) // 64)] for n in range(0, seqlen_k, span)]
    least, most = (torch.stack([getattr(t, side)(2) for t in touched], 2) for side in ("amin", "amax"))
    return torch.where(torch.arange(8) % 2 == 0, least, most)


def visible_steps(name: str, resolved: Any) -> list[tuple[int, tuple[int, int]]]:
    """(First key, (row, head)) of the tiles that are not hidden by extrema of all that a key block, or a pair, touches."""
    config, found = COLUMNS[name], []
    span = span_of(config)
    bounds, edges = touched_bounds(resolved, QUERIES, KEYS, span), tiles.block_edges(KEYS, span)
    for m in range(0, QUERIES, config.tile_m):
        stop = min(m + config.tile_m, QUERIES)
        classes = tiles.classify_row_block(bounds, edges, m, stop, resolved.left, resolved.right, QUERIES, KEYS)
        for head in range(2):
            row = classes[0, min(head, classes.shape[1] - 1)]
            seen = [n * span for n in range(len(row)) if row[n] != tiles.HIDDEN]
            found += [(key, (m, head)) for n in seen for key in range(n, n + span, config.tile_n)]
    return sorted(found)


def blocks_of(config: Any, processors: int) -> int:
    """Blocks that are launched; 0: one for each key block."""
    return processors * (2 if config.pair else 1) if config.persistent else 0


HEADS = [1, 2, 1, 2, 1, 2, 1, 2, 1, 1, 2, 2, 1, 1, 1, 2, 2, 1, 2, 1, 2, 1, 2, 1, 2]


@builds
@pytest.mark.parametrize("name, heads", list(zip(COLUMNS, HEADS, strict=True)))
def test_visible_tiles_once_without_hang_or_race(name: str, heads: int, built: Built) -> None:
    """Masks of all heads and of each query head of a group; dQ of each visible tile is added once by each warpgroup."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    resolved, bounds, options = masked(name, heads, seed)
    traced, processors, config = built.traced(name), 1 + seed % 2, COLUMNS[name]
    launch = backward(traced, config, QUERIES, KEYS, blocks_of(config, processors), bounds=bounds, **options)
    machine = Agreeing(traced.kernel, launch, seed, processors).run()
    expected = visible_steps(name, resolved)
    found = multiplied(machine, *(("do", "v") if config.roles else ("v", "do")))
    parts = 2
    if config.pair:  # whose warpgroups begin products that nobody looks at after the last step, and add dQ in three parts
        assert set(multiplied(machine, "k", "q")) >= set(expected) <= set(found)
        parts = 3
    else:
        assert sorted(found) == expected
    assert sum(map(len, machine.added.values())) == parts * len(expected)
    assert len(machine.added) == parts * len({(key % 128 * config.pair, queries) for key, queries in expected})


@builds
@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize(
    "name", ["head_dim 128, causal", "head_dim 64, causal", "head_dim 96, window", "head_dim 64, causal, chunks"]
)
def test_dq_of_later_heads_begins_at_zero(name: str, processors: int, built: Built) -> None:
    """Blocks of a key head clear the next one's dQ; who adds to it comes after all zeros."""
    seed, batches, config = random.randrange(2**32), 6, COLUMNS[name]
    print(f"seed {seed}")
    resolved, bounds, options = masked(name, 1, seed)
    traced = built.traced(name)
    launch = backward(traced, config, QUERIES, KEYS, processors, bounds=bounds, batches=batches, **options)
    size = 4 * config.tile_m * config.head_dim // 2  # of a warpgroup's part of a tile
    each = 2 * 2 * -(-QUERIES // config.tile_m) * size  # of a key head, with two query heads
    machine = Clearing(traced.kernel, launch, seed, processors, launch.watched.start + each, size).run()
    assert sum(map(len, machine.added.values())) == 2 * batches * len(visible_steps(name, resolved))
    assert sorted(machine.handed) == list(range(launch.watched.start + each, launch.watched.start + batches * each, 16))


DETERMINISTIC = [
    ("head_dim 128, causal, deterministic", 2),
    ("head_dim 64, window, deterministic", 1),
    ("head_dim 192, causal, deterministic", 2),
    ("head_dims 192 and 128, causal, deterministic", 1),
    ("head_dim 256, causal, deterministic", 2),
    ("head_dim 128, causal, chunks, deterministic", 2),
    ("head_dim 64, causal, chunks, deterministic", 1),
]


@builds
@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize(("name", "heads"), DETERMINISTIC)
def test_deterministic_blocks_take_turns(name: str, heads: int, processors: int, built: Built) -> None:
    """At each query tile those that see it, in their order, whoever is first."""
    seed, config = random.randrange(2**32), COLUMNS[name]
    print(f"seed {seed}")
    resolved, bounds, options = masked(name, heads, seed)
    traced = built.traced(name)
    launch = backward(traced, config, QUERIES, KEYS, blocks_of(config, processors), bounds=bounds, **options)
    machine = Turning(traced.kernel, launch, seed, processors).run()
    expected = defaultdict(list)
    for key, (row, head) in visible_steps(name, resolved):
        counter = 2 * (head * -(-QUERIES // config.tile_m) + row // config.tile_m)
        if config.pair:  # a counter of each half of the columns
            counter += key // config.tile_n % 2
        expected[counter].append(key // span_of(config) + 1)
    first = min(machine.turns) // (1 << 32) * (1 << 32)
    assert {(at - first) // 4: order for at, order in machine.turns.items()} == expected


@builds
@pytest.mark.parametrize("first", [0, 1, 2])
def test_turns_across_more_blocks_than_lanes(first: int, built: Built) -> None:
    """Of 35 key blocks two see anything: the loader looks for the former among the 32 before the latter, then further on."""
    name, seqlen_q, blocks = "head_dim 128, causal, deterministic", 100, 35
    seen = (torch.arange(blocks) == first) | (torch.arange(blocks) == blocks - 1)
    lts = torch.where(seen, seqlen_q, 0).repeat_interleave(128)[None, None].int()
    mask = masks.ColumnMask(lts, causal=True).resolve(seqlen_q, 128 * blocks)
    traced, bounds = built.traced(name), fine_and_coarse(mask, seqlen_q, 128 * blocks)
    launch = backward(traced, COLUMNS[name], seqlen_q, 128 * blocks, 2, bounds=bounds)
    turns = Turning(traced.kernel, launch, first, 2).run().turns
    assert len(turns) == 4  # two query tiles of two heads, each by both blocks unless they lie past the diagonal
    assert {tuple(order) for order in turns.values()} == {(first + 1, blocks)}


@builds
def test_a_block_that_never_comes_is_waited_for(built: Built) -> None:
    """Where the first one is not handed out, the next one that sees a tile of its waits for ever."""
    name = "head_dim 128, causal, deterministic"
    vectors = [torch.full((1, 1, KEYS), n, dtype=torch.int32) for n in (QUERIES, QUERIES, 0, 0)]
    bounds = fine_and_coarse(masks.ColumnMask(*vectors).resolve(QUERIES, KEYS), QUERIES, KEYS)
    traced = built.traced(name)
    launch = backward(traced, COLUMNS[name], QUERIES, KEYS, 2, bounds=bounds, handed_out=1)
    with pytest.raises(HangError):
        Agreeing(traced.kernel, launch, 0, 2).run()


@builds
@pytest.mark.parametrize("name", ["head_dim 128, causal", "head_dim 192, causal, deterministic", "head_dim 256"])
def test_a_mask_that_hides_all(name: str, built: Built) -> None:
    """No step; blocks end all the same."""
    mask = masks.ColumnMask(torch.zeros(1, 1, KEYS, dtype=torch.int32), causal=True).resolve(QUERIES, KEYS)
    traced = built.traced(name)
    blocks = blocks_of(COLUMNS[name], 1)
    launch = backward(traced, COLUMNS[name], QUERIES, KEYS, blocks, bounds=fine_and_coarse(mask, QUERIES, KEYS))
    machine = Agreeing(traced.kernel, launch, 0, 1).run()
    assert not machine.added and not multiplied(machine, "v", "do") and not multiplied(machine, "do", "v")


@builds
@pytest.mark.parametrize(
    ("name", "heads"), [("head_dim 128, causal", 1), ("head_dim 64, causal", 2), ("head_dim 96, window", 1)]
)
def test_pieces_of_cut_blocks_add_up(name: str, heads: int, built: Built) -> None:
    """Each step once, whoever has it; sums are read after they were handed over, in one order. Some pieces are of no step."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    resolved, bounds, options = masked(name, heads, seed)
    traced, processors, config = built.traced(name), 1 + seed % 3, COLUMNS[name]
    few, many = 2 + seed % 2, 7
    launch = backward(traced, config, QUERIES, KEYS, processors, bounds=bounds, split=2, cuts={0: few, 2: many}, **options)
    machine = Adding(traced.kernel, launch, seed, processors, config.partial_floats).run()
    steps = visible_steps(name, resolved)
    assert sorted(multiplied(machine, "v", "do")) == steps
    for first, key, pieces in ((0, 256, many), (many, 0, few)):  # the last block's pieces come first
        kept = min(pieces, sum(start == key for start, _ in steps))
        orders = [[i - first for i in read if 0 <= i - first < pieces] for read in machine.read.values()]
        assert sorted(filter(None, orders)) == [list(range(kept))] * (8 if kept > 1 else 0)


@builds
@pytest.mark.parametrize("kind", ["together", "sliding", "two runs"])
def test_heads_go_abreast_or_one_after_the_other(kind: str, built: Built) -> None:
    """The latter where neighbours do not come to one tile at one time; the last tile first."""
    name, seqlen_q, blocks = "head_dim 128", 660, 5
    step = COLUMNS[name].tile_m
    first, end = torch.arange(blocks).repeat_interleave(128), torch.full((blocks * 128,), seqlen_q)
    hidden = {"together": (end, end), "sliding": (100 * first + 160, end), "two runs": (64 * first + 130, 64 * first + 390)}
    lts, lte = hidden[kind]
    mask = masks.ColumnMask(lts[None, None].int(), lte[None, None].int()).resolve(seqlen_q, blocks * 128)
    wide, edges = tiles.column_bounds(mask, seqlen_q, blocks * 128, 128), tiles.block_edges(blocks * 128, 128)
    expected = defaultdict(list)
    for n in range(blocks):
        rows = []
        for row in reversed(range(0, seqlen_q, step)):
            past = min(row + step, seqlen_q)
            kinds = tiles.classify_row_block(wide, edges, row, past, None, None, seqlen_q, blocks * 128)
            if kinds[0, 0, n] != tiles.HIDDEN:
                rows.append(row)
        if kind == "together" or (kind == "sliding" and n in (0, blocks - 1)):
            expected[128 * n] = [(row, (n + i) % 2) for row in rows for i in range(2)]
        else:
            expected[128 * n] = [(row, head) for head in range(2) for row in rows]
    traced = built.traced(name)
    launch = backward(traced, COLUMNS[name], seqlen_q, blocks * 128, 1, bounds=fine_and_coarse(mask, seqlen_q, blocks * 128))
    machine = Agreeing(traced.kernel, launch, random.randrange(2**32), 1).run()
    found = defaultdict(list)
    for key, step in multiplied(machine, "v", "do"):
        found[key].append(step)
    assert found == expected


@builds
@pytest.mark.parametrize(
    ("batch", "processors", "slots", "own", "offset"),
    [(1, 40, 1000, 4, None), (2, 132, 1000, 4, None), (2, 132, 9, 4, None), (2, 132, 1000, 1, None), (2, 132, 1000, 4, 3000)],
)
def test_long_blocks_are_cut(
    batch: int, processors: int, slots: int, own: int, offset: int | None, built: Built
) -> None:  # fmt: skip
    """As ``guided_pieces`` has it, of no more blocks than may be; of those the last ones. Heads have one mask or four.

    ``offset``: of the queries, in every batch entry.
    """
    name = "head_dim 64, causal" if offset is None else "head_dim 64, causal, chunks"
    seqlen_q, seqlen_k, heads_kv, section, first = 9000, 70 * 128, 2, 2, offset or 0
    seed, config = random.randrange(2**32), COLUMNS[name]
    print(f"seed {seed}")
    whole = seqlen_q + first
    mask = drawn(own, whole, seqlen_k, True, torch.Generator().manual_seed(seed)).resolve(whole, seqlen_k)
    mask = mask if offset is None else chunk_of(mask, offset, seqlen_q, seqlen_k)
    traced = built.traced(name, "kernel_cutlass_before")
    bounds = fine_and_coarse(mask, seqlen_q, seqlen_k)
    sizes = (batch, seqlen_q, 4), (batch, seqlen_k, heads_kv)
    launch = before(traced, config, *sizes, bounds, section, processors, slots, first)
    machine = Noting(traced.kernel, launch, seed).run()
    edges, wide = tiles.block_edges(seqlen_k, 128), tiles.column_bounds(mask, seqlen_q, seqlen_k, 128)
    seen = torch.zeros(own, 70, dtype=torch.int64)
    for m in range(0, seqlen_q, config.tile_m):
        stop = min(m + config.tile_m, seqlen_q)
        classes = tiles.classify_row_block(wide, edges, m, stop, mask.left, mask.right, seqlen_q, seqlen_k)[0]
        seen += torch.as_tensor(classes != tiles.HIDDEN)
    total = 70 * heads_kv * batch
    blocks = [sections(i, 70, heads_kv * batch, section, choose) for i in range(total)]
    steps = [2 * int(seen[slice_ % heads_kv * 2 % own, n_block]) for n_block, slice_ in blocks]
    cuts: dict[int, int] = {}
    for i in reversed(range(total)):
        pieces = guided_pieces(steps[i], sum(steps[i:]), sum(steps) // total, processors, config.tile_m, choose)
        if pieces > 1:
            if sum(cuts.values()) + pieces > slots:
                break
            cuts[i] = pieces
    assert cuts
    start = SUMS + 4 * (COUNTERS - 1 - TABLE)
    expected = [number % 2**32 for number in cut_table(cuts)]
    table = [lane(machine.noted.get(start + 4 * i, 0), 0) % 2**32 for i in range(len(expected))]
    kept = 1 + 3 * len(cuts)
    assert machine.words[start] == expected[0]
    assert table[1:kept] == expected[1:kept] and table[kept::3] == expected[kept::3]


def seen_tiles(mask: Any, config: Any, seqlen_q: int, seqlen_k: int) -> Tensor:
    """1 where a key block, or a pair, sees a query tile: (query tiles, heads, blocks)."""
    span = span_of(config)
    edges, wide = tiles.block_edges(seqlen_k, span), touched_bounds(mask, seqlen_q, seqlen_k, span)
    found = []
    for m in range(0, seqlen_q, config.tile_m):
        stop = min(m + config.tile_m, seqlen_q)
        classes = tiles.classify_row_block(wide, edges, m, stop, mask.left, mask.right, seqlen_q, seqlen_k)[0]
        found.append(torch.as_tensor(classes != tiles.HIDDEN).int())
    return torch.stack(found)


@builds
@pytest.mark.parametrize(
    ("name", "batch", "wide"),
    [("head_dim 192", 1, False), ("head_dim 192", 2, True), ("head_dim 256", 2, False), ("head_dim 256", 2, True)],
)
def test_last_blocks_go_longest_first(name: str, batch: int, wide: bool, built: Built) -> None:
    """Each once, by eighths of the most query tiles, otherwise in their order; of 280 blocks the last ones, or all of 140.

    ``wide``: the first block of each head sees all rows, others a few; those that would outlast all others begin the call.
    """
    seed, config = random.randrange(2**32), COLUMNS[name]
    seqlen_q, seqlen_k, heads_kv, section, processors = 2000, 70 * span_of(config), 2, 2, 40
    print(f"seed {seed}")
    mask: Mask = drawn(4, seqlen_q, seqlen_k, config.right, torch.Generator().manual_seed(seed))
    if wide:
        starts = torch.randint(1, 60, (1, 4, seqlen_k), generator=torch.Generator().manual_seed(seed)).int()
        starts[..., : span_of(config)] = seqlen_q
        mask = masks.ColumnMask(starts, causal=config.right)
    resolved = mask.resolve(seqlen_q, seqlen_k)
    traced = built.traced(name, "kernel_cutlass_before")
    bounds = fine_and_coarse(resolved, seqlen_q, seqlen_k)
    launch = before(traced, config, (batch, seqlen_q, 4), (batch, seqlen_k, heads_kv), bounds, section, processors, 0)
    noted = Noting(traced.kernel, launch, seed).run().noted
    total = 70 * heads_kv * batch
    count = min(total, LAST_BLOCKS)
    start = SUMS + 4 * (COUNTERS - config.persistent - LAST_BLOCKS)
    seen = seen_tiles(resolved, config, seqlen_q, seqlen_k).sum(0)
    blocks = [sections(i, 70, heads_kv * batch, section, choose) for i in range(total)]
    length = [int(seen[slice_ % heads_kv * 2, n]) for n, slice_ in blocks]
    mean, alone = sum(length) // total, processors // (2 if config.pair else 1)
    firsts = [i for i in reversed(range(total)) if length[i] > LONGEST * mean and length[i] > sum(length[i:]) // alone]
    assert (firsts or not wide) and len(firsts) <= FIRST_BLOCKS
    expected = [*firsts, *[1 << 30] * (FIRST_BLOCKS - len(firsts))]
    assert [noted[start + 4 * (i - FIRST_BLOCKS)] for i in range(FIRST_BLOCKS)] == expected
    others = [i for i in range(total - count, total) if i not in firsts]
    most = max(length[i] for i in others)
    order = [noted[start + 4 * i] for i in range(len(others))]
    assert order == sorted(others, key=lambda i: (-(length[i] * 8 // most), i))


@builds
@pytest.mark.parametrize("name", COLUMNS)
def test_resources(name: str, built: Built) -> None:
    """No spills, and no wait between products that are issued together: more would mean that ptxas serialised wgmma."""
    config, facts, cubin = built[name]
    assert facts["stack"] == 0, "registers spill"
    waits, last = (8, 2) if config.roles else (3, 5) if config.pair else (4, 1)
    assert len(re.findall(r"WARPGROUP\.DEPBAR", machine_code(cubin))) == 2 * waits + last


# The arithmetic, in the kernel's text

MASKS, ROW_TILES = "kernels/cute/columns.py", "kernels/cute/row_tiles.py"


def shifted(x: int, by: int) -> int:
    """As PTX shifts 32 bits: to 0 from 32 on."""
    return x << by & (1 << 32) - 1 if by < 32 else 0


@pytest.mark.parametrize("rows", [64, 80, 128])
def test_bits_are_the_elements_of_a_thread(rows: int) -> None:
    """A thread has rows 0, 1, 8, 9, 16, … of a tile, from its first."""
    before = plain(ROW_TILES, "elements_before")
    hidden = plain(ROW_TILES, "hidden_elements", shifted=shifted, elements_before=before)
    own = [8 * (c // 2) + c % 2 for c in range(rows // 4)]
    for start in range(-9, rows + 9):
        for stop in [start - 5, *range(start, rows + 9), 1 << 30]:
            expected = sum(1 << c for c, row in enumerate(own) if start <= row < stop)
            assert hidden(start, stop, rows) & (1 << len(own)) - 1 == expected, (start, stop)


@pytest.mark.parametrize("keys_each", [48, 56])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("offset", [None, 0, 30, 100])
def test_lanes_find_each_others_elements(keys_each: int, left: bool, offset: int | None) -> None:
    """Past head_dim 128 a lane finds the bits of two keys, of which others have the elements: all that is hidden, no more."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator, keys = torch.Generator().manual_seed(seed), 4 * keys_each - 13
    first, shift = offset or 0, keys - 200 if offset is None else offset
    mask = drawn(1, 200 + first, keys, True, generator).resolve(200 + first, keys)
    vectors = [t[0, 0].tolist() for t in mask.vectors]
    shown = masks_dense(mask, 200 + first, keys)[0, 0, first:]
    band = torch.arange(keys)[None] - shift - torch.arange(200)[:, None]
    shown = shown & (band <= 0) & (band >= -70 if left else band < 1000)
    arch = SimpleNamespace()
    names = {
        "cute": SimpleNamespace(arch=arch), "Int64": int, "QUERIES": 16, "Float32": SimpleNamespace(inf=math.inf),
        "shifted": shifted, "in_tile": plain(MASKS, "in_tile"), "intervals": lambda _, at: [t[at] for t in vectors],
    }  # fmt: skip
    file = "attention/hopper/backward_roles.py"
    find, hide = (plain(file, f"RolesBackward.{name}", **names) for name in ("find_hidden", "hide"))
    kernel = SimpleNamespace(
        config=SimpleNamespace(right=True, left=left, q_offset=offset is not None),
        tile_m=64,
        tile_n=2 * keys_each,
        keys_each=keys_each,
        step_word=int,
    )
    columns = SimpleNamespace(vectors=[SimpleNamespace(shape=(1, 1, keys))])
    for m, warp, n_block, role in product(range(3), range(4), range(2), range(2)):
        lanes = [SimpleNamespace(role=role, row=16 * warp + i // 4, hidden_bits=[0]) for i in range(32)]
        given = SimpleNamespace(columns=columns, left=70, right=0)
        shared = SimpleNamespace(words=[0, 0, 0, n_block])
        work = SimpleNamespace(given=given, shared=shared, seqlen_k=keys, shift=shift)
        for i, r in enumerate(lanes):
            arch.lane_idx = lambda i=i: i
            find(kernel, r, work, m, 0)
        for i, r in enumerate(lanes):
            arch.lane_idx = lambda i=i: i
            arch.shuffle_sync = lambda _, source, lanes=lanes: lanes[source].hidden_bits[0]
            r.rows_s = dict.fromkeys(product(range(2), range(keys_each // 4)), 0.0)
            hide(kernel, r)
            for (half, c), score in r.rows_s.items():
                row = 64 * m + r.row + 8 * half
                key = (2 * n_block + role) * keys_each + i % 4 * 2 + c // 2 * 8 + c % 2
                if row < 200:
                    assert (score == 0.0) == bool(key < keys and shown[row, key]), (row, key)


def test_walk_classifies_as_tiles_do() -> None:
    """Hidden, partial and full tiles, the runs of hidden ones, and where keys that nobody sees may be."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    hides_all, hides_some, may_hold_dead = (plain(MASKS, name) for name in ("hides_all", "hides_some", "may_hold_dead"))
    hidden_runs = plain(ROW_TILES, "hidden_runs", choose=choose, FAR=1 << 30)
    generator = torch.Generator().manual_seed(seed)
    for causal in (False, True):
        mask = drawn(3, 400, 1100, causal, generator).resolve(400, 1100)._replace(right=None)
        bounds = tiles.column_bounds(mask, 400, 1100, 128)
        edges = tiles.block_edges(1100, 128)
        dead = ~masks_dense(mask, 400, 1100).any(2)
        for tile_m in (64, 80):
            for m in range(0, 400, tile_m):
                stop = min(m + tile_m, 400)
                classes = tiles.classify_row_block(bounds, edges, m, stop, None, None, 400, 1100)[0]
                for head in range(3):
                    for n, extrema in enumerate(bounds[0, head].tolist()):
                        hidden = hides_all(extrema, m, stop)
                        assert hidden == (classes[head, n] == tiles.HIDDEN)
                        assert hidden or hides_some(extrema, m, stop) == (classes[head, n] == tiles.PARTIAL)
                        a, b, c, d = hidden_runs(extrema, 400, tile_m)
                        assert a <= b <= c <= d
                        assert hidden == (a <= m // tile_m < b or c <= m // tile_m < d)
                        if dead[0, head, n * 128 : n * 128 + 128].any():
                            assert may_hold_dead(extrema, 400)


def masks_dense(mask: Any, seqlen_q: int, seqlen_k: int) -> Tensor:
    """What is visible, by definition: bool (batch|1, heads|1, seqlen_q, seqlen_k)."""
    row = torch.arange(seqlen_q)[:, None]
    lts, lte, uts, ute = (t[:, :, None] for t in mask.vectors)
    return ~((lts <= row) & (row < lte)) & ~((uts <= row) & (row < ute))


def test_keys_that_no_query_sees() -> None:
    """By their four numbers and the rows that the band leaves them."""
    sees_none = plain(MASKS, "sees_none", choose=choose)
    ends = [-2, 0, 3, 5, 9, 12]
    for first, end in ((0, 9), (3, 7), (5, 5), (8, 2)):
        for lts in ends:
            for lte in ends:
                for uts in ends:
                    for ute in ends:
                        shown = [row for row in range(first, end) if not (lts <= row < lte or uts <= row < ute)]
                        assert sees_none(first, end, lts, lte, uts, ute) == (not shown)


def test_extrema_of_every_block_that_a_tile_touches() -> None:
    blocks_of = plain(MASKS, "blocks_of", gcd=math.gcd, BLOCK=64)
    for keys in (64, 80, 96, 112, 128):
        touched = max((n * keys + keys - 1) // 64 - n * keys // 64 + 1 for n in range(64))
        assert blocks_of(keys) == touched
