"""Which calls the walks take, which modules they need, and that dispatch says so, quietly and under torch.compile."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sources import imported
from warploom.commands.build import named_set as every_module
from warploom.linear import hopper, reference, registry  # noqa: F401  (registry fills the dispatch list)
from warploom.linear.hopper.config import SOURCES, WalkConfig
from warploom.linear.hopper.plan import LONGEST, config, configs, named_set, outwalks, segments, width
from warploom.linear.problem import LinearCall
from warploom.runtime import dispatch, module_spec, modules, traced

PROCESSORS = 132


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper that is the CPU, where modules can be built."""
    monkeypatch.setattr(LinearCall, "device", "cuda")
    monkeypatch.setattr(hopper, "_processors", lambda index: PROCESSORS)
    monkeypatch.setattr(hopper, "_found", traced.Found())
    monkeypatch.setattr(modules, "cannot_run", lambda: None)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)


def call(**changes: Any) -> LinearCall:
    """One that is taken, with shapes ``q``, ``k`` and ``v`` or other fields changed."""
    dtype = changes.pop("dtype", torch.bfloat16)
    shape = changes.pop("shape", (4, 16, 8, 256))
    shapes = {name: changes.pop(name, shape) for name in ("q", "k", "v")}
    q, k, v = (torch.empty(1, dtype=dtype).expand(shapes[name]) for name in ("q", "k", "v"))
    numbers: dict[str, Any] = {"map_q": "identity", "map_k": "identity", "causal": True, "normalize": False, "eps": 1e-6}
    numbers |= {"scale": 1.0, "s": None, "z": None, "lengths": None, "cu_seqlens": None}
    return LinearCall(q, k, v, **{**numbers, **changes})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"dtype": torch.float16}, "takes bfloat16, not torch.float16"),
    "narrow": ({"shape": (4, 16, 8, 64)}, "takes E or M from 72 on, not 64 and 64"),
    "narrow, a denominator": ({"shape": (4, 16, 8, 128), "normalize": True}, "takes E or M from 136 on, not 128 and 128"),
    "narrow, a decay": ({"shape": (4, 16, 8, 56), "decay": torch.zeros(8)}, r"takes E \(the keys' dim\) from 64 .* not 56"),
    "too narrow a head": ({"v": (4, 16, 8, 56)}, r"takes M \(the values' dim\) from 64 to 256 in steps of 8, not 56"),
    "odd": ({"q": (4, 16, 8, 250), "k": (4, 16, 8, 250)}, r"takes E \(the keys' dim\) .* not 250"),
    "bidirectional": ({"causal": False}, "is causal only"),
    "a map alone": ({"map_q": "elu+1"}, r"takes maps with a denominator only \(normalize=True\), not 'elu\+1' and 'identity'"),
    "a state": ({"s": torch.zeros(1), "z": torch.zeros(1)}, "takes no initial state"),
    "a decay under a denominator": (
        {"decay": torch.zeros(8), "normalize": True},
        r"takes a decay without a denominator only \(normalize=False\)",
    ),
    "lengths": ({"lengths": torch.zeros(4, dtype=torch.int32)}, "takes neither lengths nor packed sequences"),
    "packed": ({"cu_seqlens": torch.zeros(2, dtype=torch.int32)}, "takes neither lengths nor packed sequences"),
    "more keys": ({"q": (4, 15, 8, 256)}, "takes as many keys as queries, not 16 and 15"),
    "groups": ({"q": (4, 16, 16, 256)}, "takes as many heads of keys as of queries, not 8 and 16"),
    "long": ({"shape": (4, 16385, 8, 256)}, "takes up to 16384 tokens, not 16385"),
    "few heads": ({"shape": (1, 16, 7, 256)}, "needs more sequences and heads to fill the device than 1 and 7"),
    "few blocks": (
        {"q": (4, 16, 7, 256), "k": (4, 16, 7, 256), "v": (4, 16, 7, 64)},
        "needs more sequences and heads to fill the device than 4 and 7",
    ),
    "few heads of many tokens": (
        {"shape": (1, 16384, 32, 128)},
        "needs more sequences and heads than 1 and 32 to walk 16384 tokens",
    ),
    "few heads of many tokens, a decay": (
        {"shape": (2, 8192, 16, 72), "decay": torch.zeros(16)},
        "needs more sequences and heads than 2 and 16 to walk 8192 tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_in_words(name: str, machine: None) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"backend='hopper' cannot run this call: .*{words}"):
        dispatch.choose(call(**changes), "hopper", "linear")


TAKEN: list[dict[str, Any]] = [{}, {"normalize": True}, {"normalize": True, "map_q": "elu+1", "map_k": "relu"}]
TAKEN += [{"decay": torch.zeros(20)}, {"decay": torch.zeros(20), "decay_grad": True}]


@pytest.mark.parametrize("changes", TAKEN, ids=["plain", "normalized", "mapped", "decay", "decay with a gradient"])
@pytest.mark.parametrize("dims", [(256, 256), (136, 136), (64, 200), (256, 128)])
def test_what_it_takes(dims: tuple[int, int], changes: dict[str, Any], machine: None) -> None:
    e, m = dims
    found = call(q=(4, 16384, 20, e), k=(4, 16384, 20, e), v=(4, 16384, 20, m), **changes)
    assert dispatch.choose(found, None, "linear") == "hopper"


@pytest.mark.parametrize("decay", [None, torch.zeros(32), torch.zeros(1, 4096, 32)], ids=["plain", "head", "token"])
@pytest.mark.parametrize("dims", [(128, 128), (72, 64), (64, 128), (64, 64)])
def test_without_a_denominator_it_takes_narrower_heads(
    dims: tuple[int, int], decay: torch.Tensor | None, machine: None
) -> None:
    """At 64 dims with a decay alone: without one Triton is as quick."""
    e, m = dims
    found = call(q=(1, 4096, 32, e), k=(1, 4096, 32, e), v=(1, 4096, 32, m), decay=decay)
    refused = hopper.BACKEND.supports(found)
    assert refused == ("takes E or M from 72 on, not 64 and 64" if decay is None and dims == (64, 64) else None)


def test_with_a_decay_few_heads_of_64_dims_are_cut(machine: None) -> None:
    def cut(tokens: int, heads: int, dim: int = 64) -> int:
        return hopper._segments(call(shape=(1, tokens, heads, dim), decay=torch.zeros(heads)))

    assert [cut(16384, heads) for heads in (79, 80, 16, 8, 1)] == [1, 1, 8, 16, 16]
    assert [cut(tokens, 16) for tokens in (2047, 2048, 4096)] == [1, 2, 4]
    assert cut(16384, 16, 128) == 1
    taken = [call(shape=(1, tokens, 16, 64), decay=torch.zeros(16)) for tokens in (1 << 17, (1 << 17) + 1, 2047)]
    refusals = [hopper.BACKEND.supports(each) for each in taken]
    assert refusals[0] is None and "takes up to 131072 tokens" in str(refusals[1]) and "to fill the device" in str(refusals[2])


def test_walks_of_dk_and_dv_run_side_by_side_where_both_find_room(machine: None) -> None:
    def paired(heads: int, dim: int = 128, **changes: Any) -> bool:
        return hopper._paired(call(shape=(1, 4096, heads, dim), decay=torch.zeros(heads), **changes))

    assert [paired(heads, decay_grad=True) for heads in (32, 66, 67)] == [True, True, False]
    assert not paired(32) and not paired(32, 64, decay_grad=True)


def test_no_sequences_are_cut_into_nothing() -> None:
    assert segments(0, 4096, 132) == 1


def test_few_long_heads_of_128_dims_are_left_to_segments() -> None:
    """As measured on an H200: 32 heads of 4096 tokens are walked, of 16384 not; the more heads, the more tokens."""
    most = [max(n for n in range(1024, LONGEST + 1, 512) if outwalks(heads, n, PROCESSORS)) for heads in range(32, PROCESSORS)]
    assert 4096 <= most[0] < 8192 and most == sorted(most)
    assert all(n == LONGEST for n in most[64 - 32 :])
    assert outwalks(2 * PROCESSORS, LONGEST, PROCESSORS)


def test_a_cpu_tensor_is_refused() -> None:
    assert hopper.BACKEND.supports(call()) == "runs on CUDA tensors, not on cpu"


def test_what_it_refuses_goes_on_quietly(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is not the slower one where the walks were not made for: neither a warning nor an error of strict()."""
    from warploom.linear import triton

    monkeypatch.setattr(triton.BACKEND, "available", lambda: None)
    monkeypatch.setattr(triton.BACKEND, "supports", lambda call: None)
    dispatch.strict()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert dispatch.choose(call(shape=(4, 16, 8, 64)), None, "linear") == "triton"
            assert dispatch.choose(call(), None, "linear") == "hopper"
    finally:
        dispatch.strict(False)


@pytest.mark.parametrize("normalize", [False, True])
def test_modules_that_cannot_come(normalize: bool, machine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the compiler a call is taken when all its modules are in the cache."""
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    monkeypatch.setattr(modules, "cannot_build", lambda: "the CuTe DSL is not installed")
    last = configs(256, normalize)[-1]
    there = {variant.spec for variant in configs(256, normalize)} - {last.spec}

    def find(spec: modules.ModuleSpec) -> tuple[Path, dict[str, Any]]:
        if spec not in there:
            raise modules.Missing("not built")
        return spec.library(), {}

    monkeypatch.setattr(modules, "find", find)
    found = hopper.BACKEND.supports(call(normalize=normalize))
    assert found == f"its module {last.name} is not built in {tmp_path / 'modules'}, and the CuTe DSL is not installed"
    there.add(last.spec)
    (tmp_path / "modules").mkdir()  # which says that something came
    assert hopper.BACKEND.supports(call(normalize=normalize)) is None
    there.clear()
    assert hopper.BACKEND.supports(call(normalize=normalize)) is None, "what was found is not looked at again"


@pytest.mark.parametrize("dynamic", [False, True])
def test_dispatch_can_be_traced(machine: None, monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    monkeypatch.setattr(modules, "cannot_build", lambda: None if Path("/").exists() else "nothing")

    def chosen(x: torch.Tensor) -> torch.Tensor:
        found = replace(call(), q=x, k=x, v=x)
        return x + 1 if dispatch.choose(found, None, "linear") == "hopper" else x

    compiled = torch.compile(chosen, fullgraph=True, dynamic=dynamic, backend="eager")
    for rows in (5, 7):
        x = torch.zeros(4, rows, 8, 256, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), x + 1)


def test_names_and_the_named_set() -> None:
    names = [variant.name for variant in named_set()]
    assert len(set(names)) == len(names) == 56
    assert names[0] == "linear_walk_sm90_bfloat16_d64_v64_64s4x4_c1g1_fading"
    assert set(names) <= {spec.name for spec in every_module("sm_90a")}
    assert not set(names) & {spec.name for spec in every_module("sm_80")}
    for variant in named_set():
        told = module_spec.from_json(module_spec.to_json(variant.spec))  # as the compiler is told
        assert WalkConfig(**dict(told.config)) == variant and told == variant.spec
        assert variant.blocks % variant.cluster == 0 and variant.shared_bytes + 1024 <= 227 * 1024  # barriers
    assert config(256, reverse=True, weighted=True).name.endswith("_reverse_weighted")


def test_named_set_has_every_variant_of_a_call() -> None:
    for dims in ((136, 64), (192, 192), (200, 64), (64, 256)):
        for kind in ((False, False), (True, False), (False, True), (False, True, True)):
            assert set(configs(width(*dims), *kind)) <= set(named_set())
    for cut, a_head, dim in ((False, False, 128), (False, True, 64), (True, False, 64), (True, True, 64)):
        found = configs(dim, False, True, a_head, cut, True)
        assert set(found) <= set(named_set()) and [variant.terms for variant in found] == [False, True, True, False]
        assert {variant.cut for variant in found} == {cut}
    for a_head in (False, True):
        assert {variant.cut for variant in configs(64, False, True, a_head, True)} == {True}
        assert set(configs(64, False, True, a_head, True)) <= set(named_set())
        found = configs(128, False, True, a_head, False, True, True)
        assert set(found) <= set(named_set()) and [variant.paired for variant in found] == [False, False, True]
    for kind in ((False, False), (False, True), (False, True, True)):
        assert set(configs(width(72, 64), *kind)) <= set(named_set())


def test_sources_are_what_walks_import() -> None:
    """Else an edit of a file that is not listed would leave modules of the older one in use."""
    assert imported("linear/hopper/build.py") == set(SOURCES)
