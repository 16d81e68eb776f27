"""Packed (varlen) and paged calls cut into dense ones, for implementations that walk sequences on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from warploom.attention.problem import AttentionArgs


@dataclass(frozen=True)
class Sequence:
    """One sequence of a packed call as a dense call of batch 1, with where it lies in the packed tensors."""

    args: AttentionArgs
    queries: slice
    keys: slice | None  # None: the keys were gathered from pages
    pages: Tensor | None  # int64 page numbers, for paged calls
    keys_used: int


def sequences(args: AttentionArgs) -> Iterator[Sequence]:
    """The sequences of a packed call in order; reads lengths on the host.

    Out-of-range contents are clamped, so that bad lengths never read out of bounds.
    """
    assert args.cu_seqlens_q is not None
    starts_q = _clamped(args.cu_seqlens_q, args.q.shape[0])
    used = None if args.seqused_k is None else args.seqused_k.tolist()
    if args.block_table is None:
        cu_k = args.cu_seqlens_q if args.cu_seqlens_k is None else args.cu_seqlens_k
        starts_k = _clamped(cu_k, args.k.shape[0])
    for n in range(len(starts_q) - 1):
        queries = slice(starts_q[n], starts_q[n + 1])
        if args.block_table is not None:
            page_size = args.k.shape[1]
            assert used is not None
            length = max(0, min(used[n], args.block_table.shape[1] * page_size))
            count = -(-length // page_size)
            pages = args.block_table[n, :count].clamp(0, args.k.shape[0] - 1).long()
            k, v = (t[pages].flatten(0, 1)[:length] for t in (args.k, args.v))
            keys, columns = None, slice(0, length)
        else:
            start, stop = starts_k[n], starts_k[n + 1]
            length = stop - start if used is None else max(0, min(used[n], stop - start))
            pages, keys = None, slice(start, start + length)
            k, v, columns = args.k[keys], args.v[keys], keys
        vectors: dict[str, Any] = {
            name: None if (vector := getattr(args, name)) is None else vector[..., columns]
            for name in ("lts", "lte", "uts", "ute")
        }
        dense = args._replace(
            q=args.q[queries][None],
            k=k[None],
            v=v[None],
            bounds=None,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            seqused_k=None,
            block_table=None,
            **vectors,
        )
        yield Sequence(dense, queries, keys, pages, length)


def _clamped(cu: Tensor, total: int) -> list[int]:
    result, last = [], 0
    for value in cu.tolist():
        last = min(max(value, last), total)
        result.append(last)
    return result
