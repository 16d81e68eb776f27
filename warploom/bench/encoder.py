"""A step of a T5 encoder of transformers: forward and backward, by who computes the attention of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from warploom.bench.harness import Call, Case, Comparison, first_line
from warploom.bench.reference import distance

# Distances from the same model in fp32, over the norm, from which what leaves it, and its table's gradient, are wrong: about
# three times what bf16 shows in all twelve layers, 0.009 and 0.05.
FURTHEST, FURTHEST_TABLE = 3e-2, 0.15
SEED = 7


@dataclass(frozen=True)
class Size:
    """Of T5 base."""

    batch: int = 32
    seqlen: int = 512
    layers: int = 12
    heads: int = 12
    head_dim: int = 64
    width: int = 768
    inner: int = 3072
    vocabulary: int = 32128


QUICK = Size(2, 64, 2, 2, 16, 32, 64, 100)


def encoder_cases(quick: bool) -> list[Case]:
    size = QUICK if quick else Size()
    name = f"T5 encoder, {size.layers} layers of {size.heads} heads of {size.head_dim}, {size.batch} × {size.seqlen}"
    return [Case("bias", name, asdict(size), partial(_build, size))]


def _build(size: Size, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    tokens = torch.randint(1, size.vocabulary, (size.batch, size.seqlen), device=device)
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for name, implementation in (("warploom", "warploom"), ("eager", "eager"), ("sdpa", "sdpa")):
        try:
            calls[name] = partial(_step, _model(size, implementation, device, torch.bfloat16), tokens)
        except Exception as error:  # transformers may be absent, or have another T5
            refused[name] = first_line(error)
    if not calls:
        yield "encoder step", Comparison({}, lambda _: 0.0, refused=refused)
        return
    part = slice(0, min(size.batch, 4))
    model = _model(size, "eager", device, torch.float32)
    want = _step(model, tokens)[0][part].clone()
    table = _table(model).grad.float()
    del model
    yield "encoder step", Comparison(calls, partial(_check, want, table, part), refused=refused)


def _model(size: Size, implementation: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The same weights under every name."""
    from transformers import T5Config, T5EncoderModel

    from warploom.integrations.transformers import register

    register()
    torch.manual_seed(SEED)
    config = T5Config(
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_kv=size.head_dim,
        d_ff=size.inner,
        num_layers=size.layers,
        num_heads=size.heads,
        dropout_rate=0.0,
    )
    with device:
        model = T5EncoderModel._from_config(config, attn_implementation=implementation)
    return model.to(dtype).train()


def _table(model: Any) -> Any:
    return model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight


def _step(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What leaves the encoder, and the gradient of its table; gradients of all parameters are computed."""
    model.zero_grad(set_to_none=True)
    hidden = model(input_ids=tokens).last_hidden_state
    hidden.float().sin().sum().backward()
    return hidden.detach(), _table(model).grad


def _check(want: Tensor, table: Tensor, part: slice, found: tuple[Tensor, Tensor]) -> float:
    error = distance("what leaves the encoder", found[0][part], want, FURTHEST)
    return max(error, distance("the table's gradient", found[1], table, FURTHEST_TABLE))
