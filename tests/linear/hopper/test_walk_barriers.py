"""The compiled walks of a cluster played through: no order of their warps hangs or races, and every chunk is multiplied."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.compiled import Built
from tests.linear.hopper.test_compile import CORE
from tests.sm90.launch import Traced, launch
from tests.sm90.machine import Machine
from tests.sm90.mutants import check_barriers, check_faults
from tests.sm90.state import Launch
from warploom.linear.hopper.config import WalkConfig
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

CHUNK = 64
SEGMENTS = 2  # where sequences are cut
# Nobody waits after the last arrival, and the state's wait for b finds what the scores', before P, has waited for.
HARMLESS = "no named barrier", "another named barrier", "threads", "no wait"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


def walk(traced: Traced, config: WalkConfig, chunks: int) -> Launch:
    """One head of one batch; the last chunk is short of a token."""
    if config.paired:
        return pair(traced, config, chunks)
    seqlen, dim, dim_v = CHUNK * chunks - 1, config.head_dim, config.head_dim_v
    weights = config.weighted or (config.fading and not config.sums_logs)
    names = ["a", "b", "c", "out", *["weights"] * weights, *["bias"] * config.biased, *["states", "fades"] * config.cut]
    names += ["logs"] * (config.sums_logs or config.finds)
    names += ["x", "dots", "totals"] * config.terms + ["dots", "totals", "dots_k", "totals_k", "found"] * config.finds
    names += ["tma_a", "tma_b", "tma_c", *["tma_x"] * config.terms]
    names += [*["tma_out"] * (not config.wide), "scores", "inter", "intra", "update", "scale"]
    values: dict[str, Any] = {
        "a": ((seqlen, dim, 1, 1), ()),
        "b": ((seqlen, dim, 1, 1), ()),
        "c": ((seqlen, dim_v, 1, 1), ()),
        "out": ((seqlen, dim_v, 1, 1), (dim_v, dim_v, seqlen * dim_v)),
        "weights": ((1,), (1,)) if config.a_head else ((1, 1, seqlen), (seqlen, seqlen)),
        "bias": ((1, 1, seqlen), (seqlen, seqlen)),
        "states": ((1, 1, SEGMENTS, dim_v, dim), (SEGMENTS * dim_v * dim, SEGMENTS * dim_v * dim, dim_v * dim, dim)),
        "fades": ((1, 1, SEGMENTS), (SEGMENTS, SEGMENTS)),
        "x": ((seqlen, dim_v, 1, 1), ()),
        "dots": ((config.parts + (config.meets or config.finds) * config.blocks, 1, 1, seqlen), (seqlen, seqlen, seqlen)),
        "totals": ((config.parts, 1, 1, chunks), (chunks, chunks, chunks)),
        "logs": ((1, seqlen, 1), (seqlen, 1, 1)),
        "dots_k": ((config.groups, 1, 1, seqlen), (seqlen, seqlen, seqlen)),
        "totals_k": ((config.groups, 1, 1, chunks), (chunks, chunks, chunks)),
        "found": ((1, seqlen, 1), (seqlen, 1)),
    }
    grid = config.blocks * (SEGMENTS if config.cut else 1)
    return launch(traced, values, names, grid=grid, cluster=config.cluster)


def pair(traced: Traced, config: WalkConfig, chunks: int) -> Launch:
    """The same of two walks."""
    seqlen, dim = CHUNK * chunks - 1, config.head_dim
    tensors, gradients = ["q", "k", "v", "dout"], ["dk", "dv"]
    names = [*tensors, *gradients, "weights" if config.a_head else "logs", "dots", "totals"]
    names += [f"tma_{name}" for name in tensors + gradients]
    names += ["scores", "inter", "intra", "update", "scale"]
    values: dict[str, Any] = {
        **dict.fromkeys(tensors, ((seqlen, dim, 1, 1), ())),
        **dict.fromkeys(gradients, ((seqlen, dim, 1, 1), (dim, dim, seqlen * dim))),
        "weights": ((1,), (1,)),
        "logs": ((1, seqlen, 1), (seqlen, 1, 1)),
        "dots": ((config.groups, 1, 1, seqlen), (seqlen, seqlen, seqlen)),
        "totals": ((config.groups, 1, 1, chunks), (chunks, chunks, chunks)),
    }
    return launch(traced, values, names, grid=2, cluster=2)


@pytest.mark.parametrize("chunks", [1, 2, 9])
@pytest.mark.parametrize("name", CORE)
def test_no_hang_and_no_race(name: str, chunks: int, built: Built) -> None:
    """In each block all warpgroups take the chunks of a in their order, and out leaves once a chunk."""
    config, traced, seed = CORE[name], built.traced(name), random.randrange(2**32)
    print(f"seed {seed}")
    machine = Machine(traced.kernel, walk(traced, config, chunks), seed).run()
    maps = sorted(machine.launch.boxes)
    each = -(-chunks // SEGMENTS) if config.cut else chunks
    for i, block in enumerate(machine.blocks):
        a, played = (maps[0], config) if not config.paired else [(maps[2], config), (maps[1], config.beside)][i]  # v, k
        of = range(i * each, min((i + 1) * each, chunks)) if config.cut else range(chunks)
        order = [CHUNK * t for t in of]
        for warp in range(4, 4 * (2 + config.groups), 4):  # the first of each of the state's, and of the scores'
            products = machine.products[block.warps[warp].component]
            times = 2 if played.terms and warp < 4 * (1 + config.groups) else 1  # a state in two numbers
            taken = [t for t in (order[::-1] if config.reverse else order) for _ in range(times)]
            assert [at[1] for p, at in products if p == a and at[0] == 0] == taken
        left_over = {barrier.name: barrier.come for barrier in block.named.values() if barrier.come}
        assert not left_over
    assert config.wide or machine.stored == (1 + config.paired) * config.blocks * config.groups * chunks


TERMS = [f"128, terms of {what}" for what in ("dq", "dq in halves", "dk beside dv")]
NEEDED = ["256", "128, a decay", "128, dv that finds", *TERMS]


@pytest.mark.parametrize("name", NEEDED)
def test_each_barrier_is_needed(name: str, built: Built) -> None:
    """A barrier that lets everybody pass is noticed, each in turn.

    But those of c's free stages where c has as many as b, whose stages come free before: the loader waits for both.
    """
    traced, config = built.traced(name), CORE[name]
    launch = walk(traced, config, 8)
    block = Machine(traced.kernel, launch, 0).run().blocks[0]
    assert len(block.mbarriers) == (5 if config.terms else 4) * config.stages + 2 * config.c_stages
    mbarriers = sorted(block.mbarriers)
    if config.c_stages == config.stages:
        free = 4 * config.stages + config.c_stages
        del mbarriers[free : free + config.c_stages]
    check_barriers(traced.kernel, launch, [*mbarriers, *(b.name for b in block.named.values())])


def test_faults_are_noticed(built: Built) -> None:
    """Wrong counts, parities, bytes and numbers, and what is left out: a sample of where this problem comes by."""
    traced = built.traced("192, weights")
    check_faults(traced.kernel, walk(traced, CORE["192, weights"], 9), HARMLESS)
