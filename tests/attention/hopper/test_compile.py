"""A core set compiles for sm_90a here, without a GPU: registers, no stack, TMA and wgmma in the machine code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.compiled import Built, machine_code
from warploom.attention.features import Features
from warploom.attention.hopper.plan import BACKWARD_TILES, TILINGS, backward_config, backward_set, config, with_reach
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

FP16, BF16 = torch.float16, torch.bfloat16
CORE = {
    "head_dim 128, causal": config(Features(FP16, 128, 128, right=True), long=False),
    "head_dim 64": config(Features(BF16, 64, 64), long=True),
    "head_dim 64, causal, short": config(Features(BF16, 64, 64, right=True), long=False),
    "head_dim 128, few queries, causal": config(Features(BF16, 128, 128, right=True), long=True, shape="few"),
    "head_dim 64, few keys": config(Features(BF16, 64, 64), long=False, shape="brief"),
    "head_dim 128, few keys": config(Features(BF16, 128, 128), long=False, shape="brief"),
    "head_dim 64, square": config(Features(BF16, 64, 64), long=False, shape="square"),
    "head_dim 128, few queries of groups, causal": config(Features(BF16, 128, 128, right=True), long=True, each=8),
    "head_dim 64, packed, causal": config(Features(BF16, 64, 64, right=True, varlen=True, used=True), long=False),
    "head_dim 256, window, softcap, sink": config(
        Features(BF16, 256, 256, right=True, left=True, softcap=True, sink=True), long=False
    ),
    **{
        f"head_dims {a} and {b}, causal, dropout": config(Features(BF16, a, b, right=True, dropout=True), long=True)
        for a, b in TILINGS
    },
    "head_dim 128, causal, ALiBi": config(Features(BF16, 128, 128, right=True, bias="alibi"), long=True),
    "head_dim 64, ALiBi": config(Features(BF16, 64, 64, bias="alibi"), long=True),
    "head_dim 64, ALiBi, reaching": with_reach(config(Features(BF16, 64, 64, bias="alibi"), long=True)),
    "head_dim 128, causal, distances": config(Features(BF16, 128, 128, right=True, bias="distance"), long=True),
    "head_dim 64, distances": config(Features(BF16, 64, 64, bias="distance"), long=True),
    "head_dim 128, packed, window, dropout": config(
        Features(FP16, 128, 128, right=True, left=True, varlen=True, used=True, dropout=True), long=False
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


@pytest.mark.parametrize("name", CORE)
def test_resources(name: str, built: Built) -> None:
    variant, facts, _ = built[name]
    assert facts["stack"] == 0, "registers spill"
    assert facts["registers"] <= 65536 // (128 * (variant.warpgroups + 1))


@pytest.mark.parametrize("name", CORE)
def test_machine_code(name: str, built: Built) -> None:
    """Each loop issues its QKᵀ and its PV without a wait in between; nothing is spilled; loads are TMA's."""
    variant, _, cubin = built[name]
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and not re.search(r"\b(LDL|STL)\b", listing)
    waits_and_gemms = re.findall(r"HGMMA|WARPGROUP\.DEPBAR\.LE gsb0, 0x[01]", listing)
    # With a bias key tiles may lie right of the queries, on the diagonal or left of them; of a table's some are partial.
    sides = 0 if variant.bias != "alibi" else 1 if variant.right else 2
    loops = 3 if variant.left or sides == 2 else 2
    loops += (2 - variant.right) if variant.bias == "distance" else 0
    per_step = variant.head_dim // 16 + -(-variant.tile_n // 16)
    leaning = sides * (variant.head_dim <= 64)  # slopes times columns, unless the diagonal crosses
    assert waits_and_gemms.count("HGMMA") == (loops + 1) * per_step + leaning
    # The first QKᵀ and the last PV wait once each, a step twice: more would mean that ptxas serialised wgmma.
    assert len(waits_and_gemms) - waits_and_gemms.count("HGMMA") == 2 * loops + 2


BACKWARD = {
    "head_dim 128, causal, deterministic": backward_config(
        Features(BF16, 128, 128, right=True, deterministic=True), short=False
    ),
    "head_dim 64": backward_config(Features(BF16, 64, 64), short=False),
    "head_dim 128, causal, short": backward_config(Features(FP16, 128, 128, right=True), short=True),
    "head_dim 128, causal, short, packed": backward_config(Features(BF16, 128, 128, right=True, varlen=True), short=True),
    "head_dim 128, causal, waves": backward_config(Features(BF16, 128, 128, right=True), short=False, waves=True),
    "head_dim 256, causal": backward_config(Features(BF16, 256, 256, right=True), short=False),
    "head_dim 192 and 128, packed, window, deterministic": backward_config(
        Features(FP16, 192, 128, right=True, left=True, varlen=True, used=True, deterministic=True), short=False
    ),
    **{
        f"head_dims {a} and {b}, causal, dropout": backward_config(Features(BF16, a, b, right=True, dropout=True), short=False)
        for a, b in BACKWARD_TILES
    },
    "head_dim 64, causal, ALiBi": backward_config(Features(BF16, 64, 64, right=True, bias="alibi"), short=False),
    "head_dim 64, causal, ALiBi, reaching": with_reach(
        backward_config(Features(BF16, 64, 64, right=True, bias="alibi"), short=False)
    ),
    "head_dim 128, causal, ALiBi, waves": backward_config(
        Features(BF16, 128, 128, right=True, bias="alibi"), short=False, waves=True
    ),
    "head_dim 128, causal, distances": replace(
        backward_config(Features(BF16, 128, 128, right=True, bias="distance"), short=False), bias_grad=False
    ),
    "head_dim 64, causal, distances with their gradient": backward_config(
        Features(BF16, 64, 64, right=True, bias="distance", bias_grad=True), short=False
    ),
    "head_dim 64, distances with their gradient": backward_config(
        Features(BF16, 64, 64, bias="distance", bias_grad=True), short=False
    ),
    "head_dim 128, packed, window, distances": backward_config(
        Features(BF16, 128, 128, right=True, left=True, varlen=True, bias="distance", bias_grad=True), short=False
    ),
    "head_dim 128, dropout": backward_config(Features(FP16, 128, 128, dropout=True), short=False),
    "head_dim 128, packed, causal, dropout": backward_config(
        Features(BF16, 128, 128, right=True, varlen=True, dropout=True), short=True
    ),
}


@pytest.fixture(scope="module")
def built_backward(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(BACKWARD, "sm_90a", tmp_path_factory)


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str, built_backward: Built) -> None:
    """No spills; TMA in and TMA adding out; five GEMMs a step and no wait between those that are issued together."""
    variant, facts, cubin = built_backward[name]
    assert facts["stack"] == 0 and facts["registers"] <= 65536 // 384
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and "UBLKRED" in listing and not re.search(r"\b(LDL|STL)\b", listing)
    thirds = (variant.left and variant.bias != "distance") or (variant.deterministic and variant.right) or variant.waves
    loops = 3 if thirds else 2
    if variant.pair:
        # dQ, the gradient and S or dP: of dV in each loop, of dK in one; S, dP and a dQ apart.
        steps, first = (variant.tile_n + variant.tile_n + variant.tile_m + variant.head_dim) // 16, 2 * variant.head_dim // 16
        first += steps + variant.tile_n * 2 // 16
        waits, last = 3, 5
    elif variant.roles:
        # S and dP of two warpgroups, dV and dK in tiles of 64 head dims, dQ.
        dims = variant.head_dim + variant.head_dim_v
        steps, first = 2 * dims // 16 + dims // 64 * (variant.tile_m // 16) + 2 * (variant.tile_n // 16), 0
        waits, last = 7 + variant.deterministic, 2
    else:
        steps, first = (variant.head_dim + variant.head_dim_v + 2 * variant.tile_m + variant.tile_n) // 16, 0
        waits, last = 4, 1
    assert len(re.findall(r"HGMMA", listing)) == loops * steps + first
    # More would mean that ptxas serialised wgmma.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", listing)) == waits * loops + last


def test_warpgroups_ask_for_no_more_registers_than_there_are() -> None:
    """Else a warpgroup waits for ever: a block of 384 threads starts with 168 each."""
    from warploom.attention.hopper.backward_base import (
        CONSUMER_REGISTERS,
        LONG_REGISTERS,
        PRODUCER_REGISTERS,
        TURNS_REGISTERS,
        WARPGROUPS,
    )
    from warploom.attention.hopper.backward_pair import PairBackward
    from warploom.attention.hopper.backward_roles import RolesBackward

    there = 3 * (65536 // 384 // 8 * 8)
    for consumer, producer in ((CONSUMER_REGISTERS, PRODUCER_REGISTERS), LONG_REGISTERS, TURNS_REGISTERS):
        assert there >= WARPGROUPS * consumer + producer
    kernels = [(PairBackward if c.pair else RolesBackward)(c) for c in backward_set() if c.roles or c.pair]
    for kernel in kernels:
        assert sum(kernel.registers_each) + kernel.producer_registers <= there
