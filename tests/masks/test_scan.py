"""Reading a matrix block by block: the same mask whatever the blocks, and never the whole matrix."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from warploom.masks import ColumnMask, scan

from .samples import SAMPLERS


@pytest.fixture(params=[(1, 1), (7, 3), (64, 2), (10**6, 10**6)], ids=str)
def blocks(request, monkeypatch):
    elements, width = request.param
    monkeypatch.setattr(scan, "_ON_CPU", elements)
    monkeypatch.setattr(scan, "_WIDTH", width)


def test_every_builder_through_any_blocks(blocks, seed):
    for name, sampler in SAMPLERS.items():
        for round_ in range(4):
            sample = sampler(random.Random(f"{name} {seed} {round_}"))
            truth = sample.dense()
            assert torch.equal(ColumnMask.from_dense(truth).dense(sample.seqlen_q, sample.seqlen_k), truth), f"{name} {round_}"


def test_the_first_column_that_fails_is_named(blocks):
    """Of all batch entries and heads, in whatever order the blocks are read."""
    visible = torch.ones(2, 2, 7, 5, dtype=torch.bool)
    visible[0, 1, ::2, 3] = visible[1, 0, ::2, 1] = visible[1, 1, ::2, 0] = False
    with pytest.raises(ValueError, match=r"column 3 \(batch 0, head 1\) hides 4 separate runs of rows"):
        ColumnMask.from_dense(visible)


def test_a_band_that_a_later_column_forbids(blocks):
    """Column 3 needs the band that column 5, with one more element, shows something beyond."""
    visible = torch.ones(9, 6, dtype=torch.bool).tril(-1)
    visible[[5, 7], 3] = False
    assert torch.equal(ColumnMask.from_dense(visible).dense(9, 6)[0, 0], visible)
    visible[0, 5] = True
    with pytest.raises(ValueError, match=r"column 3 \(batch 0, head 0\) hides 3 separate runs"):
        ColumnMask.from_dense(visible)


def test_a_column_with_many_runs_does_not_accuse_another(blocks):
    """Column 0 does within the band; only column 2, which has six runs, does not."""
    visible = torch.ones(20, 4, dtype=torch.bool).tril().triu(-14)
    visible[[3, 6], 0] = False
    visible[[4, 6, 8, 10, 12], 2] = False
    with pytest.raises(ValueError, match="column 2 "):
        ColumnMask.from_dense(visible)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out


def test_memory_grows_with_the_length_and_not_with_its_square(monkeypatch):
    """No tensor has more elements than a block, and only the vectors grow with the sequence."""
    monkeypatch.setattr(scan, "_ON_CPU", 1 << 18)
    document = torch.arange(3072) // 1000

    def packed(b, h, q_idx, kv_idx):
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    with Largest() as largest:
        mask = ColumnMask.from_mask_mod(packed, 3072, 3072, device="cpu")
    assert largest.elements <= scan._ON_CPU < 3072**2 / 30
    assert mask.causal and torch.equal(mask.lts[0, 0].long(), ((document + 1) * 1000).clamp(max=3072))
