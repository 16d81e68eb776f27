"""What a compiled kernel is given of a call's band: numbers that it can hold, and only the keys that some query sees."""

from __future__ import annotations

from warploom.runtime.arguments import keeps_nothing

# Bands reach at most this far, so that sums with row and column numbers stay in 32 bits.
FAR = 1 << 29


def seen(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> tuple[int, int]:
    """Keys [first, end) that some query's band holds."""
    if keeps_nothing(left, right):
        return 0, 0
    shift = seqlen_k - seqlen_q
    first = 0 if left is None else max(0, shift - left)
    end = seqlen_k if right is None else min(seqlen_k, seqlen_k + right)
    return first, end


def reach(distance: int | None) -> int:
    """One side of a band as a 32-bit number; 0 where a kernel has no such side."""
    return 0 if distance is None else max(-FAR, min(distance, FAR))
