"""Chunks of longer sequences, by an offset for each batch entry: values, composition with torch, what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.chunked import CHUNKED, chunked
from warploom import masks
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.chunks import attention_chunks, chunk_args
from warploom.attention.problem import MOST_OFFSET, AttentionProblem
from warploom.runtime import dispatch


def offsets(*rows: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


def tensors(batch: int = 2, rows: int = 5, keys: int = 20) -> list[Tensor]:
    return [torch.randn(batch, n, 2, 16) for n in (rows, keys, keys)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CHUNKED)
def test_case(backend: str, name: str) -> None:
    chunked(name, random.randrange(2**31)).check(backend)


@pytest.mark.parametrize("name", ["causal", "one sequence, dropout", "four vectors of each entry, causal"])
def test_case_in_half_precision(name: str) -> None:
    chunked(name, random.randrange(2**31), dtype=torch.bfloat16).check("cpu")


def test_the_reference_of_each_chunk_is_the_rows_of_the_whole_bit_for_bit() -> None:
    q, (k, v) = torch.randn(1, 60, 2, 16), (torch.randn(1, 90, 2, 16) for _ in range(2))
    options: dict[str, Any] = {"mask": masks.Document([50, 40]), "dropout_p": 0.4, "dropout_seed": 3, "backend": "reference"}
    want, want_lse = warploom.attention(q, k, v, return_lse=True, **options)
    keys = [t.expand(3, -1, -1, -1) for t in (k, v)]
    out, lse = attention_chunks(q.view(3, 20, 2, 16), *keys, offsets(0, 20, 40), seqlen_q=60, chunks=3, **options)
    assert torch.equal(out.reshape(want.shape), want)
    assert torch.equal(lse.transpose(0, 1).reshape(want_lse.shape), want_lse)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("options", [{"causal": True}, {"mask": masks.Document([12, 8])}], ids=str)
def test_compiles_whole(backend: str, options: dict[str, Any]) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        out, lse = attention_chunks(q, k, v, at, seqlen_q=20, backend=backend, **options)
        return out.square().sum() + lse.sum()

    inputs, at = [t.requires_grad_() for t in tensors()], offsets(15, 3)
    got, want = torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs, at), loss(*inputs, at)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": masks.Document([12, 8]), "dropout_p": 0.2}], ids=str)
def test_opcheck(options: dict[str, Any]) -> None:
    q, k, v = (t.requires_grad_() for t in tensors())
    args = chunk_args(q, k, v, offsets(3, 15), seqlen_q=20, chunks=2, dropout_seed=1, **options)
    torch.library.opcheck(torch.ops.warploom.attention.default, tuple(args._replace(backend="cpu")))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_packed_sequences_have_offsets_too(backend: str) -> None:
    """Of their own rows: three and four new tokens behind six and none that are there."""
    there = (6, 0)
    q, dout = torch.randn(2, 7, 2, 16)
    k, v = torch.randn(2, 13, 2, 16)
    starts, starts_k = offsets(0, 3, 7), offsets(0, 9, 13)
    options: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": 1}
    args = varlen_args(q, k, v, starts, starts_k, 4, 9, causal=True, **options)._replace(q_offset=offsets(*there))
    out, lse = dispatch.find(backend).forward(args)
    dq, dk, dv, _ = dispatch.find(backend).backward(args, dout, None, out, lse)
    for n, past in enumerate(there):
        at, keys = slice(int(starts[n]), int(starts[n + 1])), slice(int(starts_k[n]), int(starts_k[n + 1]))
        # As both entries of a batch, so that one of them is counted as this sequence.
        leaves = [t[None].expand(2, -1, -1, -1).clone().requires_grad_() for t in (q[at], k[keys], v[keys])]
        one = dense_args(*leaves, **options)._replace(right=0, q_offset=offsets(past, past))
        want, want_lse = dispatch.find("reference").forward(one)
        gradients = torch.autograd.grad(want[n], leaves, dout[at])
        got = (out[at], lse[:, at], dq[at], dk[keys], dv[keys])
        for a, b in zip(got, (want[n], want_lse[n], *(t[n] for t in gradients)), strict=True):
            torch.testing.assert_close(a, b)


def problem_of(**changes: Any) -> AttentionProblem:
    q, k, v = (t.half() for t in tensors())
    found = AttentionProblem.from_args(chunk_args(q, k, v, offsets(3, 15), seqlen_q=20), False)
    return replace(found, device="cuda", **changes)


def test_kernels_without_offsets_refuse_them_in_words() -> None:
    assert "queries are chunks" in problem_of().describe()
    assert "no query offsets" in str(dispatch.find("ampere").supports(problem_of()))


BESIDE: dict[str, tuple[dict[str, Any], str]] = {
    "packed": ({"layout": "varlen"}, "takes no query offsets of packed sequences"),
    "dropout": ({"dropout": True}, "takes no dropout with query offsets"),
    "a bias": ({"bias": "alibi"}, "takes no bias with query offsets"),
    "invariance": ({"batch_invariant": True}, "promises no batch invariance with query offsets"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_hopper_refuses_in_words_what_it_does_not_take_with_them(name: str) -> None:
    changes, words = BESIDE[name]
    assert dispatch.find("hopper").supports(problem_of(**changes)) == words


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "too few": ({"q_offset": offsets(1)}, ValueError, "q_offset has 1 entries but q has batch 2"),
    "none": ({"q_offset": None}, TypeError, "q_offset must be an int32 tensor"),
    "floats": ({"q_offset": torch.zeros(2)}, TypeError, "q_offset must be an int32 tensor"),
    "a matrix": ({"q_offset": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "q_offset must have 1 dimension"),
    "negative": ({"q_offset": offsets(3, -1)}, ValueError, f"q_offset must be from 0 to {MOST_OFFSET}, got -1"),
    "far": ({"q_offset": offsets(3, MOST_OFFSET + 1)}, ValueError, f"got {MOST_OFFSET + 1}"),
    "chunks": ({"chunks": 3}, ValueError, "chunks must divide the batch of q, 2, got 3"),
    "no chunk": ({"chunks": 0}, ValueError, "chunks must be at least 1"),
    "rows": ({"seqlen_q": -1}, ValueError, "seqlen_q must be at least 0"),
    "mask": ({"mask": masks.ColumnMask(torch.zeros(1, 1, 9, dtype=torch.int32))}, ValueError, "the mask has length 9"),
    "scale": ({"scale": "1"}, TypeError, "scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_in_words(name: str) -> None:
    given, error, words = BAD[name]
    with pytest.raises(error, match=words):
        attention_chunks(*tensors(), **{"q_offset": offsets(3, 15), "seqlen_q": 20, **given})


def test_offsets_of_other_integers_are_taken() -> None:
    q, k, v = tensors()
    want, _ = attention_chunks(q, k, v, offsets(3, 15), seqlen_q=20, causal=True)
    got, _ = attention_chunks(q, k, v, offsets(3, 15, dtype=torch.int64), seqlen_q=20, causal=True)
    assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(0, 5, 20), (2, 0, 20), (2, 5, 0)], ids=str)
def test_empty_calls(shape: tuple[int, int, int]) -> None:
    sink = torch.randn(2)
    out, lse = attention_chunks(*tensors(*shape), offsets(*[3] * shape[0]), seqlen_q=20, causal=True, sink=sink)
    assert out.shape == (*shape[:2], 2, 16)
    assert torch.equal(lse, sink[:, None].expand(shape[0], 2, shape[1])) or not out.numel()
