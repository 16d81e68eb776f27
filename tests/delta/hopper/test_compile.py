"""All modules compile for sm_90a here, without a GPU: registers, no spills in the walk, TMA and wgmma in the machine code."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.compiled import Built, machine_code
from warploom.delta.hopper.config import BackConfig, GradientConfig, KeepConfig, PrepareConfig, WalkConfig
from warploom.delta.hopper.plan import backs, gradients, modules_of
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

# The wider tile of keys, which takes the most registers, and one of the narrower.
CORE = {config.name: config for config in modules_of("bfloat16", 128)}
CORE |= {config.name: config for config in [WalkConfig("bfloat16", 64, 1), *backs("bfloat16", 128), gradients("bfloat16", 128)]}
CORE |= {config.name: config for config in [KeepConfig("bfloat16", 128), KeepConfig("bfloat16", 128, 2, True)]}
WALKS = [name for name, config in CORE.items() if isinstance(config, WalkConfig)]
BACKS = [name for name, config in CORE.items() if isinstance(config, KeepConfig | BackConfig)]
GRADIENTS = [name for name, config in CORE.items() if isinstance(config, GradientConfig)]
PREPARES = [name for name, config in CORE.items() if isinstance(config, PrepareConfig)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with Built(CORE, "sm_90a", tmp_path_factory) as built:
        yield built


@pytest.mark.parametrize("name", WALKS)
def test_walk(name: str, built: Built) -> None:
    """Products wait for each other only where the source says so; nothing is spilled."""
    config, facts, cubin = built[name]
    assert facts["stack"] == 0, "registers spill"
    assert facts["registers"] <= 65536 // ((1 + config.warpgroups) * 128)
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and "UTMASTG" in listing and not re.search(r"\b(LDL|STL)\b", listing)
    # k S and q S; two products within the chunk; the state.
    assert listing.count("HGMMA") == 2 * config.width // 16 + 3 * 4
    # The source's waits. One more, as where the state is multiplied under its own products, cost a fourth of the time.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", listing)) == 5


@pytest.mark.parametrize("name", PREPARES)
def test_prepare(name: str, built: Built) -> None:
    config, facts, cubin = built[name]
    assert facts["registers"] <= 65536 // (config.blocks * 128)
    listing = machine_code(cubin)
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
