"""Empty inputs: every family returns at once, with the right shapes and zero gradients; the lse is the sink, if any."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import warploom
from warploom import KVCache, LinearState, PagedKVCache, masks
from warploom.masks import Padding, PrefixLM

BACKENDS = [None, "cpu", "reference"]
INF = float("inf")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


OPTIONS = {
    "plain": lambda heads: {},
    "causal": lambda heads: {"causal": True},
    "softcap": lambda heads: {"softcap": 3.0},
    "dropout": lambda heads: {"dropout_p": 0.5},
    "sink": lambda heads: {"sink": normal(heads)},
    "mask": lambda heads: {"mask": PrefixLM(2)},
    "window": lambda heads: {"window": (2, 0)},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_attention(backend: str | None, option: str) -> None:
    for batch, seqlen_q, seqlen_k, (heads, kv) in product((0, 2), (0, 3), (0, 5), ((0, 0), (0, 2), (4, 2))):
        q, k, v = normal(batch, seqlen_q, heads, 16), normal(batch, seqlen_k, kv, 16), normal(batch, seqlen_k, kv, 8)
        options = OPTIONS[option](heads)
        out, lse = warploom.attention(q, k, v, return_lse=True, backend=backend, **options)
        assert out.shape == (batch, seqlen_q, heads, 8) and lse.shape == (batch, heads, seqlen_q)
        inputs = [q, k, v, *([options["sink"]] if option == "sink" else [])]
        gradients = torch.autograd.grad(out.sum() + lse.masked_fill(lse == -INF, 0.0).sum(), inputs)
        assert all(torch.isfinite(g).all() for g in gradients)
        assert warploom.explain(q, k, v, backend=backend, **options).implementation


NONE = ints().reshape(0, 2)
NO_ENTRIES = {
    "columns": masks.ColumnMask(ints().reshape(0, 1, 5)),
    "padding": Padding(ints()),
    "padding tokens": Padding(torch.ones(0, 5, dtype=torch.bool)),
    "documents": masks.Document(NONE),
    "documents from cu_seqlens": masks.Document.from_cu_seqlens(NONE),
    "documents from segment ids": masks.Document.from_segment_ids(ints().reshape(0, 5)),
    "documents from position ids": masks.Document.from_position_ids(ints().reshape(0, 5)),
    "prefix documents": masks.PrefixDocument(NONE, NONE),
    "prefix documents of one's prefixes": masks.PrefixDocument(NONE, ints(1, 1)),
    "prefix": PrefixLM(ints()),
    "shared question": masks.SharedQuestion(ints(), NONE),
    "a question for all": masks.SharedQuestion(ints(1), NONE),
    "global and window": masks.GlobalWindow(ints(), 2),
    "blockwise": masks.CausalBlockwise(NONE),
    "tree": masks.Tree(ints().reshape(0, 5)),
    "spans": masks.BidirectionalSpans(NONE, NONE),
    "spans of one's lengths": masks.BidirectionalSpans(NONE, ints(1, 1)),
}


@pytest.mark.parametrize("name", NO_ENTRIES)
def test_masks_of_no_batch_entry(name: str) -> None:
    mask, q = NO_ENTRIES[name], normal(0, 5, 2, 16)
    for given in (mask, mask & masks.Causal()):
        assert warploom.attention(q, q, q, mask=given).shape == q.shape
        assert warploom.explain(q, q, q, mask=given).tiles is None
        assert given.dense(5, 5).shape == (0, 1, 5, 5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("used", [False, True])
def test_a_token_of_no_sequence_has_no_sink(backend: str | None, used: bool) -> None:
    """Its lse was the sink where there were no keys at all, and the sink's gradient collected it."""
    for cu, beyond in product(([0], [0, 0], [0, 3], [0, 2, 2]), (0, 2)):
        tokens, sink = cu[-1] + beyond, normal(4)
        q, k, v = normal(tokens, 4, 16), normal(beyond if used else 0, 2, 16), normal(beyond if used else 0, 2, 8)
        no_keys = ints(*[0] * len(cu))
        options = {"seqused_k": no_keys[1:]} if used else {}
        out, lse = warploom.attention_varlen(
            q, k, v, ints(*cu), no_keys, sink=sink, return_lse=True, backend=backend, **options
        )
        assert not out.any() and (lse[:, cu[-1] :] == -INF).all()
        assert torch.equal(lse[:, : cu[-1]], sink[:, None].expand(4, cu[-1]))
        *zeros, dsink = torch.autograd.grad(out.sum() + lse.masked_fill(lse == -INF, 0.0).sum(), (q, k, v, sink))
        assert not any(g.any() for g in zeros) and torch.equal(dsink, torch.full((4,), float(cu[-1])))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequence_at_all_has_a_backward(backend: str | None) -> None:
    q, k, v = normal(5, 4, 16), normal(5, 2, 16), normal(5, 2, 16)
    out = warploom.attention_varlen(q, k, v, ints(0), backend=backend)
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    out = warploom.linear_attention(q, k, v, cu_seqlens=ints(0), backend=backend)
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    out = warploom.gated_delta_rule(k, k, v, v[..., 0], cu_seqlens=ints(0), backend=backend)
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (k, v)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_decode(backend: str | None, kind: type[KVCache] | type[PagedKVCache]) -> None:
    for batch, queries, (heads, kv), capacity in product((0, 2), (0, 1, 3), ((0, 0), (0, 2), (4, 2)), (0, 16)):
        cache = kind.allocate(batch, capacity, kv, 16, head_dim_v=8, dtype=torch.float32)
        tokens = min(queries, capacity)
        cache.append(torch.randn(batch, tokens, kv, 16), torch.randn(batch, tokens, kv, 8))
        assert (cache.lengths == tokens).all()
        sink = torch.randn(heads)
        out, lse = warploom.decode(torch.randn(batch, queries, heads, 16), cache, sink=sink, return_lse=True, backend=backend)
        assert out.shape == (batch, queries, heads, 8) and lse.shape == (batch, heads, queries)
        if not capacity:
            assert not out.any() and torch.equal(lse, sink[:, None].expand_as(lse))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention(backend: str | None, causal: bool) -> None:
    for batch, seqlen_q, seqlen_k, (heads, kv) in product((0, 2), (0, 3), (0, 5), ((0, 0), (4, 2))):
        q, k, v = normal(batch, seqlen_q, heads, 16), normal(batch, seqlen_k, kv, 16), normal(batch, seqlen_k, kv, 8)
        before = LinearState(*(t + 1.0 for t in LinearState.zeros(batch, kv, 16, 8)))
        options = {"feature_map": "relu", "backend": backend}
        out, state = warploom.linear_attention(q, k, v, causal=causal, state=before, return_state=True, **options)
        assert out.shape == (batch, seqlen_q, heads, 8)
        assert torch.allclose(state.z, before.z + k.relu().sum(1))  # keys count whoever reads them
        torch.autograd.grad(out.sum() + state.s.sum(), (q, k, v))
        token = torch.randn(batch, kv, 16)
        out, after = warploom.linear_attention_step(torch.randn(batch, heads, 16), token, token[..., :8], before, **options)
        assert out.shape == (batch, heads, 8) and torch.allclose(after.z, before.z + token.relu())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_delta_rule(backend: str | None) -> None:
    for batch, seqlen, (heads, heads_v) in product((0, 2), (0, 3), ((0, 0), (2, 4))):
        q, v = normal(batch, seqlen, heads, 16), normal(batch, seqlen, heads_v, 8)
        beta = normal(batch, seqlen, heads_v).abs()
        before = normal(batch, heads_v, 16, 8)
        given = {"state": before, "return_state": True, "backend": backend}
        out, state = warploom.gated_delta_rule(q, q, v, beta, -beta, normalize_qk=True, **given)
        assert out.shape == v.shape and (seqlen > 0 or torch.equal(state, before))
        torch.autograd.grad(out.sum() + state.sum(), (q, v, before))
        token = torch.randn(batch, heads, 16), torch.randn(batch, heads, 16), torch.randn(batch, heads_v, 8)
        out, after = warploom.gated_delta_step(*token, torch.rand(batch, heads_v), before, backend=backend)
        assert out.shape == (batch, heads_v, 8) and after.shape == before.shape


def test_scaled_dot_product_attention() -> None:
    """A key mask beside 0 queries and 0 keys was an error of reshape."""
    for batch, heads, seqlen_q, seqlen_k in product((0, 2), (0, 3), (0, 4), (0, 5)):
        q, k, v = normal(batch, heads, seqlen_q, 16), normal(batch, heads, seqlen_k, 16), normal(batch, heads, seqlen_k, 8)
        for shape in ((batch, 1, 1, seqlen_k), (1, 1, 1, 1), (seqlen_k,)):
            mask = torch.ones(shape, dtype=torch.bool)
            out = warploom.scaled_dot_product_attention(q, k, v, mask)
            assert out.shape == (batch, heads, seqlen_q, 8)
            torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert Padding(torch.ones(0, 0, dtype=torch.bool)).resolve(0, 0).lts is not None
