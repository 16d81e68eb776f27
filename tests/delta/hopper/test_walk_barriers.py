"""The compiled walks played through: no order of their warps hangs or races, and every chunk is multiplied and written."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.compiled import Built
from tests.sm90.launch import Traced, launch
from tests.sm90.machine import Machine
from tests.sm90.mutants import check_barriers
from tests.sm90.state import Launch
from warploom.delta.hopper.config import CHUNK, ITEM, ForwardConfig
from warploom.kernels.cute.packed import RAGGED
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

CORE = {"one": ForwardConfig("bfloat16", 128, 1), "two": ForwardConfig("bfloat16", 128, 2)}
WALK = "kernel_cutlass_kernel_warploomdeltahopperwalkWalk"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


def walk(traced: Traced, chunks: int) -> Launch:
    """One head of one sequence of 128 value columns, without states; the last chunk is short of a token."""
    seqlen = CHUNK * chunks - 1
    names = ["q", "k", "v", "out", "prepared", "state", "last", "lengths", "cu", "tma_q", "tma_k", "tma_v", "tma_out"]
    values: dict[str, Any] = {name: ((RAGGED, 128, 1, seqlen + 1, 1), ()) for name in ("q", "k", "v", "out")}
    values |= {name: ((0, 1, 1, 1), (1, 1, 1)) for name in ("state", "last")}
    values |= {"prepared": ((chunks, ITEM), ()), "lengths": ((0,), ()), "cu": ((0,), ()), "heads": 1}
    return launch(traced, values, [*names, "mma", "mma_update", "heads"], grid=1)


@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("name", CORE)
def test_no_hang_and_no_race(name: str, chunks: int, built: Built) -> None:
    traced, seed = built.traced(name, WALK), random.randrange(2**32)
    print(f"seed {seed}")
    machine = Machine(traced.kernel, walk(traced, chunks), seed).run()
    assert machine.stored == chunks * CORE[name].warpgroups
    for block in machine.blocks:
        assert not {barrier.name: barrier.come for barrier in block.named.values() if barrier.come}


def test_each_barrier_is_needed(built: Built) -> None:
    """A barrier that lets everybody pass is noticed, each in turn."""
    traced = built.traced("two", WALK)
    problem = walk(traced, 8)
    block = Machine(traced.kernel, problem, 0).run().blocks[0]
    assert len(block.mbarriers) == 2 * CORE["two"].walk.stages
    check_barriers(traced.kernel, problem, [*block.mbarriers, *(b.name for b in block.named.values())])
