"""Which key tiles a causal mask or a window leaves to query rows. Imports the CuTe DSL.

``config`` says whether there is a limit on the ``right`` (causal: 0) and on the ``left``, and a key tile's size, ``tile_n``;
``shift`` is by how much a query's position is past its row.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def key_tiles(config, row, past, seqlen_q, seqlen_k, shift, left, right):
    """First and past-the-end key tile that some query of [row, past) sees."""
    first = Int32(0)
    end = cute.ceil_div(seqlen_k, config.tile_n)
    if const_expr(config.right):
        last_row = cutlass.min(past, seqlen_q) - 1
        end = cutlass.min(end, cute.ceil_div(cutlass.max(last_row + shift + right + 1, 0), config.tile_n))
    if const_expr(config.left):
        first = cutlass.max(row + shift - left, 0) // config.tile_n
    return first, end


@cute.jit
def whole_tiles(config, row, past, first, seqlen_q, seqlen_k, shift, left, right):
    """Key tiles [first, end), from ``first`` on, that need no mask, as all queries of [row, past) see them whole."""
    whole_first, whole_end = first, seqlen_k // config.tile_n
    if const_expr(config.right):
        whole_end = cutlass.min(whole_end, cutlass.max(row + shift + right + 1, 0) // config.tile_n)
    if const_expr(config.left):
        last_row = cutlass.min(past, seqlen_q) - 1
        whole_first = cutlass.max(cute.ceil_div(cutlass.max(last_row + shift - left, 0), config.tile_n), first)
    return whole_first, whole_end
