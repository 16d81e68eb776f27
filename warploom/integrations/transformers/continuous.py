"""transformers' continuous batching: packed queries over the keys that its paged cache holds of each request."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

import warploom

from . import alibi
from .models import NAMES, name_of

# What `PagedAttentionCache.update` takes in the releases whose cache is understood here, 5.23 the first of them. Since 5.24 a
# layer calls it, and not the attention function.
_UPDATE = ("self", "key_states", "value_states", "layer_idx", "kwargs")


def watch() -> None:
    """Let `generate_batch` and its managers take models that run under our name.

    Transformers checks the name against a list of its own when a manager is made. There it learns ours; models that cannot be
    served are refused in the same place, before any request.
    """
    manager = _manager()
    original = getattr(manager, "switch_to_cb_friendly_attn", None)
    if original is None or getattr(original, "_warploom_watches", False):
        return

    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.config._attn_implementation not in NAMES:
            return original(self, model, *args, **kwargs)
        refuse(model)
        return None

    switch_to_cb_friendly_attn._warploom_watches = True  # type: ignore[attr-defined]
    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn


def refuse(model: Any) -> None:
    """Refuse a model whose attention is not that of a decoder, with layers of full or of sliding windows.

    Raises:
        ValueError: naming the model and what to use instead.
    """
    config = model.config.get_text_config()
    reason = None
    if not understood():
        reason = f"transformers {_version()} hands over its paged cache in a way not known here; 5.23's and 5.24's are"
    elif getattr(model.config, "is_encoder_decoder", False):
        reason = "it has an encoder, and a paged cache holds no keys of one"
    elif getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        reason = "it is not causal"
    elif alibi.is_adapted(type(config)):
        reason = "it makes a bias of the whole row, and a paged cache holds many requests in one"
    else:
        others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if others:
            reason = f"it has layers of {', '.join(sorted(others))}, and a paged cache holds full and sliding attention"
    if reason is not None:
        raise ValueError(
            f"attn_implementation='warploom': continuous batching of {name_of(config)} is not supported: {reason}; "
            "use generate()"
        )


def understood() -> bool:
    """Whether the installed transformers hands over its paged cache in the way known here."""
    try:
        from transformers.generation.continuous_batching import PagedAttentionCache
    except ImportError:
        return False
    return tuple(inspect.signature(PagedAttentionCache.update).parameters) == _UPDATE


def is_paged(kwargs: dict[str, Any]) -> bool:
    """Whether an attention function is called for continuous batching, by what transformers passes beside."""
    return kwargs.get("cache") is not None or kwargs.get("read_index") is not None or kwargs.get("block_table") is not None


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention of one layer over what a paged cache holds of the requests.

    Where the cache is among ``kwargs`` it takes the new keys here and gives those that the requests read; else the layer has
    done so, and key and value are those.

    The mask a model makes of the new tokens alone is not read: requests end where `cu_seq_lens_q` and `cu_seq_lens_k` say, and
    are causal within.

    Args:
        query, key, value: `(1, heads, tokens, head_dim)`, the tokens of all requests side by side.
        window: of the layer, as `attention()` takes it.
        options: further keywords of `attention_varlen()`.
        kwargs: what transformers passes beside: the offsets of requests, the cache's indices, perhaps the cache.

    Returns:
        `(1, tokens, heads, head_dim)`.

    Raises:
        ValueError: a cache that is not understood, or a layer that is not causal.
    """
    cache = kwargs.get("cache")
    missing = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index") if kwargs.get(name) is None]
    if cache is None and not isinstance(kwargs.get("cu_seq_lens_k"), Tensor):
        missing.append("cu_seq_lens_k of this layer")
    if not understood() or not causal or missing or kwargs.get("block_table") is not None:
        config = getattr(module, "config", None)
        raise ValueError(
            f"cache: {type(cache).__name__} (continuous batching, here of {name_of(config)}) is not supported in this call "
            f"(transformers {_version()}{'' if causal else ', a layer that is not causal'}); use generate(), or "
            "attn_implementation='sdpa' for continuous batching"
        )
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = warploom.attention_varlen(
        q,
        k,
        v,
        kwargs["cu_seq_lens_q"],
        kwargs["cu_seq_lens_k"],
        int(kwargs["max_length_q"]),
        int(kwargs["max_length_k"]),
        causal=True,
        window=window,
        **options,
    )
    return out.unsqueeze(0)


def _manager() -> Any:
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager
    except ImportError:
        return None
    return ContinuousBatchingManager


def _version() -> str:
    import transformers

    return transformers.__version__
