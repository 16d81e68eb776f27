"""Checks of caches, of what is appended to them, and of device contents where looking is free or asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.decode.problem import AppendArgs
from warploom.kernels.e4m3 import E4M3
from warploom.runtime import arguments


def check_cache(
    k_name: str, k: Tensor, v_name: str, v: Tensor, layout: str, lengths: Any, block_table: Any, paged: bool
) -> tuple[Tensor, Tensor | None]:
    """Types, shapes, dtypes and devices of a cache's tensors; its lengths and table as int32."""
    for name, t in ((k_name, k), (v_name, v)):
        if arguments.strided(name, t).ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions {layout}, got shape {tuple(t.shape)}")
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got strides {t.stride()}; a cache is never copied"
            )
    if k.dtype not in (*arguments.FLOATS, E4M3):
        raise TypeError(f"{k_name} has dtype {k.dtype}; a cache takes float16, bfloat16, float32, float64 or float8_e4m3fn")
    if v.dtype != k.dtype:
        raise TypeError(f"{v_name} has dtype {v.dtype} but {k_name} has {k.dtype}")
    if v.device != k.device:
        raise ValueError(f"{v_name} is on {v.device} but {k_name} is on {k.device}")
    arguments.with_values(k_name, k)
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{k_name} and {v_name} must agree in all but the last dimension, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if lengths is None or (block_table is None and paged):
        raise TypeError(f"{'lengths' if lengths is None else 'block_table'} must be an int32 tensor, got None")
    if isinstance(lengths, Tensor) and lengths.dtype == torch.int32 and lengths.ndim == 1 and not lengths.is_contiguous():
        raise ValueError(f"lengths must be contiguous, got strides {lengths.stride()}; append() advances them where they are")
    lengths = arguments.int32("lengths", lengths, 1, k, k_name)
    block_table = arguments.int32("block_table", block_table, 2, k, k_name)
    if block_table is None:
        if lengths.shape[0] != k.shape[0]:
            raise ValueError(f"lengths has {lengths.shape[0]} entries but {k_name} has batch {k.shape[0]}")
        return lengths, None
    if lengths.shape[0] != block_table.shape[0]:
        raise ValueError(f"lengths has {lengths.shape[0]} entries but block_table describes {block_table.shape[0]} sequences")
    page_size = k.shape[1]
    if (page_size & (page_size - 1) or page_size == 0) and block_table.shape[1] != 1:
        raise ValueError(f"page_size must be a power of two, got {page_size} ({k_name} of shape {tuple(k.shape)})")
    if block_table.stride(-1) != 1 and block_table.shape[1] > 1:
        raise ValueError(f"block_table must be contiguous in its last dimension, got strides {block_table.stride()}")
    return lengths, block_table


def is_latent(k: Tensor, v: Tensor) -> bool:
    """Whether a cache's values are the first columns of its keys, in the same memory; not in FP8, whose keys are rotated.

    A compiler does not see which memory a tensor has: a cache that it builds is latent where `allocate` is told so.
    """
    if k.dtype == E4M3 or torch.compiler.is_compiling() or k.untyped_storage()._cdata != v.untyped_storage()._cdata:
        return False
    return v.storage_offset() == k.storage_offset() and v.stride() == k.stride() and v.shape[3] <= k.shape[3]


def check_append(args: AppendArgs, quantises: bool = False) -> None:
    """New keys and values against the cache they go to; of any floats where they are quantised."""
    k_cache, v_cache, lengths, block_table, slot_mapping, k, v, _ = args
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        arguments.strided(name, t)
        expected = (lengths.shape[0], k.shape[1] if isinstance(k, Tensor) and k.ndim > 1 else 1, *cache.shape[2:])
        if t.ndim != 4 or tuple(t.shape) != expected:
            raise ValueError(
                f"{name} must have shape (batch, T, heads_kv, head_dim) = ({expected[0]}, T, {expected[2]}, {expected[3]}) as "
                f"the cache and the same T in k and v, got {tuple(t.shape)}"
            )
        if quantises:
            if t.dtype not in arguments.FLOATS:
                raise TypeError(f"{name} has dtype {t.dtype}; a cache of {cache.dtype} quantises what it is given as floats")
        elif t.dtype != cache.dtype:
            raise TypeError(f"{name} has dtype {t.dtype} but the cache has {cache.dtype}")
        if t.device != cache.device:
            raise ValueError(f"{name} is on {t.device} but the cache is on {cache.device}")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, and a cache has no gradient: append under torch.no_grad(), or append {name}.detach()"
            )
    if slot_mapping is not None:
        if not isinstance(slot_mapping, Tensor) or slot_mapping.dtype not in arguments.INTEGERS:
            raise TypeError(f"slot_mapping must be an int32 or int64 tensor, got {arguments.describe(slot_mapping)}")
        arguments.strided("slot_mapping", slot_mapping)
        if slot_mapping.shape != k.shape[:2]:
            raise ValueError(f"slot_mapping must have shape (batch, T) = {tuple(k.shape[:2])}, got {tuple(slot_mapping.shape)}")
        if slot_mapping.device != k.device:
            raise ValueError(f"slot_mapping is on {slot_mapping.device} but k is on {k.device}")
    if arguments.readable(k_cache):
        check_contents(k_cache, lengths, block_table, new=k.shape[1] if slot_mapping is None else 0)
        _check_room(k_cache, lengths, block_table, slot_mapping, k.shape[1])
        if slot_mapping is not None and slot_mapping.numel():
            slots = k_cache.shape[0] * k_cache.shape[1]
            if int(slot_mapping.max()) >= slots:
                raise ValueError(f"slot_mapping reaches {int(slot_mapping.max())} but the pool has {slots} slots")


def _check_room(k_cache: Tensor, lengths: Tensor, block_table: Tensor | None, slot_mapping: Tensor | None, tokens: int) -> None:
    """ValueError where a sequence has no room for its new tokens."""
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    new = torch.full_like(lengths, tokens) if slot_mapping is None else (slot_mapping >= 0).sum(1)
    full = lengths.long() + new > capacity
    if bool(full.any()):
        b = int(full.nonzero()[0])
        raise ValueError(
            f"k and v hold {int(new[b])} new tokens for sequence {b}, which holds {int(lengths[b])} keys already; "
            f"the cache has room for {capacity}"
        )


def checked_tree(tree: Any, q: Tensor) -> Tensor | None:
    """The parents of q's tokens as int32; their values are looked at where they may be read."""
    tree = arguments.int32("tree", tree, 2, q)
    if tree is None:
        return None
    batch, queries = q.shape[:2]
    if tree.shape[0] not in (1, batch) or tree.shape[1] != queries:
        raise ValueError(f"tree must have shape (batch or 1, T) = ({batch} or 1, {queries}), got {tuple(tree.shape)}")
    if arguments.readable(tree) and tree.numel():
        bad = (tree < -1) | (tree >= torch.arange(queries, device=tree.device))
        if bool(bad.any()):
            row, t = bad.nonzero()[0].tolist()
            raise ValueError(
                f"tree[{row}, {t}] is {int(tree[row, t])}; a token's parent is an earlier one of its tree, from 0 to t - 1, or "
                "-1 for a root"
            )
    return tree


def check_contents(k: Tensor, lengths: Tensor, block_table: Tensor | None, new: int = 0) -> None:
    """Values of lengths, and of the table's entries for the keys held and ``new`` ones behind them."""
    if not arguments.readable(k) or not lengths.numel():
        return
    pages, page_size = k.shape[:2]
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    low, high = (int(x) for x in torch.aminmax(lengths))
    if low < 0 or high > capacity:
        raise ValueError(f"lengths must be from 0 to the {capacity} keys a sequence can hold, got {low} to {high}")
    if block_table is None:
        return
    used = torch.arange(block_table.shape[1], device=k.device) * page_size < (lengths + new)[:, None]
    bad = used & ((block_table < 0) | (block_table >= pages))
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        value = int(block_table[row, column])
        raise ValueError(f"block_table[{row}, {column}] is {value}, outside the pool of {pages} pages")
