"""A variant compiles for sm_90a here, without a GPU: registers, no spills, TMA in the machine code."""

from __future__ import annotations

import re

import pytest
import torch

from tests.compiled import Built, machine_code
from warploom.decode.hopper.plan import config
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

CORE = {"head_dim 64": config(torch.bfloat16, 64, 64, None)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


def test_resources_and_machine_code(built: Built) -> None:
    variant, facts, cubin = built["head_dim 64"]
    assert facts["stack"] == 0, "registers spill"
    assert facts["registers"] <= 168  # three warps on a quarter of a multiprocessor
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and not re.search(r"\b(LDL|STL)\b", listing)
    # Every cluster size has its kernel, with a masked and a plain step each: S and PV of 16 keys.
    assert len(re.findall(r"HMMA\.16816", listing)) == len(variant.clusters) * 2 * 2 * (64 // 16) * 2
