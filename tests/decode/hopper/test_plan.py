"""What the Hopper decode takes and refuses, which variant serves a call, and where its lanes look for a key."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.sources import imported
from warploom.commands.build import named_set as every_module
from warploom.decode.hopper import BACKEND
from warploom.decode.hopper.config import SHARED_BYTES, SOURCES, DecodeConfig
from warploom.decode.hopper.plan import HEAD_DIMS, LEAST, cluster, config, named_set, page_size
from warploom.decode.problem import DecodeProblem
from warploom.runtime import dispatch, module_spec, modules

BF16 = torch.bfloat16
PLAIN = DecodeProblem(
    device="cuda", dtype=BF16, batch=4, queries=1, capacity=4096, heads_q=32, heads_kv=8, head_dim=128, head_dim_v=128
)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has the compiler."""
    monkeypatch.setattr(modules, "cannot_build", lambda: None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"queries": 4},
        {"head_dim": 64, "head_dim_v": 40},
        {"head_dim": 96, "head_dim_v": 80},
        {"dtype": torch.float16},
        {"sink": True},
        {"page_size": 8, "left": 100},
        {"page_size": 256, "batch": 65535, "softcap": True},
        {"page_size": 90, "capacity": 90},
    ],
)
def test_takes(changes: dict[str, object], builds: None) -> None:
    assert BACKEND.supports(replace(PLAIN, **changes)) is None
    assert BACKEND.describe(replace(PLAIN, **changes)).startswith("module decode_sm90_")


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"device": "cpu"}, "runs on CUDA tensors, not on cpu"),
        ({"dtype": torch.float32}, "takes float16 or bfloat16, not torch.float32"),
        ({"fp8": True}, "reads no FP8 caches yet"),
        ({"tree": True}, "has no trees yet"),
        ({"bias": "alibi"}, "has no bias yet"),
        ({"head_dim": 192}, "takes head_dim from 16 to 128 in steps of 8, not 192"),
        ({"head_dim_v": 12}, "takes head_dim_v from 16 to 128 in steps of 8, not 12"),
        ({"sink": True, "softcap": True}, "has no kernel yet for these dims, dtype, pages, softcap and sink together"),
        ({"queries": 5}, "takes up to 16 queries × heads of a key head, not 20"),
        ({"heads_q": 16, "heads_kv": 4}, "takes 8 key heads or more, not 4"),
        ({"page_size": 4}, "takes pages of 8 keys or more, not of 4"),
        ({"batch": 65536}, "takes 65535 sequences of 1073741824 keys at the most, not 65536 of 4096"),
        # Of more it would leave out the first: a window that ends nowhere is so long.
        ({"capacity": 2**30 + 1}, "takes 65535 sequences of 1073741824 keys at the most, not 4 of 1073741825"),
    ],
)
def test_refusals(changes: dict[str, object], words: str, builds: None) -> None:
    assert BACKEND.supports(replace(PLAIN, **changes)) == words


def test_runs_by_name_alone(builds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is faster depends on the batch, and a sequence's bits must not; that Triton runs is no fall to report."""
    monkeypatch.setattr(type(BACKEND), "available", lambda self: None)
    assert [backend.name for backend in dispatch.implementations("decode")][:2] == ["hopper", "triton"]
    assert dispatch.choose(PLAIN, "hopper", "decode") == "hopper"
    assert "ask for it by backend='hopper'" in (BACKEND.declines() or "")
    for batch in (1, 64):
        assert BACKEND.refusal(replace(PLAIN, batch=batch)) == BACKEND.declines()
    with pytest.raises(ValueError, match="backend='hopper' cannot run this call: has no trees yet"):
        dispatch.choose(replace(PLAIN, tree=True), "hopper", "decode")


def test_choice_does_not_depend_on_the_batch(builds: None) -> None:
    """Else a sequence's bits would: neither whether it is taken, nor its variant."""
    for changes in ({"batch": 1}, {"batch": 512}, {"capacity": 10}, {"capacity": 1 << 20}):
        assert BACKEND.supports(replace(PLAIN, **changes)) is None
        assert BACKEND.describe(replace(PLAIN, **changes)) == BACKEND.describe(PLAIN)


def test_variants_differ_in_nothing_that_decides_bits() -> None:
    """Of contiguous keys and pages of every size: the tile, the warps and the splits are those of the dims."""
    for dim in HEAD_DIMS:
        found = {replace(config(BF16, dim, dim, size), box=0, paged=False) for size in (None, 8, 16)}
        assert len(found) == 1


def test_page_sizes() -> None:
    assert page_size(None, False) is None
    assert [page_size(keys, False) for keys in (8, 16, 256)] == [8, 16, 16]
    assert page_size(90, True) == 16


def test_every_head_dim_has_a_tile() -> None:
    for dim in range(16, 129, 8):
        for dim_v in range(16, 129, 8):
            tile = config(BF16, dim, dim_v, None).head_dim
            assert max(dim, dim_v) <= tile and (tile == 64 or max(dim, dim_v) > 64)


def test_clusters_find_room() -> None:
    variant = config(BF16, 128, 128, None)
    assert variant.clusters[0] == variant.splits and variant.clusters[-1] == 1
    found = [cluster(variant, pairs, 132) for pairs in range(1, 200)]
    assert found[7] == 8 and found[-1] == 1 and found == sorted(found, reverse=True)
    assert all(size * pairs <= 132 or size == 1 for pairs, size in enumerate(found, 1))
    assert set(found) == set(variant.clusters)


def test_names_and_the_named_set() -> None:
    found = named_set()
    names = [variant.name for variant in found]
    assert len(set(names)) == len(names) and all(name.isidentifier() for name in names)
    assert set(names) <= {spec.name for spec in every_module("sm_90a")}
    for variant in found:
        told = module_spec.from_json(module_spec.to_json(variant.spec))
        assert DecodeConfig(**dict(told.config)) == variant and told == variant.spec
        assert LEAST % variant.tile_n == 0 and variant.tile_n % variant.box == 0
        for size in variant.clusters:
            rest = 4 * (variant.exchanged_floats + variant.merged_floats(size))
            assert variant.slots(size) >= 4 and variant.slots(size) * variant.slot_bytes + rest + 1024 <= SHARED_BYTES


def test_sources_are_what_the_kernel_imports() -> None:
    """Else an edit of a file that is not listed would leave modules of the older one in use."""
    assert imported("decode/hopper/build.py") == set(SOURCES)


@pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")
@pytest.mark.parametrize("box", [8, 16, 64, 128])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_lanes_find_their_keys(dim: int, box: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TMA puts eight columns of a key: box after box, 64 columns after 64, and 16 bytes of a row change places by the
    eight rows that the address lies in."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    from warploom.decode.hopper import consumers

    monkeypatch.setattr(consumers, "ldmatrix_x4", lambda address, offset, trans: address + offset)
    of = consumers.Consumers(replace(config(BF16, dim, dim, None), tile_n=128, box=box))
    for key in range(0, 128, 5):
        for column in range(0, dim, 8):
            row = key // box * (box * dim // 64) + column // 64 * box + key % box
            place = row * 128 + column % 64 * 2
            place ^= (place >> 7 & 7) << 4
            first, sub = key // 64 * 64, key % 64 // 16
            lane = of.lane_place(first + key % 16, column // 8 % 2)
            assert of.block(lane, {}, sub, column // 16 * 16, False) == place


@pytest.mark.parametrize("page_size", [None, 8, 64])
def test_shapes_may_all_be_symbols(page_size: int | None, builds: None) -> None:
    """Under torch.compile(dynamic=True) head dims and page sizes are, which no function takes whose answers are kept."""

    def taken(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        (batch, queries, heads_q, dim), (_, keys, heads_kv, _) = q.shape, k.shape
        sizes = {"batch": batch, "queries": queries, "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": dim}
        problem = replace(PLAIN, **sizes, head_dim_v=dim, capacity=4 * keys, page_size=None if page_size is None else keys)
        return q + 1 if BACKEND.supports(problem) is None else q

    compiled = torch.compile(taken, fullgraph=True, dynamic=True, backend="eager")
    for batch in (2, 5):
        q, k = (torch.zeros(batch, size, 8, 128, dtype=BF16) for size in (1, page_size or 64))
        assert torch.equal(compiled(q, k), q + 1)
