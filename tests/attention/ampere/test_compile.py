"""A core set compiles for sm_80 here, without a GPU: registers, no stack, cp.async, ldmatrix and mma in the machine code."""

from __future__ import annotations

import re

import pytest
import torch

from tests.compiled import Built, machine_code
from warploom.attention.ampere.plan import config
from warploom.attention.features import Features
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

FP16, BF16 = torch.float16, torch.bfloat16
CORE = {
    "8.0, head_dim 128": config((8, 0), Features(BF16, 128, 128)),
    "8.0, head_dim 128, window, softcap, sink": config(
        (8, 0), Features(FP16, 128, 128, right=True, left=True, softcap=True, sink=True)
    ),
    "8.0, head_dim 64, causal": config((8, 0), Features(FP16, 64, 64, right=True)),
    "8.9, head_dim 128, causal": config((8, 9), Features(BF16, 128, 128, right=True)),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_80", tmp_path_factory)


@pytest.mark.parametrize("name", CORE)
def test_resources(name: str, built: Built) -> None:
    variant, facts, _ = built[name]
    assert facts["stack"] == 0, "registers spill"
    assert facts["registers"] <= 65536 // (32 * variant.warps * variant.blocks)


@pytest.mark.parametrize("name", CORE)
def test_machine_code(name: str, built: Built) -> None:
    """Every loop multiplies and reads just as often as its tiles need; nothing is spilled; copies go past the registers."""
    variant, _, cubin = built[name]
    listing = machine_code(cubin)
    assert not re.search(r"\b(LDL|STL)\b", listing)
    loops = 3 if variant.left else 2
    blocks = variant.tile_n // 16 * variant.head_dim // 16  # of 16 × 16, of K and of V
    reads_of_q = variant.atoms * variant.head_dim // 16
    assert len(re.findall(r"\bHMMA", listing)) == loops * 2 * blocks * 2 * variant.atoms
    times = 1 if variant.q_registers else loops
    assert len(re.findall(r"\bLDSM", listing)) == loops * 2 * blocks + times * reads_of_q
    rows = 32 * variant.warps // (variant.head_dim // 8)
    copies = 2 * variant.tile_n // rows
    assert len(re.findall(r"\bLDGSTS", listing)) == (loops + 1) * copies + variant.tile_m // rows
