"""A training step: every contender computes the same, and a mask that is a token off does not pass."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.bench import fake_cudnn
from warploom.bench import training
from warploom.bench.choice import Choice
from warploom.bench.harness import WrongResult
from warploom.bench.peers import Attention
from warploom.bench.training import QUICK, Packed, Trainer, check, exact, ours

CPU = torch.device("cpu")
SEED = 3


def first_step(prepare: training.Prepare, batches: list[Packed]) -> tuple[torch.Tensor, torch.Tensor]:
    return Trainer(QUICK, SEED, prepare, batches, CPU)()


def test_documents_fill_a_row() -> None:
    for _ in range(10):
        packed = Packed.draw(QUICK, CPU)
        assert packed.lengths.sum() == QUICK.tokens and packed.longest == packed.lengths.max() <= QUICK.longest
        assert torch.equal(packed.cu_seqlens.diff(), packed.lengths) and packed.cu_seqlens[0] == 0
        assert torch.equal(packed.number.bincount(), packed.lengths)


def test_every_contender_makes_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cudnn.install(monkeypatch)
    batches = [Packed.draw(QUICK, CPU)]
    want = first_step(exact, batches)
    found = training.contenders(Choice(), on_gpu=True)
    assert set(found) == {"warploom", "warploom, packed", "SDPA, dense mask", "FlexAttention", "cuDNN-Flex", "FA4"}
    for name in ("warploom", "warploom, packed", "SDPA, dense mask", "cuDNN-Flex"):
        assert check(want, first_step(found[name], batches)) < training.FURTHEST / 2, name


def test_flex_attention_sees_a_document_and_what_is_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles on no CPU of every machine: what it is given is held against the mask."""
    packed = Packed.draw(QUICK, CPU)
    i, j = torch.arange(QUICK.tokens)[:, None], torch.arange(QUICK.tokens)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(training.peers, "flex_block_mask", lambda mod, tokens, device: seen.append(mod(0, 0, i, j)))
    monkeypatch.setattr(training.peers, "flex", lambda block_mask: None)
    training.flex(packed)
    assert torch.equal(seen[0], training.Document(packed.lengths).dense()[0, 0])


def late(packed: Packed) -> Attention:
    """The second document begins a token late."""
    lengths = packed.lengths.clone()
    lengths[0] += 1
    lengths[1] -= 1
    return ours(replace(packed, lengths=lengths))


def both_ways(packed: Packed) -> Attention:
    mask = training.Document(packed.lengths, causal=False)
    return lambda q, k, v: training.warploom.attention(q, k, v, mask=mask)


@pytest.mark.parametrize("wrong", [late, both_ways])
def test_a_wrong_mask_does_not_pass(wrong: training.Prepare) -> None:
    batches = [Packed.draw(QUICK, CPU)]
    with pytest.raises(WrongResult, match="of its norm away, more than"):
        check(first_step(exact, batches), first_step(wrong, batches))


def test_steps_take_batches_in_turn_and_prepare_each() -> None:
    batches = [Packed.draw(QUICK, CPU) for _ in range(3)]
    prepared: list[Packed] = []

    def prepare(packed: Packed) -> Attention:
        prepared.append(packed)
        return ours(packed)

    trainer = Trainer(QUICK, SEED, prepare, batches, CPU)
    first = trainer.model.head[1].weight.clone()
    for _ in range(7):
        trainer()
    assert [id(each) for each in prepared] == [id(batches[at]) for at in (0, 1, 2, 0, 1, 2, 0)]
    assert not torch.equal(first, trainer.model.head[1].weight)  # the optimizer steps too


def test_unwanted_peers_are_left_out() -> None:
    assert set(training.contenders(Choice(peers=("FA4",)), on_gpu=True)) == {"warploom", "warploom, packed", "FA4"}


def program() -> ModuleType:
    """benchmarks/training.py, which is no part of the package."""
    path = Path(__file__).parents[2] / "benchmarks" / "training.py"
    spec = importlib.util.spec_from_file_location("benchmarks_training", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_packed_sequences_attend_as_they_do_alone() -> None:
    """The loss curves' "packed" computes what it computes without, and each layer's kind of attention is there."""
    curves = program()
    for kind in curves.LAYERS:
        dim = 16
        q = torch.randn(curves.PACKED, curves.SEQLEN, kind.heads, dim, requires_grad=True)
        k, v = (torch.randn(curves.PACKED, curves.SEQLEN, kind.kv_heads, dim, requires_grad=True) for _ in range(2))
        dout = torch.randn_like(q)
        alone, packed = (curves.kernels("cpu", packed=each)(q, k, v, kind.window) for each in (False, True))
        torch.testing.assert_close(packed, alone, atol=2e-2, rtol=2e-2)
        for got, want in zip(*(torch.autograd.grad(out, (q, k, v), dout) for out in (packed, alone)), strict=True):
            assert float((got - want).norm() / want.norm()) < 5e-3, kind
