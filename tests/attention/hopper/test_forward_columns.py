"""The compiled forward kernels under column masks, played through: which tiles they multiply, and the bits of partial tiles."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.attention.hopper.played import forward
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
from warploom.attention.hopper.plan import config
from warploom.masks.intervals import ResolvedMask
from warploom.masks.tiles import FULL, HIDDEN, TileClasses
from warploom.masks.visible import visible
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

BF16 = torch.bfloat16
CORE = {
    "head_dim 128, causal": config(Features(BF16, 128, 128, right=True, columns=True), long=True),
    "head_dim 64": config(Features(BF16, 64, 64, columns=True), long=True),
    "head_dim 256, window, softcap, sink": config(
        Features(BF16, 256, 256, right=True, left=True, columns=True, softcap=True, sink=True), long=True
    ),
}
LEFT = 90  # of the window


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with Built(CORE, "sm_90a", tmp_path_factory) as built:
        yield built


@pytest.mark.parametrize("name", CORE)
def test_resources(name: str, built: Built) -> None:
    variant, facts, cubin = built[name]
    assert facts["stack"] == 0, "registers spill"
    assert facts["registers"] <= 65536 // (128 * (variant.warpgroups + 1))
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and "LDL" not in listing


class Watching(Machine):
    """Keeps the words that consumers read of the masks, in their order: by (warp, row of the tile, lane of the quad)."""

    start: int  # of the masks, in bytes
    rows: int  # of a tile
    read: dict[tuple[int, int, int], list[int]]

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
                    word = at // 4 % (4 * self.rows)
                    key = warp.number, word // 4, word % 4
                    self.read.setdefault(key, []).append(lane(self.value(warp, str(targets[0])), i))
            return done

        return watched


def drawn(kind: str, seqlen_q: int, seqlen_k: int, draw: random.Random) -> ResolvedMask:
    """A mask's vectors."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))

    def rows(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (1, 1, seqlen_k), generator=generator, dtype=torch.int32)

    if kind == "documents":
        mask = masks.Document(lengths=[seqlen_k // 3, seqlen_k - seqlen_k // 3 - 70, 70], causal=False)
        return mask.resolve(seqlen_k, seqlen_k, torch.device("cpu"))
    if kind == "eviction":
        return ResolvedMask(None, None, rows(0, seqlen_q), None, None, None)
    if kind == "blocks":  # whole tiles are hidden, others are not touched
        lts = (torch.arange(seqlen_k) // 128 * 37 % 3 * (seqlen_q // 2)).int()[None, None]
        return ResolvedMask(None, None, lts, lts + seqlen_q // 2, None, None)
    four = [rows(-3, seqlen_q + 3) for _ in range(4)]
    return ResolvedMask(None, None, *four)


@pytest.mark.parametrize("kind", ["documents", "eviction", "blocks", "four vectors"])
@pytest.mark.parametrize("name", CORE)
def test_tiles_and_bits(name: str, kind: str, built: Built) -> None:
    """Hidden tiles are not multiplied, others once; the bits of partial tiles are those of the dense mask."""
    variant, traced, seed = CORE[name], built.traced(name), random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    seqlen_q, seqlen_k = (400, 400) if kind == "documents" else (draw.randrange(1, 420), draw.randrange(1, 600))
    mask = drawn(kind, seqlen_q, seqlen_k, draw)
    mask = mask._replace(left=LEFT if variant.left else None, right=0 if variant.right else None)
    launch = forward(traced, variant, seqlen_q, seqlen_k, 1, left=LEFT if variant.left else 0, mask=mask)
    machine = Watching(traced.kernel, launch, seed)
    machine.rows, machine.read = variant.tile_m, {}
    barriers = 2 * variant.warpgroups + 5 * variant.stages + 8
    machine.start = -(-8 * barriers // 16) * 16 + 2 * 4 * 12
    machine.run()

    classes = TileClasses.of(mask, seqlen_q, seqlen_k, variant.tile_m, variant.tile_n, "cpu").matrix()
    dense = torch.zeros(classes.shape[0] * variant.tile_m, classes.shape[1] * variant.tile_n, dtype=torch.bool)
    dense[:seqlen_q, :seqlen_k] = visible(mask, torch.arange(seqlen_q), torch.arange(seqlen_k), seqlen_k - seqlen_q)[0, 0]
    # What bounds of blocks of 64 columns and of all columns of a tile say may differ: a tile is hidden only if no row sees it.
    listed = {(row // variant.tile_m, first // variant.tile_n) for (row, _), first in multiplied(machine)}
    seen = {
        (m, n)
        for m in range(classes.shape[0])
        for n in range(classes.shape[1])
        if dense[m * variant.tile_m : (m + 1) * variant.tile_m, n * variant.tile_n : (n + 1) * variant.tile_n].any()
    }
    assert seen <= listed <= {(m, n) for m, n in (classes != HIDDEN).nonzero().tolist()}
    assert sorted(multiplied(machine)) == sorted(
        ((m * variant.tile_m + 64 * g, head), n * variant.tile_n)
        for m, n in listed
        for g in range(variant.warpgroups)
        for head in range(2)
    )
    blocks = TileClasses.of(mask, seqlen_q, seqlen_k, variant.tile_m, 64, "cpu").matrix()
    each, columns = variant.tile_n // 64, variant.tile_n // 4
    order = [(m, n) for m in sorted({m for m, _ in listed}, reverse=True) for _ in range(2) for n in _of(listed, m)]
    plain = {(m, n) for m, n in listed if (n + 1) * variant.tile_n <= seqlen_k and (blocks[m, n * each :][:each] == FULL).all()}
    partial = [at for at in order if at not in plain]
    assert {len(words) for words in machine.read.values()} == ({len(partial)} if partial else set())
    for i, (m, n) in enumerate(partial):
        part = dense[m * variant.tile_m : (m + 1) * variant.tile_m, n * variant.tile_n : (n + 1) * variant.tile_n]
        for (_, row, lane_of_quad), words in machine.read.items():
            own = [8 * (c // 2) + 2 * lane_of_quad + c % 2 for c in range(columns)]
            if m * variant.tile_m + row < seqlen_q:
                assert [words[i] >> c & 1 for c in range(columns)] == part[row, own].int().tolist(), (m, n, row)
    assert all(
        dense[m * variant.tile_m : seqlen_q, n * variant.tile_n :][: variant.tile_m, : variant.tile_n].all() for m, n in plain
    )


def _of(listed: set[tuple[int, int]], m: int) -> list[int]:
    """Key tiles of a query tile, in the order of the walk."""
    return sorted((n for row, n in listed if row == m), reverse=True)


def test_faults_are_noticed(built: Built) -> None:
    """Wrong counts, parities, bytes and numbers, and what is left out: a sample of where this problem comes by."""
    variant, traced = CORE["head_dim 128, causal"], built.traced("head_dim 128, causal")
    mask = drawn("four vectors", 300, 500, random.Random(0))._replace(right=0)
    check_faults(traced.kernel, forward(traced, variant, 300, 500, 1, mask=mask))
