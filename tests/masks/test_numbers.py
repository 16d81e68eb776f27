"""Integers of masks past 32 bits: exact where they mean something, an error in words where they do not, never wrapped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from warploom import masks
from warploom.masks import Causal, ColumnMask, Document

FAR = [2**31 - 1, 2**31, 2**31 + 3, 2**32, 2**32 + 3, 2**40, 2**62]


def wide(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("far", FAR)
def test_a_size_past_the_keys_is_as_good_as_any(far: int) -> None:
    """They wrapped: a chunk of 2**32 + 3 positions was one of 3, a prefix of 2**31 none."""
    causal = Causal().dense(9, 9)
    assert torch.equal(masks.Chunked(far).dense(9, 9), causal)
    assert torch.equal(masks.BlockDiffusion(4, far).dense(8, 8), masks.BlockDiffusion(4, 4).dense(8, 8))
    for prefix in (far, [far], wide(far)):
        assert masks.PrefixLM(prefix).dense(9, 9).all()
    for tokens in (far, [far], wide(far)):
        assert masks.GlobalWindow(tokens, 0).dense(9, 9).tril().equal(causal)
    assert torch.equal(masks.GlobalWindow(2, far, far).dense(9, 9), torch.ones_like(causal))
    assert torch.equal(masks.RandomEviction(wide(*[far] * 9)).dense(9, 9), causal)
    assert torch.equal(masks.PrefixDocument(wide(9), wide(far)).dense(9, 9), torch.ones_like(causal))


def test_segment_ids_that_are_hashes() -> None:
    """Ids that agree in their low 32 bits were one document, and ids with bit 31 set were padding."""
    a, b, c = 0x0123_4567_89AB_CDEF, 0x7654_3210_89AB_CDEF, 2**31 + 7
    found = Document.from_segment_ids(wide(a, a, b, b, c, c, c, -1, -(2**40)))
    assert torch.equal(found.dense(), Document([2, 2, 3]).dense(9, 9))
    assert torch.equal(Document.from_segment_ids([a, a, b, b, c, c, c, -1, -(2**40)]).dense(), found.dense())


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2, 2**62, -(2**31) - 2])
def test_positions_past_32_bits(start: int) -> None:
    ids = [*range(start, start + 5), *range(start - 2**32, start - 2**32 + 3)]
    assert torch.equal(Document.from_position_ids(wide(*ids)).dense(), Document([5, 3]).dense())


@pytest.mark.parametrize(
    "dtype,largest", [(torch.int8, 127), (torch.uint8, 255), (torch.int32, 2**31 - 1), (torch.int64, 2**63 - 1)]
)
def test_the_largest_position_of_a_dtype_has_no_next_one(dtype: torch.dtype, largest: int) -> None:
    ids = torch.tensor([largest - 1, largest, torch.iinfo(dtype).min, torch.iinfo(dtype).min + 1], dtype=dtype)
    assert torch.equal(Document.from_position_ids(ids).dense(), Document([2, 2]).dense())


def test_rows_of_eight_bits() -> None:
    rows = torch.full((300,), 255, dtype=torch.uint8)
    assert torch.equal(masks.RandomEviction(rows).dense(300, 300), masks.RandomEviction(rows.int()).dense(300, 300))


@pytest.mark.parametrize("far", FAR)
def test_vectors_of_64_bits_saturate(far: int) -> None:
    found = ColumnMask(wide(1, far, -far), wide(far, far, -far), uts=wide(-far, 0, far), ute=wide(1, -far, far))
    assert found.lts is not None and found.lts.dtype == torch.int32
    assert torch.equal(found.dense(5, 3), ColumnMask(*(torch.tensor(v, dtype=torch.int32) for v in (
        [1, 5, 0], [5, 5, 0], [0, 0, 5], [1, 0, 5],
    ))).dense(5, 3))  # fmt: skip


REFUSED = {
    "lengths": (lambda n: Document([n, 3]), "lengths sum to .*, but there are only 9 keys"),
    "wide lengths": (lambda n: Document(wide(n, n, n)), "lengths sum to .*, but there are only 9 keys"),
    "cu_seqlens": (lambda n: Document.from_cu_seqlens(wide(0, n)), "cu_seqlens ends at .*, but there are only 9 keys"),
    "prefix documents": (lambda n: masks.PrefixDocument([n], [1]), "lengths sum to"),
    "blocks": (lambda n: masks.CausalBlockwise([2, n]), "block_lengths sum to"),
    "question": (lambda n: masks.SharedQuestion(n, [2, 3]), "question and answers sum to"),
    "answers": (lambda n: masks.SharedQuestion(2, [3, n]), "question and answers sum to"),
    "padding": (lambda n: masks.Padding([4, n]), r"Padding: a length is \d+, but there are only 9 keys"),
    "padding of all": (lambda n: masks.Padding(n), r"Padding: a length is \d+, but there are only 9 keys"),
    "span": (lambda n: masks.BidirectionalSpans([1], [n]), r"a span ends at \d+, but there are only 9 keys"),
    "span's start": (lambda n: masks.BidirectionalSpans([1, n], [2, 1]), r"a span ends at \d+, but there are only 9 keys"),
    "dropped": (lambda n: masks.QKSparse([1, n]), "names position .*, but there are only 9 keys"),
}


@pytest.mark.parametrize("far", [10, *FAR])
@pytest.mark.parametrize("name", REFUSED)
def test_lengths_past_the_keys_are_refused(name: str, far: int) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        make(far).resolve(9, 9)


UNREAD = [
    "warploom.masks.zoo.documents",
    "warploom.masks.zoo.branches",
    "warploom.masks.zoo.prefixes",
    "warploom.masks.zoo.bands",
]


@pytest.mark.parametrize("far", [10, *FAR])
def test_on_a_device_they_saturate(far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents that are not read go on to the last key, as any length past it does."""
    for module in (*UNREAD, "warploom.masks.zoo.positions", "warploom.masks.zoo.sparse", "warploom.masks.arguments"):
        monkeypatch.setattr(f"{module}.readable", lambda _: False)
    causal = Causal().dense(9, 9)
    assert torch.equal(Document(wide(2, far, far)).dense(9, 9), Document([2, 7]).dense(9, 9))
    assert torch.equal(Document.from_cu_seqlens(wide(0, 2, far)).dense(9, 9), Document([2, 7]).dense(9, 9))
    assert torch.equal(masks.Padding(wide(far)).dense(9, 9), torch.ones_like(causal))
    assert torch.equal(masks.SharedQuestion(wide(far), wide(1, far)).dense(9, 9), causal)
    assert torch.equal(masks.CausalBlockwise(wide(far, far)).dense(9, 9), causal)
    spans = masks.BidirectionalSpans(wide(1, far), wide(far, far)).dense(9, 9)
    assert torch.equal(spans, masks.BidirectionalSpans([1], [8]).dense(9, 9))


def test_lengths_that_32_bits_of_rows_do_not_count() -> None:
    for call in (
        lambda n: masks.PrefixLM(2).resolve(n, 4),
        lambda n: masks.PrefixLM(2).resolve(4, n),
        lambda n: masks.PrefixLM(2).density(n, 4),
        lambda n: masks.Causal().tiles(64, 64, n, 4),
    ):
        for length in (2**29 + 1, 2**31, 2**70):
            with pytest.raises(ValueError, match=r"seqlen_[qk] must be at most 536870912"):
                call(length)
    assert masks.Causal().resolve(2**40, 2**40).right == 0  # a band counts nothing
    assert masks.Causal().tiles(2**62, 2**62, 9, 9).shape == (1, 1)


def test_sixty_four_bits_are_the_most() -> None:
    for make in (masks.PrefixLM, masks.Document.from_segment_ids, masks.QKSparse):
        with pytest.raises(ValueError, match="must hold values that fit int64, got"):
            make([2**70])
