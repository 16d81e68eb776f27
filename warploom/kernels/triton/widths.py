"""Widths of the tiles that hold rows of q and k, and rows of v."""

from __future__ import annotations

from functools import cache

# Bytes of a row from which on shared memory is swizzled alike whatever the row's width.
_WIDEST_SWIZZLE = 128


@cache
def tile_widths(head_dim: int, head_dim_v: int, itemsize: int) -> tuple[int, int]:
    """Elements of a tile's row for head_dim and for head_dim_v: powers of two, at least a tensor core's depth of 16.

    Rows of up to 128 bytes are swizzled by their width, and the ptxas of Triton 3.6 (12.8.93) writes wrong matrix
    descriptors where two tiles swizzled differently take turns in one place of shared memory (docs/lab-notes/compiler.md).
    So the narrower row is filled up until both are of one width, or of 128 bytes and more. Products of fp32 read values
    transposed, in rows of 32 keys and so of 128 bytes: all others have as many.
    """
    row = _WIDEST_SWIZZLE // itemsize
    least = row if itemsize == 4 else 16
    width, width_v = (max(least, 1 << (dim - 1).bit_length()) for dim in (head_dim, head_dim_v))
    return max(width, min(width_v, row)), max(width_v, min(width, row))
