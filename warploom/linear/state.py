"""What linear attention remembers of the keys and values it has seen."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LinearState(NamedTuple):
    """Running sums over the keys seen so far; a pytree, never changed in place.

    Attributes:
        s: sum of outer products of mapped keys and values, (batch, heads, E, M), fp32 (fp64 for fp64 inputs).
        z: sum of mapped keys, (batch, heads, E), same dtype.
    """

    s: torch.Tensor
    z: torch.Tensor
