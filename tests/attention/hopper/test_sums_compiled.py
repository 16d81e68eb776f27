"""Compiled column sums: registers, products that run ahead; played through, no order of their warps hangs or races."""

from __future__ import annotations

import random
import re

import pytest
import torch

from tests.attention.hopper.played import tags, visible
from tests.compiled import Built, machine_code
from tests.sm90.launch import Traced, launch
from tests.sm90.machine import Machine
from tests.sm90.mutants import check_barriers, check_faults
from tests.sm90.state import Launch
from warploom.attention.features import Features
from warploom.attention.hopper.sums_config import CHUNKS, ROWS, WARPGROUPS, SumsConfig
from warploom.attention.hopper.sums_plan import sums_config
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

FP16, BF16 = torch.float16, torch.bfloat16
CORE = {
    "head_dim 64": sums_config(Features(BF16, 64, 64)),
    "head_dim 64, causal": sums_config(Features(BF16, 64, 64, right=True)),
    "head_dim 96, softcap": sums_config(Features(FP16, 96, 96, softcap=True)),
    "head_dim 128": sums_config(Features(BF16, 128, 128)),
    "head_dim 128, causal": sums_config(Features(FP16, 128, 128, right=True)),
    "head_dim 128, window": sums_config(Features(BF16, 128, 128, right=True, left=True)),
    "head_dim 192, window, softcap": sums_config(Features(BF16, 192, 192, right=True, left=True, softcap=True)),
    "head_dim 256, causal": sums_config(Features(BF16, 256, 256, right=True)),
}
LOOPS = 2  # of tiles that are seen whole, and of others


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


@pytest.mark.parametrize("name", CORE)
def test_machine_code(name: str, built: Built) -> None:
    """Nothing is spilled, and each product is waited for once: more would mean that ptxas serialised wgmma."""
    variant, facts, cubin = built[name]
    assert facts["stack"] == 0 and facts["registers"] <= 65536 // (128 * (WARPGROUPS + 1))
    listing = machine_code(cubin)
    assert "UTMALDG" in listing and not re.search(r"\b(LDL|STL)\b", listing)
    products = CHUNKS * LOOPS + 1
    assert len(re.findall("HGMMA", listing)) == products * variant.head_dim // 16
    assert len(re.findall(r"WARPGROUP\.DEPBAR", listing)) == products
    if variant.share:
        whole = listing.count("MUFU.EX2") - CHUNKS * variant.chunk // 2 * 2 * LOOPS
        assert whole == -CHUNKS * variant.chunk // 2 * LOOPS * variant.share // 16


def sums(traced: Traced, config: SumsConfig, seqlen_q: int, seqlen_k: int, blocks: int, left: int = 0) -> Launch:
    """Two heads, one of keys, of one batch."""
    heads = 2
    names = ["q", "k", "lse", "sums", "tma_q", "tma_k", "mma", "multiplier", "cap_in", "left", "right"]
    values = {
        "q": ((seqlen_q, config.head_dim, heads, 1), ()),
        "k": ((seqlen_k, config.head_dim, 1, 1), ()),
        "lse": ((1, heads, seqlen_q), (heads * seqlen_q, seqlen_q)),
        "sums": ((1, heads, seqlen_k), (heads * seqlen_k, seqlen_k)),
        "left": left,
        "right": 0,
    }
    return launch(traced, values, names, grid=blocks)


def multiplied(machine: Machine) -> list[tuple[int, int, int]]:
    """(head, row of 64 queries, first key of a chunk) of each product."""
    first = min(machine.launch.boxes)
    found = []
    for products in tags(machine, ("q", "k"), first):
        queries: tuple[int, ...] = ()
        for name, at in products:
            if name == "q":
                queries = at
            else:
                found.append((queries[1], queries[0], at[0]))
    return found


@pytest.mark.parametrize("name", CORE)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "blocks"), [(300, 700, 2), (700, 300, 3), (1, 1, 1), (900, 900, 2)])
def test_no_hang_and_no_race(name: str, seqlen_q: int, seqlen_k: int, blocks: int, built: Built) -> None:
    """What is seen is multiplied, all else but a few tiles is not."""
    config, traced, seed = CORE[name], built.traced(name), random.randrange(2**32)
    print(f"seed {seed}")
    left = 90 if config.left else None
    launched = sums(traced, config, seqlen_q, seqlen_k, blocks, left=left or 0)
    machine = Machine(traced.kernel, launched, seed, blocks).run()
    found = multiplied(machine)
    for head in range(2):
        for row in range(0, seqlen_q, ROWS):
            for key in range(0, seqlen_k, config.chunk):
                rows, keys = range(row, row + ROWS), range(key, key + config.chunk)
                if visible(rows, keys, seqlen_q, seqlen_k, config.right, left):
                    assert (head, row, key) in found
    # Besides each warpgroup's last product, which comes twice.
    assert len(found) - len(set(found)) <= WARPGROUPS * blocks


def test_each_barrier_is_needed(built: Built) -> None:
    """A barrier that lets everybody pass is noticed, each in turn."""
    name = "head_dim 128"
    config, traced = CORE[name], built.traced(name)
    launched = sums(traced, config, 900, 1000, 1)
    block = Machine(traced.kernel, launched, 0).run().blocks[0]
    assert len(block.mbarriers) == 2 * config.stages * WARPGROUPS + 2 * config.k_slots
    check_barriers(traced.kernel, launched, [*block.mbarriers, *(b.name for b in block.named.values())])


def test_faults_are_noticed(built: Built) -> None:
    """Wrong counts, parities, bytes and numbers, and what is left out: a sample of where this problem comes by."""
    name = "head_dim 128"
    check_faults(built.traced(name).kernel, sums(built.traced(name), CORE[name], 500, 600, 1))
