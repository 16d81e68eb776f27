"""What a backend of the gated delta rule does beside the others of `warploom.runtime.backend`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warploom.delta.problem import StepArgs
from warploom.runtime.backend import Backend


class DeltaBackend(Backend):
    """One way to compute the gated delta rule. Its problem and its arguments are one: a `DeltaCall`.

    ``forward(call, return_state)`` returns out (batch, seqlen, heads_v, M) in v's dtype and the last state
    (sequences, heads_v, E, M) in the accumulator's, or None where it is not asked for.

    ``backward(call, dout, dstate)`` takes the gradients of out (v's dtype) and of the last state (None: there is none) and
    returns dq, dk, dv in their tensors' dtypes, dbeta, and ddecay and dstate of the initial state, None where the call has
    none, in the accumulator's. It reads no result of the forward pass.

    What ``bind(call, return_state)`` makes takes q, k, v, beta, decay, state, lengths and cu_seqlens of further calls, perhaps
    without a batch of 1, and returns what ``forward`` does; None where it does not take these addresses. Its call's beta and
    decay may have any dtypes that the backend ``reads``. What ``bind_backward(call, dout, dstate)`` makes takes dout and dstate
    before those.
    """

    def reads(self, dtype: torch.dtype) -> bool:
        """Whether bound launches read a beta or decay of this dtype, where it is not the accumulator's."""
        return False

    def step(self, args: StepArgs, into: Tensor | None) -> tuple[Tensor, Tensor]:
        """Out (batch, heads_v, M) and the new state of one token a sequence.

        Args:
            into: ``args.state`` itself, over which the new state is written; None: it is a new tensor.
        """
        refused = f"{self.name} takes no single tokens"
        raise NotImplementedError(refused)

    def bind_step(self, args: StepArgs, into: Tensor | None) -> Callable[..., tuple[Tensor, Tensor] | None] | None:
        """What launches further steps by q, k, v, beta, the state and decay, as ``bind`` does calls; None: nothing quicker."""
        return None
