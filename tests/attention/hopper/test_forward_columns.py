"""The compiled forward kernels under column masks, played through: which tiles they multiply, and the bits of partial tiles."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from tests.attention.hopper.played import Claims, choose, chunk_of, forward
from tests.attention.hopper.test_forward_barriers import multiplied
from tests.compiled import Built, machine_code
from tests.sm90.core import Run
from tests.sm90.lanes import LANES, lane
from tests.sm90.machine import Machine
from tests.sm90.mutants import check_faults
from tests.sm90.ptx import Instruction
from tests.sm90.state import SHARED_START, Warp
from warploom import masks
from warploom.attention.features import Features
from warploom.attention.hopper import schedule
from warploom.attention.hopper.config import ForwardConfig
from warploom.attention.hopper.plan import config, walked
from warploom.masks.intervals import ResolvedMask
from warploom.masks.tiles import FULL, HIDDEN, TileClasses
from warploom.masks.visible import visible
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

BF16 = torch.bfloat16
CORE = {
    "head_dim 128, causal": config(Features(BF16, 128, 128, right=True, columns=True), long=True),
    "head_dim 64": config(Features(BF16, 64, 64, columns=True), long=True),
    "head_dim 64, window, sink": config(Features(BF16, 64, 64, right=True, left=True, columns=True, sink=True), long=True),
    "head_dim 256, window, softcap, sink": config(
        Features(BF16, 256, 256, right=True, left=True, columns=True, softcap=True, sink=True), long=True
    ),
    "head_dim 64, causal, chunks": config(Features(BF16, 64, 64, right=True, columns=True, q_offset=True), long=True),
    "head_dim 128, window, chunks": config(
        Features(BF16, 128, 128, right=True, left=True, columns=True, q_offset=True), long=True
    ),
}
LEFT = 90  # of the window


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


@pytest.mark.parametrize("name", CORE)
def test_resources(name: str, built: Built) -> None:
    variant, facts, cubin = built[name]
    assert facts["stack"] == 0, "registers spill"
    assert facts["registers"] <= 65536 // (128 * (variant.warpgroups + 1))
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and "LDL" not in listing
    # Two rows of a tile's columns a thread, of a first tile and of those behind it, hidden by units that make no maxima.
    assert listing.count("FSEL") < variant.tile_n // 2


class Watching(Machine):
    """Keeps the words that consumers read of the masks, in their order: by (warp, row of the tile, lane of the quad)."""

    start: int  # of the masks, in bytes
    rows: int  # of a tile
    span: int  # of a mask, whose two stages lie together
    read: dict[tuple[int, int, int], list[int]]

    def watch(self, variant: ForwardConfig) -> None:
        """Before it runs: where a variant's masks stand."""
        owners = variant.warpgroups if variant.apart else 1
        self.rows, self.span, self.read = variant.tile_m, variant.tile_m // owners, {}
        assert self.span == walked(variant)  # as explain() counts tiles
        barriers = 2 * variant.warpgroups + 5 * variant.stages + 5 + 4 * owners
        words = (12 if variant.varlen else 8 + variant.q_offset) + 2 * owners if variant.apart else 12
        self.start = -(-(-(-8 * barriers // 16) * 16 + 2 * 4 * words) // 16) * 16

    def _ld_shared(self, x: Instruction) -> Run:
        load = super()._ld_shared(x)
        targets = x.operands[0] if isinstance(x.operands[0], tuple) else (x.operands[0],)

        def watched(warp: Warp, mask: int) -> bool:
            done = load(warp, mask)
            where = self.address(warp, str(x.operands[1]))
            size = 2 * 16 * self.rows
            for i in range(LANES):
                at = lane(where, i) - SHARED_START - self.start
                if warp.number >= 4 and mask >> i & 1 and 0 <= at < size:
                    row, quarter = divmod(at // 4, 4)
                    key = warp.number, row // (2 * self.span) * self.span + row % self.span, quarter
                    self.read.setdefault(key, []).append(lane(self.value(warp, str(targets[0])), i))
            return done

        return watched


def drawn(kind: str, seqlen_q: int, seqlen_k: int, draw: random.Random) -> ResolvedMask:
    """A mask's vectors."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))

    def rows(low: int, high: int, heads: int = 1) -> torch.Tensor:
        return torch.randint(low, high + 1, (1, heads, seqlen_k), generator=generator, dtype=torch.int32)

    if kind == "documents":
        mask = masks.Document(lengths=[seqlen_k // 3, seqlen_k - seqlen_k // 3 - 70, 70], causal=False)
        return mask.resolve(seqlen_k, seqlen_k, torch.device("cpu"))
    if kind == "eviction":
        return ResolvedMask(None, None, rows(0, seqlen_q), None, None, None)
    if kind == "blocks":  # whole tiles are hidden, others are not touched
        lts = (torch.arange(seqlen_k) // 128 * 37 % 3 * (seqlen_q // 2)).int()[None, None]
        return ResolvedMask(None, None, lts, lts + seqlen_q // 2, None, None)
    if kind == "own heads":
        return ResolvedMask(None, None, rows(0, seqlen_q, 2), rows(0, seqlen_q, 2), None, None)
    four = [rows(-3, seqlen_q + 3) for _ in range(4)]
    if kind == "alike":  # 32 rows see the same columns, but for some columns
        some = rows(0, 200) == 0
        four = [torch.where(some, t, t // 32 * 32).int() for t in four]
    return ResolvedMask(None, None, *four)


@pytest.mark.parametrize("kind", ["documents", "eviction", "blocks", "four vectors", "alike", "own heads"])
@pytest.mark.parametrize("name", CORE)
def test_tiles_and_bits(name: str, kind: str, built: Built) -> None:
    """Hidden tiles are not multiplied, others once; the bits of partial tiles are those of the dense mask."""
    variant, traced, seed = CORE[name], built.traced(name), random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    seqlen_q, seqlen_k = (400, 400) if kind == "documents" else (draw.randrange(1, 420), draw.randrange(1, 600))
    # With offsets the queries are a chunk of as many more; what a device's memory says may be anything.
    offset = draw.choice((-5, 0, 7, 64, 150, 390, 600, 1 << 29, 2**31 - 1)) if variant.q_offset else 0
    whole = seqlen_q + min(max(offset, 0), 600)
    mask = drawn(kind, whole, seqlen_k, draw)
    mask = mask._replace(left=LEFT if variant.left else None, right=0 if variant.right else None)
    launch = forward(traced, variant, seqlen_q, seqlen_k, 1, left=LEFT if variant.left else 0, mask=mask, offset=offset)
    mask = chunk_of(mask, offset, seqlen_q, seqlen_k) if variant.q_offset else mask
    machine = Watching(traced.kernel, launch, seed)
    machine.watch(variant)
    machine.run()

    span, heads = machine.span, range(2)  # rows that are classified together
    counted = TileClasses.of(mask, seqlen_q, seqlen_k, span, variant.tile_n, "cpu")
    blocks = TileClasses.of(mask, seqlen_q, seqlen_k, span, 64, "cpu")
    last = blocks.hidden.shape[1] - 1
    classes, of_blocks = ([c.matrix(0, min(h, last)) for h in heads] for c in (counted, blocks))
    tiles = range(classes[0].shape[0]), range(classes[0].shape[1])
    dense = torch.zeros(2, len(tiles[0]) * span, len(tiles[1]) * variant.tile_n, dtype=torch.bool)
    shown = visible(mask, torch.arange(seqlen_q), torch.arange(seqlen_k), seqlen_k - seqlen_q)[0]
    dense[:, :seqlen_q, :seqlen_k] = shown
    # What bounds of blocks of 64 columns and of all columns of a tile say may differ: a tile is hidden only if no row sees it.
    listed = {(row // span, first // variant.tile_n, head) for (row, head), first in multiplied(machine)}
    seen = {
        (m, n, head)
        for m, n, head in product(*tiles, heads)
        if dense[head, m * span : (m + 1) * span, n * variant.tile_n : (n + 1) * variant.tile_n].any()
    }
    # Of a window of chunks the last one may be listed too, where a query tile's keys would begin in it, past those there are.
    spare = tiles[1][-1] if variant.q_offset and variant.left else None
    assert seen <= listed
    assert listed <= {(m, n, h) for m, n, h in product(*tiles, heads) if classes[h][m, n] != HIDDEN or n == spare}
    assert sorted(multiplied(machine)) == sorted(
        ((m * span + 64 * g, head), n * variant.tile_n) for m, n, head in listed for g in range(span // 64)
    )
    each, columns = variant.tile_n // 64, variant.tile_n // 4
    plain = {
        (m, n, head)
        for m, n, head in listed
        if (n + 1) * variant.tile_n <= seqlen_k and (of_blocks[head][m, n * each :][:each] == FULL).all()
    }
    for owner in range(variant.tile_m // span):
        own = sorted({m for m, _, _ in listed if m % (variant.tile_m // span) == owner}, reverse=True)
        partial = [(m, n, head) for m in own for head in heads for n in _of(listed, m, head) if (m, n, head) not in plain]
        read = {key: words for key, words in machine.read.items() if key[1] // span == owner}
        assert {len(words) for words in read.values()} == ({len(partial)} if partial else set())
        for i, (m, n, head) in enumerate(partial):
            part = dense[head, m * span : (m + 1) * span, n * variant.tile_n : (n + 1) * variant.tile_n]
            for (_, row, lane_of_quad), words in read.items():
                row %= span
                mine = [8 * (c // 2) + 2 * lane_of_quad + c % 2 for c in range(columns)]
                if m * span + row < seqlen_q:
                    assert [words[i] >> c & 1 for c in range(columns)] == part[row, mine].int().tolist(), (m, n, row)
    assert all(dense[head, m * span : seqlen_q, n * variant.tile_n :][:span, : variant.tile_n].all() for m, n, head in plain)


@pytest.mark.parametrize("counts", [(150, 100, 20), (20, 100, 150), (20, 100, 20)])
def test_more_lists_than_one_look_finds(counts: tuple[int, ...], built: Built) -> None:
    """Past 32 lists of 32 key tiles: the words of a list that waits for the next one are kept while others are looked at.

    The last list, the first one or both have tiles that only some warpgroups see; in the last case one sees none at all.
    """
    variant, traced, seed = CORE["head_dim 64"], built.traced("head_dim 64"), random.randrange(2**32)
    print(f"seed {seed}")
    seqlen_q, seqlen_k = 150, (32 * 32 + 6) * variant.tile_n
    shown = dict(zip((2, 40, 1029), counts, strict=True))  # queries that see a key tile, from the first on: of lists 0, 1, 32
    lts = torch.zeros(1, 1, seqlen_k, dtype=torch.int32)
    for n, past in shown.items():
        lts[..., n * variant.tile_n : (n + 1) * variant.tile_n] = past
    launch = forward(traced, variant, seqlen_q, seqlen_k, 1, mask=ResolvedMask(None, None, lts, None, None, None))
    machine = Watching(traced.kernel, launch, seed)
    machine.watch(variant)
    machine.run()
    assert sorted(multiplied(machine)) == sorted(
        ((row, head), n * variant.tile_n) for n, past in shown.items() for row in range(0, past, 64) for head in range(2)
    )


@pytest.mark.parametrize(("m_blocks", "heads", "section", "last"), [(7, 4, 2, 3), (5, 3, 2, 0), (2, 5, 5, 1), (1, 6, 4, 0)])
def test_the_first_tiles_of_all_heads_come_last(m_blocks: int, heads: int, section: int, last: int, built: Built) -> None:
    """Every tile comes once, within its part the last rows first; without ``last`` ones in the order of sections."""
    from warploom.attention.hopper.forward_columns import masked_tile

    order = [masked_tile(i, m_blocks, heads, section, last, choose) for i in range(m_blocks * heads)]
    upper = (m_blocks - last) * heads
    sections = [schedule.sections(i, m_blocks - last, heads, section, choose) for i in range(upper)]
    assert order[:upper] == [(m_blocks - 1 - row, head) for row, head in sections]
    assert order[upper:] == [(row, head) for row in reversed(range(last)) for head in range(heads)]
    assert len({*order}) == m_blocks * heads


@pytest.mark.parametrize(("blocks", "last"), [(2, 0), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", ["head_dim 128, causal", "head_dim 64"])
def test_blocks_share_tiles(name: str, blocks: int, last: int, built: Built) -> None:
    """Each tile once, whoever claims it; some see no key."""
    variant, traced, seed = CORE[name], built.traced(name), random.randrange(2**32)
    print(f"seed {seed}")
    seqlen_q, seqlen_k = 2 * variant.tile_m + 70, 500
    lts = torch.full((1, 1, seqlen_k), seqlen_q - variant.tile_m, dtype=torch.int32)
    lts[..., : variant.tile_n] = variant.tile_m
    mask = ResolvedMask(None, 0 if variant.right else None, lts, None, None, None)
    launch = forward(traced, variant, seqlen_q, seqlen_k, blocks, mask=mask, split=last)
    machine = Machine(traced.kernel, launch, seed, blocks).run()
    span = variant.tile_m // (variant.warpgroups if variant.apart else 1)
    classes = TileClasses.of(mask, seqlen_q, seqlen_k, span, variant.tile_n, "cpu").matrix()
    assert sorted(multiplied(machine)) == sorted(
        ((m * span + 64 * g, head), n * variant.tile_n)
        for m, n in (classes != HIDDEN).nonzero().tolist()
        for g in range(span // 64)
        for head in range(2)
    )


def test_a_tile_is_claimed_before_the_last_keys_of_the_one_before(built: Built) -> None:
    """No earlier, or other blocks would have nothing to do at a call's end."""
    variant, traced, seed = CORE["head_dim 64"], built.traced("head_dim 64"), random.randrange(2**32)
    print(f"seed {seed}")
    seqlen_q, n_blocks = 3 * variant.tile_m, 5
    seqlen_k = n_blocks * variant.tile_n
    mask = ResolvedMask(None, None, torch.full((1, 1, seqlen_k), seqlen_q, dtype=torch.int32), None, None, None)
    machine = Claims(traced.kernel, forward(traced, variant, seqlen_q, seqlen_k, 1, mask=mask), seed).run()
    machine.check(variant, [n_blocks] * (3 * 2))


def _of(listed: set[tuple[int, int, int]], m: int, head: int) -> list[int]:
    """Key tiles of a head's query tile, in the order of the walk."""
    return sorted((n for row, n, of in listed if (row, of) == (m, head)), reverse=True)


@pytest.mark.parametrize("name", ["head_dim 128, causal", "head_dim 64"])
def test_faults_are_noticed(name: str, built: Built) -> None:
    """Wrong counts, parities, bytes and numbers, and what is left out: a sample of where this problem comes by."""
    variant, traced = CORE[name], built.traced(name)
    mask = drawn("four vectors", 300, 500, random.Random(0))._replace(right=0 if variant.right else None)
    check_faults(traced.kernel, forward(traced, variant, 300, 500, 1, mask=mask))
