"""What the Hopper kernel of latent caches takes and refuses, which variant serves a call, and how sequences are shared out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.sources import imported
from warploom.commands.build import named_set as every_module
from warploom.decode.hopper import BACKEND
from warploom.decode.hopper.latent_config import SOURCES, LatentConfig
from warploom.decode.hopper.latent_plan import (
    LEAST,
    MOST_LOG,
    blocks_log,
    config,
    kept_floats,
    levels,
    named_set,
    parts_log,
    splits_log,
)
from warploom.decode.problem import DecodeProblem
from warploom.runtime import dispatch, module_spec, modules

BF16 = torch.bfloat16
PLAIN = DecodeProblem(
    device="cuda", dtype=BF16, batch=4, queries=1, capacity=4096, heads_q=128, heads_kv=1, head_dim=576, head_dim_v=512,
    latent=True,
)  # fmt: skip


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has the compiler."""
    monkeypatch.setattr(modules, "cannot_build", lambda: None)


@pytest.mark.parametrize(
    "changes,name",
    [
        ({"heads_q": 64}, "bfloat16"),
        ({}, "bfloat16_pair"),
        ({"queries": 3, "heads_q": 16}, "bfloat16"),
        ({"queries": 16, "heads_q": 16}, "bfloat16_pair"),
        ({"heads_q": 1, "dtype": torch.float16}, "float16_few"),
        ({"queries": 2, "heads_q": 8}, "bfloat16_few"),
        ({"heads_q": 17}, "bfloat16"),
        ({"heads_q": 17, "prefix": True}, "bfloat16"),
        ({"page_size": 8, "left": 100, "heads_q": 16}, "bfloat16_paged8_few"),
        ({"page_size": 32, "heads_q": 16}, "bfloat16_paged16_few"),
        ({"page_size": 32, "heads_q": 40}, "bfloat16_paged16"),
        ({"page_size": 64, "heads_q": 16}, "bfloat16_paged64_few"),
        ({"page_size": 64}, "bfloat16_paged32_pair"),
        ({"page_size": 256, "batch": 65535, "heads_q": 16}, "bfloat16_paged64_few"),
        ({"page_size": 90, "capacity": 90, "heads_q": 16}, "bfloat16_paged64_few"),
    ],
)
def test_takes(changes: dict[str, object], name: str, builds: None) -> None:
    assert BACKEND.supports(replace(PLAIN, **changes)) is None
    assert BACKEND.describe(replace(PLAIN, **changes)).startswith(f"module decode_latent_sm90_{name} ")


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"device": "cpu"}, "runs on CUDA tensors, not on cpu"),
        ({"dtype": torch.float32}, "takes float16 or bfloat16, not torch.float32"),
        ({"tree": True}, "has no trees yet"),
        ({"bias": "alibi"}, "has no bias yet"),
        ({"sink": True}, "has no softcap and no sink over latent caches yet"),
        ({"softcap": True}, "has no softcap and no sink over latent caches yet"),
        ({"heads_kv": 2}, "takes one key head of a latent cache, not 2"),
        ({"head_dim_v": 256}, "takes latent caches of 576 columns, 512 of them values, not 576 and 256"),
        ({"heads_q": 4096, "queries": 16}, "takes 65535 queries × heads of a latent cache at the most, not 65536"),
        ({"page_size": 4}, "takes pages of 8 keys or more, not of 4"),
        ({"batch": 65536}, "takes 65535 sequences of 1073741824 keys at the most, not 65536 of 4096"),
    ],
)
def test_refusals(changes: dict[str, object], words: str, builds: None) -> None:
    assert BACKEND.supports(replace(PLAIN, **changes)) == words


def test_runs_unasked(builds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in dispatch.implementations("decode")[:2]:
        monkeypatch.setattr(type(backend), "available", lambda self: None)
        monkeypatch.setattr(type(backend), "tensors_refusal", lambda *_: None, raising=False)
    for batch in (1, 64):
        for heads in (1, 16, 17, 32, 63, 64, 128):
            assert dispatch.choose(replace(PLAIN, batch=batch, heads_q=heads), None, "decode") == "hopper"
    assert dispatch.choose(replace(PLAIN, sink=True), None, "decode") == "triton"
    plain = replace(PLAIN, latent=False, heads_kv=8, head_dim=128, head_dim_v=128)
    assert "ask for it by backend='hopper'" in (BACKEND.refusal(plain) or "")


def test_choice_does_not_depend_on_the_batch(builds: None) -> None:
    """Else a sequence's bits would: neither whether it is taken, nor its variant."""
    for changes in ({"batch": 1}, {"batch": 512}, {"capacity": 10}, {"capacity": 1 << 20}):
        assert BACKEND.supports(replace(PLAIN, **changes)) is None
        assert BACKEND.describe(replace(PLAIN, **changes)) == BACKEND.describe(PLAIN)


def test_blocks_fill_the_processors() -> None:
    """A sequence's splits go to one block where there are sequences enough, and else to as many as find room."""
    tiles = LEAST << MOST_LOG
    found = {units: blocks_log(units, tiles, 132) for units in range(1, 400)}
    assert found[1] == found[2] == MOST_LOG and found[128] == 0 and found[64] == 1 and found[32] == 2
    for units, log in found.items():
        rounds = -(-(units << log) // 132)
        assert rounds / (1 << log) <= -(-units // 132)
    assert blocks_log(1, LEAST - 1, 132) == 0


def test_splits() -> None:
    assert [splits_log(tiles) for tiles in (0, LEAST, 2 * LEAST - 1, 2 * LEAST, 1 << 24)] == [0, 0, 0, 1, MOST_LOG]
    assert kept_floats(LEAST << 2, 1, 132) == 0 < kept_floats(LEAST << 2, 0, 132)


def test_there_is_room_for_parts_and_totals() -> None:
    """Of every sequence that is as long as there is room, or shorter: what `logs` makes of it."""
    for most in range(MOST_LOG + 1):
        tiles = LEAST << most
        for blocks in range(most + 1):
            for log in range(most + 1):
                each = max(log - blocks, 0)
                part = each if blocks == 0 else each // 2 * 2
                assert log - part <= parts_log(tiles, blocks) if blocks else part == log
                assert 4 ** levels(tiles, blocks) >= 1 << part


def test_names_and_the_named_set() -> None:
    found = named_set()
    names = [variant.name for variant in found]
    assert len(set(names)) == len(names) and all(name.isidentifier() for name in names)
    assert set(names) <= {spec.name for spec in every_module("sm_90a")}
    for variant in found:
        told = module_spec.from_json(module_spec.to_json(variant.spec))
        assert LatentConfig(**dict(told.config)) == variant and told == variant.spec
    for dtype in (BF16, torch.float16):
        for size in (None, *(8 << n for n in range(6))):
            assert all(config(dtype, size, False, *kind) in found for kind in ((), (True,), (False, True)))
        assert all(config(dtype, 90, True, *kind) in found for kind in ((), (True,), (False, True)))


def test_sources_are_what_the_kernel_imports() -> None:
    """Else an edit of a file that is not listed would leave modules of the older one in use."""
    assert imported("decode/hopper/latent_build.py") == set(SOURCES)


@pytest.mark.parametrize("page_size", [None, 8, 64])
def test_shapes_may_all_be_symbols(page_size: int | None, builds: None) -> None:
    """Under torch.compile(dynamic=True) page sizes are, which no function takes whose answers are kept."""

    def taken(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        (batch, queries, heads_q, dim), (_, keys, heads_kv, _) = q.shape, k.shape
        sizes = {"batch": batch, "queries": queries, "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": dim}
        problem = replace(PLAIN, **sizes, capacity=4 * keys, page_size=None if page_size is None else keys)
        return q + 1 if BACKEND.supports(problem) is None else q

    compiled = torch.compile(taken, fullgraph=True, dynamic=True, backend="eager")
    for batch in (2, 5):
        q, k = (torch.zeros(batch, size, heads, 576, dtype=BF16) for size, heads in ((1, 16), (page_size or 64, 1)))
        assert torch.equal(compiled(q, k), q + 1)
