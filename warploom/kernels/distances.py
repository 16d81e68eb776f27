"""How a table of distances is spread out in memory, which the host allocates and kernels fill."""

from __future__ import annotations

from typing import Any

PAD = 256  # copies of an end: more than the queries of a warpgroup and the keys of a tile together
HEADER = 8  # floats in front of a head's values


def copy_length(entries: Any) -> Any:
    """Of one of a head's two copies: whole 16 bytes."""
    return (entries + 2 * PAD + 3) // 4 * 4


def head_length(entries: Any) -> Any:
    """Floats of a head."""
    return HEADER + 2 * copy_length(entries)
