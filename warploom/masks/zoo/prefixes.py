"""Causal masks with parts that see ahead."""

from __future__ import annotations

from typing import Any

import torch

from warploom.masks.arguments import per_batch_value
from warploom.masks.columns import Mask
from warploom.masks.intervals import ResolvedMask
from warploom.masks.zoo.positions import columns, rows_of, scalar_or_column


class PrefixLM(Mask):
    """Key j is visible when j <= p, or when j lies in the prefix: every query sees all of the prefix.

    Args:
        prefix: prefix tokens, one int, or one per batch entry (list or tensor (batch,)).
    """

    _fields = ("prefix",)

    def __init__(self, prefix: Any) -> None:
        self.prefix = per_batch_value("prefix", prefix)

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        column = columns(seqlen_k, device)
        ute = rows_of(column, seqlen_q, seqlen_k).where(
            (column >= scalar_or_column(self.prefix, device)).unsqueeze(1), 0
        )
        return ResolvedMask(None, None, None, None, None, ute)
