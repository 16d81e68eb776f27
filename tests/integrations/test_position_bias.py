"""Models that add a learned bias to their scores: equal to eager, gradients of the bias's table included."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.tiny_models import close, close_gradients
from warploom.integrations.collators import cu_seqlens_bounds
from warploom.integrations.transformers import register

T5 = dict(
    vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4, decoder_start_token_id=0,
    relative_attention_num_buckets=8, relative_attention_max_distance=10, dropout_rate=0.0,
)  # fmt: skip


def models(name: str):
    """(eager, warploom) of one seed's weights, in evaluation mode."""
    import transformers as t

    cls, config = {
        "t5": lambda: (t.T5ForConditionalGeneration, t.T5Config(**T5)),
        "mt5": lambda: (t.MT5ForConditionalGeneration, t.MT5Config(**T5)),
        "longt5, local": lambda: (t.LongT5ForConditionalGeneration, t.LongT5Config(**T5, local_radius=3)),
        "longt5, global": lambda: (
            t.LongT5ForConditionalGeneration,
            t.LongT5Config(**T5, local_radius=3, global_block_size=4, encoder_attention_type="transient-global"),
        ),
        "umt5": lambda: (t.UMT5ForConditionalGeneration, t.UMT5Config(**T5)),
        "switch": lambda: (t.SwitchTransformersForConditionalGeneration, t.SwitchTransformersConfig(**T5, num_experts=2)),
        "t5 encoder": lambda: (t.T5EncoderModel, t.T5Config(**T5)),
        "swin": lambda: (
            t.SwinModel,
            t.SwinConfig(image_size=16, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4),
        ),
    }[name]()
    register()
    found = []
    for implementation in ("eager", "warploom"):
        torch.manual_seed(1)
        model = cls._from_config(config, attn_implementation=implementation)
        with torch.no_grad():
            for n, parameter in model.named_parameters():
                if "relative" in n:
                    parameter.normal_()
        found.append(model.eval())
    return found


def batch():
    torch.manual_seed(0)
    ids, seen = torch.randint(1, 50, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    answers, said = torch.randint(1, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    seen[1, 7:], said[1, 6:] = 0, 0
    return {"input_ids": ids, "attention_mask": seen, "decoder_input_ids": answers, "decoder_attention_mask": said}


def compared(pair, inputs, real=None) -> list[str]:
    """Outputs and gradients of both models are equal; returns the names of the tables."""
    results = []
    for model in pair:
        out = model(**inputs)[0]
        out = out if real is None else out[real]
        (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
        results.append((out.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (want, want_grads), (got, got_grads) = results
    close(got, want, "output")
    close_gradients(got_grads, want_grads)
    return [n for n, gradient in got_grads.items() if "relative" in n and gradient is not None and bool(gradient.any())]


@pytest.mark.parametrize("name", ["t5", "mt5", "umt5", "switch", "longt5, local", "longt5, global"])
def test_encoders_and_decoders(name):
    pair, inputs = models(name), batch()
    tables = compared(pair, {**inputs, "use_cache": False}, inputs["decoder_attention_mask"].bool())
    assert len(tables) == {"umt5": 4, "longt5, global": 3}.get(name, 2)
    asked = {n: inputs[n] for n in ("input_ids", "attention_mask")}
    tokens = [model.generate(**asked, max_new_tokens=6, do_sample=False) for model in pair]
    assert torch.equal(*tokens)


def test_swin():
    assert compared(models("swin"), {"pixel_values": torch.randn(2, 3, 16, 16)})


def test_packed_documents_by_column_bounds():
    eager, ours = models("t5 encoder")
    ids = batch()["input_ids"]
    want = torch.cat([eager(input_ids=ids[:1, :7]).last_hidden_state, eager(input_ids=ids[1:]).last_hidden_state], 1)
    bounds = cu_seqlens_bounds(torch.tensor([0, 7, 19], dtype=torch.int32), 19)
    packed = torch.cat([ids[:1, :7], ids[1:]], 1)
    close(ours(input_ids=packed, attention_mask=bounds).last_hidden_state, want)


def test_kernels_read_contiguous_rows(monkeypatch):
    """T5's heads lie next to each other: one head's rows would be read out of all heads'."""
    import transformers as t

    import warploom

    register()
    strides, attention = [], warploom.attention

    def spy(*args, **options):
        strides.append(options["bias"].stride(-1))
        return attention(*args, **options)

    monkeypatch.setattr(warploom, "attention", spy)
    model = t.T5EncoderModel._from_config(t.T5Config(**T5), attn_implementation="warploom")
    model(input_ids=torch.randint(1, 50, (1, 12)))
    assert strides == [1, 1]
