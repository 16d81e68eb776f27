"""Packed documents: through transformers' own detection, through offsets, and through collators' bounds."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening

from tests.integrations.tiny_models import build, close
from warploom.integrations.collators import (
    BoundsCollator,
    cu_seqlens_bounds,
    padding_bounds,
    position_ids_bounds,
)
from warploom.masks import ColumnMask, Document, Padding

LENGTHS = (5, 1, 8, 3)


def documents(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(1, 89, (n,), generator=g).tolist()} for n in LENGTHS]


def apart(model, features):
    with torch.no_grad():
        return torch.cat([first(model(torch.tensor([f["input_ids"]])))[0] for f in features])


def first(result):
    return result.logits if "logits" in result else result.last_hidden_state


def without_labels(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_an_encoder_packs_by_bounds(name):
    eager, ours = build(name)
    features = documents()
    expected = apart(eager, features)
    window = {"full_attention": None, "sliding_attention": (2, 2)} if name == "modernbert" else None
    batch = BoundsCollator(DataCollatorWithFlattening(), causal=False, window=window)(features)
    close(first(ours(**without_labels(batch)))[0], expected)


def test_bert_does_not_derive_documents_from_position_ids():
    # The reason for bounds: without them a packed encoder silently mixes its documents.
    eager, ours = build("bert")
    features = documents()
    batch = without_labels(DataCollatorWithFlattening()(features))
    assert (first(ours(**batch))[0] - apart(eager, features)).abs().max() > 0.05


def test_a_packed_row_longer_than_the_positions_needs_position_ids():
    _, ours = build("bert")
    ours.embeddings.position_embeddings.weight.data = ours.embeddings.position_embeddings.weight.data[:10]
    ours.embeddings.position_ids = ours.embeddings.position_ids[:, :10]
    features = documents()
    batch = without_labels(BoundsCollator(DataCollatorWithFlattening(), causal=False)(features))
    close(first(ours(**batch))[0], apart(ours, features))
    del batch["position_ids"]
    with pytest.raises((RuntimeError, IndexError)):
        ours(**batch)


@pytest.mark.parametrize("columns", [2, 4])
def test_an_encoder_takes_bounds_of_a_mask(columns):
    eager, ours = build("bert")
    features = documents()
    batch = without_labels(DataCollatorWithFlattening()(features))
    bounds, causal = Document(list(LENGTHS), causal=False).to_startend_row_indices(sum(LENGTHS), sum(LENGTHS))
    assert bounds.shape == (1, 1, sum(LENGTHS), 2) and not causal
    if columns == 4:
        bounds = cu_seqlens_bounds(torch.tensor([0, 5, 6, 14, 17]), 17)
    close(first(ours(**batch, attention_mask=bounds))[0], apart(eager, features))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_decoder_packs_by_bounds(name):
    # gpt_oss does not tell transformers its position_ids: without bounds or offsets its documents would mix.
    eager, ours = build(name)
    features = documents()
    window = {"full_attention": None, "sliding_attention": (4, 0)} if name == "gpt_oss" else None
    batch = BoundsCollator(DataCollatorWithFlattening(), causal=True, window=window)(features)
    close(first(ours(**without_labels(batch)))[0], apart(eager, features))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "llama4"])
def test_decoders_find_documents_by_position_ids(name):
    eager, ours = build(name)
    features = documents()
    batch = without_labels(DataCollatorWithFlattening()(features))
    close(first(ours(**batch, use_cache=False))[0], apart(eager, features))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "gpt_oss"])
def test_documents_by_offsets(name, use_cache):
    eager, ours = build(name)
    features = documents()
    batch = without_labels(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features))
    if name != "bert":
        batch["use_cache"] = use_cache
    close(first(ours(**batch))[0], apart(eager, features))


def test_documents_by_offsets_have_gradients():
    eager, ours = build("llama")
    features = documents()
    batch = without_labels(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features))
    weights = torch.randn(sum(LENGTHS), 97)
    (first(ours(**batch))[0] * weights).sum().backward()
    (torch.cat([first(eager(torch.tensor([f["input_ids"]])))[0] for f in features]) * weights).sum().backward()
    for (name, p), (_, e) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        close(p.grad, e.grad, name)


def test_offsets_of_a_batch_are_refused():
    _, ours = build("bert")
    with pytest.raises(ValueError, match="cu_seq_lens_q: packed rows have batch 1, got batch 2"):
        ours(torch.ones(2, 4, dtype=torch.long), cu_seq_lens_q=torch.tensor([0, 2, 4], dtype=torch.int32))


def dense(bounds, length):
    assert bounds.dtype == torch.int32 and bounds.shape[1:] == (1, length, 4)
    return ColumnMask.from_startend_row_indices(bounds, causal=False).dense(length, length)


@pytest.mark.parametrize("window", [None, (2, 0), (1, 3), (None, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_builders_say_what_the_masks_say(causal, window):
    from warploom.masks import Causal, SlidingWindow

    def limited(mask, length):
        visible = mask.dense(length, length)
        if causal:
            visible = visible & Causal().dense(length, length)
        return visible if window is None else visible & SlidingWindow(*window).dense(length, length)

    options = {"causal": causal, "window": window}
    real = torch.tensor([[0, 1, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    keys = real[:, None, None, :].bool().expand(3, 1, 6, 6)
    full = Document([6], causal=False)
    assert torch.equal(dense(padding_bounds(real, **options), 6), keys & limited(full, 6))

    cu = torch.tensor([0, 5, 6, 14, 17])
    assert torch.equal(dense(cu_seqlens_bounds(cu, 20, **options), 20), limited(Document(list(LENGTHS), causal=False), 20))

    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [3, 4, 0, 0, 1, 2]])
    expected = limited(Document.from_position_ids(positions, causal=False), 6)
    assert torch.equal(dense(position_ids_bounds(positions, **options), 6), expected)


def test_empty_documents_and_empty_rows():
    assert torch.equal(
        dense(cu_seqlens_bounds(torch.tensor([0, 0, 2, 2, 3, 3]), 4), 4),
        Document([2, 1], causal=False).dense(4, 4),
    )
    assert cu_seqlens_bounds(torch.tensor([0]), 0).shape == (1, 1, 0, 4)


def test_a_padded_batch_through_the_collator():
    eager, ours = build("llama")
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ids = torch.randint(1, 89, (2, 5)) * real
    batch = BoundsCollator(lambda _: {"input_ids": ids, "attention_mask": real}, causal=True)(None)
    expected = first(eager(input_ids=ids, attention_mask=real))
    close(first(ours(**batch))[real.bool()], expected[real.bool()])


def test_documents_and_padding_together():
    real = torch.tensor([[1, 1, 1, 1, 0, 0]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    batch = BoundsCollator(lambda _: {"input_ids": real, "attention_mask": real, "position_ids": positions}, causal=False)(None)
    keys = Padding(real.bool()).dense(6, 6)
    assert torch.equal(dense(batch["attention_mask"], 6), Document([2, 4], causal=False).dense(6, 6) & keys)


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match="position_ids: got list"):
        position_ids_bounds([[0, 1]])
    with pytest.raises(ValueError, match=r"cu_seqlens: got a torch.float32 tensor of shape \(2,\)"):
        cu_seqlens_bounds(torch.tensor([0.0, 1.0]), 1)
    with pytest.raises(ValueError, match=r"attention_mask: got .* of shape \(1, 1, 2, 2\)"):
        padding_bounds(torch.ones(1, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="says nothing about documents or padding"):
        BoundsCollator(lambda _: {"input_ids": torch.ones(1, 2)}, causal=True)(None)
