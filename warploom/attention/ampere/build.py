"""Compile a forward variant into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cutlass import Float32, Int32

from warploom.attention.ampere.config import ForwardConfig
from warploom.attention.ampere.forward import AmpereForward
from warploom.kernels.cute.arguments import rows, stream, vector, view
from warploom.kernels.cute.basics import DTYPES
from warploom.runtime.compile import compile_kernel


def compile_forward(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers, stack and shared bytes.

    The arguments are described by fakes: every size and stride is its own symbol, so that one module serves every view,
    and only what cp.async needs is required, 16-byte alignment and a contiguous last dimension.
    """
    variant = ForwardConfig(**config)
    tensors = [view(DTYPES[variant.dtype], 3) for _ in range(4)]
    scalars = [Float32(1.0), Float32(1.0), Int32(0), Int32(0)]
    arguments = [*tensors, rows(3), vector(Float32, variant.sink), *scalars, stream()]
    return {**compile_kernel(AmpereForward(variant), arguments, name, library), "shared": variant.shared_bytes}
