"""The gated delta rule for Hopper (sm_90a) in the CuTe DSL, forward and backward: TMA, wgmma, warp specialisation.

One kernel prepares all chunks of 64 tokens at once: their weights, and the inverse of a triangular matrix. Another walks the
chunks of each value head with the state in registers (Yang et al., 2024, "Gated Delta Networks", arXiv 2412.06464, section
3.3). A backward pass prepares and walks again, walks back, and takes gradients chunk by chunk, in ranges of chunks within the
bytes of q, k, v and out. Modules are compiled ahead of time by `warploom build`, or once at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.delta.backend import DeltaBackend
from warploom.delta.hopper.plan import LONGEST, WIDEST, back_modules_of, modules_of, width
from warploom.runtime import dispatch, modules, traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from warploom.delta.problem import DeltaCall, StepArgs

NAME = "hopper"
_DTYPES = {torch.bfloat16: "bfloat16"}
_READS = (torch.float32, torch.bfloat16)  # as beta and decay


@traced.constant
def _module_refusal(dtype: str, width: int) -> str | None:
    """Why a module can be neither loaded nor built here."""
    return _found.refusal((dtype, width), lambda: [variant.spec for variant in modules_of(dtype, width)])


@traced.constant
def _back_refusal(dtype: str, width: int) -> str | None:
    """The same of a backward pass."""
    return _found.refusal((dtype, width, "back"), lambda: [variant.spec for variant in back_modules_of(dtype, width)])


_found = traced.Found()


def _kernels_refusal(call: DeltaCall) -> str | None:
    """Why no kernel is written for a call, or None."""
    if call.device != "cuda":
        return f"runs on CUDA tensors, not on {call.device}"
    if call.v.dtype not in _DTYPES:
        return f"takes bfloat16, not {call.v.dtype}"
    tokens, e, m = call.q.shape[1], call.q.shape[3], call.v.shape[3]
    for name, dim, most in (("E (the keys' dim)", e, WIDEST), ("M (the values' dim)", m, 256)):
        if not 8 <= dim <= most or dim % 8:
            return f"takes {name} from 8 to {most} in steps of 8, not {dim}"
    if not 2 <= tokens <= LONGEST:
        return f"takes from 2 to {LONGEST} tokens, not {tokens}"
    return None


class Hopper(DeltaBackend):
    """Calls of more than one token in bfloat16, of up to 128 dims of keys, with states, lengths and packed sequences."""

    name = NAME
    special = True

    def available(self) -> str | None:
        return traced.cannot_run()

    def wavers(self, problem: DeltaCall | None = None) -> bool:
        """Where it builds no modules, another process may; nothing else that it refuses changes."""
        return (problem is None or _kernels_refusal(problem) is None) and modules.cannot_build() is not None

    def supports(self, call: DeltaCall) -> str | None:
        refused = _kernels_refusal(call)
        return _module_refusal(_DTYPES[call.v.dtype], width(call.q.shape[3])) if refused is None else refused

    def forward(self, call: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor | None]:
        """Out and the last state; see `warploom.delta.backend`."""
        from warploom.delta.hopper.run import forward as run

        return run(call, return_state)

    def reads(self, dtype: torch.dtype) -> bool:
        """See `warploom.delta.backend`."""
        return dtype in _READS

    def bind(self, call: DeltaCall, return_state: bool = False) -> Callable[..., tuple[Tensor, Tensor | None] | None] | None:
        """What launches further calls of this kind; see `warploom.delta.backend`."""
        from warploom.delta.hopper.run import bind as run

        return run(call, return_state)

    def backward(
        self, call: DeltaCall, dout: Tensor, dstate: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Gradients, which read no result of the forward pass; from the next implementation where modules are missing."""
        if self._goes_back(call):
            from warploom.delta.hopper.run_back import backward as run

            return run(call, dout, dstate)
        return self._beside(call).backward(call, dout, dstate)

    def bind_backward(
        self, call: DeltaCall, dout: Tensor, dstate: Tensor | None
    ) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None] | None:
        if self._goes_back(call):
            from warploom.delta.hopper.run_back import bind_backward as run

            return run(call, dout, dstate)
        return self._beside(call).bind_backward(call, dout, dstate)

    def step(self, args: StepArgs, into: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._beside(args.call()).step(args, into)

    def _goes_back(self, call: DeltaCall) -> bool:
        return _back_refusal(_DTYPES[call.v.dtype], width(call.q.shape[3])) is None

    def _beside(self, call: DeltaCall) -> DeltaBackend:
        beside = dispatch.delegate(NAME, call, "delta")
        assert isinstance(beside, DeltaBackend)
        return beside


BACKEND = Hopper()
