"""Key/value caches: what decode reads and a model's layers append to. Lengths live on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from warploom.decode import op
from warploom.decode.contents import check_append, check_cache


@dataclass(frozen=True, eq=False)
class KVCache:
    """A contiguous cache: row b holds sequence b from its first key on.

    Attributes:
        k: (batch, max_seqlen, heads_kv, head_dim), the last dimension contiguous; other strides are free.
        v: (batch, max_seqlen, heads_kv, head_dim_v).
        lengths: int32 (batch,) on k's device, keys held by each sequence.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    ready: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # decode's short ways, by call

    def __post_init__(self) -> None:
        check_cache("k", self.k, "v", self.v, "(batch, max_seqlen, heads_kv, head_dim)", self.lengths, None)

    @classmethod
    def allocate(
        cls,
        batch: int,
        max_seqlen: int,
        kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """An empty cache for ``batch`` sequences of up to ``max_seqlen`` keys."""
        shape = (batch, max_seqlen, kv_heads)
        return cls(
            torch.empty((*shape, head_dim), dtype=dtype, device=device),
            torch.empty((*shape, head_dim if head_dim_v is None else head_dim_v), dtype=dtype, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Keys a sequence can hold."""
        return self.k.shape[1]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write new keys and values behind each sequence, in place, and advance the lengths.

        No host synchronisation; works inside a CUDA graph. Tokens for which a sequence has no room are dropped, and its
        length stays at the capacity.

        Args:
            k: (batch, T, heads_kv, head_dim) in the cache's dtype.
            v: (batch, T, heads_kv, head_dim_v).
        """
        append(self.k, self.v, self.lengths, None, None, k, v)


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """A cache in pages drawn from one pool; a page may serve several sequences (a shared prefix).

    Attributes:
        k_pages: (pages, page_size, heads_kv, head_dim), page_size a power of two (or one page a sequence: any size).
        v_pages: (pages, page_size, heads_kv, head_dim_v).
        block_table: int32 (batch, pages_per_sequence), the pages of each sequence in order.
        lengths: int32 (batch,), keys held by each sequence.
    """

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    lengths: Tensor
    ready: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # decode's short ways, by call

    def __post_init__(self) -> None:
        layout = "(pages, page_size, heads_kv, head_dim)"
        check_cache("k_pages", self.k_pages, "v_pages", self.v_pages, layout, self.lengths, self.block_table)

    @classmethod
    def allocate(
        cls,
        batch: int,
        max_seqlen: int,
        kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 16,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> PagedKVCache:
        """An empty cache whose sequences own ⌈max_seqlen / page_size⌉ pages each, in order."""
        if page_size < 1:
            raise ValueError(f"page_size must be a power of two, got {page_size}")
        each = -(-max_seqlen // page_size)
        shape = (batch * each, page_size, kv_heads)
        return cls(
            torch.empty((*shape, head_dim), dtype=dtype, device=device),
            torch.empty((*shape, head_dim if head_dim_v is None else head_dim_v), dtype=dtype, device=device),
            torch.arange(batch * each, dtype=torch.int32, device=device).view(batch, each),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1]

    @property
    def capacity(self) -> int:
        """Keys a sequence can hold."""
        return self.block_table.shape[1] * self.page_size

    def append(self, k: Tensor, v: Tensor, slot_mapping: Tensor | None = None) -> None:
        """Write new keys and values behind each sequence, in place, and advance the lengths.

        Args:
            k: (batch, T, heads_kv, head_dim) in the cache's dtype.
            v: (batch, T, heads_kv, head_dim_v).
            slot_mapping: int32 or int64 (batch, T), where in the pool each token goes, page · page_size + offset, in place
                of what block_table says. A negative slot leaves its token out, and the length does not count it.

        Tokens without room, or whose page is outside the pool, are not written.
        """
        append(self.k_pages, self.v_pages, self.lengths, self.block_table, slot_mapping, k, v)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    k: Tensor,
    v: Tensor,
    advance: bool = True,
) -> None:
    """The append of both caches on bare tensors; with ``advance=False`` the lengths stay as they are."""
    check_append(k_cache, v_cache, lengths, block_table, slot_mapping, k, v)
    run = op.append_op if op.needs_op(k) else op.append
    run(k_cache, v_cache, lengths, block_table, slot_mapping, k, v, advance)
