"""The Triton kernels in the interpreter on chunks of longer sequences, by an offset for each batch entry."""

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
from warploom.attention import bounds
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.chunks import attention_chunks, chunk_args
from warploom.attention.triton import BACKEND
from warploom.attention.triton.call import Call as Launched
from warploom.masks.tiles import column_bounds
from warploom.runtime import dispatch

HALF = torch.float16


def seed() -> int:
    return random.randrange(2**31)


def offsets(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("name", CHUNKED)
def test_case(name: str) -> None:
    chunked(name, seed(), dtype=HALF).check("triton")


@pytest.mark.parametrize("name", ["causal", "window", "four vectors", "one sequence, dropout"])
def test_case_in_float32(name: str) -> None:
    chunked(name, seed()).check("triton")


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (70, 10)}, {"causal": True, "softcap": 2.0}], ids=str)
def test_chunks_of_whole_tiles_have_the_bits_of_the_whole(options: dict[str, Any]) -> None:
    """Where tiles of queries and keys are the same: fp32 has one tiling."""
    q, (k, v) = torch.randn(1, 256, 2, 16), (torch.randn(1, 300, 1, 16) for _ in range(2))
    want, want_lse = warploom.attention(q, k, v, return_lse=True, backend="triton", **options)
    keys = [t.expand(2, -1, -1, -1) for t in (k, v)]
    at = offsets(0, 128)
    out, lse = attention_chunks(q.view(2, 128, 2, 16), *keys, at, seqlen_q=256, backend="triton", **options)
    assert torch.equal(out.reshape(want.shape), want)
    assert torch.equal(lse.transpose(0, 1).reshape(want_lse.shape), want_lse)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["four vectors", "lts and lte, window", "documents", "all hidden"])
def test_bounds_are_those_of_each_chunk_alone(name: str, batch: int) -> None:
    """A chunk's own mask, by the definition: the vectors minus its first row, under its band."""
    given = chunked(name, 1)
    q, k, v = given.q[:3], given.k[:3], given.v[:3]
    rows, keys, at = q.shape[1], k.shape[1], (163, 0, 64)
    options = {n: x for n, x in given.keywords.items() if n in ("mask", "window")}
    args = chunk_args(q, k, v, offsets(*at), seqlen_q=200, **options)
    args = args._replace(**{n: None if t is None else t.expand(batch, -1, -1) for n, t in _vectors(args).items()})
    found = BACKEND.prepare(args).bounds
    assert found is not None and found.shape[0] == 3
    for b, first in enumerate(at):
        own = {n: None if t is None else t[:1].long().sub(first).clamp(0, rows).int() for n, t in _vectors(args).items()}
        shift = first - (keys - rows)
        band = {"left": None if args.left is None else args.left - shift}
        band["right"] = None if args.right is None else args.right + shift
        mask = args.mask._replace(**own, **band)
        blocks = [column_bounds(mask, rows, keys, block) for block in (bounds.BLOCK, bounds.COARSE_BLOCK)]
        assert torch.equal(found[b : b + 1], torch.cat(blocks, dim=2))


def _vectors(args: Any) -> dict[str, Tensor | None]:
    return dict(zip(("lts", "lte", "uts", "ute"), args.mask.vectors, strict=True))


def test_bounds_are_kept_by_the_offsets_too() -> None:
    q, k, v = (torch.randn(2, n, 2, 16) for n in (5, 200, 200))
    mask, at = masks.Document([100, 100]), offsets(3, 150)
    resolved = chunk_args(q, k, v, at, seqlen_q=200, mask=mask).mask
    first = bounds.prepared_bounds(resolved, 5, 200, at)
    assert bounds.prepared_bounds(resolved, 5, 200, at) is first
    assert bounds.prepared_bounds(resolved, 5, 200) is not first
    assert bounds.prepared_bounds(resolved, 5, 200, at.clone()) is not first
    at[0] = 120
    again = bounds.prepared_bounds(resolved, 5, 200, at)
    assert again is not first and not torch.equal(again, first)


def test_packed_sequences_have_offsets_too() -> None:
    """Columns, dropout and gradients of each sequence by its own offset, tokens past the last by none."""
    starts, starts_k, there = offsets(0, 70, 75, 110), offsets(0, 150, 160, 230), offsets(64, 3, 0)
    q, (k, v) = torch.randn(113, 4, 16), (torch.randn(235, 2, 16) for _ in range(2))
    drawn = [torch.randint(-20, 150, (1, 2, 235), dtype=torch.int32) for _ in range(4)]
    options = {"mask": masks.ColumnMask(*drawn), "dropout_p": 0.3, "dropout_seed": 7}
    args = varlen_args(q, k, v, starts, starts_k, 70, 150, window=(90, 12), **options)._replace(q_offset=there)
    dout = torch.randn_like(q)
    found: dict[str, list[Tensor]] = {}
    for name in ("triton", "reference"):
        backend = dispatch.find(name)
        out, lse = backend.forward(args)
        found[name] = [out, lse, *backend.backward(args, dout, None, out, lse)[:3]]
    for got, want in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_compiles_whole_with_the_bounds_of_its_mask() -> None:
    q, k, v = (torch.randn(2, n, 2, 16).requires_grad_() for n in (40, 200, 200))
    lengths, at = torch.tensor([90, 110]), offsets(7, 160)

    def loss(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, at: Tensor) -> Tensor:
        options: dict[str, Any] = {"mask": masks.Document(lengths), "backend": "triton"}
        return attention_chunks(q, k, v, at, seqlen_q=200, **options)[0].square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for rows in ((7, 160), (100, 0)):
        at.copy_(offsets(*rows))
        got, want = compiled(q, k, v, lengths, at), loss(q, k, v, lengths, at)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got, (q, k, v)), torch.autograd.grad(want, (q, k, v)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("batch", [1, 2])
def test_opcheck_of_the_bounds(batch: int) -> None:
    vectors = torch.randint(0, 200, (4, batch, 3, 150), dtype=torch.int32).unbind()
    torch.library.opcheck(torch.ops.warploom.column_bounds.default, (*vectors, 5, None, 40, offsets(7, 160)))


@pytest.mark.parametrize("offset", [-5, 2**31 - 1, -(2**31)])
def test_offsets_out_of_range_read_and_write_nothing_else(offset: int) -> None:
    """A device's contents are not looked at: they are held to the range."""
    q, k, v = (torch.randn(2, n, 2, 16) for n in (40, 90, 90))
    mask = masks.ColumnMask(*[torch.randint(0, 200, (1, 1, 90), dtype=torch.int32) for _ in range(4)])
    args = chunk_args(q, k, v, offsets(7, 7), seqlen_q=200, mask=mask, window=(500, 0), dropout_p=0.2, dropout_seed=1)
    held = min(max(offset, 0), 2**29)
    results = []
    for at in (offset, held):
        ready = BACKEND.prepare(args._replace(q_offset=offsets(7, at)))
        out, lse = BACKEND.forward(ready)
        results.append([out, lse, *BACKEND.backward(ready, torch.ones_like(out), None, out, lse)[:3]])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_calls_without_offsets_take_the_kernels_that_they_took() -> None:
    """What is None is a constant: neither an argument nor a variant is added."""
    q, k, v = (torch.randn(2, n, 2, 16) for n in (40, 90, 90))
    plain = Launched.of(dense_args(q, k, v, causal=True))
    chunks = Launched.of(chunk_args(q, k, v, offsets(7, 7), seqlen_q=90, causal=True))
    assert plain.sequences == (None,) * 4
    assert plain.mask[-1] is None
    assert chunks.variant != plain.variant
    assert replace(chunks, variant=plain.variant, sequences=plain.sequences).config == plain.config
