"""The kernel of latent caches for few rows: its resources, and played through: no order of its warps hangs or races."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

from tests.compiled import Built, machine_code
from tests.decode.hopper.test_latent_barriers import FAR, NAMES
from tests.sm90.launch import Traced, launch
from tests.sm90.machine import Machine
from tests.sm90.mutants import check_faults
from tests.sm90.state import Launch
from warploom.decode.hopper.latent_config import FEW_ROWS, HEAD_DIM, HEAD_DIM_V, PIECE, PIECES, TILE, LatentConfig
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

PAGED = "pages of 16"
CORE = {PAGED: LatentConfig("bfloat16", 16, True, few=True)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


def problem(traced: Traced, lengths: list[int], blocks: int, blocks_log: int = 0, queries: int = 1, left: int = FAR) -> Launch:
    """All rows; pages of 16 keys in turn, splits of a tile at least."""
    capacity, batch, page, rows = 1024, len(lengths), 16, FEW_ROWS
    each = capacity // page
    values: dict[str, Any] = {
        "q": ((rows, HEAD_DIM, batch), ()), "k": ((page, HEAD_DIM, 1, each * batch), ()),
        "out": ((batch, rows, HEAD_DIM_V), (rows * HEAD_DIM_V, HEAD_DIM_V)),
        "lse": ((batch, rows // queries, queries), (rows, queries)),
        "lengths": ((batch,), ()), "table": ((batch, each), (each,)),
        **{name: ((1 << 24,), ()) for name in ("parts", "stats", "kept")},
        "left": left, "right": 0, "capacity": capacity, "page_shift": 4, "least": 1, "most_log": 3, "blocks_log": blocks_log,
        "parts_log": blocks_log and 3, "levels": 0, "items": batch << blocks_log,
    }  # fmt: skip
    words = {(NAMES.index("lengths") + 1 << 32) + 4 * i: length for i, length in enumerate(lengths)}
    words |= {(NAMES.index("table") + 1 << 32) + 4 * i: i for i in range(each * batch)}
    return launch(traced, values, NAMES, grid=blocks, words=words)


def test_resources_and_machine_code(built: Built) -> None:
    _, facts, cubin = built[PAGED]
    listing = machine_code(cubin)
    assert "UTMALDG" in listing
    # Both warpgroups have an S of all columns, and PV of all values.
    assert len(re.findall("HGMMA.64x16x16", listing)) == 2 * (HEAD_DIM + HEAD_DIM_V // 64 * TILE) // 16
    assert listing.count("WARPGROUP.DEPBAR") == 6, "ptxas runs products one by one"
    assert facts["stack"] == 0, "registers spill"


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": [TILE * 7 - 3, 0, 300, 1], "blocks": 2},
        {"lengths": [829, 0, 70], "blocks": 4, "blocks_log": 1},
        {"lengths": [900], "blocks": 4, "blocks_log": 2, "queries": 4, "left": 100},
    ],
)
def test_no_hang_and_no_race(options: dict[str, Any], built: Built) -> None:
    traced, seed = built.traced(PAGED), random.randrange(2**32)
    print(f"seed {seed}")
    machine = Machine(traced.kernel, problem(traced, **options), seed, options["blocks"]).run()
    for block in machine.blocks:
        assert not {barrier.name: barrier.come for barrier in block.named.values() if barrier.come}
    k = max(machine.launch.boxes)
    found = [Counter(at for parameter, at in products if parameter == k) for products in machine.products.values()]
    if options["blocks"] == 2:
        # Of every tile the columns that are no values are scored once.
        last = sum(at[0] == HEAD_DIM - PIECE for products in found for at in products.elements())
        assert last == 4 * sum(-(-length // TILE) for length in options["lengths"])


def test_each_barrier_is_needed(built: Built) -> None:
    """A barrier that lets everybody pass is noticed: a sample of those of shared memory, and all that have names."""
    traced, seed = built.traced(PAGED), random.randrange(2**32)
    print(f"seed {seed}")
    launched = problem(traced, [317, 400], 2)
    block = Machine(traced.kernel, launched, 0).run().blocks[0]
    assert len(block.mbarriers) == 2 + 2 * (PIECES + 2)
    missed = []
    for barrier in [*random.Random(seed).sample([*block.mbarriers], 3), *(b.name for b in block.named.values())]:
        try:
            Machine(traced.kernel, launched, 1, passing=barrier).run()
        except AssertionError:
            continue
        missed.append(barrier)
    assert not missed, missed


def test_faults_are_noticed(built: Built) -> None:
    """A warpgroup that meets at another barrier of its own meets all the same."""
    traced = built.traced(PAGED)
    check_faults(traced.kernel, problem(traced, [317, 400], 2), ("another named barrier",), sample=4)
