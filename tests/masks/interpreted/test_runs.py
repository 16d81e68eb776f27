"""Vectors of documents that segment or position ids describe, by one launch, are those of torch's operations."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from warploom import masks
from warploom.masks.zoo import run_kernel
from warploom.masks.zoo.run_kernel import run_launch, run_vectors

CPU = torch.device("cpu")
DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COLUMNS, CHUNK = 32, 128  # of the kernel here: the interpreter takes a second for a thousand columns
LENGTHS = (1, 1, 1, 2, 3, 10, COLUMNS - 1, COLUMNS, COLUMNS + 1, 100, 150)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run_launch.cache_clear()
    monkeypatch.setattr(run_kernel, "COLUMNS", COLUMNS)
    monkeypatch.setattr(run_kernel, "CHUNK", CHUNK)
    yield
    run_launch.cache_clear()


def test_blocks_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    columns, chunk = run_kernel.COLUMNS, run_kernel.CHUNK
    assert columns > COLUMNS and chunk > CHUNK
    check(ids_of([5, columns + chunk, 9], True)[None], True, 100)


def check(ids: Tensor, segments: bool, seqlen_q: int) -> None:
    build = masks.Document.from_segment_ids if segments else masks.Document.from_position_ids
    seqlen_k = ids.shape[1]
    for causal in (False, True):
        want = build(ids, causal)._resolve(seqlen_q, seqlen_k, CPU)
        found = run_vectors(ids, segments, causal, seqlen_q, seqlen_k)
        assert found is not None
        lts, ute = found
        assert lts is not None and lts.dtype == torch.int32 and want.lts is not None and torch.equal(lts, want.lts)
        assert (ute is None) == causal and (ute is None or (want.ute is not None and torch.equal(ute, want.ute)))


def ids_of(lengths: list[int], segments: bool) -> Tensor:
    if not segments:
        return torch.cat([torch.arange(n) for n in lengths])
    return 1 + torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("segments", [False, True])
def test_drawn_documents(segments: bool, dtype: torch.dtype) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(2):
        rows = [ids_of(draw.choices(LENGTHS, k=9), segments) for _ in range(draw.choice((1, 2)))]
        shortest = min(map(len, rows))
        seqlen_k = max(1, shortest - draw.choice((0, 1, 50)))
        ids = torch.stack([row[:seqlen_k] for row in rows])
        if segments and dtype.is_signed:
            ids[ids == draw.randrange(4)] = -1
            ids[:, seqlen_k - draw.randrange(seqlen_k) :] = -2
        if not segments:
            ids %= torch.iinfo(dtype).max
        check(ids.to(dtype), segments, max(0, seqlen_k + draw.choice((0, 7, -50))))


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("length", [1, COLUMNS, CHUNK, 2 * CHUNK + 1, CHUNK + COLUMNS + 5])
def test_a_document_of_several_blocks(length: int, before: int) -> None:
    """It is found from its last column backwards, by as many columns at once as divide its blocks or do not."""
    for segments in (False, True):
        check(ids_of([before, length, 2], segments)[None], segments, length + 1)
        check(ids_of([before, length], segments)[None], segments, length + before)


def test_padding_of_several_blocks_is_seen_by_nothing() -> None:
    ids = torch.full((2, 2 * COLUMNS + 9), -1)
    ids[0, :7], ids[1, -7:] = 1, 1
    check(ids, True, 100)


def test_tokens_of_their_own() -> None:
    check(torch.arange(COLUMNS + 3)[None], True, COLUMNS + 3)
    check(torch.zeros(2, 11, dtype=torch.int32), False, 11)


def test_strided_ids() -> None:
    ids = torch.stack([ids_of([5, COLUMNS, 3], True), ids_of([COLUMNS, 7, 1], True)], 1)
    check(ids.T, True, 9)
    check(ids[::2, 1:].T, True, 9)
    check(ids[:, :1].T.expand(3, -1), True, 9)
    check(torch.arange(40).view(1, 40)[:, 10:30], False, 20)


@pytest.mark.parametrize("ids", [[2**31 + 5, 2**32 + 2**31 + 5, -(2**40), -1, 7], [2**63 - 1, -(2**63), -(2**63) + 1, 0, 1]])
def test_all_64_bits_count(ids: list[int]) -> None:
    for segments in (False, True):
        check(torch.tensor([ids]), segments, 5)


def test_the_largest_id_has_no_next_one() -> None:
    for dtype in DTYPES:
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        check(torch.tensor([[most - 1, most, least, least + 1]], dtype=dtype), False, 4)


def test_no_columns() -> None:
    check(torch.zeros(2, 0, dtype=torch.int64), True, 5)
