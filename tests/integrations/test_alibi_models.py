"""Bloom and MPT, whose layers compute scores of their own: equal to eager under our name, gradients included."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.integrations.tiny_models import close, close_gradients, pair
from warploom.bias import ALiBi
from warploom.integrations.collators import cu_seqlens_bounds
from warploom.integrations.transformers import alibi, models, register

HEADS = 6  # no power of two: the slopes of the last two heads lie between the others'


def built(name: str, **changes):
    """(eager, warploom) of one seed's weights, in evaluation mode."""
    import transformers as t

    sizes = {"vocab_size": 60, "n_layers" if name == "mpt" else "n_layer": 2}
    if name == "mpt":
        attention = t.models.mpt.configuration_mpt.MptAttentionConfig(clip_qkv=2.0)
        config, cls = t.MptConfig(**sizes, d_model=48, n_heads=HEADS, max_seq_len=64, attn_config=attention), t.MptForCausalLM
    else:
        config, cls = t.BloomConfig(**sizes, hidden_size=48, n_head=HEADS), t.BloomForCausalLM
    config.update({"pad_token_id": 0, "eos_token_id": 59, "bos_token_id": 58, **changes})
    register()
    return pair(cls, config, 1)


PADDING = {
    "none": None,
    "left": [[0] * 5 + [1] * 8, [1] * 13],
    "right": [[1] * 8 + [0] * 5, [1] * 13],
    "in the middle": [[1] * 4 + [0] * 4 + [1] * 5, [1] * 13],
}


def batch(padding: str):
    torch.manual_seed(0)
    given = {"input_ids": torch.randint(1, 50, (2, 13))}
    if PADDING[padding] is not None:
        given["attention_mask"] = torch.tensor(PADDING[padding])
    return given


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_equal_to_eager_with_gradients(name, padding):
    pair, given = built(name), batch(padding)
    real = given.get("attention_mask", torch.ones(2, 13)).bool()
    results = []
    for model in pair:
        out = model(**given, use_cache=False).logits[real]
        (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
        results.append((out.detach(), {n: p.grad for n, p in model.named_parameters()}))
    close(results[1][0], results[0][0])
    close_gradients(results[1][1], results[0][1])


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_no_scores_of_their_own(name, monkeypatch):
    """The second way is taken, and by a model with our name alone."""
    eager, ours = built(name)
    calls = []
    import transformers

    kept = transformers.AttentionInterface._global_mapping["warploom"]
    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping, "warploom", lambda *a, **k: (calls.append(1), kept(*a, **k))[1]
    )
    ours(**batch("left"))
    assert len(calls) == 2
    eager(**batch("left"))
    assert len(calls) == 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_generate(name, cache):
    given = batch("left")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    made = [model.generate(**given, **options) for model in built(name)]
    assert made[0].shape[1] > 13 and torch.equal(*made)
    made = [model.generate(**given, max_new_tokens=5, num_beams=3, do_sample=False) for model in built(name)]
    assert torch.equal(*made)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_packed_documents_by_column_bounds(name):
    eager, ours = built(name)
    ids = batch("none")["input_ids"]
    want = torch.cat([eager(ids[:1, :7]).logits, eager(ids[1:]).logits], 1)
    bounds = cu_seqlens_bounds(torch.tensor([0, 7, 20], dtype=torch.int32), 20, causal=True)
    packed = torch.cat([ids[:1, :7], ids[1:]], 1)
    close(ours(packed, attention_mask=bounds, use_cache=False).logits, want)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_compiled_in_one_graph(name):
    eager, ours = built(name)
    given = batch("left")
    torch.compiler.reset()
    found = torch.compile(ours, fullgraph=True, backend="aot_eager")(**given, use_cache=False).logits
    real = given["attention_mask"].bool()
    close(found[real], eager(**given, use_cache=False).logits[real])


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_checkpointed_layers_drop_the_same_again(name):
    changes = {"attention_dropout": 0.5} if name == "bloom" else {}
    _, ours = built(name, **changes)
    if name == "mpt":
        for block in ours.transformer.blocks:
            block.attn.attn_dropout_p = 0.5
    given, found = batch("left"), []
    for checkpointed in (False, True):
        ours.train()
        if checkpointed:
            ours.gradient_checkpointing_enable({"use_reentrant": False})
        ours.zero_grad()
        torch.manual_seed(3)
        ours(**given, use_cache=False).logits.square().sum().backward()
        found.append({n: p.grad.clone() for n, p in ours.named_parameters()})
    ours.zero_grad()
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    torch.manual_seed(4)
    ours(**given, use_cache=False).logits.square().sum().backward()
    assert not all(torch.equal(found[0][n], p.grad) for n, p in ours.named_parameters())


def test_exact_slices_of_bloom_leave_the_bias_out():
    eager, ours = built("bloom", pretraining_tp=2, slow_but_exact=True)
    close(ours(**batch("none")).logits, eager(**batch("none")).logits)


def test_bias_of_mpt_is_alibi_and_of_any_length():
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    for keys in (2, 9):
        found = alibi._slopes(build_mpt_alibi_tensor(HEADS, keys)).slopes
        assert torch.equal(found, ALiBi.standard(HEADS).slopes)
    assert not alibi._slopes(build_mpt_alibi_tensor(HEADS, 1)).slopes.any()


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_what_is_refused(name):
    _, ours = built(name)
    with pytest.raises(ValueError, match=r"output_attentions: .*use attn_implementation='eager'"):
        ours(**batch("none"), output_attentions=True)
    with pytest.raises(ValueError, match=rf"continuous batching of {name}.*a bias of the whole row.*use generate"):
        ours.generate_batch([[5, 6, 7]])


def test_layers_of_another_release_are_left_alone(monkeypatch):
    import transformers

    module = sys.modules[transformers.MptForCausalLM.__module__]
    layer = type("MptAttention", (), {"forward": lambda self, hidden_states, cache_position=None: None})
    monkeypatch.setattr(module, "MptAttention", layer)
    monkeypatch.setattr(alibi, "_adapted", set())
    before = layer.forward, module.create_causal_mask
    alibi.adapt(module, transformers.MptConfig, "warploom")
    assert (layer.forward, module.create_causal_mask) == before and not alibi.is_adapted(transformers.MptConfig)
    monkeypatch.setattr(models, "_own_scores", {})
    assert models.computes_own_scores(transformers.MptConfig)
