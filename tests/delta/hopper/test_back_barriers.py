"""The compiled kernels of a backward pass played through: no order of their warps hangs or races, and all of it is written."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.compiled import Built
from tests.sm90.launch import Traced, launch
from tests.sm90.machine import Machine
from tests.sm90.state import Launch
from warploom.delta.hopper.config import BACK_ITEM, CHUNK, COLUMNS, BackConfig, GradientConfig, KeepConfig
from warploom.kernels.cute.packed import RAGGED
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

WIDTH = 128
CORE: dict[str, Any] = {
    "keep": KeepConfig("bfloat16", WIDTH),
    "again": KeepConfig("bfloat16", WIDTH, 2, True),
    "back": BackConfig("bfloat16", WIDTH, 2, 2),
    "gradients": GradientConfig("bfloat16", WIDTH),
}
NAMES = {
    "keep": "k v prepared state last resume states missing missing_odd lengths cu tma_k tma_v tma_missing tma_odd mma "
    "mma_update heads size begin end per_sequence carriers",
    "again": "keep",
    "back": "q k dout dv prepared last first carry dstates lengths cu tma_q tma_k tma_dout tma_dv mma mma_turned mma_update "
    "heads size current per_sequence",
    "gradients": "q k dout dv decay prepared states dstates missing missing_odd dq dk dbeta ddecay lengths cu tma_q tma_k "
    "tma_dout tma_dv tma_missing tma_odd tma_dq tma_dk mma_square mma_state mma_tokens mma_turned eps normalize decays size "
    "current per_sequence total slots heads seqlen",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


def problem(name: str, traced: Traced, chunks: int, group: int = 2) -> Launch:
    """One key head of one sequence of 128 value columns; the last chunk is short of a token."""
    seqlen = CHUNK * chunks - 1
    keys = "q", "k", "dq", "dk", "missing", "missing_odd"
    values: dict[str, Any] = {name: ((RAGGED, 128, 1, seqlen + 1, 1), ()) for name in keys}
    values |= {name: ((RAGGED, 128, group, seqlen + 1, 1), ()) for name in ("v", "dout", "dv")}
    values |= {name: ((0, 1, 1, 1), (1, 1, 1)) for name in ("state", "last", "first", "carry", "resume")}
    values |= {name: ((1, seqlen, group), (seqlen * group, group, 1)) for name in ("decay", "dbeta", "ddecay")}
    values |= {name: ((chunks * group * 2, WIDTH * COLUMNS), ()) for name in ("states", "dstates")}
    values["prepared"] = (chunks * group, BACK_ITEM), ()
    values |= {"lengths": ((0,), ()), "cu": ((0,), ()), "heads": 1, "size": chunks, "begin": 0, "end": 0, "current": 0}
    values |= {"per_sequence": 1, "carriers": 1, "normalize": 1, "decays": 1}
    values |= {"total": chunks, "slots": chunks, "seqlen": seqlen}
    names = NAMES.get(NAMES[name], NAMES[name])
    return launch(traced, values, names.split(), grid=1)


@pytest.mark.parametrize("name", CORE)
def test_no_hang_and_no_race(name: str, built: Built) -> None:
    """More chunks than stages of the rings of walks back and of gradients."""
    traced, chunks, seed = built.traced(name), 3, random.randrange(2**32)
    print(f"seed {seed}")
    machine = Machine(traced.kernel, problem(name, traced, chunks), seed).run()
    assert machine.stored == chunks * {"keep": 1, "again": 0, "back": 2, "gradients": 4}[name]
    for block in machine.blocks:
        assert not {barrier.name: barrier.come for barrier in block.named.values() if barrier.come}
