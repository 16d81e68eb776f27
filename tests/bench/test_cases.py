"""What is benchmarked: masks of the same truth, and a reference that notices."""

from __future__ import annotations

import pytest
import torch

import warploom
from warploom import masks
from warploom.bench import linear
from warploom.bench.harness import WrongResult
from warploom.bench.masks import document_lengths, pairs, subtree_ends, tree_parents
from warploom.bench.reference import Dropout, one_head

SEQLEN = 512


@pytest.mark.parametrize("name", pairs(SEQLEN, "cpu"))
def test_mask_and_mask_mod_agree(name: str) -> None:
    pair = pairs(SEQLEN, "cpu")[name]()
    i, j = torch.arange(SEQLEN)[:, None], torch.arange(SEQLEN)[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    shown = True if pair.mask_mod is None else pair.mask_mod(zero, zero, i, j)
    want = torch.as_tensor(shown).expand(SEQLEN, SEQLEN)
    assert torch.equal(pair.mask.dense(SEQLEN, SEQLEN)[0, 0], want)


def test_documents_fill_the_sequence() -> None:
    for seqlen in (256, 512, 8192, 32768):
        lengths = document_lengths(seqlen)
        assert lengths.sum() == seqlen and len(lengths) > 1 and (lengths > 0).all()
    assert lengths[:-1].min() >= 200 and lengths.max() <= 6000


def test_subtrees_end_where_their_last_node_does() -> None:
    parents = tree_parents(64)
    ends = subtree_ends(parents)
    for node in range(64):
        inside = {node}
        for other in range(node + 1, 64):
            if int(parents[other]) in inside:
                inside.add(other)
        assert int(ends[node]) == max(inside) + 1


@pytest.mark.parametrize("mask", [masks.Full(), masks.Document([700, 300, 200]), masks.SlidingWindow(50, 3)])
def test_reference_of_one_head(mask: masks.Mask) -> None:
    """1200 rows: more than a chunk."""
    q, k, v = (torch.randn(2, 1200, 2, 16, requires_grad=True) for _ in range(3))
    dout = torch.randn(2, 1200, 2, 16)
    out = warploom.attention(q, k, v, mask=mask)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    want = one_head(q, k, v, mask.resolve(1200, 1200), dout)
    assert want.check_out(out) < 1e-5 and want.check_gradients(gradients) < 1e-5
    with pytest.raises(WrongResult, match="out is"):
        want.check_out(out + 0.01 * out.abs().max())
    with pytest.raises(WrongResult, match="dv is"):
        want.check_gradients((*gradients[:2], gradients[2] * 1.05))
    with pytest.raises(WrongResult):
        want.check_out(out * float("nan"))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_reference_of_a_group(heads: int, dropout: float) -> None:
    """dk and dv are sums over the group's query heads, each with its own mask and its own dropped elements."""
    q, k, v = (torch.randn(2, 130, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    dout, rows = torch.randn(2, 130, 4, 16), torch.randint(1, 130, (2, heads, 130))
    mask, seed = masks.RandomEviction(rows), torch.tensor([2**40 + 5])
    options = {"dropout_p": dropout, "dropout_seed": seed} if dropout else {}
    out = warploom.attention(q, k, v, mask=mask, **options)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    want = one_head(q, k, v, mask.resolve(130, 130), dout, Dropout(dropout, seed) if dropout else None)
    assert want.check_out(out) < 1e-5 and want.check_gradients(gradients) < 1e-5
    with pytest.raises(WrongResult, match="dk is"):
        want.check_gradients((gradients[0], gradients[1] * 1.05, gradients[2]))


@pytest.mark.parametrize("normalize", [True, False])
def test_reference_and_recurrence_of_linear_attention(normalize: bool) -> None:
    """1100 rows: more than a chunk. The token-by-token peer computes the same, gradients too."""
    q, k, v = (torch.rand(2, 1100, 2, 16).requires_grad_() for _ in range(3))
    dout = torch.randn(2, 1100, 2, 16)
    out = warploom.linear_attention(q, k, v, feature_map="identity", normalize=normalize)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    want = linear.one_head(q, k, v, dout, normalize)
    assert want.check_out(out) < 1e-5 and want.check_gradients(gradients) < 1e-4
    peer = linear.token_by_token(q, k, v, normalize)
    assert want.check_out(peer) < 1e-5 and want.check_gradients(torch.autograd.grad(peer, (q, k, v), dout)) < 1e-4
    with pytest.raises(WrongResult):
        want.check_out(1.02 * out)
