"""The bias suite: its reference notices wrong results, and its bars judge the worst case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from warploom.bench import bias_bars, encoder
from warploom.bench.bias import _check
from warploom.bench.harness import WrongResult
from warploom.bench.reference import biased_head
from warploom.bias import Relative


@pytest.mark.parametrize("causal", [False, True])
def test_reference_of_a_shared_matrix(causal: bool) -> None:
    """1030 rows: more than a chunk. The matrix's gradient is a sum over the batch."""
    q, k, v = (torch.randn(2, 1030, 1, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, 1030, 1030, requires_grad=True)
    dout = torch.randn(2, 1030, 1, 16)
    out = warploom.attention(q, k, v, bias=bias, causal=causal)
    found = (out, *torch.autograd.grad(out, (q, k, v, bias), dout))
    want = biased_head(q, k, v, dout, bias[0, -1], lambda leaf, rows: leaf[rows], causal)
    assert _check(want, found) < 1e-4
    with pytest.raises(WrongResult, match="the bias's gradient is"):
        _check(want, (*found[:4], found[4] / 2))
    with pytest.raises(WrongResult, match="dk is"):
        _check(want, (*found[:2], found[2] * 1.05, *found[3:]))


def test_reference_of_a_table() -> None:
    q, k, v, dout = (torch.randn(1, 100, 2, 16) for _ in range(4))
    table = torch.randn(2, 199, requires_grad=True)
    out = warploom.attention(q, k, v, bias=Relative(table))
    (gradient,) = torch.autograd.grad(out, table, dout)

    def matrix(row: Tensor, rows: Tensor) -> Tensor:
        return row[99 + rows[:, None] - torch.arange(100)]

    want = biased_head(q, k, v, dout, table[-1], matrix, False)
    assert torch.allclose(gradient[-1], want[-1], atol=1e-5)
    assert _check(want[:1], out) < 1e-5


def test_bars_judge_the_worst_case() -> None:
    def row(case: str, **found: Any) -> dict[str, Any]:
        return {"case": case, "contenders": {"warploom": {"ms": 1.0}, **found}}

    rows = [
        row("a matrix, a", efficient={"ms": 1.2}, FlexAttention={"ms": 2.0}),
        row("a matrix, b", efficient={"ms": 1.5}),
        row("ALiBi, a", **{bias_bars.NO_BIAS: {"ms": 0.5}}),
        row("T5, a", **{bias_bars.NO_BIAS: {"ms": 1.0, "peak_bytes": 100}, bias_bars.TABLE: {"peak_bytes": 105}}),
    ]
    found = {what.split(",")[0]: value for what, _, value in bias_bars.BARS["bias", "forward and backward"](rows)}
    assert found["torch's efficient kernel over ours"] == 1.2 and found["FlexAttention over ours"] == 2.0
    assert found["1.03 of no bias over ALiBi"] == pytest.approx(0.515)
    memory = "1.05 of no bias's peak memory over T5 buckets'"
    assert found[memory] == pytest.approx(1.0)
    rows[-1]["contenders"]["warploom"]["peak_bytes"] = 210  # of a frozen table
    assert {what.split(",")[0]: value for what, _, value in bias_bars.BARS["bias", "forward and backward"](rows)}[
        memory
    ] == pytest.approx(0.5)


@pytest.mark.parametrize("path", encoder.PATHS)
def test_encoder_is_that_of_t5(path: str) -> None:
    """Of the same weights, by each who computes its attention."""
    transformers = pytest.importorskip("transformers")
    size, device = encoder.QUICK, torch.device("cpu")
    ours = encoder.model_of(size, path, device)
    config = transformers.T5Config(
        vocab_size=size.vocabulary, d_model=size.width, d_kv=size.head_dim, d_ff=size.inner, num_layers=size.layers,
        num_heads=size.heads, dropout_rate=0.0,
    )  # fmt: skip
    theirs = transformers.T5EncoderModel._from_config(config, attn_implementation="eager")
    named = {"shared": ours.embedding, "encoder.final_layer_norm": ours.norm}
    for n, layer in enumerate(ours.layers):
        block = f"encoder.block.{n}.layer"
        named |= {f"{block}.0.SelfAttention.{name}": getattr(layer, name) for name in "qkvo"}
        named |= {f"{block}.{i}.layer_norm": layer.norms[i] for i in range(2)}
        named |= {f"{block}.1.DenseReluDense.wi": layer.wide, f"{block}.1.DenseReluDense.wo": layer.narrow}
    named["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"] = ours.table
    weights = {f"{name}.weight": module.weight.detach() for name, module in named.items()}
    weights["encoder.embed_tokens.weight"] = weights["shared.weight"]
    theirs.load_state_dict(weights)
    tokens = torch.randint(1, size.vocabulary, (size.batch, size.seqlen))
    hidden, gradient = encoder._step(ours, tokens)
    want = theirs(input_ids=tokens).last_hidden_state
    want.float().sin().sum().backward()
    torch.testing.assert_close(hidden, want, atol=2e-5, rtol=2e-5)
    table = theirs.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    torch.testing.assert_close(gradient, table.grad, atol=2e-4, rtol=2e-3)
