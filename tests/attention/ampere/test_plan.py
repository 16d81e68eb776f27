"""Which variant serves which call, what is refused, and that the tilings fit the machines they are for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom.attention import ampere
from warploom.attention.ampere.config import ForwardConfig
from warploom.attention.ampere.plan import ARCHS, SMALL, config_for, named_set, tile_dim
from warploom.attention.problem import AttentionProblem
from warploom.commands.build import named_set as named_modules
from warploom.runtime import dispatch, module_spec, modules

SHARED = {(8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100, (9, 0): 228}  # KiB a multiprocessor


def problem(**changes: Any) -> AttentionProblem:
    fields: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "layout": "dense", "batch": 2, "seqlen_q": 100}
    fields |= {"seqlen_k": 100, "heads_q": 4, "heads_kv": 2, "head_dim": 128, "head_dim_v": 128, **changes}
    return AttentionProblem(**fields)


@pytest.mark.parametrize("capability", ARCHS)
def test_variants_fit(capability: tuple[int, int]) -> None:
    for config in named_set(capability):
        assert config.arch == ARCHS[capability]
        assert config.blocks * (config.shared_bytes + 1024) <= SHARED[capability] * 1024
        assert 65536 // (32 * config.warps * config.blocks) >= 128
        threads, pieces = 32 * config.warps, config.head_dim // 8
        assert config.tile_n % 16 == 0 and config.tile_n % (threads // pieces) == 0
        assert config.tile_m % (threads // pieces) == 0


def test_small_machines_have_tilings_of_their_own() -> None:
    assert {config_for(problem(), c).shared_bytes > 100 * 1024 // 2 for c in SMALL} == {True}
    assert config_for(problem(), (8, 6)) != config_for(problem(), (8, 0)) == config_for(problem(), (8, 7))


def test_names_tell_variants_apart() -> None:
    found = [config for capability in ARCHS for config in named_set(capability)]
    names = {config.name: config for config in found}
    assert len(names) == len(set(found))
    assert all(names[config.name] == config for config in found)
    swizzles = {ForwardConfig("float16", 128, 48, swizzle=s, pad=p).name for s, p in ((True, 0), (False, 0), (False, 8))}
    assert len(swizzles) == 3


def test_the_compiler_is_told_the_whole_configuration() -> None:
    """Through a line of JSON: a field that JSON does not keep, or that the module's spec left out, would be another."""
    for variant in (config for capability in ARCHS for config in named_set(capability)):
        told = module_spec.from_json(module_spec.to_json(variant.spec))
        assert ForwardConfig(**dict(told.config)) == variant and told == variant.spec


def test_build_knows_them() -> None:
    names = [spec.name for spec in named_modules("sm_80")]
    assert len(names) == len(set(names)) and all(name.startswith("attn_fwd_sm80_") for name in names)
    assert config_for(problem(), (8, 0)).name in names and config_for(problem(right=0), (8, 9)).name in names


@pytest.mark.parametrize(("dims", "tile"), [((8, 8), 64), ((64, 64), 64), ((64, 72), 128), ((128, 8), 128)])
def test_tile_dims(dims: tuple[int, int], tile: int) -> None:
    assert tile_dim(*dims) == tile


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "not on cpu"),
        ({"dtype": torch.float32}, "float16 or bfloat16, not torch.float32"),
        ({"head_dim": 136}, "head_dim from 8 to 128 in steps of 8, not 136"),
        ({"head_dim_v": 12}, "head_dim_v from 8 to 128 in steps of 8, not 12"),
        ({"layout": "varlen"}, "no packed sequences"),
        ({"layout": "paged"}, "no pages"),
        ({"columns": ("lts",)}, "no column masks"),
        ({"dropout": True}, "no dropout"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    assert words in (ampere.BACKEND.supports(problem(**changes)) or "")


def test_what_is_built_or_can_be_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    monkeypatch.setattr(ampere, "_capabilities", lambda: ((8, 0),))
    monkeypatch.setattr(modules, "cannot_build", lambda: "the DSL is gone")
    words = ampere.BACKEND.supports(problem())
    assert words is not None and "is not built in" in words and "the DSL is gone" in words
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    assert ampere.BACKEND.supports(problem()) is None


@pytest.mark.parametrize(
    ("capability", "unasked", "by_name"), [((8, 6), None, None), ((9, 0), "only", None), ((10, 0), "10.0", "10.0")]
)
def test_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], unasked: str | None, by_name: str | None
) -> None:
    """Chosen on 8.x; on Hopper for backend='ampere' only; elsewhere never."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(modules, "driver_version", lambda: 13000)
    monkeypatch.setattr(ampere, "_capabilities", lambda: (capability,))
    monkeypatch.setattr(modules, "cannot_load", lambda: None)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    ours = dispatch.find("ampere")
    for found, words in ((ours.refusal(problem()), unasked), (ours.refusal(problem(), by_name=True), by_name)):
        assert found is None if words is None else words in (found or "")


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(modules, "driver_version", lambda: 12080)
    monkeypatch.setattr(ampere, "_capabilities", lambda: ((8, 0),))
    assert "12.8" in (ampere.BACKEND.available() or "")
