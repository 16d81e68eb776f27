"""Merging partial softmax results by their log-sum-exp: the arithmetic every split implementation shares."""

from __future__ import annotations

import torch
from torch import Tensor

_NEG_INF = float("-inf")


def merge(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge normalised partial results over the first dimension (Flash-Decoding's reduction).

    Args:
        outs: (splits, ..., head_dim), each split's softmax-weighted mean; 0 where a split shows a row nothing.
        lses: (splits, ...), natural log of each split's softmax denominator; -inf where it shows nothing.
        sink: broadcastable to lses[0]; a logit that joins the denominator once. Splits exclude it.

    Returns:
        out (..., head_dim) and lse (...). A row that no split shows anything has out 0 and lse -inf (the sink with one);
        a NaN of any split stays NaN.
    """
    top = lses.amax(0) if lses.shape[0] else lses.new_full(lses.shape[1:], _NEG_INF)
    if sink is not None:
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == _NEG_INF, 0.0)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    if sink is not None:
        total = total + torch.exp(sink - top)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    out = (weights[..., None] * outs).sum(0) / total[..., None]
    return out, (top + torch.log(total)).masked_fill(empty, _NEG_INF)
