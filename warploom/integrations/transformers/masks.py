"""The mask function transformers calls once a forward: its closures in, int32 column bounds out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import intervals
from .evaluate import reduce_rows
from .guard import guard
from .models import name_of, refuse_own_scores
from .recognise import recognise


def mask_bounds(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    *,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The column bounds of a transformers mask: what `AttentionMaskInterface` holds under our name.

    Offsets are folded in, so the result needs no alignment rule: a static cache, whose keys reach past the
    last query, reads right. Known closures (causal, sliding, chunked, packed, block-bidirectional, and their
    unions and intersections) are recognised and cost O(keys) without a host synchronisation; any other
    function is evaluated in chunks of rows and reduced exactly.

    Args:
        q_offset: position of the first query, an int or (static cache) a 0-d tensor.
        kv_offset: position of the first key.
        mask_function: `f(batch, head, query position, key position) -> visible`; None is causal.
        attention_mask: the 2-D padding mask `(batch, tokens)`, nonzero = a real token.

    Returns:
        int32 `(batch, 1, kv_length, 4)`: lts, lte, uts, ute of every key; None when nothing at all is hidden. For a
        model, whose `config` transformers gives, they are guarded: arithmetic on them is a ValueError. With a static
        cache (`q_offset` a tensor) they are a plain tensor, since generate() hands those to a compiled forward, whose
        machinery takes no other kind.

    Raises:
        ValueError: a mask that column bounds cannot say, a padding mask that is not 2-D, or a model that would add the
            bounds to scores of its own.
    """
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    if attention_mask is not None and attention_mask.dim() != 2:
        got = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask: got shape {got}; the padding mask is (batch, tokens)")
    # The modules of a decoder run with config.is_causal=False still say is_causal: None would mean causal
    # there.
    full = mask_function is masking_utils.bidirectional_mask_function and attention_mask is None
    if full and allow_is_bidirectional_skip and getattr(config, "is_causal", True):
        return None
    refuse_own_scores(config)

    columns = (torch.arange(kv_length, device=device) + kv_offset)[None]
    # torch.compile cannot open closures while it traces: there the mask is evaluated.
    visible = None if torch.compiler.is_compiling() else recognise(mask_function, columns)
    if visible is not None:
        if attention_mask is not None:
            visible = visible & intervals.only(_padding(attention_mask, columns))
        bounds = visible.bounds(q_length, q_offset, batch_size)
        return _guarded(bounds, config, q_length, q_offset, open_ended=True)

    dense_mask: Callable[..., Any] = masking_utils.sdpa_mask

    def rows(low: int, high: int) -> Tensor:
        return dense_mask(
            batch_size=batch_size,
            q_length=high - low,
            kv_length=kv_length,
            q_offset=q_offset + low,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=None if attention_mask is None else attention_mask.to(device=device, dtype=torch.bool),
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )

    bounds = reduce_rows(rows, batch_size, q_length, kv_length, device)
    return _guarded(bounds, config, q_length, q_offset, open_ended=False)


def _guarded(bounds: Tensor, config: Any, q_length: int, q_offset: int | Tensor, open_ended: bool) -> Tensor:
    """`open_ended`: every lower interval ends at the last row and every upper one starts at row 0.

    Kernels and intersections have less to read then. A plain copy loses the note and nothing else.
    """
    if config is not None and not isinstance(q_offset, Tensor):
        return guard(bounds, name_of(config), q_length, open_ended)
    bounds.open_ended = open_ended  # type: ignore[attr-defined]
    return bounds


def _padding(attention_mask: Tensor, columns: Tensor) -> Tensor:
    """The padding mask at the given key positions; positions it does not reach are padding."""
    real = attention_mask.to(device=columns.device, dtype=torch.bool)
    reach = real.shape[-1]
    return real[:, columns[0].clamp(max=reach - 1)] & (columns < reach)


def is_open_ended(bounds: Tensor) -> bool:
    return bool(getattr(bounds, "open_ended", False))
