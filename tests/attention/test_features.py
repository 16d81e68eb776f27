"""The list of what a call carries: read alike of problems and arguments, and unknown to no kernel that runs such a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.attention.harness import Call
from warploom import PagedKVCache, masks
from warploom.attention.ampere.config import ForwardConfig as AmpereForward
from warploom.attention.ampere.plan import config_for as ampere_config
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.caches import cache_args
from warploom.attention.chunks import chunk_args
from warploom.attention.features import Features
from warploom.attention.hopper import run, run_backward
from warploom.attention.hopper.config import BackwardConfig, ForwardConfig
from warploom.attention.hopper.offsets import with_columns
from warploom.attention.hopper.plan import backward_config_for, config_for
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.bias import ALiBi
from warploom.runtime import dispatch, modules
from warploom.runtime.module_spec import ModuleSpec

PAGES = torch.zeros(2, 2, dtype=torch.int32)
LENGTHS = torch.tensor([3, 2], dtype=torch.int32)
# Feature: keywords of a call that carries it. Packed calls have two sequences.
CARRIED: dict[str, dict[str, Any]] = {
    "right": {"causal": True},
    "left": {"window": (5, None)},
    "columns": {"mask": masks.Padding(torch.tensor([3]))},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": torch.zeros(2)},
    "dropout": {"dropout_p": 0.5, "dropout_seed": 1},
    "varlen": {"packed": True},
    "paged": {"packed": True, "seqused_k": LENGTHS, "block_table": PAGES},
    "used": {"packed": True, "seqused_k": LENGTHS},
    "deterministic": {"deterministic": True},
    "batch_invariant": {"batch_invariant": True},
    "q_offset": {"q_offset": torch.zeros(1, dtype=torch.int32), "seqlen_q": 20},
    "fp8_pages": {"packed": True, "cache": torch.float8_e4m3fn},
    "bias": {"bias": ALiBi(torch.zeros(2))},
    "bias_grad": {"bias": ALiBi(torch.zeros(2, requires_grad=True))},
}
# Without a kernel for it, a call's out and lse are none the less right.
NO_MATTER = {"deterministic", "dlse"}  # of gradients alone
FLAGS = [name for name, value in Features(torch.float16, 16, 16)._asdict().items() if value is False or value == ""]


def carrying(packed: bool = False, heads_kv: int = 2, **keywords: Any) -> AttentionArgs:
    q = torch.zeros(1, 20, 2, 16, dtype=torch.bfloat16)
    k = torch.zeros(1, 20, heads_kv, 16, dtype=torch.bfloat16)
    if "cache" in keywords:
        pages = PagedKVCache.allocate(2, 10, heads_kv, 16, page_size=4, dtype=keywords.pop("cache"), hadamard_seed=None)
        return cache_args(q[0], pages, cu_seqlens_q=torch.tensor([0, 5, 20], dtype=torch.int32), **keywords)
    if not packed:
        return (chunk_args if "q_offset" in keywords else dense_args)(q, k, k, **keywords)
    k = k.new_zeros(4, 16, heads_kv, 16) if "block_table" in keywords else k[0]
    return varlen_args(q[0], k, k, torch.tensor([0, 5, 20], dtype=torch.int32), **keywords)


def problem(feature: str) -> AttentionProblem:
    return replace(AttentionProblem.from_args(carrying(**CARRIED[feature]), False), device="cuda")


def flags(of: Features) -> set[str]:
    return {name for name in FLAGS if getattr(of, name)}


def test_every_feature_has_a_call_here() -> None:
    assert {*CARRIED, "dlse"} == set(FLAGS)
    assert len(Features._fields) == len(FLAGS) + len(("dtype", "head_dim", "head_dim_v", "page_box"))


@pytest.mark.parametrize("feature", CARRIED)
def test_a_problem_and_its_arguments_carry_the_same(feature: str) -> None:
    args = carrying(**CARRIED[feature])
    found = Features.of_args(args)
    assert found == Features.of(AttentionProblem.from_args(args, False))
    also = {"varlen"} if CARRIED[feature].get("packed") else set()
    more = {"paged": {"used"}, "fp8_pages": {"used", "paged"}, "bias_grad": {"bias"}, "batch_invariant": {"deterministic"}}
    also |= more.get(feature, set())
    assert flags(found) - flags(Features.of_args(carrying())) == {feature} | also


@pytest.mark.parametrize("dlse", [False, True])
def test_sizes_and_dlse_are_read_alike(dlse: bool) -> None:
    call = Call(3, head_dim=40, head_dim_v=72, dtype=torch.bfloat16)
    args = dense_args(*call.tensors()[:3])
    found = Features.of_args(args, dlse)
    assert found == Features.of(AttentionProblem.from_args(args, True), dlse)
    assert found == Features(torch.bfloat16, 40, 72, dlse=dlse)


def known(configs: tuple[Any, ...]) -> set[str]:
    return {field.name for config in configs for field in fields(config)}


# What is kept by the choice of tiles, or written as something else first: compiled kernels need not know it.
PLANNED = {"hopper": {"batch_invariant", "fp8_pages"}, "ampere": set[str]()}
BACKENDS: dict[str, tuple[Any, ...]] = {"hopper": (ForwardConfig, BackwardConfig), "ampere": (AmpereForward,)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature", CARRIED)
def test_no_kernel_runs_a_call_without_knowing_its_features(
    backend: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who adds a feature gives these configurations a field for it, or has ``supports`` refuse it in words."""
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    refused = dispatch.find(backend).supports(problem(feature))
    needed = {"bias_grad": "bias"}.get(feature, feature)  # its gradient, another implementation's may compute
    assert (refused is None) == (needed in known(BACKENDS[backend]) | NO_MATTER | PLANNED[backend])


@pytest.mark.parametrize("config", [ForwardConfig("", 64, 64, 64), BackwardConfig("", 64, 64, 64), AmpereForward("", 64, 64)])
def test_what_a_kernel_knows_is_in_its_name(config: Any) -> None:
    """Else two kernels would share a file."""
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool):
            assert replace(config, **{field.name: not value}).name != config.name, field.name
        if value == "" and field.name != "dtype":
            assert replace(config, **{field.name: "x"}).name != config.name, field.name


@pytest.mark.parametrize("feature", [name for name in CARRIED if name in known((ForwardConfig, BackwardConfig))])
def test_a_call_runs_the_module_that_dispatch_looked_for(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; and kernels that know the feature are compiled for it."""
    names: list[str] = []

    def load(spec: ModuleSpec) -> Callable[..., None]:
        names.append(spec.name)
        return lambda *_: None

    for module in (run, run_backward):
        monkeypatch.setattr(module, "_ready", {})
        monkeypatch.setattr(module, "processors", lambda index: 7)
    monkeypatch.setattr(run, "_counters", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(modules, "load", load)
    args, described = carrying(**CARRIED[feature]), problem(feature)
    if feature in ("columns", "q_offset"):
        args = with_columns(args)._replace(bounds=torch.zeros(1, 1, 1, 8, dtype=torch.int32))
    out, lse = run.forward(args)
    run_backward.backward(args, out, None, out, lse)
    planned = config_for(described), backward_config_for(described)
    assert names == [config.name for config in planned]
    assert all(getattr(config, feature, True) for config in planned)


@pytest.mark.parametrize("feature", [name for name in CARRIED if name in known((AmpereForward,))])
def test_ampere_has_a_kernel_for_each_that_it_knows(feature: str) -> None:
    assert getattr(ampere_config(problem(feature), (8, 0)), feature)
