"""Launching the append kernel."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from warploom.decode.problem import AppendArgs
from warploom.decode.triton.kernels import append_kernel
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch

# Up to this many tokens one program appends a whole sequence's, and so may advance its length itself.
TOKENS = 16


def append(args: AppendArgs) -> None:
    """Write k, v (batch, T, heads_kv, ·) behind each sequence's length, in place."""
    k_cache, v_cache, lengths, block_table, slot_mapping, k, v, advance = args
    batch, tokens, heads_kv, head_dim = k.shape
    pages, page_size = k_cache.shape[:2]
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    whole = tokens <= TOKENS
    launch = _launch(
        head_dim,
        v.shape[3],
        k.dtype,
        block_table is not None,
        None if slot_mapping is None else slot_mapping.dtype,
        whole and advance,
        k.device.index if k.is_cuda else None,
    )
    with on_device(k):
        launch(
            (batch, 1 if whole else -(-tokens // TOKENS)),
            k_cache, v_cache, lengths, block_table, slot_mapping, k, v,
            *k_cache.stride()[:3], *v_cache.stride()[:3],
            0 if block_table is None else block_table.stride(0),
            *((0, 0) if slot_mapping is None else slot_mapping.stride()),
            *k.stride(), *v.stride(),
            tokens, heads_kv, pages, page_size, capacity,
        )  # fmt: skip
        if advance and not whole:
            add_tokens(lengths, tokens, slot_mapping, capacity)


def add_tokens(lengths: Tensor, tokens: int, slot_mapping: Tensor | None, capacity: int) -> None:
    """What programs of a part of a sequence's tokens leave to do: the lengths, after them."""
    added = tokens if slot_mapping is None else (slot_mapping >= 0).sum(1, dtype=torch.int32)
    lengths.clamp_(0, capacity).add_(added).clamp_(max=capacity)


@lru_cache(maxsize=1024)
def _launch(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    paged: bool,
    slots: torch.dtype | None,
    advance: bool,
    device: int | None,
) -> Launch:
    """The launch of one variant. ``dtype``, ``paged`` and ``slots`` only tell apart calls that need binaries of their own."""
    pdl = device is not None and torch.cuda.get_device_capability(device)[0] >= 9
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "ADVANCE": advance,
        "TOKENS": TOKENS,
        "BLOCK": 1024,
        "PDL": pdl,
    }
    return Launch(append_kernel, constants | ({"launch_pdl": True} if pdl else {}), direct=True)
