"""Modules compile for sm_90a here, without a GPU: registers, no spills in the walk, TMA and wgmma in the machine code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.compiled import Built, kernels_of, machine_code
from warploom.delta.hopper.config import BackConfig, ForwardConfig, GradientConfig, KeepConfig
from warploom.delta.hopper.plan import backs, gradients, modules_of, prepare
from warploom.runtime import modules
from warploom.runtime.cubin import resources

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

# The wider tile of keys, which takes the most registers, and one of the narrower.
CORE = {config.name: config for config in modules_of("bfloat16", 128)}
CORE |= {config.name: config for config in [ForwardConfig("bfloat16", 64, 1), *backs("bfloat16", 128)]}
CORE |= {config.name: config for config in [KeepConfig("bfloat16", 128), KeepConfig("bfloat16", 128, 2, True)]}
CORE |= {config.name: config for config in [gradients("bfloat16", 128), prepare("bfloat16", 128)]}
FORWARDS = [name for name, config in CORE.items() if isinstance(config, ForwardConfig)]
BACKS = [name for name, config in CORE.items() if isinstance(config, KeepConfig | BackConfig)]
GRADIENTS = [name for name, config in CORE.items() if isinstance(config, GradientConfig)]
PREPARES = [*FORWARDS, prepare("bfloat16", 128).name]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


def kernel(cubin: Path, part: str) -> tuple[Any, str]:
    """What one of a module's kernels takes, and its listing."""
    ((name, listing),) = ((name, text) for name, text in kernels_of(cubin).items() if part in name)
    (found,) = (found for found in resources(cubin.read_bytes()) if found.kernel == name)
    return found, listing


@pytest.mark.parametrize("name", FORWARDS)
def test_walk(name: str, built: Built) -> None:
    """Products wait for each other only where the source says so; nothing is spilled."""
    config, _, cubin = built[name]
    found, listing = kernel(cubin, "walkWalk")
    assert found.stack == 0, "registers spill"
    assert found.registers <= 65536 // ((1 + config.warpgroups) * 128)
    assert "UTMALDG" in listing and "UTMASTG" in listing and not re.search(r"\b(LDL|STL)\b", listing)
    # k S and q S; two products within the chunk; the state.
    assert listing.count("HGMMA") == 2 * config.width // 16 + 3 * 4
    # The source's waits. One more, as where the state is multiplied under its own products, cost a fourth of the time.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", listing)) == 5


@pytest.mark.parametrize("name", PREPARES)
def test_prepare(name: str, built: Built) -> None:
    config, _, cubin = built[name]
    found, listing = kernel(cubin, "preparePrepare")
    blocks = (config.prepare if isinstance(config, ForwardConfig) else config).blocks
    assert found.registers <= 65536 // (blocks * 128)
    assert listing.count("HGMMA") == 2 * config.width // 16
    assert len(re.findall(r"\bHMMA", listing)) == 17 * 2 * 3, "products of blocks, of two halves each, in three parts"


@pytest.mark.parametrize("name", BACKS)
def test_walks_of_a_backward_pass(name: str, built: Built) -> None:
    config, facts, cubin = built[name]
    assert facts["stack"] == 0, "registers spill"
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and not re.search(r"\b(LDL|STL)\b", listing)
    keys = config.width // 16  # steps of a product that sums over keys' dims
    wanted = keys + 4 * 4 if isinstance(config, BackConfig) else 4 if config.again else keys + 2 * 4
    assert listing.count("HGMMA") == wanted


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, built: Built) -> None:
    _, facts, cubin = built[name]
    assert facts["stack"] == 0, "registers spill"
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and "UTMASTG" in listing and not re.search(r"\b(LDL|STL)\b", listing)
    # Three products of queries and three of keys that read and of keys that write; of these one each in two parts.
    assert listing.count("HGMMA") == 11 * 4
