"""Vectors that follow from positions, by one launch, are those of torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom import masks
from warploom.masks.zoo.position_kernel import COLUMNS, position_vectors

CPU = torch.device("cpu")
SIZES = [(1, 1), (7, 5), (5, 7), (40, COLUMNS + 3), (2 * COLUMNS, 90)]
FAR = [2**31 - 1, 2**40]


def check(mask: masks.Mask, kind: str, number: Any, seqlen_q: int, seqlen_k: int, *limits: int) -> None:
    want = mask._resolve(seqlen_q, seqlen_k, CPU)
    wanted = tuple(t is not None for t in want.vectors)
    found = position_vectors(kind, number, wanted, seqlen_q, seqlen_k, CPU, *limits)  # type: ignore[arg-type]
    assert found is not None
    for a, b in zip(found, want.vectors, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (b is not None and a.dtype == torch.int32 and torch.equal(a, b.expand_as(a)))


@pytest.mark.parametrize("sizes", SIZES)
def test_prefixes(sizes: tuple[int, int]) -> None:
    for prefix in (0, 3, COLUMNS + 1, *FAR):
        check(masks.PrefixLM(prefix), "prefix", prefix, *sizes)
    for dtype in (torch.int32, torch.int64):
        rows = torch.tensor([[4], [0], [COLUMNS + 2]], dtype=dtype)
        check(masks.PrefixLM(rows), "prefix", rows, *sizes)
        check(masks.PrefixLM(rows[::2]), "prefix", rows[::2], *sizes)
    rows = torch.tensor([[2**40], [3]])
    check(masks.PrefixLM(rows), "prefix", rows, *sizes)


@pytest.mark.parametrize("sizes", SIZES)
def test_chunks(sizes: tuple[int, int]) -> None:
    for size in (1, 4, 100, 2**29):
        check(masks.Chunked(size), "chunks", size, *sizes)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("window", [(3, 0), (3, 2), (None, 2), (3, None), (-2, 5), (4, -2)])
def test_global_tokens(window: tuple[int | None, int | None], sizes: tuple[int, int]) -> None:
    limits = [0 if x is None else x for x in window]
    for tokens in (0, 2, COLUMNS + 1, *FAR, torch.tensor([[2], [0], [2**40]])):
        check(masks.GlobalWindow(tokens, *window), "global", tokens, *sizes, *limits)


@pytest.mark.parametrize("length", [0, 1, 10, COLUMNS // 2 + 3])
@pytest.mark.parametrize("block", [1, 4, 2**29])
def test_diffusion(length: int, block: int) -> None:
    for seqlen_q in (2 * length, 3, 2 * length + 5):
        check(masks.BlockDiffusion(length, block), "diffusion", length, seqlen_q, 2 * length, block)
