"""Compile a variant of column sums into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cutlass import Float32, Int32

from warploom.attention.hopper.sums import ColumnSums
from warploom.attention.hopper.sums_config import SumsConfig
from warploom.kernels.cute.arguments import rows, stream, view
from warploom.kernels.cute.basics import DTYPES
from warploom.runtime.compile import compile_kernel


def compile_sums(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers, stack and shared bytes."""
    variant = SumsConfig(**config)
    tensors = [*(view(DTYPES[variant.dtype], 3) for _ in range(2)), rows(3), rows(3)]
    arguments = [*tensors, Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), stream()]
    return {**compile_kernel(ColumnSums(variant), arguments, name, library), "shared": variant.shared_bytes}
