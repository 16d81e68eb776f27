"""The attention function transformers calls in every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import warploom
from warploom.bias import Bias
from warploom.masks import ColumnMask, Document, Padding

from . import continuous
from .guard import Bounds, plain
from .masks import is_open_ended
from .models import name_of

_DENSE_DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Every layer of a forward is handed the same mask tensor: what is made of it lives as long as it does.
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | Bias | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as `AttentionInterface` calls it.

    Args:
        query, key, value: `(batch, heads, seqlen, head_dim)`; key and value have the KV heads, not repeated.
        attention_mask: 4-D. int32 whose last dimension is 1, 2 or 4: column bounds, which then are the whole
            truth (`is_causal` and `sliding_window` only describe them; two columns a key are read by
            `is_causal`). bool (True = visible): a dense mask, run by torch's SDPA. float: a bias, added to the
            scores. None: `is_causal`, `sliding_window` and `cu_seq_lens_q`, `cu_seq_lens_k` say what is visible.
        dropout: used in training only.
        scaling: of the scores; None is head_dim ** -0.5.
        is_causal: None takes the module's own `is_causal`.
        sliding_window: W keys including the query's own: left = W - 1, and right too where not causal.
        softcap: tanh cap of the scores.
        s_aux: sink logits `(heads,)`.
        position_bias: added to the scores, as T5 and its family have it: `(batch | 1, heads | 1, seqlen | 1, keys)`,
            differentiable; beside column bounds also a bias of `warploom.bias`.

    Returns:
        `(batch, seqlen, heads, head_dim)` and None: attention weights never exist.

    Raises:
        ValueError: a mask of another kind, or an argument that cannot be honoured (output_attentions, a paged
            cache of an unknown kind, position_bias of packed documents).
    """
    _refuse(module, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": float(softcap or 0.0),
        "sink": s_aux,
        "dropout_p": float(dropout) if module.training else 0.0,
        "deterministic": True if kwargs.get("deterministic") else None,
        "bias": _rows_first(position_bias),
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    paged = continuous.is_paged(kwargs)
    if position_bias is not None and (paged or (attention_mask is None and cu_q is not None)):
        raise ValueError(
            f"position_bias: {_model(module)} gives one for the whole row, and cu_seq_lens_q packs documents in it; "
            "give their column bounds as attention_mask instead (docs/transformers.md, 'Packing instead of padding')"
        )
    if paged:
        return continuous.attend(module, query, key, value, causal, _window(sliding_window, causal), options, kwargs), None
    if attention_mask is None:
        options.update(causal=causal, window=_window(sliding_window, causal))
        if cu_q is not None:
            return _packed(q, k, v, kwargs, options), None
        return warploom.attention(q, k, v, **options), None
    _check_rank(attention_mask)
    if attention_mask.dtype == torch.int32:
        mask = _from_bounds(attention_mask, causal, key.shape[2], cu_q, cu_k)
        return warploom.attention(q, k, v, mask=mask, **options), None
    if attention_mask.dtype in _DENSE_DTYPES:
        return _dense(query, key, value, attention_mask, options), None
    raise ValueError(
        f"attention_mask: got dtype {attention_mask.dtype}; it takes int32 column bounds "
        "(batch, heads, keys, 1 | 2 | 4), or a dense mask as bool (True = visible) or float (added to the "
        "scores)"
    )


def _rows_first(bias: Tensor | Bias | None) -> Tensor | Bias | None:
    """The same with contiguous rows: T5 gives a permuted embedding, whose heads lie next to each other.

    A kernel that reads one head of it would read all. The copy is small beside what the layer computes, and its gradient is
    the copy's.
    """
    if isinstance(bias, Tensor) and bias.ndim == 4 and min(bias.shape[2:]) > 1 and bias.stride(-1) != 1:
        return bias.contiguous()
    return bias


def _refuse(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError(
            f"output_attentions: {_model(module)} runs with attn_implementation='warploom', where attention weights are never "
            "materialised; use attn_implementation='eager' for them"
        )
    for name in ("sinks", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}: {_model(module)} gives it, and it is not supported; use attn_implementation='eager' there"
            )


def _model(module: torch.nn.Module) -> str:
    """The layer and its model, for a message."""
    config = getattr(module, "config", None)
    return type(module).__name__ if config is None else f"{type(module).__name__} of {name_of(config)}"


def _window(sliding_window: int | None, causal: bool) -> tuple[int | None, int | None] | None:
    if sliding_window is None:
        return None
    if sliding_window < 1:
        raise ValueError(f"sliding_window: got {sliding_window}; it counts keys including the query's own, from 1 up")
    return (sliding_window - 1, 0 if causal else sliding_window - 1)


def _check_rank(mask: Tensor) -> None:
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}; the attention function takes 4-D masks. A 2-D "
            "padding mask belongs to the model's own attention_mask argument"
        )


def _packed(q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Documents in one row, without padding, by their offsets (DataCollatorWithFlattening)."""
    if q.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q: packed rows have batch 1, got batch {q.shape[0]}")
    cu_q, cu_k = kwargs["cu_seq_lens_q"].to(torch.int32), kwargs.get("cu_seq_lens_k")
    longest_q, longest_k = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    out = warploom.attention_varlen(
        q[0],
        k[0],
        v[0],
        cu_q,
        None if cu_k is None else cu_k.to(torch.int32),
        None if longest_q is None else int(longest_q),
        None if longest_k is None else int(longest_k),
        **options,
    )
    return out.unsqueeze(0)


def _from_bounds(bounds: Tensor, causal: bool, seqlen_k: int, cu_q: Tensor | None, cu_k: Tensor | None) -> Any:
    """The mask of int32 column bounds, within the packed documents whose offsets the model passes, if any."""
    columns = bounds.shape[-1]
    if columns not in (1, 2, 4) or bounds.shape[-2] != seqlen_k:
        raise ValueError(
            f"attention_mask: got int32 of shape {tuple(bounds.shape)} for {seqlen_k} keys; int32 masks are "
            "column bounds (batch, heads, keys, 1 | 2 | 4). Give a dense mask as bool or float"
        )
    if columns == 1 and not causal:
        raise ValueError(
            "attention_mask: one bound a key (the first hidden row below the diagonal) is a causal mask, and "
            "this layer is not causal; give two or four bounds a key"
        )
    if cu_q is not None and cu_k is not None and cu_q.shape != cu_k.shape:
        raise ValueError("cu_seq_lens_q, cu_seq_lens_k: with column bounds both must be of the same documents")
    if not _may_keep(bounds, cu_q):
        return _build(bounds, causal, cu_q)
    kept = _made.setdefault(bounds, {})
    tag = (bounds._version, causal, None if cu_q is None else (id(cu_q), cu_q._version))
    if tag not in kept:
        kept.clear()
        kept[tag] = (_build(bounds, causal, cu_q), cu_q)  # holding cu_q keeps its id its own
    return kept[tag][0]


def _build(bounds: Tensor, causal: bool, cu: Tensor | None) -> Any:
    """A mask made of copies: a kept mask that refers to its own key would never be freed."""
    open_ended, bounds = is_open_ended(bounds), plain(bounds)
    if bounds.stride(0) == 0:
        bounds = bounds[:1]
    mask: Any
    if open_ended:
        lts, ute = (bounds[..., i].clone(memory_format=torch.contiguous_format) for i in (0, 3))
        mask = ColumnMask(lts, ute=ute)
    else:
        mask = ColumnMask.from_startend_row_indices(bounds.clone(), causal and bounds.shape[-1] < 4)
    return mask if cu is None else mask & Document.from_cu_seqlens(cu.to(torch.int32), causal=False)


def _may_keep(*tensors: Tensor | None) -> bool:
    """Whether a mask made of these may be kept for the next layer: versions are known and no graph is being recorded."""
    given = [t for t in tensors if t is not None]
    if torch.compiler.is_compiling() or any(type(t) not in (Tensor, Bounds) or t.is_inference() for t in given):
        return False
    return not (any(t.is_cuda for t in given) and torch.cuda.is_current_stream_capturing())


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    bias = options["bias"]
    if options["softcap"] or options["sink"] is not None or bias is not None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if bias is not None and mask.dtype == torch.bool:
            return warploom.attention(q, k, v, **options | {"bias": bias.masked_fill(~mask, float("-inf"))})
        columns = _dense_as_columns(mask, query.shape[2])
        if columns is None:
            bias = mask if bias is None else bias + mask
        return warploom.attention(q, k, v, mask=columns, **options | {"bias": bias})
    if mask.is_floating_point() and mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    out = warploom.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options["dropout_p"],
        scale=options["scale"],
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


def _dense_as_columns(mask: Tensor, seqlen_q: int) -> Any:
    """A dense mask as columns, exactly, made once for each tensor; None for numbers that are a bias.

    Raises:
        ValueError: a boolean mask that is no column mask.
    """
    keep = _may_keep(mask)
    kept = _made.setdefault(mask, {}) if keep else {}
    tag = ("dense", mask._version if keep else 0, seqlen_q)
    if tag not in kept:
        kept.clear()
        kept[tag] = _columns(mask, seqlen_q)
    return kept[tag]


def _columns(mask: Tensor, seqlen_q: int) -> Any:
    visible = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and (mask.requires_grad or not bool((visible | (mask <= torch.finfo(mask.dtype).min)).all())):
        return None
    if mask.shape[1] == mask.shape[2] == 1:
        return Padding(visible[:, 0, 0])
    try:
        return ColumnMask.from_dense(visible.expand(-1, -1, seqlen_q, -1))
    except ValueError:
        if mask.dtype == torch.bool:
            raise
        return None
