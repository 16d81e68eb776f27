"""What linear attention remembers of the keys and values it has seen."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LinearState(NamedTuple):
    """Running sums over the keys seen so far; a pytree, never changed in place.

    Attributes:
        s: sum of outer products of mapped keys and values, (batch, heads_kv, E, M), fp32 (fp64 for fp64 inputs).
        z: sum of mapped keys, (batch, heads_kv, E), same dtype.
    """

    s: torch.Tensor
    z: torch.Tensor

    @classmethod
    def zeros(
        cls,
        batch: int,
        heads_kv: int,
        E: int,
        M: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> LinearState:
        """The state before the first key."""
        s = torch.zeros(batch, heads_kv, E, M, dtype=dtype, device=device)
        return cls(s, s.new_zeros(batch, heads_kv, E))
