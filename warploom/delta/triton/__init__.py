"""The gated delta rule on the GPU in Triton: in chunks of matrix products, with deterministic gradients.

What needs no state is prepared for all chunks at once, then each value head's state walks its chunks in slices of value
columns (Yang et al., 2024, "Gated Delta Networks", arXiv 2412.06464, section 3.3). The backward pass walks again from states
kept now and then, range by range, within the bytes of q, k, v and out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warploom.delta.backend import DeltaBackend
from warploom.runtime.triton_backend import TritonBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from warploom.delta.problem import DeltaCall, StepArgs


class Triton(TritonBackend, DeltaBackend):
    """Calls of up to 256 dims a head, with states, lengths and packed sequences."""

    def supports(self, call: DeltaCall) -> str | None:
        refused = self.tensors_refusal(call.device, call.v.dtype)
        if refused is not None:
            return refused
        for name, dim in (("E (the keys' dim)", call.q.shape[3]), ("M (the values' dim)", call.v.shape[3])):
            if not 1 <= dim <= 256:
                return f"takes {name} up to 256, not {dim}"
        return None

    def forward(self, call: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor | None]:
        """Out and the last state; see `warploom.delta.backend`."""
        from warploom.delta.triton.run import forward as run

        return run(call, return_state)

    def bind(self, call: DeltaCall, return_state: bool = False) -> Callable[..., tuple[Tensor, Tensor | None] | None] | None:
        """What launches further calls of this kind; see `warploom.delta.backend`."""
        from warploom.delta.triton.run import bind as run

        return run(call, return_state)

    def backward(
        self, call: DeltaCall, dout: Tensor, dstate: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """dq, dk, dv, dbeta, ddecay and the initial state's gradient."""
        from warploom.delta.triton.run import backward as run

        return run(call, dout, dstate)

    def bind_backward(
        self, call: DeltaCall, dout: Tensor, dstate: Tensor | None
    ) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None] | None:
        from warploom.delta.triton.run import bind_backward as run

        return run(call, dout, dstate)

    def step(self, args: StepArgs, into: Tensor | None) -> tuple[Tensor, Tensor]:
        from warploom.delta.triton.run import step as run

        return run(args, into)

    def bind_step(self, args: StepArgs, into: Tensor | None) -> Callable[..., tuple[Tensor, Tensor] | None] | None:
        from warploom.delta.triton.run import bind_step as run

        return run(args, into)


BACKEND = Triton()
