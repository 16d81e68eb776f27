"""Which calls the Hopper kernels take, which modules they need, and that dispatch says so, quietly and under torch.compile."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sources import imported
from warploom.commands.build import named_set as every_module
from warploom.delta import hopper, registry  # noqa: F401  (registry fills the dispatch list)
from warploom.delta.hopper.config import (
    BACK_SOURCES,
    FORWARD_SOURCES,
    GRADIENT_SOURCES,
    PREPARE_SOURCES,
    ForwardConfig,
)
from warploom.delta.hopper.plan import LONGEST, back, back_modules_of, forward, gradients, keep, modules_of, named_set, prepare
from warploom.delta.problem import DeltaCall, StepArgs
from warploom.runtime import dispatch, module_spec, modules, traced


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper that is the CPU, where modules can be built."""
    monkeypatch.setattr(DeltaCall, "device", "cuda")
    monkeypatch.setattr(hopper, "_found", traced.Found())
    monkeypatch.setattr(modules, "cannot_run", lambda: None)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)


def call(**changes: Any) -> DeltaCall:
    """One that is taken, with other shapes or fields."""
    dtype, tokens = changes.pop("dtype", torch.bfloat16), changes.pop("tokens", 16)
    e, m = changes.pop("dims", (128, 128))
    q, v = (torch.empty(1, dtype=dtype).expand(1, tokens, heads, dim) for heads, dim in ((2, e), (8, m)))
    beta = torch.empty(1).expand(1, tokens, 8)
    plain = DeltaCall(q, q, v, beta, beta, 1.0, True, 1e-6, None, None, None)
    return replace(plain, **changes)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"dtype": torch.float16}, "takes bfloat16, not torch.float16"),
    "fp32": ({"dtype": torch.float32}, "takes bfloat16, not torch.float32"),
    "wide keys": ({"dims": (136, 64)}, r"takes E \(the keys' dim\) from 8 to 128 in steps of 8, not 136"),
    "odd values": ({"dims": (64, 20)}, r"takes M \(the values' dim\) from 8 to 256 in steps of 8, not 20"),
    "a token": ({"tokens": 1}, f"takes from 2 to {LONGEST} tokens, not 1"),
    "long": ({"tokens": LONGEST + 1}, f"takes from 2 to {LONGEST} tokens, not {LONGEST + 1}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_in_words(name: str, machine: None) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"backend='hopper' cannot run this call: .*{words}"):
        dispatch.choose(call(**changes), "hopper", "delta")


@pytest.mark.parametrize("dims", [(8, 256), (64, 64), (128, 128)], ids=str)
def test_what_it_takes(dims: tuple[int, int], machine: None) -> None:
    state = torch.empty(1).expand(1, 8, *dims)
    for changes in ({}, {"decay": None}, {"state": state}, {"cu_seqlens": torch.zeros(2, dtype=torch.int32)}):
        assert dispatch.choose(call(dims=dims, **changes), None, "delta") == "hopper"


def test_a_cpu_tensor_is_refused() -> None:
    assert hopper.BACKEND.supports(call()) == "runs on CUDA tensors, not on cpu"


def test_what_it_refuses_goes_on_quietly(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """To Triton, and so do steps, and gradients where a module of theirs is missing."""
    from warploom.delta import triton

    monkeypatch.setattr(triton.BACKEND, "available", lambda: None)
    monkeypatch.setattr(triton.BACKEND, "supports", lambda call: None)
    monkeypatch.setattr(triton.BACKEND, "backward", lambda *given: "gradients")
    monkeypatch.setattr(triton.BACKEND, "step", lambda *given: "a step")
    dispatch.strict()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert dispatch.choose(call(dtype=torch.float16), None, "delta") == "triton"
    finally:
        dispatch.strict(False)
    monkeypatch.setattr(hopper, "_back_refusal", lambda dtype, width: "not built")
    found: Any = hopper.BACKEND.backward(call(), torch.empty(0), None)
    assert found == "gradients"
    one = call(tokens=1)
    q, v, beta = (t.squeeze(1) for t in (one.q, one.v, one.beta))
    found = hopper.BACKEND.step(StepArgs(q, q, v, beta, torch.empty(0), None, 1.0, True, 1e-6, "hopper"), None)
    assert found == "a step"


def test_modules_that_cannot_come(machine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the compiler a call is taken when all its modules are in the cache."""
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    monkeypatch.setattr(modules, "cannot_build", lambda: "the CuTe DSL is not installed")
    needed = modules_of("bfloat16", 128)
    there = {variant.spec for variant in needed[:-1]}

    def find(spec: modules.ModuleSpec) -> tuple[Path, dict[str, Any]]:
        if spec not in there:
            raise modules.Missing("not built")
        return spec.library(), {}

    monkeypatch.setattr(modules, "find", find)
    found = hopper.BACKEND.supports(call())
    assert found == f"its module {needed[-1].name} is not built in {tmp_path / 'modules'}, and the CuTe DSL is not installed"
    there.add(needed[-1].spec)
    (tmp_path / "modules").mkdir()  # which says that something came
    assert hopper.BACKEND.supports(call()) is None
    there.clear()
    assert hopper.BACKEND.supports(call()) is None, "what was found is not looked at again"


@pytest.mark.parametrize("dynamic", [False, True])
def test_dispatch_can_be_traced(machine: None, monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    monkeypatch.setattr(modules, "cannot_build", lambda: None if Path("/").exists() else "nothing")

    def chosen(x: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        found = DeltaCall(x, x, x, beta, None, 1.0, True, 1e-6, None, None, None)
        return x + 1 if dispatch.choose(found, None, "delta") == "hopper" else x

    compiled = torch.compile(chosen, fullgraph=True, dynamic=dynamic, backend="eager")
    for rows in (5, 7):
        x = torch.zeros(2, rows, 8, 128, dtype=torch.bfloat16)
        assert torch.equal(compiled(x, torch.zeros(2, rows, 8)), x + 1)


def test_how_many_warpgroups() -> None:
    """Two where one each would need another wave; one where an odd number of tiles would leave the second nothing."""
    assert forward("bfloat16", 128, 128, 66, 132).warpgroups == 1
    assert forward("bfloat16", 128, 128, 67, 132).warpgroups == 2
    assert forward("bfloat16", 128, 64, 500, 132).warpgroups == 1
    assert forward("bfloat16", 64, 72, 500, 132) == ForwardConfig("bfloat16", 64, 2)


def test_names_and_the_named_set() -> None:
    names = [variant.name for variant in named_set()]
    assert len(set(names)) == len(names) == 20
    assert set(names) <= {spec.name for spec in every_module("sm_90a")}
    assert not set(names) & {spec.name for spec in every_module("sm_80")}
    for variant in named_set():
        told = module_spec.from_json(module_spec.to_json(variant.spec))  # as the compiler is told
        assert type(variant)(**dict(told.config)) == variant and told == variant.spec


def test_named_set_has_every_variant_of_a_call() -> None:
    for e in (8, 64, 72, 128):
        assert {*modules_of("bfloat16", e), *back_modules_of("bfloat16", e)} <= set(named_set())
        assert prepare("bfloat16", e) in back_modules_of("bfloat16", e)
        for m, heads in ((64, 1), (128, 1), (256, 500)):
            assert forward("bfloat16", e, m, heads, 132) in modules_of("bfloat16", e)
            columns = "bfloat16", e, m, heads, 132
            walks = keep(*columns), keep(*columns, True), back(*columns)
            assert {*walks, gradients("bfloat16", e)} <= set(back_modules_of("bfloat16", e))


def test_sources_are_what_kernels_import() -> None:
    """Else an edit of a file that is not listed would leave modules of the older one in use."""
    assert imported("delta/hopper/build.py") == {*PREPARE_SOURCES, *FORWARD_SOURCES, *BACK_SOURCES, *GRADIENT_SOURCES}
