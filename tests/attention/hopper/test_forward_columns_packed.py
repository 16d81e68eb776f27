"""The compiled forward kernels under column masks of packed sequences, played through.

Which tiles they multiply, the bits of partial ones, which values they clear, and where they store.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.attention.hopper.played import Sequences, forward, tags
from tests.attention.hopper.test_forward_barriers import MAPS
from tests.attention.hopper.test_forward_columns import LEFT, Watching
from tests.compiled import Built, machine_code
from tests.sm90.core import Run
from tests.sm90.lanes import LANES, lane
from tests.sm90.mutants import check_faults
from tests.sm90.ptx import Instruction
from tests.sm90.state import SHARED_START, Warp
from warploom.attention.features import Features
from warploom.attention.hopper.plan import config
from warploom.masks.intervals import ResolvedMask
from warploom.masks.tiles import FULL, HIDDEN, TileClasses
from warploom.masks.visible import visible
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

BF16 = torch.bfloat16
CORE = {
    "head_dim 128, causal": config(Features(BF16, 128, 128, right=True, columns=True, varlen=True), long=True),
    "head_dim 64, used": config(Features(BF16, 64, 64, columns=True, varlen=True, used=True), long=True),
    "head_dim 256, window, softcap, sink, used": config(
        Features(BF16, 256, 256, right=True, left=True, columns=True, varlen=True, used=True, softcap=True, sink=True),
        long=True,
    ),
}
# Of all features together registers are few: one more value kept through the loop spilled.
FULL_HOUSE = {
    "head_dim 256, everything": config(
        Features(
            BF16, 256, 256, right=True, left=True, columns=True, varlen=True, used=True, softcap=True, sink=True, dropout=True
        ),
        long=True,
    ),
    "head_dim 64, window, sink, used": config(
        Features(BF16, 64, 64, right=True, left=True, columns=True, varlen=True, used=True, sink=True), long=True
    ),
}
RAGGED = 1 << 24  # rows of the tensor map's packed sequences, of which each is the end
HEADS, OUT, LSE = 2, 4 << 32, 5 << 32  # addresses of the results


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE | FULL_HOUSE, "sm_90a", tmp_path_factory)


@pytest.mark.parametrize("name", [*CORE, *FULL_HOUSE])
def test_resources(name: str, built: Built) -> None:
    variant, facts, cubin = built[name]
    assert facts["stack"] == 0, "registers spill"
    assert facts["registers"] <= 65536 // (128 * (variant.warpgroups + 1))
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and "LDL" not in listing and "STL" not in listing


class Clearing(Watching):
    """Keeps which rows of a tile of values are cleared too, in their order."""

    values: int  # where the tiles begin, in bytes
    tile: int  # bytes of one
    wide: int  # bytes of a row of it that lie together
    keys: int
    cleared: list[int]

    def _st_shared(self, x: Instruction) -> Run:
        store = super()._st_shared(x)

        def noted(warp: Warp, mask: int) -> bool:
            where = self.address(warp, str(x.operands[0]))
            places = {lane(where, i) - SHARED_START - self.values for i in range(LANES) if mask >> i & 1}
            if min(places) >= 0:
                rows = {at % self.tile % (self.keys * self.wide) // self.wide for at in places}
                assert len(rows) == 1 and len(places) == LANES
                if self.cleared[-1:] != [*rows]:
                    self.cleared += rows
            return store(warp, mask)

        return noted


# Queries, keys, those that count; the tokens behind the last sequence are of none.
LENGTHS = {
    "empty ones": ([0, 150, 70, 5, 0, 210], [40, 300, 0, 130, 0, 129], [40, 260, 0, 130, 0, 0]),
    "long": ([90], [4500], [4300]),
}


def drawn(kind: str, sequences: Sequences, total_k: int, draw: random.Random) -> ResolvedMask:
    """Vectors of each head."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    rows = torch.zeros(total_k, dtype=torch.int64)
    for n in range(len(sequences.used)):
        rows[sequences.starts_k[n] : sequences.starts_k[n + 1]] = sequences.starts_q[n + 1] - sequences.starts_q[n]

    def some(low: int, more: int) -> torch.Tensor:
        share = torch.rand((1, HEADS, total_k), generator=generator)
        return (low + share * (rows + more - low + 1)).int()

    if kind == "eviction":
        return ResolvedMask(None, None, some(0, 0), None, None, None)
    if kind == "blocks":  # whole tiles are hidden, columns among them from all rows, others are not touched
        lts = (torch.arange(total_k) // 128 * 37 % 3 * (rows // 2)).int().expand(1, HEADS, -1).clone()
        lts[:, 1] = (torch.arange(total_k) // 200 * 29 % 2 * rows).int()
        return ResolvedMask(None, None, lts.contiguous(), (lts + (rows + 1) // 2).int(), None, None)
    return ResolvedMask(None, None, *[some(-3, 3) for _ in range(4)])


@pytest.mark.parametrize(
    ("lengths", "kind"), [("empty ones", k) for k in ("eviction", "blocks", "four")] + [("long", "blocks")]
)
@pytest.mark.parametrize("name", CORE)
def test_tiles_and_bits(name: str, lengths: str, kind: str, built: Built) -> None:
    """As of a dense call, in each sequence; nobody looks at what stands where no key counts."""
    variant, traced, seed = CORE[name], built.traced(name), random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    queries, keys, used = LENGTHS[lengths]
    starts_q, starts_k = ([sum(each[:n]) for n in range(len(each) + 1)] for each in (queries, keys))
    sequences = Sequences(starts_q, starts_k, used)
    total_q, total_k = starts_q[-1] + 70, starts_k[-1] + 20
    mask = drawn(kind, sequences, total_k, draw)
    left = LEFT if variant.left else None
    mask = mask._replace(left=left, right=0 if variant.right else None)
    launch = forward(
        traced, variant, total_q, total_k, 1, HEADS, left=left or 0, mask=mask, sequences=sequences,
        watched=range(OUT, LSE + 4 * HEADS * total_q),
    )  # fmt: skip
    machine = Clearing(traced.kernel, launch, seed)
    tile_m, tile_n = variant.tile_m, variant.tile_n
    machine.watch(variant)
    machine.cleared, span = [], machine.span  # rows that are classified together
    owners = tile_m // span
    operands = -(-(machine.start + 2 * 16 * tile_m + 4) // 1024) * 1024
    machine.values = operands + 2 * variant.head_dim * (tile_m + variant.stages * tile_n)
    machine.tile, machine.wide, machine.keys = 2 * tile_n * variant.head_dim_v, 2 * variant.boxes[1], tile_n
    machine.run()

    counts = used if variant.used else keys
    every = {
        ((starts_q[s] + m * span + 64 * g, head), (RAGGED - counts[s] + n * tile_n, starts_k[s] + counts[s])): (s, m, head, n)
        for s in range(len(queries))
        for m in range(-(-queries[s] // tile_m) * owners)
        for g in range(span // 64)
        for head in range(HEADS)
        for n in range(-(-counts[s] // tile_n))
    }
    found = multiplied(machine)
    assert len(found) == len(set(found)) and set(found) <= set(every)
    listed = {every[at] for at in found}
    assert len(found) == len(listed) * span // 64
    words, cleared = [iter(range(10**6)) for _ in range(owners)], []
    for s, rows in enumerate(queries):
        own = slice(starts_k[s], starts_k[s] + counts[s])
        each = mask._replace(**{n: t[..., own].contiguous() for n, t in mask._asdict().items() if isinstance(t, torch.Tensor)})
        if not rows or not counts[s]:
            continue
        tiles = TileClasses.of(each, rows, counts[s], span, tile_n, "cpu")
        blocks = TileClasses.of(each, rows, counts[s], span, 64, "cpu")
        shown = visible(each, torch.arange(rows), torch.arange(counts[s]), counts[s] - rows)[0]
        for m, head in ((m, head) for m in reversed(range(-(-rows // tile_m))) for head in range(HEADS)):
            for n in reversed(range(-(-counts[s] // tile_n))):
                clears = False
                for owner, at in enumerate(range(m * owners, min((m + 1) * owners, -(-rows // span)))):
                    part = shown[head, at * span : (at + 1) * span, n * tile_n : (n + 1) * tile_n]
                    if (s, at, head, n) not in listed:
                        assert not part.any()
                        continue
                    assert tiles.matrix(0, head)[at, n] != HIDDEN
                    classes = blocks.matrix(0, head)[at, n * tile_n // 64 :][: tile_n // 64]
                    if (n + 1) * tile_n <= counts[s] and (classes == FULL).all():
                        assert part.all()
                        continue
                    clears = True
                    of_owner = {key: words for key, words in machine.read.items() if key[1] // span == owner}
                    check_words(of_owner, next(words[owner]), part, tile_n, span)
                dead = ~shown[head, :, n * tile_n : (n + 1) * tile_n].any(0)
                order = [c for i in range(0, tile_n, 32) for c in reversed(range(i, i + 32)) if clears and c < len(dead)]
                cleared += [c for c in order if dead[c]]
    for owner in range(owners):
        assert {len(found) for key, found in machine.read.items() if key[1] // span == owner} <= {next(words[owner])}
    assert machine.cleared == once(cleared)
    chunks = range(0, 2 * variant.head_dim_v, 16)
    stores = {
        OUT + 2 * variant.head_dim_v * (HEADS * row + head) + at
        for row in range(total_q)
        for head in range(HEADS)
        for at in chunks
    }
    assert set(machine.handed) == stores | {LSE + 4 * i for i in range(HEADS * total_q)}


def multiplied(machine: Clearing) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(row, head) of 64 queries, and row and end of the keys' tile, of each product."""
    found = []
    for products in tags(machine, MAPS, min(machine.launch.boxes)):
        queries: tuple[int, ...] = ()
        keys, values = [], []
        for name, at in products:
            if name == "q":
                queries = at[:2]
            elif name == "k":
                keys.append(at)
                found.append((queries, (at[0], at[2])))
            else:
                values.append(at)
        assert keys == values, "P of one tile of keys meets another's values"
    return found


def check_words(read: dict[tuple[int, int, int], list[int]], i: int, part: torch.Tensor, tile_n: int, span: int) -> None:
    """The i-th mask that consumers read is that of the elements ``part`` of ``span`` rows, which may end before the tile."""
    for (_, row, lane_of_quad), words in read.items():
        row %= span
        own = [8 * (c // 2) + 2 * lane_of_quad + c % 2 for c in range(tile_n // 4)]
        if row < part.shape[0]:
            want = [int(part[row, c]) if c < part.shape[1] else 0 for c in own]
            assert [words[i] >> c & 1 for c in range(tile_n // 4)] == want, (i, row)


def once(rows: list[int]) -> list[int]:
    """Without repetitions of the row before, which ``Clearing`` does not see."""
    return [row for i, row in enumerate(rows) if i == 0 or rows[i - 1] != row]


def test_faults_are_noticed(built: Built) -> None:
    """Wrong counts, parities, bytes and numbers, and what is left out: a sample of where this problem comes by."""
    variant, traced = CORE["head_dim 128, causal"], built.traced("head_dim 128, causal")
    sequences = Sequences([0, 0, 140, 300], [0, 30, 330, 470], [30, 300, 140])
    mask = drawn("four", sequences, 480, random.Random(0))._replace(right=0)
    check_faults(traced.kernel, forward(traced, variant, 310, 480, 1, HEADS, mask=mask, sequences=sequences))
