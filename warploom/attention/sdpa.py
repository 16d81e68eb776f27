"""The drop-in for torch's scaled_dot_product_attention, and which of its calls torch's own function runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.attention.api import attention
from warploom.attention.arguments import dense_args
from warploom.attention.calls import problem_of
from warploom.masks import Mask, Padding
from warploom.runtime import arguments, dispatch, invariance
from warploom.runtime.qkv import scalars


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for torch.nn.functional.scaled_dot_product_attention, same arguments and (…, heads, seqlen, head_dim).

    ``is_causal`` is top-left aligned, as torch's. ``attn_mask`` also takes a mask of `warploom.masks`. A boolean mask over keys
    alone (query dimension 1) runs here, and a floating point one, as attention()'s bias, where a kernel takes it. Any other
    tensor mask goes to torch's own function: turning a dense boolean mask into columns on the hot path would cost more than it
    saves. explain(..., attn_mask=...) says which, and why. Under `warploom.batch_invariant` such a call raises a ValueError.

    Args:
        query: (…, heads_q, seqlen_q, head_dim); float16, bfloat16, float32 or float64.
        key, value: (…, heads_kv, seqlen_k, ·), of query's dtype and device.
        attn_mask: a mask of `warploom.masks`, or a tensor that broadcasts to (…, heads_q, seqlen_q, seqlen_k): bool, True =
            visible, or floats that are added to the scores.
        dropout_p: probability of dropping a softmax weight, in [0, 1), whatever the module's mode.
        is_causal: query i sees keys j <= i. Not beside ``attn_mask``.
        scale: factor on query keyᵀ; default 1/√head_dim.
        enable_gqa: lets heads_kv divide heads_q.

    Returns:
        out (…, heads_q, seqlen_q, head_dim_v) in query's dtype.

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it got and what it takes.
    """
    is_causal, enable_gqa = arguments.flag("is_causal", is_causal), arguments.flag("enable_gqa", enable_gqa)
    check_sdpa(query, key, value, attn_mask, is_causal, enable_gqa)
    reason = why_torch(query, key, value, attn_mask, dropout_p)
    if reason is not None:
        check_promised(reason)
        assert attn_mask is None or isinstance(attn_mask, Tensor)
        checked_scale, _, dropout_p = scalars(scale, 0.0, dropout_p, query.shape[-1])
        scale = None if scale is None else checked_scale
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v, options = sdpa_call(query, key, value, attn_mask, is_causal)
    out = attention(q, k, v, scale=scale, dropout_p=dropout_p, **options)
    out = out.transpose(1, 2)
    return out if query.ndim == 4 else out.reshape(*query.shape[:-1], value.shape[-1])


def why_torch(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | Mask | None, dropout_p: float
) -> str | None:
    """Why the SDPA drop-in hands a checked call to torch, or None."""
    if not isinstance(attn_mask, Tensor):
        return None
    if attn_mask.dtype != torch.bool:
        return _why_torch_adds(query, key, value, attn_mask, dropout_p)
    if query.ndim == 4 and _is_key_padding(attn_mask):
        return None
    return f"attn_mask is a dense mask of shape {tuple(attn_mask.shape)}; ColumnMask.from_dense converts it once, ahead"


def check_promised(reason: str) -> None:
    """Refuse under warploom.batch_invariant() what torch's function runs for this reason."""
    if invariance.enabled:
        raise ValueError(f"batch_invariant: torch's function, which makes no such promise, would run this call: {reason}")


def _why_torch_adds(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, dropout_p: float) -> str | None:
    """The same of a floating point attn_mask, an additive bias."""
    what = f"attn_mask is a {str(attn_mask.dtype).removeprefix('torch.')} tensor, an additive bias"
    if query.ndim > 4 and attn_mask.ndim > 3:
        return f"{what} with dimensions before the heads beyond a batch"
    q, k, v, options = sdpa_call(query, key, value, attn_mask, False)
    problem = problem_of(dense_args(q, k, v, dropout_p=dropout_p, dropout_seed=0, **options))
    refused = []
    for implementation in dispatch.implementations():
        reason = implementation.refusal(problem)
        if reason is None and not implementation.eager:
            return None
        if reason is not None and implementation.device in (None, problem.device):
            refused.append(f"{implementation.name}: {reason}")
    return f"{what}, which no kernel takes here ({'; '.join(refused)})"


def check_sdpa(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, enable_gqa: bool) -> None:
    """The tensors of a drop-in call, whoever takes it: names and shapes as the caller has them."""
    arguments.with_values("query", arguments.strided("query", query))
    for name, t in (("query", query), ("key", key), ("value", value)):
        if arguments.strided(name, t).ndim < 3 or t.ndim != query.ndim:
            raise ValueError(
                f"{name} must have 3 or more dimensions (…, heads, seqlen, head_dim) and as many as query, "
                f"got shape {tuple(t.shape)}"
            )
        if t.dtype not in arguments.FLOATS:
            raise TypeError(f"{name} has dtype {t.dtype}; attention takes float16, bfloat16, float32 or float64")
        if t.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise TypeError(f"{name} has dtype {t.dtype} but query has {query.dtype}; give all three one dtype")
        if t.device != query.device:
            raise ValueError(f"{name} is on {t.device} but query is on {query.device}; move them to one device")
        if t.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} and query must agree before the heads, got {tuple(t.shape)} and {tuple(query.shape)}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"key and value must agree in all but the last dimension, got {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head_dim, got {query.shape[-1]} and {key.shape[-1]}")
    heads, heads_kv = query.shape[-3], key.shape[-3]
    if heads != heads_kv and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key {heads_kv}; pass enable_gqa=True for grouped heads")
    if heads % heads_kv if heads_kv else heads:
        raise ValueError(f"query has {heads} heads, which is not a multiple of the {heads_kv} heads of key and value")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal=True together are not allowed, as in torch; use attention(mask=, causal=)")
    if attn_mask is None or isinstance(attn_mask, Mask):
        return
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.dtype in arguments.FLOATS):
        raise TypeError(
            "attn_mask must be a bool or floating point tensor, or a mask of warploom.masks, "
            f"got {arguments.describe(attn_mask)}"
        )
    if arguments.strided("attn_mask", attn_mask).device != query.device:
        raise ValueError(f"attn_mask is on {attn_mask.device} but query is on {query.device}")
    full = (*query.shape[:-1], key.shape[-2])
    if attn_mask.ndim > len(full) or any(
        [have not in (1, want) for have, want in zip(reversed(attn_mask.shape), reversed(full), strict=False)]
    ):
        raise ValueError(f"attn_mask must broadcast to (…, heads, seqlen_q, seqlen_k) = {full}, got {tuple(attn_mask.shape)}")


def _is_key_padding(attn_mask: Tensor) -> bool:
    """(batch|1, 1, 1, seqlen_k), or with leading ones left out: a row over keys for each batch entry."""
    shape = (1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape)
    return attn_mask.ndim <= 4 and shape[1] == 1 and shape[2] == 1


def sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v as attention() takes them and its keywords, of a checked call."""
    if query.ndim == 3:
        query, key, value = (t[None] for t in (query, key, value))
    elif query.ndim > 4:
        query, key, value = (t.flatten(0, -4) for t in (query, key, value))
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    options: dict[str, Any] = {}
    if is_causal:
        # torch aligns top-left, j <= i: in our coordinates p - j >= seqlen_k - seqlen_q.
        options["window"] = (None, seqlen_q - seqlen_k)
    elif isinstance(attn_mask, Tensor) and attn_mask.dtype != torch.bool:
        options["bias"] = attn_mask
    elif isinstance(attn_mask, Tensor):
        batch = attn_mask.shape[0] if attn_mask.ndim == 4 else 1
        options["mask"] = Padding(attn_mask.reshape(batch, attn_mask.shape[-1]).expand(batch, seqlen_k))
    elif attn_mask is not None:
        options["mask"] = attn_mask
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return q, k, v, options
