"""Whole models against attn_implementation="eager": forward, gradients, generate."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.tiny_models import DECODERS, ENCODERS, build, close, close_gradients

BATCH, LENGTH = 3, 14
EVERY = (*ENCODERS, *DECODERS, "gemma3_image")


def inputs(name: str, padding: str, seed: int):
    """A batch, and which of its rows and tokens are real."""
    torch.manual_seed(seed)
    batch = {"input_ids": torch.randint(1, 89, (BATCH, LENGTH))}
    real = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for row, count in enumerate((4, 0, 7)):
        if padding == "left":
            real[row, :count] = 0
        elif padding == "right":
            real[row, LENGTH - count :] = 0
    if padding != "none":
        batch["attention_mask"] = real
        batch["input_ids"] = batch["input_ids"] * real
    if name == "gemma3_image":
        kinds = torch.zeros_like(real)
        kinds[:, 2:5] = 1
        kinds[:, 7:13] = 1
        batch["token_type_ids"] = kinds * real
    return batch, real.bool()


def output(model, batch):
    result = model(**batch)
    return result.logits if "logits" in result else result.last_hidden_state


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", EVERY)
def test_forward_and_parameter_gradients(name, padding):
    batch, real = inputs(name, padding, seed=1)
    eager, ours = build(name)
    weights = None
    gradients = []
    for model in (eager, ours):
        out = output(model, batch)[real]
        if weights is None:
            weights = torch.randn_like(out)
        (out * weights).sum().backward()
        gradients.append((out.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (expected, expected_grads), (result, result_grads) = gradients
    close(result, expected, "output")
    assert any("sinks" in n for n in expected_grads) == (name == "gpt_oss")
    close_gradients(result_grads, expected_grads)


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "gemma2", "gpt_oss"])
def test_gradient_checkpointing(name):
    batch, real = inputs(name, "left", seed=2)
    eager, ours = build(name)
    ours.gradient_checkpointing_enable()
    gradients = []
    for model in (eager, ours.train()):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if hasattr(model.config, "use_cache"):
            batch["use_cache"] = False
        output(model, batch)[real].square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    close_gradients(gradients[1], gradients[0])


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", (*DECODERS, "gemma3_image"))
def test_generate(name, cache, padding):
    batch, _ = inputs(name, padding, seed=3)
    options = dict(
        max_new_tokens=9,  # past every sliding window and chunk of 5
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
    )
    if cache == "static":
        options["cache_implementation"] = "static"
    expected, result = (model.generate(**batch, **options) for model in build(name))
    assert torch.equal(result.sequences, expected.sequences)
    for step, (a, b) in enumerate(zip(result.logits, expected.logits, strict=True)):
        close(a, b, f"logits of step {step}")


def test_generate_with_beams():
    batch, _ = inputs("llama", "left", seed=4)
    expected, result = (
        model.generate(**batch, max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None) for model in build("llama")
    )
    assert torch.equal(result, expected)


def test_generate_in_chunks_of_the_prompt():
    batch, _ = inputs("gemma2", "none", seed=5)
    batch["input_ids"] = batch["input_ids"][:1]
    options = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, prefill_chunk_size=4)
    expected, result = (model.generate(**batch, **options) for model in build("gemma2"))
    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_decoder_run_bidirectionally(name):
    # config.is_causal=False makes transformers ask for a bidirectional mask while the modules still say
    # causal.
    batch, real = inputs(name, "none", seed=6)
    eager, ours = build(name)
    for model in (eager, ours):
        model.config.is_causal = False
    causal, _ = build(name)
    expected = output(eager, batch)
    assert (expected - output(causal, batch)).abs().max() > 0.1
    close(output(ours, batch)[real], expected[real])


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "gpt_oss"])
def test_bf16_under_autocast(name):
    batch, real = inputs(name, "left", seed=7)
    eager, ours = build(name)
    exact = output(eager, batch)[real]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, result = (output(model, batch)[real].float() for model in (eager, ours))
    rounding = (expected - exact).norm() / exact.norm()
    assert (result - exact).norm() / exact.norm() <= 1.5 * rounding


def test_dropout_only_in_training():
    batch, real = inputs("bert", "right", seed=8)
    _, ours = build("bert")
    for layer in ours.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    still = output(ours, batch)
    assert torch.equal(output(ours, batch), still)
    for module in ours.train().modules():
        if isinstance(module, torch.nn.Dropout) and module.p != 0.5:
            module.p = 0.0
    torch.manual_seed(9)
    first = output(ours, batch)
    second = output(ours, batch)
    torch.manual_seed(9)
    assert torch.equal(output(ours, batch), first)
    assert (first - second)[real].abs().max() > 1e-3
    many = torch.stack([output(ours, batch)[real] for _ in range(60)]).mean(0)
    assert (many - still[real]).norm() < 0.5 * (first - still)[real].norm()


def test_functional_gradient_of_a_model():
    batch, real = inputs("llama", "right", seed=10)
    gradients = []
    for model in build("llama"):
        parameters = {n: p.detach() for n, p in model.named_parameters()}

        def loss(values, model=model):
            result = torch.func.functional_call(model, values, (), {**batch, "use_cache": False})
            return result.logits[real].square().mean()

        gradients.append(torch.func.grad(loss)(parameters))
    close_gradients(gradients[1], gradients[0])


def test_compiled_in_one_graph():
    batch, real = inputs("gemma2", "left", seed=11)
    eager, ours = build("gemma2")
    batch["use_cache"] = False
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    close(output(compiled, batch)[real], output(eager, batch)[real])
