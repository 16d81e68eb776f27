"""The compiled backward kernels played through: no order of their warps hangs or races, and every tile is multiplied once.

Of head_dim 256 the blocks of a cluster exchange dS.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.attention.hopper.played import backward, tags, visible
from tests.attention.hopper.test_compile import BACKWARD
from tests.compiled import Built
from tests.sm90.machine import Machine
from tests.sm90.mutants import check_barriers, check_faults
from tests.sm90.state import SHARED_START, HangError
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

MAPS = "q", "k", "v", "do"
PARTED, PAIR = "head_dim 64", "head_dim 256, causal"
DETERMINISTIC, CLAIMS = "head_dim 128, causal, deterministic", "head_dim 128, causal, short"
# Of named barriers and waits some are made up for by others, which ``REDUNDANT`` names.
HARMLESS = "no named barrier", "another named barrier", "threads", "no wait"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(BACKWARD, "sm_90a", tmp_path_factory)


def multiplied(machine: Machine, left: str, right: str) -> list[tuple[int, tuple[int, ...]]]:
    """First key and (row, head) of each product of a tile of ``left`` by one of ``right``: by who has the tile's first rows.

    Of keys by queries, or of queries by keys.
    """
    found = []
    for products in tags(machine, MAPS, min(machine.launch.boxes)):
        for (one, rows), (other, columns) in pairwise(products):
            if (one, other) == (left, right):
                keys, queries = (rows, columns) if left in ("k", "v") else (columns, rows)
                found.append((keys[0], queries[:2]))
    return found


def played(name: str, built: Built, seed: int, processors: int, *sizes: int, **options: int) -> Machine:
    traced = built.traced(name)
    return Machine(traced.kernel, backward(traced, BACKWARD[name], *sizes, **options), seed, processors).run()


def steps(name: str, seqlen_q: int, seqlen_k: int) -> list[tuple[int, tuple[int, int]]]:
    """(First key, (row, head)) of the tiles that a key block has to look at."""
    config = BACKWARD[name]
    span = config.tile_n * (2 if config.pair else 1)  # both blocks of a pair walk the queries that one of them needs
    return sorted(
        (n, (m, head))
        for head in range(2)
        for n in range(0, -(-seqlen_k // span) * span, config.tile_n)
        for m in range(0, seqlen_q, config.tile_m)
        if visible(
            range(m, m + config.tile_m), range(n // span * span, n // span * span + span), seqlen_q, seqlen_k, config.right
        )
    )


@pytest.mark.parametrize("processors", [1, 2])
@pytest.mark.parametrize("name", [name for name, config in BACKWARD.items() if not config.reaches])  # as the forward's tests
def test_no_hang_and_no_race(name: str, processors: int, built: Built) -> None:
    """One processor or two; S and dP of each step once, and dQ added once by each warpgroup."""
    config, seed = BACKWARD[name], random.randrange(2**32)
    print(f"seed {seed}")
    sizes = (140, 200) if processors == 1 else (200, 140)
    blocks = processors * (2 if config.pair else 1) if config.persistent else 0
    options = {"left": 90} if config.left else {"each": 1}
    machine = played(name, built, seed, processors, *sizes, blocks, **options)
    if not config.varlen:
        expected = steps(name, *sizes)
        scores, gradients = (("q", "k"), ("do", "v")) if config.roles else (("k", "q"), ("v", "do"))
        # A pair's warpgroup begins a product that nobody looks at after the last step.
        assert set(multiplied(machine, *scores)) == set(expected) == set(multiplied(machine, *gradients))
        if not config.pair:
            assert sorted(multiplied(machine, *gradients)) == expected
            assert sum(map(len, machine.added.values())) == 2 * len(expected)
            assert len(machine.added) == 2 * len({queries for _, queries in expected})


@pytest.mark.parametrize("name", [DETERMINISTIC, "head_dim 192 and 128, packed, window, deterministic"])
def test_deterministic_blocks_add_in_their_order(name: str, built: Built) -> None:
    """To each part of dQ in one order, however many processors there are and whatever they do first."""
    options = {"left": 90} if BACKWARD[name].left else {}
    orders = [played(name, built, seed, processors, 140, 260, 0, **options).added for seed, processors in ((1, 1), (2, 3))]
    assert orders[0] == orders[1] and any(len(order) > 1 for order in orders[0].values())


def test_deterministic_blocks_in_waves(built: Built) -> None:
    """Each step once, and key blocks add to each part of dQ in their order; two waves have more blocks than can be played."""
    first, second = (played(DETERMINISTIC, built, n, n, 200, 300, 0, section=-1) for n in (1, 3))
    assert sorted(multiplied(first, "v", "do")) == steps(DETERMINISTIC, 200, 300)
    assert first.added == second.added


def test_blocks_that_start_in_the_wrong_order_hang(built: Built) -> None:
    """With too few processors a deterministic block waits for one that has not started."""
    traced = built.traced(DETERMINISTIC)
    with pytest.raises(HangError):
        Machine(traced.kernel, backward(traced, BACKWARD[DETERMINISTIC], 200, 300, 0), 0).run(backwards=True)


@pytest.mark.parametrize("each", [2, 3, 5])
@pytest.mark.parametrize("name", [PARTED, "head_dim 64, distances with their gradient"])
def test_pieces_of_blocks_add_up(name: str, each: int, built: Built) -> None:
    """The last two key blocks in shares of so many steps: each step once, and sums are read after they were handed over."""
    config, seed = BACKWARD[name], random.randrange(2**32)
    assert config.stream_k
    print(f"seed {seed}")
    machine = played(name, built, seed, 3, 250, 380, 3, split=2, each=each)
    assert sorted(multiplied(machine, "v", "do")) == steps(name, 250, 380)
    assert machine.handed


def test_a_piece_that_does_not_wait_for_those_before_it_is_seen(built: Built) -> None:
    """Sums that are read as they were before anybody handed them over."""
    traced = built.traced(PARTED)
    launch = backward(traced, BACKWARD[PARTED], 250, 380, 3, split=2, each=3)
    machine = Machine(traced.kernel, launch, 0, 3)
    machine._acquire = lambda warp, at: machine.words.get(at, 0)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="handed over"):
        machine.run()


# Barriers that others make up for. dO has as many stages as Q, whose release comes later and is waited for first, and the
# turns to issue S and dP are for speed. Of a pair the bytes of dS are sent after it was written by all, and who waits for the
# one that says so (1) waits for the bytes as well; and P (7) is written again after dS of it has come.
REDUNDANT = {
    CLAIMS: {SHARED_START + 48, SHARED_START + 56, "named barrier 6", "named barrier 7"},
    PAIR: {"named barrier 1", "named barrier 7"},
}


@pytest.mark.parametrize("name", [CLAIMS, PAIR])
def test_each_barrier_is_needed(name: str, built: Built) -> None:
    """A barrier that lets everybody pass is noticed, each in turn."""
    traced, config = built.traced(name), BACKWARD[name]
    launch = backward(traced, config, 100, 200, 2) if config.pair else backward(traced, config, 240, 200, 1)
    block = Machine(traced.kernel, launch, 0).run().blocks[0]
    barriers = [*block.mbarriers, *(b.name for b in block.named.values())]
    check_barriers(traced.kernel, launch, [barrier for barrier in barriers if barrier not in REDUNDANT[name]])


def test_faults_are_noticed(built: Built) -> None:
    """Wrong counts, parities, bytes and numbers, and what is left out: a sample of where this problem comes by."""
    traced = built.traced(CLAIMS)
    check_faults(traced.kernel, backward(traced, BACKWARD[CLAIMS], 150, 200, 1), HARMLESS)
