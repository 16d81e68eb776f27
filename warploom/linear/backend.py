"""What a backend of linear attention does beside the others of `warploom.runtime.backend`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from warploom.runtime.backend import Backend


class LinearBackend(Backend):
    """One way to compute linear attention. Its problem and its arguments are one: a `LinearCall`.

    ``forward(call, return_state)`` returns out (batch, seqlen_q, heads_q, M), norm (batch, heads_q, seqlen_q) or None without
    normalize, and the last state's s and z or None; ``backward(call, dout, norm, ds, dz)`` dq, dk, dv, and ds and dz of the
    initial state or None.
    """

    def step(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """One token a sequence: out (batch, heads_q, M) and the new s and z.

        ``tensors``: q (batch, heads_q, E), k, v (batch, heads_kv, ·), s, z. ``options``: map_q, map_k, normalize, eps, scale.
        """
        refused = f"{self.name} takes no single tokens"
        raise NotImplementedError(refused)
