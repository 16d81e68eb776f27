"""The compiled forward kernels played through: no order of their warps hangs or races, and every tile is multiplied once."""

from __future__ import annotations

import random

import pytest

from tests.attention.hopper.played import Claims, Sequences, forward, tags, visible
from tests.attention.hopper.test_compile import CORE
from tests.compiled import Built
from tests.sm90.machine import Machine
from tests.sm90.mutants import check_barriers, check_faults
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

MAPS = "q", "k", "v"
LONG, TURNS, PACKED = "head_dim 128, causal", "head_dim 64", "head_dim 64, packed, causal"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


def multiplied(machine: Machine) -> list[tuple[tuple[int, ...], int]]:
    """(row, head) of 64 queries and first key of each product; the values' tiles are those of the keys, in their order."""
    first = min(machine.launch.boxes)
    found = []
    for products in tags(machine, MAPS, first):
        queries: tuple[int, ...] = ()
        keys, values = [], []
        for name, at in products:
            if name == "q":
                queries = at[:2]
            elif name == "k":
                keys.append(at[0])
                found.append((queries, at[0]))
            else:
                values.append(at[0])
        assert keys == values, "P of one tile of keys meets another's values"
    return found


def wanted(config, seqlen_q: int, seqlen_k: int, heads: int, left: int | None) -> list[tuple[tuple[int, ...], int]]:  # type: ignore[no-untyped-def]
    return sorted(
        ((row, head), n)
        for head in range(heads)
        for row in range(0, seqlen_q, 64)
        for n in range(0, seqlen_k, config.tile_n)
        if visible(range(row, row + 64), range(n, n + config.tile_n), seqlen_q, seqlen_k, config.right, left)
    )


# How many keys count is a matter of slopes and norms, numbers that are not played: `test_near.py` has it.
@pytest.mark.parametrize("name", [name for name, config in CORE.items() if not config.reaches])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "blocks"), [(300, 500, 2), (450, 130, 3), (70, 0, 1)])
def test_no_hang_and_no_race(name: str, seqlen_q: int, seqlen_k: int, blocks: int, built: Built) -> None:
    config, traced, seed = CORE[name], built.traced(name), random.randrange(2**32)
    print(f"seed {seed}")
    left = 90 if config.left else None
    launch = forward(traced, config, seqlen_q, seqlen_k, blocks, left=left or 0)
    machine = Machine(traced.kernel, launch, seed, blocks).run()
    found = multiplied(machine)
    assert len(found) == len(set(found)) or config.pack_gqa or config.varlen
    if not config.pack_gqa and not config.varlen:
        assert sorted(found) == wanted(config, seqlen_q, seqlen_k, 2, left)


@pytest.mark.parametrize(("name", "seqlen_q", "split"), [(LONG, 128, 2), (TURNS, 384, 1)])
def test_pieces_of_split_tiles(name: str, seqlen_q: int, split: int, built: Built) -> None:
    """The key tiles of the query tiles that are left of rounds of three blocks are dealt out to these: each still once."""
    config, traced, seed = CORE[name], built.traced(name), random.randrange(2**32)
    print(f"seed {seed}")
    launch = forward(traced, config, seqlen_q, 700, 3, split=split)
    machine = Machine(traced.kernel, launch, seed, 3).run()
    assert sorted(multiplied(machine)) == wanted(config, seqlen_q, 700, 2, None)


def test_warpgroups_take_turns(built: Built) -> None:
    """Whatever their rows see, all issue as many products, one after the other."""
    config, traced = CORE[TURNS], built.traced(TURNS)
    assert config.pv_wait == "pingpong"
    launch = forward(traced, config, 200, 600, 1)
    machine = Machine(traced.kernel, launch, 0).run()
    counts = {barrier.name: barrier.opened for barrier in machine.blocks[0].named.values() if barrier.name[-2:] != " 0"}
    tiles = 2 * 2 * -(-600 // config.tile_n)
    assert set(counts.values()) == {tiles} and len(counts) == config.warpgroups


def test_a_packed_tile_is_claimed_before_the_last_keys_of_the_one_before(built: Built) -> None:
    config, traced, seed = CORE[PACKED], built.traced(PACKED), random.randrange(2**32)
    print(f"seed {seed}")
    sequences = Sequences([0, 3 * config.tile_m], [0, 5 * config.tile_n], [5 * config.tile_n])
    launch = forward(traced, config, 3 * config.tile_m, 5 * config.tile_n, 1, sequences=sequences)
    shift = 5 * config.tile_n - 3 * config.tile_m
    seen = [-(-((m + 1) * config.tile_m + shift) // config.tile_n) for m in (2, 2, 1, 1, 0, 0)]
    Claims(traced.kernel, launch, seed).run().check(config, seen)


def test_each_barrier_is_needed(built: Built) -> None:
    """A barrier that lets everybody pass is noticed, each in turn."""
    config, traced = CORE[LONG], built.traced(LONG)
    launch = forward(traced, config, 300, 600, 1)
    block = Machine(traced.kernel, launch, 0).run().blocks[0]
    assert len(block.mbarriers) == 2 * config.warpgroups + 4 * config.stages + 4
    check_barriers(traced.kernel, launch, [*block.mbarriers, *(b.name for b in block.named.values())])


def test_faults_are_noticed(built: Built) -> None:
    """Wrong counts, parities, bytes and numbers, and what is left out: a sample of where this problem comes by."""
    config, traced = CORE[LONG], built.traced(LONG)
    check_faults(traced.kernel, forward(traced, config, 300, 400, 1))
