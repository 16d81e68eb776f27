"""Vectors of prefix documents, shared questions and blocks by one launch are those of torch's operations."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from warploom import masks
from warploom.masks.zoo.document_kernel import COLUMNS, DOCUMENTS, part_vectors

CPU = torch.device("cpu")
COUNTS = (0, 1, 2, 5, DOCUMENTS, 2 * DOCUMENTS + 7)
LENGTHS = (0, 0, 1, 1, 2, 3, 10, 40)


def check(kind: str, rows: Tensor, others: Tensor | int | None, seqlen_q: int, seqlen_k: int) -> None:
    build: dict[str, Callable[[], masks.Mask]] = {
        "prefixes": lambda: masks.PrefixDocument(rows, others),
        "answers": lambda: masks.SharedQuestion(others if isinstance(others, int) else others[:, 0], rows),  # type: ignore[index]
        "blocks": lambda: masks.CausalBlockwise(rows),
    }
    want = build[kind]()._resolve(seqlen_q, seqlen_k, CPU)
    wanted = {"prefixes": (True, True, False), "answers": (True, False, False), "blocks": (want.ute is not None, True, True)}
    given = {"question": others} if isinstance(others, int) else {"others": others}
    found = part_vectors(kind, rows, wanted[kind], seqlen_q, seqlen_k, **given)  # type: ignore[arg-type]
    vectors = [t for t in want.vectors if t is not None]
    assert found is not None
    kept = [t for t in found if t is not None]
    assert len(kept) == len(vectors)
    for a, b in zip(kept, vectors, strict=True):
        assert a.dtype == torch.int32 and torch.equal(a, b.expand_as(a) if b.shape[0] == 1 else b)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["prefixes", "answers", "one question", "blocks"])
def test_drawn_parts(kind: str, count: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for more in (0, draw.choice((1, 50))):
        batches = draw.choice(((1, 1), (2, 2), (1, 2), (2, 1)))
        dtype = draw.choice((torch.int32, torch.int64))

        def drawn(batch: int, n: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.tensor([draw.choices(LENGTHS, k=n) for _ in range(batch)], dtype=dtype).view(batch, n)

        rows, others = drawn(batches[0], count), None
        total = rows.sum(1)
        if kind == "prefixes":
            others = drawn(batches[1], count)
        elif kind == "answers":
            others = drawn(batches[1], 1)
            total = total + others[:, 0]
        elif kind == "one question":
            others = draw.choice((0, 7, 300))
            total = total + others
        else:
            rows = rows[:1]
            total = total[:1]
        seqlen_k = max(1, int(total.max())) + more
        check(
            "answers" if kind == "one question" else kind, rows, others, max(0, seqlen_k + draw.choice((0, 7, -50))), seqlen_k
        )


@pytest.mark.parametrize("kind", ["prefixes", "answers", "blocks"])
def test_parts_of_several_programs(kind: str) -> None:
    rows = torch.tensor([[COLUMNS + 44, 10, 2 * COLUMNS, 0, 5, 0]])
    others = torch.tensor([[COLUMNS + 3, 4, 5, 0, 1, 0]]) if kind == "prefixes" else None if kind == "blocks" else 400
    total = int(rows.sum()) + (400 if kind == "answers" else 0)
    for seqlen_k in (total, total + COLUMNS + 1):
        check(kind, rows, others, 777, seqlen_k)


def test_strided_lengths() -> None:
    rows = torch.tensor([[3, 9, 4, 9], [2, 9, 0, 9]])
    check("prefixes", rows[:, ::2], rows[:, 1::2], 10, 10)
    check("answers", rows[:, ::2], rows[:, 3:], 20, 20)
    check("blocks", rows.T[:2], None, 20, 20)


def test_lengths_past_all_keys() -> None:
    far = torch.iinfo(torch.int64).max // 3
    found = part_vectors("answers", torch.tensor([[2, far]]), (True, False, False), 8, 6, question=far)
    assert found is not None and found[0] is not None and found[0].flatten().tolist() == [8] * 6
    found = part_vectors("prefixes", torch.tensor([[2, far]]), (True, True, False), 6, 6, torch.tensor([[1, far]]))
    assert found is not None and found[0] is not None and found[1] is not None
    assert found[0].flatten().tolist() == [2, 2, 6, 6, 6, 6] and found[1].flatten().tolist() == [0, 1, 2, 2, 2, 2]


def test_senseless_lengths_lead_to_no_row_outside() -> None:
    rows = torch.tensor([[-5, 3, -(2**31), 2**31 - 1]], dtype=torch.int32)
    for kind, wanted in (("prefixes", (True, True, False)), ("answers", (True, False, False)), ("blocks", (True, True, True))):
        others = None if kind == "blocks" else rows.flip(1) if kind == "prefixes" else rows[:, :1]
        found = part_vectors(kind, rows, wanted, 5, 6, others)
        assert found is not None
        for t in found:
            assert t is None or (int(t.min()) >= 0 and int(t.max()) <= 5)
