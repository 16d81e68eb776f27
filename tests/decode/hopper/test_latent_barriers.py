"""The compiled kernel of latent caches: its resources, and played through: no order of its warps hangs or races."""

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
from warploom.decode.hopper.latent_config import HEAD_DIM, ROWS, TILE, LatentConfig
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

PAIR = "pages of 16, pairs"
CORE = {PAIR: LatentConfig("bfloat16", 16, True, True)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


def problem(traced: Traced, *shape: Any, **options: Any) -> Launch:
    """128 rows, which a pair of blocks shares; splits of three tiles at least."""
    numbers = {"rows": 2 * ROWS, "row_blocks": 2, "least": 3, "most_log": 2, "levels": 1, "cluster": 2}
    return played_latent.problem(traced, *shape, **numbers, **options)


def test_resources_and_machine_code(built: Built) -> None:
    _, facts, cubin = built[PAIR]
    listing = machine_code(cubin)
    assert "UTMALDG" in listing
    # Both warpgroups have their S and two PVs in a pair of tiles, and one S and two PVs where the last tile has no other.
    assert len(re.findall("HGMMA.64x64x16", listing)) == 3 * HEAD_DIM // 16
    assert len(re.findall("HGMMA.64x256x16", listing)) == 6 * TILE // 16
    assert listing.count("WARPGROUP.DEPBAR") < 16, "ptxas runs products one by one"
    assert facts["stack"] <= 32, "registers spill"


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": [TILE * 7 - 3, 0, 300, 1], "blocks": 2},
        {"lengths": [829, 0, 70], "blocks": 4, "blocks_log": 1},
        {"lengths": [900], "blocks": 4, "blocks_log": 1, "queries": 4, "left": 100},
    ],
)
def test_no_hang_and_no_race(options: dict[str, Any], built: Built) -> None:
    traced = built.traced(PAIR)
    last = play(traced, problem(traced, **options), options["blocks"])
    if options["blocks"] == 2:
        # The last columns of every tile are scored by a warpgroup of each block, and then hold P, which its other one reads.
        assert last == 2 * 2 * 4 * tiles_of(options["lengths"])


def test_each_barrier_is_needed(built: Built) -> None:
    """A sample of those of shared memory, and of those that have names."""
    traced = built.traced(PAIR)
    check_each_barrier(traced, problem(traced, [317, 400], 2), lambda draw, named: draw.sample(named, 3))


def test_faults_are_noticed(built: Built) -> None:
    """A warpgroup that meets at another barrier of its own meets all the same."""
    traced = built.traced(PAIR)
    check_faults(traced.kernel, problem(traced, [317, 400], 2), ("another named barrier",), sample=4)
