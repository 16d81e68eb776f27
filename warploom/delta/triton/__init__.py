"""The gated delta rule on the GPU in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warploom.delta.backend import DeltaBackend
from warploom.runtime.triton_backend import TritonBackend

if TYPE_CHECKING:
    from warploom.delta.problem import DeltaCall


class Triton(TritonBackend, DeltaBackend):
    """No calls so far."""

    def supports(self, call: DeltaCall) -> str | None:
        return self.tensors_refusal(call.device, call.v.dtype) or "has no kernels of the gated delta rule yet"

    def forward(self, call: DeltaCall, *options: Any) -> Any:
        raise NotImplementedError(self.supports(call))


BACKEND = Triton()
