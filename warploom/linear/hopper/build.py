"""Compile a walk into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from warploom.kernels.cute.basics import DTYPES
from warploom.linear.hopper.config import WalkConfig
from warploom.linear.hopper.walk import Walk
from warploom.runtime.compile import compile_kernel, view


def compile_walk(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers, stack and shared bytes."""
    variant = WalkConfig(**config)
    tensors = [view(DTYPES[variant.dtype], 3) for _ in range(3)]
    tensors.append(view(Float32 if variant.wide else DTYPES[variant.dtype], 3))
    for present in (variant.weighted, variant.biased):
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        rows = make_fake_tensor(Float32, tuple(cute.sym_int() for _ in range(3)), stride=strides, assumed_align=4)
        tensors.append(rows if present else None)
    arguments = [*tensors, Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True)]
    return {**compile_kernel(Walk(variant), arguments, name, library), "shared": variant.shared_bytes}
