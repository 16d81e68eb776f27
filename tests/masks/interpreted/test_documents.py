"""Vectors of packed documents by one launch are those of torch's operations."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from warploom import masks
from warploom.masks.zoo.document_kernel import COLUMNS, DOCUMENTS, document_vectors

CPU = torch.device("cpu")
COUNTS = (0, 1, 2, 5, DOCUMENTS - 1, DOCUMENTS, DOCUMENTS + 1, 2 * DOCUMENTS + 7)
LENGTHS = (0, 0, 1, 1, 2, 3, 10, 40)


def expected(rows: Tensor, cumulative: bool, causal: bool, seqlen_q: int, seqlen_k: int) -> masks.ResolvedMask:
    build = masks.Document.from_cu_seqlens if cumulative else masks.Document
    return build(rows, causal)._resolve(seqlen_q, seqlen_k, CPU)


def vectors(*arguments: Any) -> tuple[Tensor | None, ...]:
    found = document_vectors(*arguments)
    assert found is not None
    return found


def check(rows: Tensor, cumulative: bool, seqlen_q: int, seqlen_k: int) -> None:
    for causal in (False, True):
        want = expected(rows, cumulative, causal, seqlen_q, seqlen_k)
        lts, ute, starts = vectors(rows, cumulative, causal, seqlen_q, seqlen_k, rows.shape[0] == 1 and seqlen_k > 0)
        if starts is not None:
            ends = rows[:, 1:] if cumulative else rows.cumsum(1)
            assert starts.tolist() == [0, *ends[0].clamp(max=seqlen_k).tolist()] and starts.dtype == torch.int32
        assert lts is not None and lts.dtype == torch.int32 and want.lts is not None and torch.equal(lts, want.lts)
        assert (ute is None) == causal and (ute is None or (want.ute is not None and torch.equal(ute, want.ute)))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("cumulative", [False, True])
def test_drawn_documents(cumulative: bool, count: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(2):
        batch, dtype = draw.choice((1, 2)), draw.choice((torch.int32, torch.int64))
        lengths = torch.tensor([draw.choices(LENGTHS, k=count) for _ in range(batch)], dtype=dtype).view(batch, count)
        seqlen_k = max(1, int(lengths.sum(1).max())) + draw.choice((0, 1, 50))
        rows = lengths
        if cumulative:
            first = torch.full((batch, 1), draw.choice((0, 5)), dtype=dtype)
            rows = torch.cat([first, lengths], 1).cumsum(1).to(dtype)
            seqlen_k = max(seqlen_k, int(rows.max()))
        check(rows, cumulative, max(0, seqlen_k + draw.choice((0, 7, -50))), seqlen_k)


def test_documents_of_several_blocks() -> None:
    check(torch.tensor([[COLUMNS + 44, 10, 2 * COLUMNS, 0, 5]]), False, 900, 900)


def test_strided_rows() -> None:
    check(torch.tensor([[3, 9, 4, 9], [2, 9, 0, 9]], dtype=torch.int32)[:, ::2], False, 10, 10)


def test_no_columns() -> None:
    check(torch.zeros(2, 3, dtype=torch.int64), False, 5, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ends_past_all_keys_are_ends(dtype: torch.dtype) -> None:
    """Lengths on a device are not looked at: their sums may pass 32 bits, and a document reach past the last key."""
    rows = torch.tensor([[2, torch.iinfo(dtype).max // 3, 2**30, 2**30, 2**30]], dtype=dtype)
    lts, ute, starts = vectors(rows, False, False, 8, 6, True)
    assert lts is not None and ute is not None and starts is not None
    assert starts.tolist() == [0, 2, 6, 6, 6, 6]
    assert lts.flatten().tolist() == [4] * 2 + [8] * 4 and ute.flatten().tolist() == [2] * 2 + [4] * 4


def test_senseless_rows_lead_to_no_row_outside() -> None:
    for rows in ([[-5, 3, -(2**31), 2**31 - 1]], [[9, 2, -7, 4]]):
        for cumulative in (False, True):
            for t in vectors(torch.tensor(rows, dtype=torch.int32), cumulative, False, 5, 6)[:2]:
                assert t is not None and int(t.min()) >= 0 and int(t.max()) <= 5


def test_who_says_where_documents_start() -> None:
    """Those of one batch entry from position 0 on, as many queries as keys, and not many more than tiles."""
    assert masks.Document([300, 212])._documents(512, 512) == 2
    of_cu = masks.Document.from_cu_seqlens
    assert of_cu([0, 300, 512])._documents(512, 512) == 2
    ids, two = torch.arange(512), masks.Document([300, 211])
    for other in (
        masks.Document([[300, 212]] * 2), masks.Document([]), masks.Document.from_position_ids(ids), of_cu([1, 300, 512]),
        masks.Document.from_segment_ids(ids // 256), masks.Document([300, 211, 1]), two & masks.SlidingWindow(3),
    ):  # fmt: skip
        assert other._documents(512, 512) is None
    assert two._documents(511, 512) is two._documents(511, 511) is None
