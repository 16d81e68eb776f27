"""What a backend of linear attention does beside the others of `warploom.runtime.backend`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from warploom.linear.problem import StepArgs
from warploom.runtime.backend import Backend


class LinearBackend(Backend):
    """One way to compute linear attention. Its problem and its arguments are one: a `LinearCall`.

    ``forward(call, return_state)`` returns out (batch, seqlen_q, heads_q, M), norm (batch, heads_q, seqlen_q) or None without
    normalize, and the last state's s and z or None; ``backward(call, dout, norm, ds, dz)`` dq, dk, dv, ds and dz of the
    initial state or None, and the decay's gradient, None unless ``call.decay_grad``.

    What ``bind(call, return_state)`` makes takes q, k, v, s, z, decay, lengths and cu_seqlens of further calls, perhaps without
    a batch of 1, and returns what ``forward`` does; None where it does not take these addresses. What ``bind_backward(call,
    dout, norm, ds, dz)`` makes takes dout, norm, ds and dz before those.
    """

    def step(self, args: StepArgs) -> tuple[Tensor, Tensor, Tensor]:
        """Out (batch, heads_q, M) and the new s and z of one token a sequence."""
        refused = f"{self.name} takes no single tokens"
        raise NotImplementedError(refused)

    def bind_step(self, args: StepArgs) -> Callable[..., tuple[Tensor, Tensor, Tensor] | None] | None:
        """What launches further steps by q, k, v, s, z and decay, as ``bind`` does calls; None: nothing quicker."""
        return None
