"""Compile a decode variant into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from warploom.decode.hopper.config import SHARED_BYTES, DecodeConfig
from warploom.decode.hopper.split import HopperDecode
from warploom.kernels.cute.arguments import rows, stream, vector, view
from warploom.kernels.cute.basics import DTYPES
from warploom.runtime.compile import compile_kernel


def compile_decode(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers, stack and shared bytes."""
    variant = DecodeConfig(**config)
    tensors = [view(DTYPES[variant.dtype], 3) for _ in range(4)]
    table = None
    if variant.paged:
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1), assumed_align=4)
    scalars = [Float32(1.0), Float32(1.0), *[Int32(0)] * 7]
    arguments = [*tensors, rows(3), vector(Int32), table, vector(Float32, variant.sink), *scalars, stream()]
    shared = SHARED_BYTES  # less than a tile of it is left over
    return {**compile_kernel(HopperDecode(variant), arguments, name, library), "shared": shared}
