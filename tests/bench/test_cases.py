"""What is benchmarked: masks of the same truth, and a reference that notices."""

from __future__ import annotations

import pytest
import torch

import warploom
from warploom import masks
from warploom.bench import linear, suites
from warploom.bench.harness import Comparison, WrongResult
from warploom.bench.masks import document_lengths, pairs, subtree_ends, tree_parents
from warploom.bench.reference import one_head

SEQLEN = 512


@pytest.mark.parametrize("name", pairs(SEQLEN, "cpu"))
def test_mask_and_mask_mod_agree(name: str) -> None:
    pair = pairs(SEQLEN, "cpu")[name]()
    i, j = torch.arange(SEQLEN)[:, None], torch.arange(SEQLEN)[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    want = torch.as_tensor(pair.mask_mod(zero, zero, i, j)).expand(SEQLEN, SEQLEN)
    assert torch.equal(pair.mask.dense(SEQLEN, SEQLEN)[0, 0], want)


def test_documents_fill_the_sequence() -> None:
    for seqlen in (512, 8192, 32768):
        lengths = document_lengths(seqlen)
        assert lengths.sum() == seqlen and len(lengths) == 8 and (lengths > 0).all()


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


def test_reference_of_a_group() -> None:
    q, k = torch.randn(1, 64, 4, 16), torch.randn(1, 64, 2, 16)
    want = one_head(q, k, k, masks.Causal().resolve(64, 64), None)
    assert want.check_out(warploom.attention(q, k, k, causal=True)) < 1e-5


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


def test_what_preparing_a_mask_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors made anew in one contender, held in the other; a band has none; a peer that failed is not called."""
    seen: list[object] = []
    monkeypatch.setattr(suites, "capture", lambda call: call)
    monkeypatch.setattr(suites, "_bounds", lambda mask, seqlen: seen.append(mask.lts))
    mask = pairs(SEQLEN, "cpu")["causal document"]().mask
    device = torch.device("cpu")
    found = suites._preparation(mask, SEQLEN, device, lambda: None, {}, {})
    assert list(found.calls) == ["warploom", "warploom, with the vectors", "FlexAttention"]
    for name in ("warploom", "warploom, with the vectors"):
        seen.clear()
        found.calls[name]()
        found.calls[name]()
        assert len(seen) == 2 and torch.equal(seen[0], seen[1])
        assert (seen[0] is seen[1]) == (name == "warploom")
    band = suites._preparation(masks.Causal(), SEQLEN, device, lambda: None, {"FlexAttention": "out of memory"}, {})
    assert band.calls == {} and "nothing to prepare" in band.refused["warploom"]


@pytest.mark.parametrize("suite", ["masks", "forward"])
def test_ours_is_timed_where_a_block_mask_fails(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("no block mask")

    class Cuda:
        type = "cuda"

    monkeypatch.setattr(suites.Shape, "draw", lambda self, device: [torch.randn(1, 256, 2, 16)] * 4)
    monkeypatch.setattr(suites, "pairs", lambda seqlen, device: pairs(seqlen, "cpu"))
    monkeypatch.setattr(suites, "_preparation", lambda *arguments: Comparison({}, lambda _: 0.0))
    monkeypatch.setattr(suites.peers, "flex_block_mask", fails)
    case = next(c for c in suites.cases([suite], torch.device("cpu"), True) if "causal" in c.name)
    forward = dict(case.build(Cuda()))["forward"]
    assert "warploom" in forward.calls and forward.refused["FlexAttention"] == "AssertionError: no block mask"
