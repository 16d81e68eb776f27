"""How results leave registers. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


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
