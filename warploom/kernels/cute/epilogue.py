"""How rows of an accumulator leave registers, 16 bytes a lane.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from warploom.kernels.cute.instructions import pack16


@cute.jit
def transpose_quad(words: list[Int32], lane: Int32) -> list[Int32]:
    """Lane t of each quad holds word t of four chunks; it returns with the four words of chunk t."""
    words = list(words)
    for bit in (1, 2):
        odd = lane // bit % 2 == 1
        for low in [i for i in range(4) if not i & bit]:
            high = low | bit
            given = words[low] if odd else words[high]
            taken = cute.arch.shuffle_sync_bfly(given, offset=bit)
            words[low] = taken if odd else words[low]
            words[high] = words[high] if odd else taken
    return words


def quad_words(pairs: list[Any], factor: Any, dtype: Any, lane: Any) -> list[Int32]:
    """Four neighbouring pairs of a row that a quad holds, times ``factor``, in a 16-bit dtype: this lane's 8 columns of 32.

    Pair i is of columns 8 i + 2 (lane % 4); None stands for zeros.
    """
    packed = [Int32(0) if pair is None else pack16(pair[0] * factor, pair[1] * factor, dtype) for pair in pairs]
    return transpose_quad(packed, lane)


def store_words(target: Any, words: list[Any], offset: Any = 0) -> None:
    """Eight 16-bit elements, four words, by one store, ``offset`` elements past ``target``; both are multiples of eight."""
    four = cute.make_rmem_tensor(4, Int32)
    for i in range(4):
        four[i] = words[i]
    into = cute.make_tensor((target + offset).align(16), cute.make_layout(8))
    cute.autovec_copy(four, cute.recast_tensor(into, Int32))
