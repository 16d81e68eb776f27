"""Configurations: one name each, head dims rounded in one place, shared memory that fits."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sources import imported
from warploom.attention import ampere, hopper
from warploom.attention.band import seen
from warploom.attention.features import Features
from warploom.attention.hopper import plan
from warploom.attention.hopper.config import BACKWARD_SOURCES, SOURCES, BackwardConfig, ForwardConfig
from warploom.attention.hopper.fp8_plan import fp8_config
from warploom.attention.hopper.plan import backward_set, config, config_for, named_set, pack_gqa, takes_columns, tile_dims
from warploom.attention.problem import AttentionProblem
from warploom.masks import SlidingWindow
from warploom.runtime import dispatch, module_spec, modules, traced
from warploom.runtime.alignment import aligned
from warploom.runtime.backend import Backend

SHARED = 227 * 1024  # bytes a block of sm_90 has
OVERHEAD = 512 + 1024  # barriers, the tile ring, alignment


def problem(**changes: object) -> AttentionProblem:
    shape = {"batch": 1, "seqlen_q": 128, "seqlen_k": 128, "heads_q": 2, "heads_kv": 1, "head_dim": 128, "head_dim_v": 128}
    return AttentionProblem(**{"device": "cuda", "dtype": torch.bfloat16, "layout": "dense", **shape, **changes})  # type: ignore[arg-type]


def test_sources_are_what_kernels_import() -> None:
    """Else an edit of a file that is not listed would leave modules of the older one in use."""
    here = "attention/hopper"
    build = f"{here}/build.py"
    built = build, "kernels/cute/arguments.py", "runtime/compile.py"
    assert {*built, *imported(f"{here}/forward.py")} == set(SOURCES)
    assert {*built, *imported(f"{here}/backward.py", f"{here}/backward_roles.py", f"{here}/backward_pair.py")} == set(
        BACKWARD_SOURCES
    )
    assert imported(build) == {*SOURCES, *BACKWARD_SOURCES}


def test_names_are_unique_and_few() -> None:
    found = [*named_set(), *backward_set()]
    assert len({c.name for c in found}) == len(found) <= 522
    assert all(c.name.isidentifier() for c in found)


def test_the_compiler_is_told_the_whole_configuration() -> None:
    """Through a line of JSON: a field that JSON does not keep, or that the module's spec left out, would be another."""
    for kind, variants in ((ForwardConfig, named_set()), (BackwardConfig, backward_set())):
        for variant in variants:
            told = module_spec.from_json(module_spec.to_json(variant.spec))
            assert kind(**dict(told.config)) == variant and told == variant.spec


def test_shared_memory_fits() -> None:
    for variant in named_set():
        assert variant.shared_bytes + OVERHEAD <= SHARED, variant


def test_every_head_dim_has_a_tile() -> None:
    for dim in range(8, 257, 8):
        for dim_v in range(8, 257, 8):
            tile, tile_v = tile_dims(dim, dim_v)
            assert tile >= dim and tile_v >= dim_v
    assert tile_dims(128, 128) == (128, 128) and tile_dims(72, 72) == (96, 96) and tile_dims(192, 128) == (192, 128)


def test_values_are_not_part_of_a_variant() -> None:
    """Scale, lengths, strides and window values come at run time: one module for all of them."""
    base = config_for(problem(left=100, right=0))
    assert config_for(problem(left=7, right=5, batch=9, seqlen_q=999, heads_q=8, head_dim=104)) == base
    assert config_for(problem(left=100)) != base


def test_a_named_set_serves_plain_calls() -> None:
    names = {c.name for c in named_set()}
    for layout in ("dense", "varlen"):
        for left, right in ((None, None), (None, 0), (100, 0)):
            for seqlen_k in (100, 100_000):
                assert config_for(problem(layout=layout, left=left, right=right, seqlen_k=seqlen_k)).name in names
                packed_window = layout == "varlen" and left is not None
                under_mask = problem(layout=layout, left=left, right=right, seqlen_k=seqlen_k, columns=("lts",))
                assert (config_for(under_mask).name in names) != packed_window
    for right, head_dim, seqlen_k in product((None, 0), (64, 128, 256), (500, 5000)):
        few = problem(seqlen_q=1, heads_q=8, right=right, head_dim=head_dim, head_dim_v=head_dim, seqlen_k=seqlen_k)
        assert config_for(few).pack_gqa and config_for(few).name in names


def test_three_warpgroups_go_apart_under_a_column_mask() -> None:
    """Each walks the key tiles of its own rows; two do not, nor does anyone without columns, nor FP8."""
    found = {dims: config(Features(torch.bfloat16, *dims, columns=True), True).apart for dims in plan.TILINGS}
    assert found == {dims: dims == (64, 64) for dims in plan.TILINGS}
    assert not config(Features(torch.bfloat16, 64, 64, columns=True, softcap=True), True).apart
    assert not config(Features(torch.bfloat16, 64, 64), True).apart
    fp8 = fp8_config(Features(torch.float8_e4m3fn, 64, 64, columns=True), torch.bfloat16)
    assert fp8.warpgroups == 3 and not fp8.apart


@pytest.mark.parametrize(
    ("m_blocks", "heads", "last"), [(128, 8, 17), (43, 32, 5), (64, 64, 0), (30, 4, 0), (1, 500, 0), (2, 500, 1), (500, 1, 132)]
)
def test_about_a_round_of_first_tiles_ends_a_short_masked_call(m_blocks: int, heads: int, last: int) -> None:
    assert plan.last_tiles(m_blocks, heads, 132) == last


def test_heads_of_a_group_share_a_tile_where_that_halves_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PACK_GQA", (8, 32))
    found = {queries: pack_gqa(queries, 4, 128) for queries in (1, 8, 9, 32, 64, 65, 128, 5000)}
    assert found == {1: 8, 8: 8, 9: 32, 32: 32, 64: 32, 65: 0, 128: 0, 5000: 0}
    assert [pack_gqa(1, group, 128) for group in (1, 2, 16, 17)] == [0, 8, 8, 8]
    assert config_for(problem(seqlen_q=1, heads_q=8)).queries == 8
    assert config_for(problem(seqlen_q=1, heads_q=8, layout="varlen")).queries == 128
    pages = {"layout": "paged", "page_box": 16, "seqused": True, "heads_q": 4}
    for longest, mean, queries in ((1, 1, 8), (16, 16, 32), (512, 512, 128), (512, 9, 32), (5000, 1, 8)):
        assert config_for(problem(**pages, seqlen_q=longest, mean_q=mean)).queries == queries
    assert config_for(problem(**pages, seqlen_q=1, mean_q=1, batch_invariant=True)).queries == 128


def test_key_tiles_over_pages_may_be_shared_out() -> None:
    """Where lengths that the host does not know may leave blocks idle for long."""
    assert plan.may_share(8, 8, 64, 256, 132) and plan.may_share(1, 32, 32, 512, 132)
    assert not plan.may_share(1, 32, 128, 128, 132)  # one sequence, whose tiles are nearly as many as blocks
    assert plan.may_share(16, 8, 128, 64, 132)  # several, one of which may be long
    assert not plan.may_share(16, 8, 128, 16, 132)  # too short for it


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "not on cpu"),
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"head_dim": 100}, "steps of 8"),
        ({"head_dim_v": 264}, "8 to 256"),
        ({"layout": "paged", "page_box": 8}, "takes pages of whole 16 keys"),
        ({"layout": "paged", "fp8_pages": True, "batch_invariant": True}, "no batch invariance over pages of FP8"),
        ({"layout": "paged", "page_box": 16, "dropout": True}, "no dropout over pages"),
        ({"layout": "paged", "page_box": 16, "bias": "alibi"}, "no bias over pages"),
        ({"layout": "paged", "page_box": 16, "backward": True}, "no gradient over pages"),
        ({"bias": "tensor"}, "no bias but ALiBi and tables of distances"),
        ({"bias": "distance", "softcap": True}, "no table of distances beside a softcap or dropout"),
        ({"bias": "alibi", "columns": ("lts",)}, "no bias under a column mask"),
        ({"bias": "alibi", "head_dim": 136}, "no bias past head_dim 128"),
        ({"bias": "alibi", "head_dim_v": 192}, "no bias past head_dim 128"),
        ({"bias": "alibi", "dtype": torch.float16}, "a bias of calls in bfloat16 alone"),
        ({"bias": "distance", "dtype": torch.float16}, "a bias of calls in bfloat16 alone"),
        ({"bias": "distance", "sink": True}, "beside a sink"),
        ({"bias": "distance", "head_dim": 96, "head_dim_v": 96}, "at head dims from 72 to 96"),
        ({"bias": "alibi", "softcap": True, "dropout": True}, "no bias beside both"),
    ],
)
def test_refusals(changes: dict[str, object], words: str) -> None:
    assert words in (hopper.BACKEND.supports(problem(**changes)) or "")


def test_pages_that_no_gpu_saw_are_left_to_others_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper.modules, "cannot_build", lambda: None)
    monkeypatch.setattr(hopper.traced, "cannot_run", lambda: None)
    known = problem(layout="paged", page_box=16, seqused=True, right=0, dtype=torch.bfloat16, head_dim=128, head_dim_v=128)
    assert hopper.BACKEND.refusal(known) is None and hopper.BACKEND.refusal(replace(known, left=50)) is None
    unknown: list[dict[str, Any]] = [
        {"right": None}, {"softcap": True}, {"sink": True}, {"dtype": torch.float16}, {"head_dim": 136, "head_dim_v": 136},
    ]  # fmt: skip
    for changes in unknown:
        call = replace(known, **changes)
        assert "by backend='hopper'" in (hopper.BACKEND.refusal(call) or "")
        assert hopper.BACKEND.refusal(call, by_name=True) is None


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (Features(torch.bfloat16, 128, 128, bias="alibi"), None),
        (Features(torch.bfloat16, 96, 96, bias="alibi", softcap=True), None),
        (Features(torch.bfloat16, 128, 128, bias="alibi", bias_grad=True), "gradient of slopes"),
        (Features(torch.bfloat16, 128, 128, bias="distance", bias_grad=True), None),
        (Features(torch.bfloat16, 64, 64, bias="distance"), None),
        (Features(torch.bfloat16, 64, 64, bias="distance", deterministic=True), "no deterministic backward"),
        (Features(torch.bfloat16, 64, 64, bias="distance", bias_grad=True, dlse=True), "no gradient through lse"),
        (Features(torch.bfloat16, 64, 64, bias="distance", bias_grad=True, deterministic=True), "in any order"),
        (Features(torch.bfloat16, 104, 104, bias="alibi", softcap=True), "beside a softcap past head_dim 96"),
        (Features(torch.bfloat16, 128, 128, bias="alibi", dropout=True), None),
        (Features(torch.bfloat16, 128, 128, bias="alibi", dropout=True, varlen=True), "beside dropout of packed calls"),
    ],
)
def test_backward_of_a_bias(features: Features, words: str | None) -> None:
    found = plan.bias_backward_refusal(features)
    assert found is None if words is None else words in (found or "")


def test_tables_are_taken_unasked() -> None:
    for grad in (False, True):
        call = problem(bias="distance", bias_grad=grad, backward=True)
        assert hopper.BACKEND.declines(call) is None and hopper.BACKEND.supports(call) is None


def test_alibi_of_common_models_is_prepared() -> None:
    forward, backward = {c.name for c in named_set()}, {c.name for c in backward_set()}
    layouts: list[tuple[str, int | None]] = [("dense", 0), ("varlen", 0), ("dense", None)]
    for dim, (layout, right), length in product((64, 128), layouts, (1000, 9000)):
        call = problem(head_dim=dim, head_dim_v=dim, layout=layout, right=right, seqlen_q=length, seqlen_k=length, bias="alibi")
        assert config_for(call).name in forward and "_alibi" in config_for(call).name
        assert plan.backward_config_for(replace(call, heads_q=1)).name in backward
        for variant in (config_for(call), plan.backward_config_for(call)):
            assert variant.reaches == ("_reaches" in variant.name) == (layout == "dense" and length == 9000)


@pytest.mark.parametrize(
    ("changes", "forward", "backward"),
    [
        ({}, True, True),
        ({"right": 7}, True, True),
        ({"right": -1}, False, False),
        ({"seqlen_k": plan.REACH - 1}, False, False),
        ({"left": 100}, False, False),
        ({"layout": "varlen"}, False, False),
        ({"softcap": True}, False, False),
        ({"dropout": True}, True, True),
        ({"deterministic": True}, True, False),
        ({"seqlen_q": 1, "heads_q": 8}, False, True),  # slopes of several heads in a tile
        ({"bias": ""}, False, False),
        ({"bias": "distance"}, False, False),
        ({"batch": 65535}, True, True),
        ({"batch": 65536}, False, False),  # more than a grid has on the axis
        ({"heads_q": 65528, "heads_kv": 8}, False, False),
    ],
    ids=str,
)
def test_which_calls_leave_out_what_is_too_far_away(changes: dict[str, Any], forward: bool, backward: bool) -> None:
    call = problem(**{"seqlen_k": plan.REACH, "bias": "alibi", **changes})
    assert (config_for(call).reaches, plan.backward_config_for(call).reaches) == (forward, backward)
    assert not plan.backward_config_for(call, dlse=True).reaches


def test_the_largest_logits_of_long_causal_calls_are_prepared() -> None:
    names = {c.name for c in named_set()}
    for dim in (64, 128):
        call = problem(head_dim=dim, head_dim_v=dim, right=0, seqlen_q=9000, seqlen_k=9000, dtype=torch.bfloat16)
        assert plan.with_largest(config_for(call)).name in names


def test_tables_of_common_models_are_prepared() -> None:
    forward, backward = {c.name for c in named_set()}, {c.name for c in backward_set()}
    for dim, right, length in product((64, 128), (None, 0), (1000, 9000)):
        size = {"head_dim": dim, "head_dim_v": dim, "right": right, "seqlen_q": length, "seqlen_k": length}
        call = problem(**size, bias="distance", bias_grad=True)
        assert config_for(call).name in forward and "_distance" in config_for(call).name
        assert plan.backward_config_for(call).name in backward and "_distance_grad" in plan.backward_config_for(call).name
        frozen = plan.backward_config_for(replace(call, bias_grad=False)).name
        assert frozen in backward and "_distance" in frozen and "_grad" not in frozen
        assert not plan.backward_config_for(replace(call, heads_q=8)).waves


@pytest.mark.parametrize(
    ("dims", "refused"),
    [
        ((64, 64), "-"), ((96, 72), "-"), ((104, 104), "softcap, dropout deterministic"),
        ((64, 128), "softcap, dropout deterministic"),
        ((136, 64), "softcap deterministic"), ((192, 192), "softcap deterministic"),
        ((200, 64), "softcap"), ((256, 256), "softcap"),
    ],
    ids=str,
)  # fmt: skip
def test_backward_of_column_masks_where_registers_suffice(dims: tuple[int, int], refused: str) -> None:
    without = [set(words.split()) for words in refused.split(", ")]
    for asked in ("", "deterministic", "softcap", "dropout", "softcap deterministic", "dropout deterministic"):
        flags = dict.fromkeys(asked.split(), True)
        features = Features(torch.bfloat16, *dims, columns=True, right=True, **flags)
        taken = not any(words <= flags.keys() for words in without)
        assert takes_columns(features) == taken, asked
        assert takes_columns(features._replace(varlen=True)) == (taken and max(dims) <= 128), asked


def test_queries_of_a_masked_backward_step() -> None:
    """At head_dim 128 those of a dense one, but packed, deterministic or limited on the left, where registers are short."""

    def queries(**flags: Any) -> int:
        return plan.backward_config(Features(torch.bfloat16, 128, 128, **flags), False).tile_m

    assert queries() == queries(columns=True) == queries(columns=True, right=True) == queries(columns=True, dlse=True) == 80
    assert queries(varlen=True) == queries(deterministic=True) == 80
    for flag in ("varlen", "deterministic", "left"):
        assert queries(columns=True, right=True, **{flag: True}) == 64


def test_missing_module_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    monkeypatch.setattr(modules, "cannot_build", lambda: "the CuTe DSL is not installed")
    words = hopper.BACKEND.supports(problem())
    assert words is not None and "not built" in words and "DSL" in words
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    assert hopper.BACKEND.supports(problem()) is None


def test_calls_with_used_keys_were_refused_for_another_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the fuzzer: seqused_k has modules of its own, and the one without it was looked for."""
    asked: list[str] = []
    monkeypatch.setattr(modules, "cannot_build", lambda: "the CuTe DSL is not installed")
    monkeypatch.setattr(modules, "absence", lambda spec: asked.append(spec.name))
    monkeypatch.setattr(hopper, "_found", traced.Found())
    for seqused in (False, True):
        described = problem(layout="varlen", seqused=seqused)
        assert hopper.BACKEND.supports(described) is None and asked.pop() == config_for(described).name
        assert ("_used" in config_for(described).name) == seqused


@pytest.mark.parametrize(
    ("dim", "lengths", "right", "tile"),
    [
        (64, (4096, 77), None, (192, 80, "pingpong")), (128, (4096, 77), None, (192, 80, "early")),
        (64, (4096, 81), None, (192, 128, "pingpong")), (256, (4096, 77), None, (128, 80, "late")),
        (64, (4096, 77), 0, (256, 64, "early")), (128, (4096, 77), 0, (128, 128, "early")),
        (64, (197, 197), None, (256, 64, "early")), (64, (192, 197), None, (192, 128, "pingpong")),
        (64, (197, 257), None, (192, 128, "pingpong")), (128, (197, 197), None, (128, 128, "early")),
        (128, (512, 16384), 0, (128, 128, "pingpong")), (128, (4096, 4096), 0, (128, 128, "pingpong")),
        (128, (4097, 8192), 0, (128, 128, "early")), (128, (512, 2047), 0, (128, 128, "early")),
        (128, (512, 16384), None, (128, 128, "early")),
    ],
    ids=str,
)  # fmt: skip
def test_tiles_by_lengths(dim: int, lengths: tuple[int, int], right: int | None, tile: tuple[int, int, str]) -> None:
    """Of dense calls of one head a tile; others, and those whose registers are short, have the usual ones."""
    shape = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "head_dim": dim, "head_dim_v": dim, "right": right}
    found = config_for(problem(**shape))
    assert (found.tile_m, found.tile_n, found.pv_wait) == tile
    for other in ({"left": 3}, {"softcap": True}, {"dropout": True}, {"columns": ("lts",)}, {"layout": "varlen"}):
        described = problem(**shape | other)
        assert config_for(described) == config(Features.of(described), lengths[1] >= plan.LONG)
    few = problem(**shape | {"seqlen_q": 1}, heads_q=8)
    assert config_for(few) == config(Features.of(few), lengths[1] >= plan.LONG, 8)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (3, 11), (11, 3)])
def test_seen_is_what_the_band_shows(seqlen_q: int, seqlen_k: int) -> None:
    for left in (None, -3, 0, 2, 20):
        for right in (None, -20, -3, 0, 2):
            shown = SlidingWindow(left, right).dense(seqlen_q, seqlen_k)[0, 0].any(0).nonzero()[:, 0].tolist()
            first, end = seen(seqlen_q, seqlen_k, left, right)
            if shown:
                assert first <= shown[0] and shown[-1] < end, (left, right)
                assert (first, end) == (shown[0], shown[-1] + 1) or (left is not None and right is not None and right < -left)
            else:
                assert first >= end or (left is not None and right is not None and right < -left) or seqlen_q < 1


def test_copies_only_what_tma_cannot_read() -> None:
    t = torch.zeros(2, 64, 4, 128, dtype=torch.float16)
    assert aligned(t) is t
    assert aligned(t.transpose(1, 2)).data_ptr() == t.data_ptr()
    assert aligned(t[..., :104]).data_ptr() == t.data_ptr()
    for awkward in (t[..., 1:105], torch.zeros(2, 64, 4, 132, dtype=torch.float16)[..., :128], t.transpose(2, 3)):
        copied = aligned(awkward)
        assert copied.is_contiguous() and torch.equal(copied, awkward)


def test_config_rounds_head_dims() -> None:
    assert config(Features(torch.float16, 40, 72, right=True), False).head_dim == 96


def test_expanded_keys_are_not_copied() -> None:
    keys = torch.zeros(1, 64, 1, 128, dtype=torch.float16).expand(3, 64, 5, 128)
    assert aligned(keys) is keys


@pytest.mark.parametrize(
    ("capability", "driver", "words"),
    [((9, 0), 13000, None), ((9, 0), None, None), ((9, 0), 12080, "this one is for 12.8"), ((10, 0), 13000, "has 10.0")],
)
def test_available_in_words(monkeypatch: pytest.MonkeyPatch, capability: object, driver: object, words: str | None) -> None:
    """On a machine that looks like one with such a GPU and driver."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(modules, "driver_version", lambda: driver)
    monkeypatch.setattr(modules, "cannot_load", lambda: None)
    modules.cannot_run.cache_clear()
    found = hopper.BACKEND.available()
    modules.cannot_run.cache_clear()
    assert found is None if words is None else words in (found or "")


@pytest.mark.parametrize("dynamic", [False, True])
def test_dispatch_can_be_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: object, dynamic: bool) -> None:
    """torch.compile settles availability and the module's state while it traces, with nothing asked before."""
    # What dynamo cannot trace: a cache, sets, the environment, files.
    monkeypatch.setattr(modules, "cannot_run", functools.cache(lambda: None if {os.getpid(), *os.environ} else "nowhere"))
    monkeypatch.setattr(modules, "cannot_build", lambda: None if Path(str(tmp_path)).exists() else "nothing")
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))

    def chosen(x: torch.Tensor) -> torch.Tensor:
        call = problem(seqlen_q=x.shape[0], seqlen_k=x.shape[0], right=0, dtype=x.dtype, backward=x.requires_grad)
        return x + 1 if dispatch.choose(call, "hopper") == "hopper" else x

    compiled = torch.compile(chosen, fullgraph=True, dynamic=dynamic, backend="eager")
    for rows in (5, 7):
        x = torch.zeros(rows, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), x + 1)


@pytest.mark.parametrize("backend", [hopper.BACKEND, ampere.BACKEND], ids=["hopper", "ampere"])
def test_shapes_may_all_be_symbols(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch.compile(dynamic=True) head dims are, which no function takes whose answers are kept."""
    monkeypatch.setattr(modules, "cannot_build", lambda: None)

    def taken(x: torch.Tensor) -> torch.Tensor:
        lengths, heads, dims = ({name: size for name in names} for names, size in zip(SIZES, x.shape, strict=True))
        return x + 1 if backend.supports(problem(dtype=x.dtype, **lengths, **heads, **dims)) is None else x

    compiled = torch.compile(taken, fullgraph=True, dynamic=True, backend="eager")
    for shape in ((20, 8, 128), (50, 4, 64), (30, 8, 72)):
        x = torch.zeros(shape, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), x + 1)


SIZES = (("seqlen_q", "seqlen_k"), ("heads_q", "heads_kv"), ("head_dim", "head_dim_v"))


@pytest.mark.parametrize("backend", [hopper.BACKEND, ampere.BACKEND], ids=["hopper", "ampere"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_tracer_asks_where_no_module_can_be_built(backend: Backend, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile failed with "tuple index out of range" where modules are in a cache and the DSL is not installed."""
    monkeypatch.setattr(modules, "cannot_build", lambda: "no compiler")
    monkeypatch.setattr(modules, "absence", lambda spec: f"absent {spec.name}")
    monkeypatch.setattr(dispatch, "following", lambda *arguments: None if backend is hopper.BACKEND else backend)
    monkeypatch.setattr(ampere, "_capabilities", lambda: ((8, 0),))
    found: list[str | None] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        refusal = backend.supports(problem(backward=backward))
        found.append(refusal)
        return x + len(refusal or "")

    want = backend.supports(problem(backward=backward))
    assert want is not None and "absent attn_" in want
    torch._dynamo.reset()
    one = torch.zeros(1)
    assert torch.compile(traced, backend="eager")(one).item() == len(want)
