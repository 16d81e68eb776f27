"""Two attentions of the sweep's own: one that is right where eager averages padding, and one that is wrong."""

from __future__ import annotations

from typing import Any

import torch

ZEROING, MUTANT = "sweep_zeroing", "sweep_mutant"
LOWEST = -1e30  # of a float mask: anything lower hides


def zeroing(
    module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, position_bias=None, **kwargs: Any
):
    """Eager attention but for two things.

    A query that sees no key gets 0, where eager averages all values. True in a boolean mask is visible, where eager adds
    it to the scores as 1.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask > LOWEST
        if attention_mask.is_floating_point():
            scores = scores + attention_mask
        scores = scores.masked_fill(~visible, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].nan_to_num(0.0)
    return (weights @ value).transpose(1, 2).contiguous(), None


def mutant(module, query, key, value, attention_mask, scaling=None, **kwargs: Any):
    """No mask, and scores one and a half times as large: what the comparison has to see."""
    scale = 1.5 * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return zeroing(module, query, key, value, None, scale)


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def dense_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    AttentionInterface.register(ZEROING, zeroing)
    AttentionMaskInterface.register(ZEROING, dense_mask)
    AttentionInterface.register(MUTANT, mutant)
    AttentionMaskInterface.register(MUTANT, lambda *args, **kwargs: None)
