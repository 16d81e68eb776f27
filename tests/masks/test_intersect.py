"""Intersection against the AND of dense masks: exact, or refused."""

import random

import pytest
import torch

from warploom import masks
from warploom.masks import Causal, ColumnMask, Document, Full, Padding, SlidingWindow

from .samples import SAMPLERS
from .test_columns import expressible, vector
from .test_tiles import adversarial


def test_bands_give_a_band():
    assert repr(Causal() & SlidingWindow(5, 3)) == "SlidingWindow(left=5, right=0)"
    assert repr(Full() & Full()) == "Full()"
    assert repr(SlidingWindow(None, 2) & Causal()) == "Causal()"
    document = Document([3])
    assert (Full() & document) is document and (document & Full()) is document
    assert repr(ColumnMask(vector(1, 2)) & Causal()) == "ColumnMask(lts=[1, 2], causal=True)"


@pytest.mark.parametrize("first", SAMPLERS)
def test_any_two_builders(first, seed):
    """Where `&` refuses, the AND has a column with three runs of hidden rows or more."""
    refused = 0
    for round_ in range(60):
        rng = random.Random(f"{first} {seed} {round_}")
        a, b = SAMPLERS[first](rng), SAMPLERS[rng.choice(list(SAMPLERS))](rng)
        q, k = a.seqlen_q, a.seqlen_k
        try:
            other = b.mask.dense(q, k)
            together = torch.broadcast_shapes(a.mask.dense(q, k).shape, other.shape)
        except (ValueError, RuntimeError):
            continue  # b is for another length or batch
        truth = a.mask.dense(q, k) & other
        both = a.mask & b.mask if rng.random() < 0.5 else b.mask & a.mask
        where = f"seed {seed} round {round_}: {both} q={q} k={k}"
        try:
            got = both.dense(q, k)
        except ValueError as error:
            assert "and a column has two" in str(error), where
            assert not expressible(truth), where
            refused += 1
            continue
        assert torch.equal(got.expand(together), truth), where
        expected = truth.double().mean().item() if truth.numel() else 0.0
        assert both.density(q, k) == pytest.approx(expected, abs=1e-12), where
    print(f"{refused} refused")
    assert refused < 20


def test_adversarial_column_masks(seed):
    refused = 0
    for round_ in range(300):
        rng = random.Random(f"{seed} {round_}")
        q, k = rng.randint(1, 20), rng.randint(1, 20)
        a, b = adversarial(rng, q, k, beyond=0), adversarial(rng, q, k, beyond=0)
        truth = None
        try:
            truth = a.dense(q, k) & b.dense(q, k)
            got = (a & b).dense(q, k)
        except ValueError as error:
            assert "and a column has two" in str(error)
            assert not expressible(truth)
            refused += 1
            continue
        assert torch.equal(got, truth.expand_as(got)), f"seed {seed} round {round_}: {a} & {b}"
    assert 0 < refused < 250


def test_hiding_a_whole_column_is_always_expressible(seed):
    """Padding joins any mask: a column that it hides needs one interval only."""
    rng = random.Random(seed)
    q = k = 20
    mask = None
    while mask is None or mask.resolve(q, k).lte is None:
        mask = adversarial(rng, q, k)
    real = torch.rand(1, k) > 0.5
    assert torch.equal((mask & Padding(real)).dense(q, k), mask.dense(q, k) & real[:, None, None])


def test_structure_alone_decides_without_reading_values():
    """What unites by kind of interval reads no value, so that masks on a device do not synchronise."""
    lengths = torch.tensor([3, 4])
    combined = [
        Document(lengths) & Padding([6]) & SlidingWindow(3),
        Document(lengths, causal=False) & Padding([6]),
        masks.PrefixLM(torch.tensor([2])) & Document(lengths),
        masks.QKSparse([1]) & Padding([5]),
        ColumnMask(torch.zeros(7, dtype=torch.int32)) & ColumnMask(None, ute=torch.ones(7, dtype=torch.int32)),
    ]

    for mask in combined:
        on_meta = torch.utils._pytree.tree_map(lambda t: t.to("meta"), mask)  # meta tensors have no values to read
        on_meta.resolve(7, 7, "meta")
        mask.resolve(7, 7)


def test_refusals_in_words():
    ones = torch.ones(9, dtype=torch.int32)
    a, b = ColumnMask(ones, 2 * ones, 5 * ones, 6 * ones), ColumnMask(3 * ones, 4 * ones)
    with pytest.raises(
        ValueError,
        match=r"column 1 \(batch 0, head 0\) hides 3 separate runs of rows, and a column has two",
    ):
        a & b
    with pytest.raises(ValueError, match="hides 3 separate"):
        (a & Causal() & b).resolve(9, 9)
    with pytest.raises(ValueError, match="cannot intersect masks of 2 and 3 batch entries"):
        (Document([[1], [2]]) & Padding([1, 2, 3])).resolve(4, 4)
    with pytest.raises(ValueError, match="has length 9, but the keys have seqlen_k 3"):
        a & ColumnMask(vector(1, 2, 3))
    with pytest.raises(TypeError):
        Causal() & 3


def test_masks_of_key_heads_and_of_query_heads_intersect():
    """Query head h sees what the mask of key head h // group and its own show."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 12, (2, heads, 9), generator=generator, dtype=torch.int32) for heads in (2, 8, 4)]
    of_keys, of_queries, between = (ColumnMask(t) for t in drawn)
    for one, other in (
        (of_keys, of_queries),
        (of_queries, of_keys),
        (of_keys & between, of_queries),
        (Causal() & of_keys, of_queries),
    ):
        both = (one & other).dense(12, 9)
        wanted = [m.dense(12, 9) for m in (one, other)]
        wanted = [m.repeat_interleave(8 // m.shape[1], dim=1) for m in wanted]
        assert torch.equal(both.expand(2, 8, 12, 9), (wanted[0] & wanted[1]).expand(2, 8, 12, 9))
    with pytest.raises(ValueError, match="cannot intersect masks of 2 and 3 heads"):
        of_keys & ColumnMask(torch.ones(2, 3, 9, dtype=torch.int32))
