"""The keys and values of each sequence of a cache, for implementations that walk sequences on the host."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from warploom.decode.problem import DecodeArgs


def keys_and_values(args: DecodeArgs) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each sequence k (length, heads_kv, head_dim) and v: views of a contiguous cache, copies of pages.

    Lengths and page numbers out of range are clamped, so that bad contents never read out of bounds.
    """
    page_size = args.k.shape[1]
    for b, length in enumerate(args.lengths.clamp(0, args.capacity).tolist()):
        if args.block_table is None:
            yield args.k[b, :length], args.v[b, :length]
        elif args.k.shape[0] == 0:
            yield args.k.new_empty((0, *args.k.shape[2:])), args.v.new_empty((0, *args.v.shape[2:]))
        else:
            used = args.block_table[b, : -(-length // page_size)].clamp(0, args.k.shape[0] - 1).long()
            yield args.k[used].flatten(0, 1)[:length], args.v[used].flatten(0, 1)[:length]
