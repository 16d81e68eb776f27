"""A core set of walks compiles for sm_90a here, without a GPU: registers, no stack, TMA and wgmma in the machine code."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.compiled import Built, machine_code
from warploom.linear.hopper.config import COLUMNS
from warploom.linear.hopper.plan import config
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

# The most registers of each kind, with what runs beside the state's product.
CORE = {
    "256": config(256),
    "256, fp32": config(256, wide=True),
    "256, weights and bias": config(256, reverse=True, weighted=True, biased=True),
    "192, weights": config(192, reverse=True, weighted=True),
    "256, a decay": config(256, reverse=True, fading=True),
    "64, a decay over segments": config(64, fading=True, cut=True),
    "128": config(128, reverse=True),
    "128, a decay": config(128, fading=True),
    "128, a decay a head": config(128, reverse=True, fading=True, a_head=True),
    "128, terms of dq": config(128, fading=True, terms=True),
    "128, terms of dq in halves": config(128, halves=True, fading=True, terms=True),
    "128, terms of dk": config(128, reverse=True, fading=True, terms=True),
    "128, terms of dk beside dv": config(128, reverse=True, fading=True, terms=True, paired=True),
    "128, terms of dk beside dv, a head": config(128, reverse=True, fading=True, a_head=True, terms=True, paired=True),
    "128, dv that finds": config(128, reverse=True, fading=True, finds=True),
    "128, dv that finds, a head": config(128, reverse=True, fading=True, a_head=True, finds=True),
    "64, dv that finds over segments": config(64, reverse=True, fading=True, cut=True, finds=True),
    "64, terms over segments": config(64, reverse=True, fading=True, cut=True, terms=True),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


@pytest.mark.parametrize("name", CORE)
def test_resources(name: str, built: Built) -> None:
    variant, facts, _ = built[name]
    assert facts["stack"] == 0, "registers spill"
    assert facts["registers"] <= 65536 // ((2 + variant.groups) * 128)


@pytest.mark.parametrize("name", CORE)
def test_machine_code(name: str, built: Built) -> None:
    """Products wait for each other only where the source says so; nothing is spilled."""
    variant, _, cubin = built[name]
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and not re.search(r"\b(LDL|STL)\b", listing)
    slices, tokens = variant.head_dim // 16, variant.chunk // 16
    # Of pairs a second product, of a block's own columns; of terms the state in two numbers.
    walks = (variant, variant.beside) if variant.paired else (variant,)
    own = variant.groups * COLUMNS // 16
    assert listing.count("HGMMA") == sum((2 + w.terms) * slices + w.meets * own + 2 * tokens for w in walks)
    # Scores; each part of the state but the first; out; the state; what fades waits for the last part. More would mean that
    # ptxas serialised wgmma; one that comes twice, with an instruction between them at the most, is one.
    lines = [line for line in listing.splitlines() if ";" in line]
    waits = [i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line]
    expected = sum(slices // (2 if w.terms else 4) + 2 + w.fading for w in walks)
    assert sum(now - before > 2 for before, now in pairwise([-3, *waits])) == expected
