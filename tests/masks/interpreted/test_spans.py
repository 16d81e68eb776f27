"""The vector of spans by one launch is that of torch's operations."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from warploom import masks
from warploom.masks.zoo.span_kernel import COLUMNS, SPANS, span_vector


def check(starts: Tensor, lengths: Tensor, seqlen_q: int, seqlen_k: int) -> None:
    want = masks.BidirectionalSpans(starts, lengths)._resolve(seqlen_q, seqlen_k, torch.device("cpu"))
    found = span_vector(starts, lengths, seqlen_q, seqlen_k)
    assert found is not None and want.ute is not None and found.dtype == torch.int32 and torch.equal(found, want.ute)


@pytest.mark.parametrize("count", [0, 1, 3, SPANS, SPANS + 5])
def test_drawn_spans(count: int) -> None:
    """In any order, with spans of no tokens among them, which may start anywhere."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for batch in (1, 2):
        rows = []
        for _ in range(batch):
            at, spans = 0, []
            for _ in range(count):
                at += draw.choice((0, 0, 1, 9))
                spans.append((at, draw.choice((0, 1, 2, 30))))
                at += spans[-1][1]
            draw.shuffle(spans)
            rows.append(spans)
        both = torch.tensor(rows, dtype=draw.choice((torch.int32, torch.int64))).view(batch, count, 2)
        most = int((both[..., 0] + both[..., 1]).max()) if count else 5
        for more in (0, 70):
            check(both[..., 0], both[..., 1], max(0, most + draw.choice((0, 3, -20))), max(1, most + more))


def test_spans_of_several_programs_and_of_a_whole_batch() -> None:
    starts = torch.tensor([[COLUMNS + 7, 3], [900, 20]])
    check(starts, torch.tensor([[2 * COLUMNS, 15], [1, 800]]), 1000, 1000)
    check(starts, torch.tensor([[40, 10]]), 1000, 1000)


def test_senseless_spans_lead_to_no_row_outside() -> None:
    far = torch.tensor([[-5, 2**31 - 1, 3, 2**62]])
    for starts, lengths in ((far, far.flip(1)), (far, far)):
        found = span_vector(starts, lengths, 5, 6)
        assert found is not None and int(found.min()) >= 0 and int(found.max()) <= 5


def test_spans_past_all_keys_end_there() -> None:
    found = span_vector(torch.tensor([[1, 2**62]]), torch.tensor([[2**62, 2**62]]), 6, 6)
    assert found is not None and found.flatten().tolist() == [0, 1, 1, 1, 1, 1]
