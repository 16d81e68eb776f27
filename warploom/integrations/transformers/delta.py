"""The gated delta rule of transformers' own layers, through Warploom."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import warploom
from warploom.delta.convolution import convolve
from warploom.runtime import arguments

_CHUNK, _STEP = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
# Older releases keep the functions in attributes of each layer instead of its module's globals.
_ATTRIBUTES = {"chunk_gated_delta_rule": _CHUNK, "recurrent_gated_delta_rule": _STEP}
# Before the rule; the torch function that transformers falls back to convolves over the bounds of packed sequences.
_CONVOLUTION = "causal_conv1d_fn"
_KEPT = "_warploom_kept"  # where a module or a layer keeps what it had


def use_gated_delta_rule(model: nn.Module, enabled: bool = True) -> int:
    """Let a model's Gated DeltaNet layers compute by `warploom.gated_delta_rule`, or by what they had.

    For every model of transformers that is built on Qwen3-Next's layer (Qwen3-Next, Qwen3.5 and its MoE, Olmo Hybrid, and
    others), before or after it is trained, moved or compiled. Where the installed release looks the function up in the model's
    module, which newer ones do, the switch is that of all models of the architecture in this process. There packed sequences,
    whose starts come as ``cu_seq_lens_q``, are kept apart by the rule and by the convolution before it.

    Args:
        model: what `from_pretrained` returned, or any module that holds such layers.
        enabled: False gives the layers back what they had.

    Returns:
        How many layers of the model compute by it, or did.

    Raises:
        TypeError: `model` is no module, `enabled` no flag.
        ValueError: the model has no such layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    enabled = arguments.flag("enabled", enabled)
    found = list(_layers(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer that computes the gated delta rule by transformers' functions "
            f"{_CHUNK} and {_STEP}"
        )
    for owner, names in {id(owner): (owner, names) for _, owner, names in found}.values():
        kept = vars(owner).setdefault(_KEPT, {})
        for name, function in names.items():
            if enabled:
                own = kept.setdefault(name, getattr(owner, name))
                setattr(owner, name, _convolution(own) if function == _CONVOLUTION else _OURS[function])
            elif name in kept:
                setattr(owner, name, kept.pop(name))
    return len({id(layer) for layer, _, _ in found})


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, ModuleType | nn.Module, dict[str, str]]]:
    """Layers that compute the rule, who holds the functions that they call, and these functions' names there."""
    for layer in model.modules():
        attributes = {name: function for name, function in _ATTRIBUTES.items() if callable(getattr(layer, name, None))}
        if attributes:
            yield layer, layer, attributes
            continue
        home = sys.modules.get(type(layer).__module__)
        called = _called(type(layer).forward)
        names = {name: name for name in (_CHUNK, _STEP) if name in called and hasattr(home, name)}
        if home is not None and names:
            if _CONVOLUTION in called and hasattr(home, _CONVOLUTION):
                names[_CONVOLUTION] = _CONVOLUTION
            yield layer, home, names


def _called(function: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers' function of that name returns; chunks have the size that the implementation likes."""
    return _rule(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers' function of that name returns."""
    if query.shape[1] != 1 or initial_state is None or cu_seqlens is not None:
        return _rule(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    out, state = warploom.gated_delta_step(
        query, key, value, beta, _wide(initial_state, query), g, normalize_qk=use_qk_l2norm_in_kernel
    )
    return out, state if output_final_state else None


_OURS = {_CHUNK: chunk_gated_delta_rule, _STEP: recurrent_gated_delta_rule}


def _convolution(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What transformers' causal_conv1d_fn returns, which ``own`` is; packed sequences are kept apart."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if cu_seq_lens_q is None or (seq_idx is not None and find_spec("causal_conv1d") is not None):
            return own(hidden_states, weight, bias, activation=activation, seq_idx=seq_idx, **kwargs)
        tokens, taps = hidden_states.shape[-1], weight.shape[-1]
        # A cache puts the inputs before the first token, or zeros, in front: those are the first sequence's.
        before = tokens - cu_seq_lens_q[-1:]
        starts = cu_seq_lens_q + torch.where(before <= taps, before, 0)
        starts = torch.cat([torch.zeros_like(starts[:1]), starts[1:]])
        out, _ = convolve(hidden_states.mT.to(weight.dtype), weight, None, None, starts)
        out = out if bias is None else out + bias
        if activation is not None:
            from transformers.activations import ACT2FN

            out = ACT2FN[activation](out)
        return out.mT.to(hidden_states.dtype)

    return causal_conv1d_fn


def _rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    return_state: bool,
    normalize_qk: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    out, last = warploom.gated_delta_rule(
        query,
        key,
        value,
        beta,
        g,
        normalize_qk=normalize_qk,
        state=None if state is None else _wide(state, query),
        return_state=True,
        cu_seqlens=cu_seqlens,
    )
    return out, last if return_state else None


def _wide(state: Tensor, query: Tensor) -> Tensor:
    """A cached state in the dtype that it is summed in."""
    return state.to(torch.promote_types(query.dtype, torch.float32))
