"""The masks suite as on a GPU, on a CPU: peers stand in for themselves, and what they compute is checked all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.bench import fake_cudnn
from warploom import masks
from warploom.bench import harness, mask_cases
from warploom.bench.calls import Shape
from warploom.bench.choice import Choice, chosen
from warploom.bench.harness import Comparison, Timer, compare
from warploom.bench.mask_bars import DENSE, NEW, PLAIN, UNMASKED, VECTORS
from warploom.bench.mask_cases import PASSES
from warploom.bench.masks import pairs
from warploom.cli import main

SEQLEN = 256
SHAPE = Shape(1, SEQLEN, 4, 16, heads_kv=2)
FAST = Choice(passes=("forward", "backward"))


class Cuda:
    """A device of which only the type is asked."""

    type = "cuda"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would need a GPU goes on the CPU; FlexAttention cannot, and says so."""

    def draw(shape: Shape, device: Any) -> list[torch.Tensor]:
        kv, dim = shape.heads_kv or shape.heads, shape.head_dim
        return [torch.randn(shape.batch, shape.seqlen, heads, dim) for heads in (shape.heads, kv, kv, shape.heads)]

    def flex(*_: object) -> None:
        raise AssertionError("no block mask")

    monkeypatch.setattr(Shape, "draw", draw)
    monkeypatch.setattr(mask_cases, "pairs", lambda seqlen, device: pairs(seqlen, "cpu"))
    monkeypatch.setattr(mask_cases, "SHAPES", (SHAPE,))
    monkeypatch.setattr(mask_cases, "capture", lambda call: call)
    monkeypatch.setattr(mask_cases, "_bounds", lambda mask, seqlen: mask.lts)
    monkeypatch.setattr(mask_cases.peers, "flex_block_mask", flex)
    monkeypatch.setattr(mask_cases.peers, "flex", flex)
    monkeypatch.setattr(harness.torch.cuda, "synchronize", lambda: None)


def rows(name: str, choice: Choice = FAST) -> dict[str, dict[str, Any]]:
    """The rows of one mask, by measure."""
    (case,) = mask_cases.mask_cases(torch.device("cpu"), False, Choice([name], None, choice.passes, choice.peers))
    timer = Timer(torch.device("cpu"), seconds=0.0)
    return {measure: compare(comparison, timer) for measure, comparison in case.build(Cuda())}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", pairs(SEQLEN, "cpu"))
def test_every_mask_against_cudnn(name: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cudnn.install(monkeypatch)
    found = rows(name)
    assert list(found) == ["forward", "backward"]
    for measure, row in found.items():
        contenders = row["contenders"]
        assert contenders["warploom"]["ms"] > 0 and contenders[DENSE]["ms"] > 0, measure
        if name == "nothing hidden":
            assert contenders[UNMASKED]["ms"] > 0 and "cuDNN-Flex" not in contenders
            continue
        assert contenders["FlexAttention"] == {"refused": "AssertionError: no block mask"}
        if name == "random eviction":
            assert "separate runs of keys" in contenders["cuDNN-Flex"]["refused"]
        else:
            assert contenders["cuDNN-Flex"]["ms"] > 0
            ratio = contenders["cuDNN-Flex"]["ms"] / contenders["warploom"]["ms"]
            assert row["verdict"]["ratios"]["cuDNN-Flex"] == ratio


def test_a_peer_that_computes_another_mask_is_wrong(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_cudnn.install(monkeypatch)
    honest = fake.create_mask_plan
    monkeypatch.setattr(fake, "create_mask_plan", lambda f, *rest, **more: honest((f - 1).clamp(min=0), *rest, **more))
    found = rows("causal documents")
    assert all("wrong" in found[measure]["contenders"]["cuDNN-Flex"] for measure in ("forward", "backward"))
    assert "cuDNN-Flex" not in found["forward"]["verdict"]["ratios"]


def test_absent_and_unwanted_peers(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_cudnn.sys.modules, "cudnn", None)  # any import of it fails
    refused = rows("tree")["forward"]["contenders"]["cuDNN-Flex"]["refused"]
    assert "does not import here (pip install nvidia-cudnn-frontend)" in refused
    ours = rows("tree", Choice(passes=("forward",), peers=("nobody",)))["forward"]["contenders"]
    assert set(ours) == {"warploom", DENSE}


def test_every_pass(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cudnn.install(monkeypatch)
    found = rows("causal documents", Choice())
    assert tuple(found) == PASSES
    assert {"warploom", VECTORS, "cuDNN-Flex"} <= {n for n, c in found["mask"]["contenders"].items() if "ms" in c}
    assert found["mask"]["vector_bytes"] == 4 * SEQLEN and found["mask"]["bound_bytes"] == 32 * SEQLEN // 64
    assert {n for n, c in found["host"]["contenders"].items() if "ms" in c} == {"warploom", NEW, "cuDNN-Flex"}
    for option in ("deterministic", "dropout forward", "dropout backward"):
        assert {n for n, c in found[option]["contenders"].items() if "ms" in c} == {"warploom", PLAIN}, option
    assert tuple(rows("tree", Choice(peers=("nobody",)))) == ("mask", "host", "forward", "backward")


def test_a_new_mask_is_one_that_no_call_has_seen(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    kept = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: masks.Mask, **_: Any) -> torch.Tensor:
        kept.append(mask)  # so that no id is used again
        seen.append(id(mask))
        assert torch.equal(mask.dense(SEQLEN, SEQLEN), pairs(SEQLEN, "cpu")["tree"]().mask.dense())
        return q

    monkeypatch.setattr(mask_cases.warploom, "attention", attention)
    (case,) = mask_cases.mask_cases(torch.device("cpu"), False, Choice(["tree"], None, ["host"], ["nobody"]))
    ((_, comparison),) = case.build(Cuda())  # type: ignore[arg-type]
    seen.clear()
    compare(Comparison({NEW: comparison.calls[NEW]}, lambda _: 0.0, clock=comparison.clock), Timer(torch.device("cpu")))
    assert len(seen) == len(set(seen)) == 8  # checked once, timed seven times


@pytest.mark.parametrize("name", ["causal", "full", "window 1024", "causal documents"])
def test_the_dense_call_does_as_much(name: str) -> None:
    density = pairs(SEQLEN, "cpu")[name]().mask.density(SEQLEN, SEQLEN)
    shape = Shape(1, 2048, 1, 16)
    dense = mask_cases._Dense(shape, density, False, torch.device("cpu"))
    assert dense.shape.seqlen % 128 == 0
    assert dense.flops == pytest.approx(shape.flops(density), rel=0.15)


def test_what_preparing_a_mask_compares(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors made anew in one contender, held in the other; a band has none; a peer that failed is not called."""
    seen: list[object] = []
    monkeypatch.setattr(mask_cases, "_bounds", lambda mask, seqlen: seen.append(mask.lts))
    found = {}
    for name in ("causal documents", "causal"):
        (case,) = mask_cases.mask_cases(torch.device("cpu"), False, Choice([name], None, ["mask"]))
        found[name] = dict(case.build(Cuda()))["mask"]  # type: ignore[arg-type]
    assert list(found["causal documents"].calls) == ["warploom", VECTORS]
    for name in ("warploom", VECTORS):
        seen.clear()
        found["causal documents"].calls[name]()
        found["causal documents"].calls[name]()
        assert len(seen) == 2 and torch.equal(seen[0], seen[1])  # type: ignore[arg-type]
        assert (seen[0] is seen[1]) == (name == "warploom")
    assert found["causal"].calls == {} and "nothing to prepare" in found["causal"].refused["warploom"]


def test_ours_is_timed_where_a_block_mask_fails_in_dense_cases(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from warploom.bench import suites

    case = next(c for c in suites.cases(["forward"], torch.device("cpu"), True) if "causal" in c.name)
    forward = dict(case.build(Cuda()))["forward"]  # type: ignore[arg-type]
    assert "warploom" in forward.calls and forward.refused["FlexAttention"] == "AssertionError: no block mask"


def test_names_are_chosen_and_unknown_ones_refused() -> None:
    names = ("prefix LM", "window 1024", "tree")
    assert chosen("--masks", ["tree", "prefix-lm"], names) == ["prefix LM", "tree"]
    assert chosen("--shapes", ["S8192"], ["B1 S8192 H32 D64", "B1 S32768 H64/8 D128"], part=True) == ["B1 S8192 H32 D64"]
    with pytest.raises(ValueError, match="--masks trees: there is none; there are prefix LM, window 1024, tree"):
        chosen("--masks", ["trees"], names)


def test_what_peers_print_leaves_stdout_alone(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """cuDNN's planner tells on stdout what it compiles: --json prints one object there."""
    fake_cudnn.install(monkeypatch)
    real = mask_cases._build

    def build(*arguments: Any) -> Any:
        return real(*arguments[:-1], Cuda())

    monkeypatch.setattr(mask_cases, "_build", build)
    monkeypatch.setattr(mask_cases, "QUICK_SHAPES", (SHAPE,))
    arguments = ["bench", "masks", "--device", "cpu", "--quick", "--masks", "tree", "--passes", "forward", "--json"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    (row,) = json.loads(said.out)["rows"]
    assert row["contenders"]["cuDNN-Flex"]["ms"] > 0 and "Compiled mask-plan" in said.err


def test_estimates_grow_with_what_runs() -> None:
    def seconds(**more: Any) -> float:
        return sum(case.seconds or 0.0 for case in mask_cases.mask_cases(torch.device("cpu"), False, Choice(**more)))

    everything = seconds()
    assert 0 < seconds(masks=["tree"]) < everything
    assert seconds(peers=["cuDNN-Flex"]) < everything and seconds(passes=["forward"]) < everything


def test_a_case_of_no_pass_is_none() -> None:
    assert mask_cases.mask_cases(torch.device("cpu"), True, Choice(["tree"], None, ["deterministic"])) == []
