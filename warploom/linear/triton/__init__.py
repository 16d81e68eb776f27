"""Linear attention on the GPU in Triton: every tensor read once where there are heads enough, deterministic gradients.

One pass with the state in registers where sequences × heads fill the device; else sequences are cut into segments whose
states are summed first (the two regimes of Katharopoulos et al., 2020, arXiv 2006.16236, in chunks of matrix products).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warploom.linear.backend import LinearBackend
from warploom.runtime.triton_backend import TritonBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from warploom.linear.problem import LinearCall, StepArgs
    from warploom.linear.triton.run import Gradients, Results


class Triton(TritonBackend, LinearBackend):
    """Calls of up to 256 dims a head, with states, lengths and packed sequences."""

    def supports(self, call: LinearCall) -> str | None:
        dtype = call.v.dtype
        refused = self.tensors_refusal(call.device, dtype)
        if refused is not None:
            return refused
        if any(t.dtype != dtype for t in (call.q, call.k)):
            return f"takes q, k and v of one dtype, not {call.q.dtype}, {call.k.dtype} and {dtype}"
        for name, dim in (("E (the keys' dim)", call.q.shape[3]), ("M (the values' dim)", call.v.shape[3])):
            if not 1 <= dim <= 256:
                return f"takes {name} up to 256, not {dim}"
        return None

    def forward(self, call: LinearCall, return_state: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Out, norm, s and z; see `warploom.linear.problem`."""
        from warploom.linear.triton.run import forward as run

        return run(call, return_state)

    def bind(self, call: LinearCall, return_state: bool = False) -> Callable[..., Results | None] | None:
        """What launches further calls of this kind; see `warploom.linear.backend`."""
        from warploom.linear.triton.run import bind as run

        return run(call, return_state)

    def backward(
        self, call: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """dq, dk, dv, ds0 and dz0 where the call has a state, and the decay's gradient where it asks for one."""
        from warploom.linear.triton.run import backward as run

        return run(call, dout, norm, ds, dz)

    def bind_backward(
        self, call: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None
    ) -> Callable[..., Gradients | None] | None:
        from warploom.linear.triton.run import bind_backward as run

        return run(call, dout, norm, ds, dz)

    def step(self, args: StepArgs) -> tuple[Tensor, Tensor, Tensor]:
        from warploom.linear.triton.run import step as run

        return run(args)

    def bind_step(self, args: StepArgs) -> Callable[..., tuple[Tensor, Tensor, Tensor] | None] | None:
        from warploom.linear.triton.run import bind_step as run

        return run(args)


BACKEND = Triton()
