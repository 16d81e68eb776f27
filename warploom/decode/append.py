"""Appending to a cache in plain torch ops, for devices without Triton's kernel."""

from __future__ import annotations

import torch

from warploom.decode.problem import AppendArgs


def append(args: AppendArgs) -> None:
    """Write k, v (batch, T, heads_kv, ·) at positions length … length + T - 1 of each sequence, in place.

    Tokens past the capacity, in a page outside the pool or at a negative slot are left out.
    """
    k_cache, v_cache, lengths, block_table, slot_mapping, k, v, advance = args
    batch, tokens = k.shape[:2]
    pages, page_size = k_cache.shape[:2]
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    if capacity == 0 and slot_mapping is None:
        return
    position = lengths.clamp(0, capacity).long()[:, None] + torch.arange(tokens, device=k.device)
    if slot_mapping is not None:
        page, offset = slot_mapping // page_size, slot_mapping % page_size
        kept = slot_mapping >= 0
    else:
        offset = position % page_size
        kept = position < capacity
        if block_table is None:
            page = torch.arange(batch, device=k.device)[:, None].expand_as(position)
        else:
            page = block_table.gather(1, (position // page_size).clamp(max=block_table.shape[1] - 1)).long()
    inside = kept & (page >= 0) & (page < pages)
    where = (page[inside].long(), offset[inside].long())
    k_cache[where] = k[inside]
    v_cache[where] = v[inside]
    if advance:
        lengths.copy_((lengths.clamp(0, capacity) + kept.sum(1)).clamp(max=capacity))
