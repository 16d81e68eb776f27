"""The keys and values of each sequence of a cache, for implementations that walk sequences on the host."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from warploom.decode.problem import DecodeArgs


def keys_and_values(args: DecodeArgs) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each sequence k (length, heads_kv, head_dim) and v: views of a contiguous cache, copies of pages, fp32 of FP8.

    Lengths and page numbers out of range are clamped, so that bad contents never read out of bounds.
    """
    page_size = args.k.shape[1]
    for b, length in enumerate(args.lengths.clamp(0, args.capacity).tolist()):
        used = None
        if args.block_table is not None:
            used = args.block_table[b, : -(-length // page_size) if args.k.shape[0] else 0].clamp(0, args.k.shape[0] - 1).long()
        k, v = (_own(t, b, used, length) for t in (args.k, args.v))
        if args.k_scale is not None and args.v_scale is not None:
            k_scale, v_scale = (t if t.ndim == 1 else _own(t, b, used, length) for t in (args.k_scale, args.v_scale))
            k, v = k.float() * k_scale[..., None], v.float() * v_scale[..., None]
        yield k, v


def _own(t: Tensor, b: int, used: Tensor | None, length: int) -> Tensor:
    """Of a cache's tensor the rows of sequence b, which lie in the pages ``used`` of it, if it has pages."""
    return t[b, :length] if used is None else t[used].flatten(0, 1)[:length]
