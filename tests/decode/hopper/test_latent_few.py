"""The kernel of latent caches for few rows: its resources, and played through: no order of its warps hangs or races."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.compiled import Built, machine_code
from tests.decode.hopper import played_latent
from tests.decode.hopper.played_latent import check_each_barrier, play, tiles_of
from tests.sm90.launch import Traced
from tests.sm90.mutants import check_faults
from tests.sm90.state import Launch
from warploom.decode.hopper.latent_config import FEW_ROWS, HEAD_DIM, HEAD_DIM_V, TILE, LatentConfig
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

PAGED = "pages of 16"
CORE = {PAGED: LatentConfig("bfloat16", 16, True, few=True)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


def problem(traced: Traced, *shape: Any, **options: Any) -> Launch:
    """All rows; splits of a tile at least."""
    numbers = {"rows": FEW_ROWS, "row_blocks": 1, "least": 1, "most_log": 3, "levels": 0, "cluster": 1}
    return played_latent.problem(traced, *shape, **numbers, **options)


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
    traced = built.traced(PAGED)
    last = play(traced, problem(traced, **options), options["blocks"])
    if options["blocks"] == 2:
        # Of every tile the columns that are no values are scored once.
        assert last == 4 * tiles_of(options["lengths"])


def test_each_barrier_is_needed(built: Built) -> None:
    """A sample of those of shared memory, and all that have names."""
    traced = built.traced(PAGED)
    check_each_barrier(traced, problem(traced, [317, 400], 1), lambda draw, named: named)


def test_faults_are_noticed(built: Built) -> None:
    """A warpgroup that meets at another barrier of its own meets all the same."""
    traced = built.traced(PAGED)
    check_faults(traced.kernel, problem(traced, [317, 400], 2), ("another named barrier",), sample=4)
