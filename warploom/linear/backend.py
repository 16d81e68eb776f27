"""What a backend of linear attention does beside the others of `warploom.runtime.backend`."""

from __future__ import annotations

from torch import Tensor

from warploom.linear.problem import StepArgs
from warploom.runtime.backend import Backend


class LinearBackend(Backend):
    """One way to compute linear attention. Its problem and its arguments are one: a `LinearCall`.

    ``forward(call, return_state)`` returns out (batch, seqlen_q, heads_q, M), norm (batch, heads_q, seqlen_q) or None without
    normalize, and the last state's s and z or None; ``backward(call, dout, norm, ds, dz)`` dq, dk, dv, ds and dz of the
    initial state or None, and the decay's gradient, None unless ``call.decay_grad``.
    """

    def step(self, args: StepArgs) -> tuple[Tensor, Tensor, Tensor]:
        """Out (batch, heads_q, M) and the new s and z of one token a sequence."""
        refused = f"{self.name} takes no single tokens"
        raise NotImplementedError(refused)
