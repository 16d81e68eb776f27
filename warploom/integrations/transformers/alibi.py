"""Bloom and MPT: layers that add ALiBi to scores of their own, through Warploom.

Transformers has no attention function for these layers, so their ``forward`` gets a second way, which int32 column bounds
choose: the mask that only a model with our name is handed. With any other mask a layer runs as it was written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warploom.bias import ALiBi

Forward = Callable[..., tuple[Tensor, Any]]
_adapted: set[type] = set()  # configurations of models whose layers have it


def adapt(module: ModuleType, config_class: type, name: str) -> None:
    """Give the layers of a modeling file the second way, by the attention function called ``name``, if they are known here.

    A release whose layers take other arguments than these is left alone, and its models are refused as before.
    """
    known = _LAYERS.get(module.__name__)
    if known is None or config_class in _adapted:
        return
    layer, make, function, wrap = known
    kind = getattr(module, layer, None)
    if kind is None or not callable(getattr(module, function, None)):
        return
    ours = make(kind.forward, name)
    if _arguments(ours) != _arguments(kind.forward):
        return
    kind.forward = functools.wraps(kind.forward)(ours)
    setattr(module, function, wrap(getattr(module, function)))
    _adapted.add(config_class)


def _arguments(forward: Forward) -> list[str]:
    """Their names; up to transformers 5.23 `cache` was `past_key_values`."""
    return ["cache" if name == "past_key_values" else name for name in inspect.signature(forward).parameters]


def is_adapted(config_class: type) -> bool:
    """Whether models of this configuration run by an attention function."""
    return config_class in _adapted


def _bloom(original: Forward, name: str) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        if not _are_bounds(attention_mask):
            return original(
                self, hidden_states, residual, alibi, attention_mask, layer_past, use_cache, output_attentions, **kwargs
            )
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        # Positions count real tokens only, wherever padding is: no function of the distance.
        bias = alibi.unflatten(0, (-1, self.num_heads))
        out = _attend(
            self, name, query, key, value, attention_mask, bias, self.inv_norm_factor, self.attention_dropout.p
        )
        # Eager takes slices of the weight then, and no bias.
        sliced = self.pretraining_tp > 1 and self.slow_but_exact
        out = F.linear(out, self.dense.weight) if sliced else self.dense(out)
        return residual + F.dropout(out, self.hidden_dropout, self.training), None

    return forward


def _mpt(original: Forward, name: str) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_bias: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        cache = kwargs.pop("past_key_values", cache)
        if attention_mask is None or not _are_bounds(attention_mask):
            return original(self, hidden_states, position_bias, cache, attention_mask, **kwargs)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in mixed.chunk(3, dim=2))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        bias = None if position_bias is None else _slopes(position_bias)
        out = _attend(self, name, query, key, value, attention_mask, bias, self.softmax_scale, self.attn_dropout_p)
        return self.out_proj(out), None

    return forward


def _slopes(position_bias: Tensor) -> ALiBi:
    """Of slope · (key - last key), (heads, 1, keys), which is ALiBi but for a number that a row's keys share."""
    if position_bias.shape[-1] < 2:
        return ALiBi(torch.zeros_like(position_bias[:, 0, -1]))
    return ALiBi(position_bias[:, 0, -1] - position_bias[:, 0, -2])


def _attend(
    layer: nn.Module,
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    bias: Tensor | ALiBi | None,
    scaling: float,
    dropout: float,
) -> Tensor:
    """(batch, seqlen, heads · head_dim)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS[name]
    out, _ = attention(layer, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=True, position_bias=bias)
    found: Tensor = out.flatten(2)
    return found


def _are_bounds(mask: Tensor) -> bool:
    return mask.dtype == torch.int32


class _Whole:
    """Bounds on their way from ``create_causal_mask`` to MPT's layers: the model asks for booleans meanwhile."""

    def __init__(self, bounds: Tensor) -> None:
        self.bounds = bounds

    def to(self, dtype: torch.dtype) -> Tensor:
        return self.bounds


def _kept_whole(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_causal_mask(*args: Any, **kwargs: Any) -> Any:
        mask = create(*args, **kwargs)
        return _Whole(mask) if isinstance(mask, Tensor) and _are_bounds(mask) else mask

    return create_causal_mask


def _of_bounds(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Bloom's positions where a caller gives column bounds as the mask: of every key, whatever hides it."""

    @functools.wraps(build)
    def build_alibi_tensor(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        if attention_mask.dim() == 4 and _are_bounds(attention_mask):
            batch, _, keys, _ = attention_mask.shape
            attention_mask = torch.ones((batch, keys), dtype=torch.int64, device=attention_mask.device)
        return build(attention_mask, num_heads, dtype)

    return build_alibi_tensor


# Of each modeling file the layer, its second way, and a function of the file that has to let bounds through.
_LAYERS = {
    "transformers.models.bloom.modeling_bloom": ("BloomAttention", _bloom, "build_alibi_tensor", _of_bounds),
    "transformers.models.mpt.modeling_mpt": ("MptAttention", _mpt, "create_causal_mask", _kept_whole),
}
