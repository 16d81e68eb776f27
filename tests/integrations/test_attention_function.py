"""The attention function by itself: what it makes of masks and keywords, and what it refuses."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from tests.integrations.tiny_models import build, close
from warploom.integrations.transformers import attention as module
from warploom.integrations.transformers import register
from warploom.integrations.transformers.attention import attention_forward
from warploom.integrations.transformers.masks import mask_bounds
from warploom.masks import ColumnMask

B, HQ, HK, S, D = 2, 4, 2, 13, 8


class Layer(torch.nn.Module):
    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.eval()


def qkv(seqlen_q=S, seqlen_k=S, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, HQ, seqlen_q, D), (B, HK, seqlen_k, D), (B, HK, seqlen_k, D))
    return [torch.randn(shape, generator=g) for shape in shapes]


def reference(q, k, v, visible, scale=None, softcap=None, sinks=None):
    k, v = (t.repeat_interleave(HQ // HK, 1) for t in (k, v))
    scores = (q @ k.mT) * (scale or D**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(B, -1, q.shape[2], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def band(seqlen_q, seqlen_k, left=None, right=None):
    p = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    distance = p - torch.arange(seqlen_k)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible &= distance <= left
    if right is not None:
        visible &= distance >= -right
    return visible


def some_bounds(seed=0, batch=B):
    g = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, S + 1, (batch, 1, S, 4), generator=g).sort(-1).values
    return cuts[..., [2, 3, 0, 1]].to(torch.int32)  # upper interval before the lower one


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_bounds_are_the_whole_truth(causal, given):
    q, k, v = qkv()
    bounds = some_bounds()
    layer = Layer(is_causal=causal if not given else not causal)
    options = {"is_causal": causal} if given else {}
    out, weights = attention_forward(layer, q, k, v, bounds, sliding_window=3, **options)
    assert weights is None and out.shape == (B, S, HQ, D)
    visible = ColumnMask.from_startend_row_indices(bounds, causal=False).dense(S, S)
    close(out, reference(q, k, v, visible))


@pytest.mark.parametrize("causal", [True, False])
def test_two_bounds_are_read_by_is_causal(causal):
    q, k, v = qkv()
    bounds = some_bounds()[..., [0, 1] if causal else [0, 3]]
    out, _ = attention_forward(Layer(causal), q, k, v, bounds)
    visible = ColumnMask.from_startend_row_indices(bounds, causal).dense(S, S)
    close(out, reference(q, k, v, visible))
    other, _ = attention_forward(Layer(not causal), q, k, v, bounds, is_causal=causal)
    close(other, reference(q, k, v, visible))


def test_one_bound_is_causal():
    q, k, v = qkv()
    bounds = some_bounds()[..., :1]
    out, _ = attention_forward(Layer(True), q, k, v, bounds)
    visible = ColumnMask.from_startend_row_indices(bounds, causal=True).dense(S, S)
    close(out, reference(q, k, v, visible))
    with pytest.raises(ValueError, match="this layer is not causal"):
        attention_forward(Layer(False), q, k, v, bounds)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [S, 1, 5])
def test_without_a_mask_a_window_of_w_sees_w_minus_1_keys_back(seqlen_q, causal, window):
    q, k, v = qkv(seqlen_q)
    out, _ = attention_forward(Layer(causal), q, k, v, None, sliding_window=window)
    left = None if window is None else window - 1
    visible = band(seqlen_q, S, left, 0 if causal else left)
    close(out, reference(q, k, v, visible))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_dense_masks(dtype):
    q, k, v = qkv()
    visible = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.6
    visible |= torch.eye(S, dtype=torch.bool)
    mask = visible if dtype == torch.bool else torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -math.inf)
    out, _ = attention_forward(Layer(), q, k, v, mask, sliding_window=2)
    close(out, reference(q, k, v, visible))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_dense_masks_with_softcap_and_sinks(dtype):
    q, k, v = qkv()
    visible = band(S, S, 4, 2).expand(B, 1, S, S)
    lowest = torch.finfo(torch.float32).min
    mask = visible if dtype == torch.bool else torch.zeros(visible.shape).masked_fill(~visible, lowest)
    sinks = torch.randn(HQ)
    out, _ = attention_forward(Layer(), q, k, v, mask, softcap=1.5, s_aux=sinks)
    close(out, reference(q, k, v, visible, softcap=1.5, sinks=sinks))


def biased(q, k, v, bias, visible, softcap=None, sinks=None):
    """The same as `reference`, with a bias behind the softcap."""
    k, v = (t.repeat_interleave(HQ // HK, 1) for t in (k, v))
    scores = (q @ k.mT) * D**-0.5
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + bias
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(B, -1, q.shape[2], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


EVERYTHING = torch.ones(S, S, dtype=torch.bool)


def test_a_float_mask_of_any_numbers_is_a_bias():
    q, k, v = qkv()
    bias = torch.randn(B, 1, S, S, requires_grad=True)
    sinks = torch.randn(HQ)
    for options in ({}, {"softcap": 1.0}, {"s_aux": sinks}):
        out, _ = attention_forward(Layer(), q, k, v, bias, **options)
        want = biased(q, k, v, bias, EVERYTHING, options.get("softcap"), options.get("s_aux"))
        close(out, want)
        close(*(torch.autograd.grad(t.square().sum(), bias)[0] for t in (out, want)))


@pytest.mark.parametrize("mask", ["none", "bounds", "bool", "0 and lowest", "keys", "numbers"])
def test_position_bias_is_added_under_every_mask(mask):
    q, k, v = qkv()
    bias = torch.randn(1, HQ, S, S, requires_grad=True)
    g = torch.Generator().manual_seed(5)
    visible = (torch.rand(B, 1, S, S, generator=g) < 0.6) | torch.eye(S, dtype=torch.bool)
    lowest, numbers = torch.finfo(torch.float32).min, torch.randn(B, 1, S, S, generator=g)
    given, added = {
        "none": (None, 0.0),
        "bounds": (some_bounds(), 0.0),
        "bool": (visible, 0.0),
        "0 and lowest": (torch.zeros(B, 1, S, S).masked_fill(~visible, lowest), 0.0),
        "keys": (torch.zeros(B, 1, 1, S).masked_fill(~visible[:, :, :1], lowest), 0.0),
        "numbers": (numbers, numbers),
    }[mask]
    shown = visible if mask in ("bool", "0 and lowest") else EVERYTHING.expand(B, 1, S, S)
    if mask == "keys":
        shown = visible[:, :, :1].expand(B, 1, S, S)
    if mask == "bounds":
        shown = ColumnMask.from_startend_row_indices(given, causal=False).dense(S, S)
    rows = shown.any(-1).transpose(1, 2)[..., None]
    out, _ = attention_forward(Layer(False), q, k, v, given, position_bias=bias)
    want = biased(q, k, v, bias + added, shown).masked_fill(~rows, 0.0)
    close(out, want)
    close(*(torch.autograd.grad((t * torch.ones_like(t).cumsum(1)).sum(), bias)[0].nan_to_num(0.0) for t in (out, want)))


def test_position_bias_of_documents_by_offsets_is_refused():
    q, k, v = (t[:1] for t in qkv())
    offsets = torch.tensor([0, 6, S], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"position_bias: Layer gives one .* column bounds as attention_mask"):
        attention_forward(Layer(), q, k, v, None, cu_seq_lens_q=offsets, position_bias=torch.zeros(1, HQ, S, S))


def test_scaling_softcap_and_sinks():
    q, k, v = qkv()
    sinks = torch.randn(HQ)
    bounds = mask_bounds(B, S, S)
    out, _ = attention_forward(Layer(), q, k, v, bounds, scaling=0.7, softcap=0.9, s_aux=sinks)
    close(out, reference(q, k, v, band(S, S, None, 0), scale=0.7, softcap=0.9, sinks=sinks))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int16])
def test_other_integers_are_refused(dtype):
    with pytest.raises(ValueError, match=r"attention_mask: got dtype.*int32 column bounds.*bool"):
        attention_forward(Layer(), *qkv(), torch.ones(B, 1, S, S, dtype=dtype))


@pytest.mark.parametrize("shape", [(B, 1, S, 3), (B, 1, S, S), (B, 1, S + 1, 4)])
def test_int32_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"attention_mask: got int32 of shape .* for 13 keys"):
        attention_forward(Layer(), *qkv(), torch.zeros(shape, dtype=torch.int32))


def test_masks_of_another_rank_are_refused():
    with pytest.raises(ValueError, match="4-D"):
        attention_forward(Layer(), *qkv(), torch.ones(B, S, dtype=torch.bool))


@pytest.mark.parametrize("name", ["cache", "sinks", "head_mask"])
def test_what_cannot_be_honoured_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name}: .*not supported"):
        attention_forward(Layer(), *qkv(), None, **{name: torch.zeros(1)})
    attention_forward(Layer(), *qkv(), None, **{name: None})


def test_a_window_that_sees_nothing_is_refused():
    with pytest.raises(ValueError, match="sliding_window: got 0"):
        attention_forward(Layer(), *qkv(), None, sliding_window=0)


def test_models_refuse_output_attentions():
    _, llama = build("llama")
    with pytest.raises(ValueError, match=r"output_attentions: .*eager"):
        llama(torch.ones(1, 3, dtype=torch.long), output_attentions=True)


@pytest.mark.parametrize("name", ["flash_warploom", "paged|warploom", "sdpa", "eager", "", None])
def test_names_that_mean_something_else_are_refused(name):
    with pytest.raises(ValueError, match="name: got"):
        register(name)


def test_register_under_another_name():
    from transformers import AttentionInterface, AttentionMaskInterface

    assert register("tapestry") == "tapestry" == register("tapestry")
    assert AttentionInterface()["tapestry"] is attention_forward
    assert AttentionMaskInterface()["tapestry"] is mask_bounds


def test_a_mask_is_made_once_a_forward_and_let_go_with_it(monkeypatch):
    made = []
    build_mask = module._build
    monkeypatch.setattr(module, "_build", lambda *a: made.append(build_mask(*a)) or made[-1])
    q, k, v = qkv()
    bounds = mask_bounds(B, S, S)
    for _ in range(3):
        attention_forward(Layer(), q, k, v, bounds)
    assert len(made) == 1
    alive = weakref.ref(made.pop())
    bounds_alive = weakref.ref(bounds)
    del bounds
    gc.collect()
    assert alive() is None and bounds_alive() is None


def test_a_mask_changed_in_place_is_read_again():
    q, k, v = qkv()
    bounds = some_bounds(1)
    first, _ = attention_forward(Layer(), q, k, v, bounds)
    bounds.copy_(some_bounds(2))
    second, _ = attention_forward(Layer(), q, k, v, bounds)
    fresh, _ = attention_forward(Layer(), q, k, v, some_bounds(2))
    assert torch.equal(second, fresh) and not torch.equal(first, second)


def test_inference_mode():
    with torch.inference_mode():
        q, k, v = qkv()
        out, _ = attention_forward(Layer(), q, k, v, mask_bounds(B, S, S))
    close(out, reference(q, k, v, band(S, S, None, 0)))


@pytest.mark.parametrize("copy", [torch.Tensor.clone, torch.Tensor.contiguous, lambda t: t[:, :, :S]])
def test_copies_and_slices_of_bounds_mean_the_same(copy):
    # generate() calls .contiguous() on 4-D masks.
    q, k, v = qkv()
    padding = torch.ones(B, S, dtype=torch.bool)
    padding[0, :4] = False
    bounds = mask_bounds(B, S, S, attention_mask=padding)
    out, _ = attention_forward(Layer(), q, k, v, bounds)
    same, _ = attention_forward(Layer(), q, k, v, copy(bounds))
    assert torch.equal(out, same)


def test_bounds_of_one_batch_row_serve_all():
    q, k, v = qkv()
    bounds = some_bounds(batch=1)
    out, _ = attention_forward(Layer(), q, k, v, bounds)
    same, _ = attention_forward(Layer(), q, k, v, bounds.expand(B, -1, -1, -1))
    close(out, same)


def test_dropout_belongs_to_training():
    q, k, v = qkv()
    layer = Layer()
    still, _ = attention_forward(layer, q, k, v, None)
    assert torch.equal(attention_forward(layer, q, k, v, None, dropout=0.5)[0], still)
    assert not torch.equal(attention_forward(layer.train(), q, k, v, None, dropout=0.5)[0], still)
    assert torch.equal(attention_forward(layer, q, k, v, None, dropout=0.0)[0], still)
