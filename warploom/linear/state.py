"""What linear attention remembers of the keys and values it has seen."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.runtime import arguments


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
        sizes = {"batch": batch, "heads_kv": heads_kv, "E": E, "M": M}
        shape = [arguments.integer(name, size, 0, arguments.INT32[1]) for name, size in sizes.items()]
        device = arguments.device("device", device)
        s = torch.zeros(shape, dtype=arguments.float_dtype("dtype", dtype), device=device)
        return cls(s, s.new_zeros(shape[:3]))


torch.serialization.add_safe_globals([LinearState])
