"""What attention reads of a paged cache, whoever keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class PagedCache:
    """Keys and values in pages of one pool, `warploom.PagedKVCache`: ``attention_varlen`` takes one in place of k.

    Attributes:
        k_pages, v_pages: (pages, page_size, heads_kv, ·).
        block_table: int32 (batch, pages_per_sequence), the pages of each sequence in order.
        lengths: int32 (batch,), keys held by each sequence.
        k_scale, v_scale: of e4m3 pages what numbers are multiplied by, float32: (1,), (heads_kv,) or (pages, page_size,
            heads_kv); None of others.
        hadamard_seed: of e4m3 pages, the rotation of keys, which queries take too; None is none.
    """

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    lengths: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    hadamard_seed: int | None
