"""What the Triton backends of all families say of machines, devices and dtypes."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from warploom.runtime import machine
from warploom.runtime.backend import Backend

# Read here once: torch.compile does not trace the lookup.
_HAS_TRITON = find_spec("triton") is not None


class TritonBackend(Backend):
    """A backend of Triton kernels: on a GPU, or slowly on the CPU under TRITON_INTERPRET=1."""

    name = "triton"

    def available(self) -> str | None:
        elsewhere = machine.assumed
        if not _HAS_TRITON and (elsewhere is None or not elsewhere.extras):
            return "the triton package is not installed (pip install 'warploom[triton]')"
        if elsewhere is None and not _interpreting() and not torch.cuda.is_available():
            return "no CUDA device is visible"
        return None

    @staticmethod
    def tensors_refusal(device: str, dtype: torch.dtype) -> str | None:
        """Why it takes no tensors of this dtype on this type of device."""
        if device != "cuda" and not (device == "cpu" and _interpreting()):
            return f"runs on CUDA tensors, not on {device}"
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"takes float16, bfloat16 or float32, not {dtype}"
        if dtype == torch.bfloat16 and device == "cpu":
            return "Triton's interpreter multiplies bfloat16 as integers"
        return None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
