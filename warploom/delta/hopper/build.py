"""Compile a kernel into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from warploom.delta.hopper.config import ITEM, PrepareConfig, WalkConfig
from warploom.delta.hopper.prepare import Prepare
from warploom.delta.hopper.walk import Walk
from warploom.kernels.cute.arguments import rows, stream, vector, view
from warploom.kernels.cute.basics import DTYPES
from warploom.runtime.compile import compile_kernel


def compile_prepare(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers and stack."""
    variant = PrepareConfig(**config)
    tensors = [view(DTYPES[variant.dtype], 3), view(DTYPES[variant.dtype], 3), numbers(), numbers()]
    arguments = [*tensors, vector(Int32), vector(Int32), prepared()]
    arguments += [Float32(1.0), Float32(1.0), Int32(0), Int32(0), stream()]
    return compile_kernel(Prepare(variant), arguments, name, library)


def compile_walk(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers and stack."""
    variant = WalkConfig(**config)
    tensors = [view(DTYPES[variant.dtype], 3) for _ in range(4)]
    arguments = [*tensors, prepared(), states(), states(), vector(Int32), vector(Int32), stream()]
    return compile_kernel(Walk(variant), arguments, name, library)


def states() -> Any:
    """A state for each sequence and value head, contiguous."""
    shape = tuple(cute.sym_int() for _ in range(4))
    return make_fake_tensor(Float32, shape, stride=(*(cute.sym_int64() for _ in range(3)), 1), assumed_align=4)


def numbers() -> Any:
    """An fp32 for each token and head, of any strides."""
    return rows(3, cute.sym_int64())


def prepared() -> Any:
    """What prepare leaves for the walk."""
    return make_fake_tensor(Float32, (cute.sym_int(), ITEM), stride=(ITEM, 1), assumed_align=16)
