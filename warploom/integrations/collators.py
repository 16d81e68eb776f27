"""Column bounds for batches: what a collator knows of padding and packed documents, as a mask that models pass through.

Models of transformers hand any 4-D `attention_mask` to the attention function untouched, so a batch can carry
int32 column bounds `(batch, 1, keys, 4)` there, and an encoder that would never look for documents in its
rows packs too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from warploom.runtime import arguments
from warploom.runtime.arguments import Window

from . import intervals
from .intervals import Visible


def padding_bounds(attention_mask: Tensor, *, causal: bool = False, window: Window | None = None) -> Tensor:
    """Bounds of a padded batch.

    Args:
        attention_mask: bool or integer `(batch, tokens)`, nonzero = a real token, padding on either side.
        causal: hide keys after the query as well.
        window: (left, right) keys before and after the query's own; None in it is without limit.

    Returns:
        int32 `(batch, 1, tokens, 4)`.
    """
    attention_mask = _checked("attention_mask", attention_mask, 2, "(batch, tokens)")
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)[None]
    return _bounds(intervals.only(attention_mask != 0), columns, causal, window)


def cu_seqlens_bounds(cu_seqlens: Tensor, tokens: int, *, causal: bool = False, window: Window | None = None) -> Tensor:
    """Bounds of one row of packed documents, from their offsets; tokens past the last are padding.

    Args:
        cu_seqlens: integer `(documents + 1,)`, from 0 upwards, as flash-attn takes it.
        tokens: length of the row.

    Returns:
        int32 `(1, 1, tokens, 4)`.
    """
    cu_seqlens = _checked("cu_seqlens", cu_seqlens, 1, "(documents + 1,)")
    tokens = arguments.integer("tokens", tokens, 0)
    if not cu_seqlens.numel():
        raise ValueError("cu_seqlens: got no entries; it takes offsets from 0 upwards")
    if arguments.readable(cu_seqlens):
        values = cu_seqlens.tolist()
        if values[0] != 0 or any(b < a for a, b in pairwise(values)) or values[-1] > tokens:
            raise ValueError(f"cu_seqlens: got {values!r:.80}; it takes offsets from 0 upwards to at most the {tokens} tokens")
    columns = torch.arange(tokens, device=cu_seqlens.device)[None]
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), columns.to(cu_seqlens.dtype), right=True)
    return _bounds(intervals.runs(document).hide(columns >= cu_seqlens[-1]), columns, causal, window)


def position_ids_bounds(position_ids: Tensor, *, causal: bool = False, window: Window | None = None) -> Tensor:
    """Bounds of packed rows, from their positions: a document starts wherever they do not rise by one.

    Args:
        position_ids: integer `(batch, tokens)`.

    Returns:
        int32 `(batch, 1, tokens, 4)`.
    """
    position_ids = _checked("position_ids", position_ids, 2, "(batch, tokens)")
    columns = torch.arange(position_ids.shape[1], device=position_ids.device)[None]
    starts = torch.diff(position_ids, dim=1, prepend=position_ids[:, :1] - 1) != 1
    return _bounds(intervals.runs(starts.cumsum(1)), columns, causal, window)


def _bounds(seen: Visible, columns: Tensor, causal: bool, window: Window | None) -> Tensor:
    left, right = arguments.window("window", window)
    if arguments.flag("causal", causal):
        seen = seen & intervals.causal(columns)
    if left is not None or right is not None:
        seen = seen & intervals.window(columns, arguments.near(left), arguments.near(right))
    return seen.bounds(columns.shape[1])


def _checked(name: str, value: Any, rank: int, shape: str) -> Tensor:
    """A bool or integer tensor, integers as int64."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; it takes a tensor {shape}")
    if (value.dtype != torch.bool and value.dtype not in arguments.INTEGERS) or arguments.strided(name, value).dim() != rank:
        raise ValueError(f"{name}: got {arguments.describe(value)}; it takes integers {shape}")
    arguments.with_values(name, value)
    return value if value.dtype == torch.bool else arguments.widened(value)


class BoundsCollator:
    """A collator whose batches carry column bounds as their attention_mask.

        collate = BoundsCollator(DataCollatorWithFlattening(), causal=False)  # an encoder, packed

    Documents come from `cu_seq_lens_q` or else `position_ids` of the batch, padding from its 2-D
    attention_mask, whichever are there; the rest of the batch is left as it is.

    Args:
        collator: any collator that returns a mapping of tensors.
        causal: True for decoders.
        window: (left, right) of every layer; a mapping from layer type to window or None gives a mapping of
            masks, as models with layers of several kinds take it
            (`{"full_attention": None, "sliding_attention": (4095, 0)}`).

    Raises:
        ValueError: a batch says nothing about documents or padding.
    """

    def __init__(
        self,
        collator: Callable[[Any], Any],
        *,
        causal: bool,
        window: Window | Mapping[str, Window | None] | None = None,
    ) -> None:
        if not callable(collator):
            raise TypeError(f"collator must be a callable that makes batches, got {arguments.describe(collator)}")
        for each in window.values() if isinstance(window, Mapping) else (window,):
            arguments.window("window", each)
        self.collator = collator
        self.causal = arguments.flag("causal", causal)
        self.window = window

    def __call__(self, features: Any) -> Any:
        batch = self.collator(features)
        if isinstance(self.window, Mapping):
            batch["attention_mask"] = {kind: self._mask(batch, window) for kind, window in self.window.items()}
        else:
            batch["attention_mask"] = self._mask(batch, self.window)
        return batch

    def _mask(self, batch: Mapping[str, Any], window: Window | None) -> Tensor:
        options: dict[str, Any] = {"causal": self.causal, "window": window}
        padding, cu, positions = (batch.get(n) for n in ("attention_mask", "cu_seq_lens_q", "position_ids"))
        if cu is not None:
            if not isinstance(batch.get("input_ids"), Tensor):
                raise ValueError(
                    "BoundsCollator: a batch with cu_seq_lens_q must have its input_ids, whose length is the row's"
                )
            documents = cu_seqlens_bounds(torch.as_tensor(cu), batch["input_ids"].shape[-1], **options)
        elif positions is not None:
            documents = position_ids_bounds(positions, **options)
        elif padding is not None:
            return padding_bounds(padding, **options)
        else:
            raise ValueError(
                "BoundsCollator: the batch has none of cu_seq_lens_q, position_ids and attention_mask "
                f"(it has {', '.join(batch)}), so it says nothing about documents or padding"
            )
        return documents if padding is None else _intersect(documents, padding_bounds(padding, **options))


def _intersect(a: Tensor, b: Tensor) -> Tensor:
    """The intersection of bounds made here: their lower intervals end at the last row, their upper ones start at the first."""
    start, end = torch.maximum(a[..., 3], b[..., 3]), torch.minimum(a[..., 0], b[..., 0])
    return torch.stack([end, a[..., 1].expand_as(end), a[..., 2].expand_as(end), start], -1)
