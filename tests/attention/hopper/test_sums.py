"""Column sums on Hopper without one: which calls they are of, what the host hands the kernel, that dispatch says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.cases import CASES, case
from tests.attention.harness import Call
from tests.sources import imported
from warploom.attention import hopper, reference
from warploom.attention.arguments import dense_args
from warploom.attention.features import Features
from warploom.attention.hopper import stats, sums_run
from warploom.attention.hopper.sums_config import SOURCES, SumsConfig
from warploom.attention.hopper.sums_plan import TILES, sums_config, sums_refusal, sums_set
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.attention.stats import FAMILY, measured_by, stats_args, stats_backend, warm_stats
from warploom.commands.build import named_set as every_module
from warploom.runtime import dispatch, module_spec, modules, traced
from warploom.runtime.module_spec import ModuleSpec

PROCESSORS = 5
SHARED = 227 * 1024  # bytes a block of sm_90 has
OVERHEAD = 256 + 1024  # barriers and alignment
SUMS, BOTH = ("column_sums",), ("max_logits", "column_sums")


def problem(**changes: Any) -> AttentionProblem:
    shape = {"batch": 1, "seqlen_q": 128, "seqlen_k": 128, "heads_q": 2, "heads_kv": 1, "head_dim": 128, "head_dim_v": 128}
    return AttentionProblem(**{"device": "cuda", "dtype": torch.bfloat16, "layout": "dense", **shape, **changes})


def every_config() -> list[SumsConfig]:
    flags = product((torch.float16, torch.bfloat16), TILES, *((False, True),) * 3)
    return [sums_config(Features(t, d, d, right=r, left=x, softcap=c)) for t, d, r, x, c in flags]


def test_sources_are_what_the_kernel_imports() -> None:
    assert imported("attention/hopper/sums_build.py") == set(SOURCES)


def test_configurations() -> None:
    """Each has a name of its own, fits into shared memory and reaches the compiler whole."""
    found = every_config()
    assert len({c.name for c in found}) == len(found) and all(c.name.isidentifier() for c in found)
    for variant in found:
        assert variant.shared_bytes + OVERHEAD <= SHARED, variant
        assert SumsConfig(**dict(module_spec.from_json(module_spec.to_json(variant.spec)).config)) == variant
        assert variant.tile_n % 32 == 0 and variant.tile_n <= 256 and not (variant.softcap and variant.share)
    named = {variant.name for variant in sums_set()}
    assert named <= {spec.name for spec in every_module("sm_90a")} and len(named) == 8


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({"dtype": torch.float32}, "takes float16 or bfloat16, not torch.float32"),
    "wide": ({"head_dim": 264, "head_dim_v": 264}, "takes head_dim from 8 to 256 in steps of 8, not 264"),
    "packed": ({"layout": "varlen"}, "has no column sums under packed calls"),
    "mask": ({"columns": ("lts",)}, "has no column sums under column masks"),
    "bias": ({"bias": "alibi"}, "has no column sums under biases"),
    "offsets": ({"q_offset": True}, "has no column sums under query offsets"),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper that is the CPU, where modules can be built."""
    monkeypatch.setattr(stats, "_found", traced.Found())
    monkeypatch.setattr(modules, "cannot_run", lambda: None)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    monkeypatch.setattr(traced, "cannot_run", lambda: None)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take(name: str) -> None:
    changes, words = REFUSED[name]
    refused = problem(**changes)
    assert sums_refusal(refused) == words and hopper.STATS.supports(refused) == words


@pytest.mark.usefixtures("machine")
def test_who_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its own forward pass, and column sums alone: all else is somebody else's, as are other forward passes."""
    implementations = dispatch.implementations(FAMILY)
    asked = []

    class Other(type(dispatch.find("cpu"))):  # type: ignore[misc]
        name = "other"

        def supports(self, problem: AttentionProblem) -> str | None:
            asked.append(problem)
            return None

    monkeypatch.setattr(dispatch, "_families", dict(dispatch._families))
    dispatch.register(FAMILY, *(i for i in implementations if i.name == "hopper"), Other())
    call = problem(right=0, softcap=True, sink=True, dropout=True, backward=True)
    assert stats_backend(call, "hopper", SUMS) == "hopper" and not asked
    assert [stats_backend(call, "hopper", names) for names in (("max_logits",), BOTH, BOTH[::-1])] == ["other"] * 3
    assert stats_backend(call, "ampere", SUMS) == "other"
    for changes, _ in REFUSED.values():
        assert stats_backend(replace(call, **changes), "hopper", SUMS) == "other"


def kernel(spec: ModuleSpec) -> Callable[..., None]:
    """The reference in the kernel's place, held to what the kernel can read."""
    variant = SumsConfig(**dict(spec.config))

    def call(
        q: Tensor, k: Tensor, lse: Tensor, sums: Tensor, scale: float, softcap: float, left: int, right: int, blocks: int
    ) -> None:
        assert 1 <= blocks <= PROCESSORS and lse.stride(2) == 1 and sums.is_contiguous()
        assert all(s % 8 == 0 for t in (q, k) for s in t.stride()[:-1]) and q.stride(3) == k.stride(3) == 1
        assert (softcap != 0.0) == variant.softcap and q.shape[3] <= variant.head_dim
        window = (left if variant.left else None, right if variant.right else None)
        args = stats_args(dense_args(q, k, k, window=window, scale=scale, softcap=softcap))
        assert torch.allclose(reference.BACKEND.forward(args)[1].float(), lse, atol=1e-3)
        found = reference.BACKEND.stats(args, None, False, True)[1]
        assert found is not None
        sums.copy_(found)

    return call


@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name])
def test_dense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the reference has them, of the lse without a sink."""
    monkeypatch.setattr(sums_run, "processors", lambda index: PROCESSORS)
    monkeypatch.setattr(sums_run, "_ready", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    monkeypatch.setattr(modules, "load", kernel)
    q, k, v, sink = case(name, 3, dtype=torch.float16).tensors()
    args = stats_args(dense_args(q, k, v, sink=sink, **case(name, 3, dtype=torch.float16).keywords))
    lse = reference.BACKEND.forward(args)[1].float()
    want = reference.BACKEND.stats(args, None, False, True)[1]
    _, found = hopper.STATS.stats(args, lse, False, True)
    assert found is not None and want is not None and found.dtype == torch.float32
    torch.testing.assert_close(found, want.float(), rtol=2e-3, atol=2e-3)


def test_more_than_column_sums_goes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[AttentionArgs, bool, bool]] = []

    class Other(type(reference.BACKEND)):  # type: ignore[misc]
        name = "other"

        def supports(self, problem: AttentionProblem) -> str | None:
            return None

        def stats(self, args: AttentionArgs, lse: Tensor | None, max_logits: bool, column_sums: bool) -> Any:
            given.append((args, max_logits, column_sums))
            return None, None

    monkeypatch.setattr(dispatch, "_families", dict(dispatch._families))
    dispatch.register(FAMILY, hopper.STATS, Other())
    q, k, v, _ = Call(0).tensors()
    args = stats_args(dense_args(q, k, v))
    for asked in ((True, True), (True, False)):
        hopper.STATS.stats(args, torch.zeros(1), *asked)
    assert [(a, b) for _, a, b in given] == [(True, True), (True, False)]
    assert measured_by(args, AttentionProblem.from_args(args, False), "other", ()) is None


@pytest.mark.parametrize("sink", [False, True])
def test_what_sums_need_is_made_ready(sink: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module, and behind a sink the forward pass without it."""
    loaded: list[str] = []
    warmed: list[AttentionArgs] = []
    monkeypatch.setattr(sums_run, "_ready", {})
    monkeypatch.setattr(modules, "fetch", lambda spec: loaded.append(spec.name))
    monkeypatch.setattr(hopper.BACKEND, "warm", warmed.append)
    q, k, v, _ = Call(0, dtype=torch.float16).tensors()
    args = dense_args(q, k, v, sink=torch.zeros(q.shape[2]) if sink else None)
    warm_stats(args, "hopper", "hopper", ("column_sums",))
    assert len(loaded) == 1 and loaded[0].startswith("attn_sums") and len(warmed) == sink
    assert all(each.sink is None for each in warmed)
