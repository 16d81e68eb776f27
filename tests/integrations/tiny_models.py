"""Tiny randomly initialised models of every kind the integration must run, built alike for eager and warploom."""

from __future__ import annotations

from typing import Any

import torch

SMALL: dict[str, Any] = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_attention_heads=4)
DECODER: dict[str, Any] = dict(**SMALL, num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=96, bos_token_id=95)


def _gemma3_image():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = dict(DECODER, num_hidden_layers=2, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90)
    return Gemma3ForConditionalGeneration, config


def recipe(name: str):
    """Class and configuration of a model."""
    import transformers as t

    two = dict(num_hidden_layers=2)
    if name == "bert":
        return t.BertModel, t.BertConfig(**SMALL, **two)
    if name == "modernbert":
        return t.ModernBertModel, t.ModernBertConfig(
            **SMALL,
            **two,
            local_attention=4,
            layer_types=["sliding_attention", "full_attention"],
            pad_token_id=0,
        )
    if name == "llama":
        return t.LlamaForCausalLM, t.LlamaConfig(**DECODER, **two)
    if name == "gemma2":
        return t.Gemma2ForCausalLM, t.Gemma2Config(
            **DECODER,
            **two,
            sliding_window=5,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=2,
            layer_types=["sliding_attention", "full_attention"],
        )
    if name == "gemma3":
        return t.Gemma3ForCausalLM, t.Gemma3TextConfig(
            **DECODER, **two, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
        )
    if name == "gemma3_image":
        return _gemma3_image()
    if name == "gpt_oss":
        return t.GptOssForCausalLM, t.GptOssConfig(
            **DECODER,
            **two,
            sliding_window=5,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["sliding_attention", "full_attention"],
        )
    if name == "llama4":
        return t.Llama4ForCausalLM, t.Llama4TextConfig(
            **DECODER,
            num_hidden_layers=4,
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=5,
            use_qk_norm=True,
        )
    raise KeyError(name)


ENCODERS = ("bert", "modernbert")
DECODERS = ("llama", "gemma2", "gemma3", "gpt_oss", "llama4")


def build(name: str, seed: int = 0):
    """`pair` of a family's tiny model."""
    return pair(*recipe(name), seed)


def pair(cls, config, seed: int):
    """(eager, warploom): two models of the same weights in evaluation mode, initialised wide enough to matter."""
    import copy

    models = []
    for implementation in ("eager", "warploom"):
        torch.manual_seed(seed)
        model = cls._from_config(copy.deepcopy(config), attn_implementation=implementation)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3 if parameter.dim() > 1 else 0.5)
        models.append(model.eval())
    return models


def close(result: torch.Tensor, expected: torch.Tensor, what: str = "result", floor: float = 1e-3) -> None:
    """Equal to fp32 rounding of values as large as the largest, or `floor`; a wrong mask is off by a tenth and more."""
    assert result.shape == expected.shape and torch.isfinite(expected).all(), what
    delta, size = (result - expected).abs().max().item(), expected.abs().max().item()
    assert delta <= 3e-5 * max(size, floor), f"{what}: max |delta| {delta:.2e} at size {size:.2e}"


def close_gradients(result: dict, expected: dict) -> None:
    """Every parameter's gradient; one that is zero but for rounding is measured by the model's largest."""
    assert result.keys() == expected.keys()
    largest = max(g.abs().max().item() for g in expected.values() if g is not None)
    for name, gradient in expected.items():
        if gradient is None:
            assert result[name] is None, name
        else:
            close(result[name], gradient, name, floor=0.01 * largest)
