"""Every builder against its predicate, on random shapes with seqlen_q and seqlen_k apart, batches and ragged rows."""

import random

import pytest
import torch

from warploom import masks

from .samples import SAMPLERS

ROUNDS = 150


@pytest.mark.parametrize("name", SAMPLERS)
def test_dense_is_the_predicate(name, seed):
    for round_ in range(ROUNDS):
        rng = random.Random(f"{name} {seed} {round_}")
        sample = SAMPLERS[name](rng)
        truth = sample.dense()
        got = sample.mask.dense(sample.seqlen_q, sample.seqlen_k)
        where = f"seed {seed} round {round_}: {sample.mask} q={sample.seqlen_q} k={sample.seqlen_k}"
        assert got.dtype == torch.bool and got.ndim == 4, where
        assert torch.equal(got.expand_as(truth), truth), where
        density = sample.mask.density(sample.seqlen_q, sample.seqlen_k)
        expected = truth.double().mean().item() if truth.numel() else 0.0
        assert density == pytest.approx(expected, abs=1e-12), where


@pytest.mark.parametrize("name", SAMPLERS)
def test_resolved_vectors_are_what_kernels_take(name, seed):
    for round_ in range(20):
        rng = random.Random(f"{name} {seed} {round_}")
        sample = SAMPLERS[name](rng)
        resolved = sample.mask.resolve(sample.seqlen_q, sample.seqlen_k)
        vectors = [v for v in resolved[2:] if v is not None]
        for v in vectors:
            assert v.dtype == torch.int32 and v.is_contiguous() and v.shape == vectors[0].shape
            assert v.shape[0] in (1, sample.batch) and v.shape[1] in (1, sample.heads)
            assert v.shape[2] == sample.seqlen_k
            assert not v.numel() or (int(v.min()) >= 0 and int(v.max()) <= sample.seqlen_q)
        assert resolved.lte is None or resolved.lts is not None
        assert resolved.uts is None or resolved.ute is not None


def test_every_builder_is_sampled():
    built = {type(sampler(random.Random(0)).mask).__name__ for sampler in SAMPLERS.values()}
    plain = {"ColumnMask", "Mask", "ResolvedMask", "TileClasses"}
    assert built == set(masks.__all__) - plain


@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal(), masks.SlidingWindow(3), masks.SlidingWindow(None, -2)])
def test_bands_have_no_vectors(mask):
    assert mask.resolve(100, 100)[2:] == (None, None, None, None)


def test_vectors_of_the_published_table():
    """The column vectors FlashMask lists, n = 1, 2 and 4."""
    t, causal = masks.Document([3, 2]).to_startend_row_indices()
    assert causal and t.tolist() == [[[[3], [3], [3], [5], [5]]]]
    t, causal = masks.Document([3, 2], causal=False).to_startend_row_indices()
    assert not causal and t.tolist() == [[[[3, 0], [3, 0], [3, 0], [5, 3], [5, 3]]]]
    t, causal = masks.SharedQuestion(2, [1, 2]).to_startend_row_indices()
    assert causal and t.flatten().tolist() == [5, 5, 3, 5, 5]
    t, causal = masks.CausalBlockwise([2, 1, 2]).to_startend_row_indices()
    assert causal and t[0, 0].tolist() == [[2, 3], [2, 3], [3, 3], [5, 5], [5, 5]]
    t, causal = masks.QKSparse([1, 2]).to_startend_row_indices(4, 4)
    assert causal and t[0, 0].tolist() == [[4, 4], [1, 3], [2, 3], [4, 4]]
    t, causal = masks.Full().to_startend_row_indices(3)
    assert not causal and t[0, 0].tolist() == [[3, 0]] * 3
    t, causal = masks.SlidingWindow(1).to_startend_row_indices(4)
    assert causal and t.flatten().tolist() == [2, 3, 4, 4]
    t, causal = masks.PrefixLM(2).to_startend_row_indices(4)
    assert not causal and t[0, 0].tolist() == [[4, 0], [4, 0], [4, 2], [4, 3]]
    t, causal = masks.GlobalWindow(1, 1, 1).to_startend_row_indices(4)
    assert not causal and t[0, 0].tolist() == [[4, 4, 1, 0], [3, 4, 1, 0], [4, 4, 1, 1], [4, 4, 1, 2]]
    t, causal = masks.Tree([-1, 0, 1, 0, -1]).to_startend_row_indices()
    assert causal and t.flatten().tolist() == [4, 3, 3, 4, 5]
    t, causal = masks.BlockDiffusion(4, 2).to_startend_row_indices()
    assert not causal and t.shape == (1, 1, 8, 4)


def test_mask_of_a_large_tree_is_quick_to_resolve():
    count = 1 << 15
    chain = torch.arange(-1, count - 1)  # the deepest tree: every node under the one before
    assert (masks.Tree(chain).resolve(count, count).lts == count).all()
