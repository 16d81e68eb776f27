"""Compile a variant of the FP8 forward into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from warploom.attention.hopper.fp8_config import Fp8ForwardConfig
from warploom.attention.hopper.fp8_forward import Fp8Forward
from warploom.kernels.cute.arguments import column_mask, rows, stream, vector, view
from warploom.kernels.cute.basics import DTYPES
from warploom.runtime.compile import compile_kernel


def compile_fp8(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers, stack and shared bytes."""
    variant = Fp8ForwardConfig(**config)
    modes = 2 if variant.varlen else 3  # besides head_dim
    q, k, v = _bytes(modes, modes), _bytes(modes, modes), _bytes(modes, modes - 2)
    scales = [rows(modes, last=cute.sym_int64()) for _ in range(3)]
    counted = variant.varlen or variant.columns
    packed = [vector(Int32, present) for present in (variant.varlen, variant.varlen, variant.used, counted)]
    parts = rows(3, align=16) if variant.split else None  # in place of it the lse where nothing is split
    scalars = [Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(0), Int32(1)]
    arguments = [
        *(q, k, v, view(DTYPES[variant.dtype], modes), rows(modes), *scales, vector(Float32, variant.sink)),
        *(*packed, parts, column_mask() if variant.columns else None, *scalars, stream()),
    ]
    return {**compile_kernel(Fp8Forward(variant), arguments, name, library), "shared": variant.shared_bytes}


def _bytes(modes: int, contiguous: int) -> Any:
    """A tensor of bytes, of ``modes`` dimensions and head_dim, one of which is contiguous, aligned to 16 bytes."""
    strides = [1 if i == contiguous else cute.sym_int64(divisibility=16) for i in range(modes + 1)]
    shape = (*(cute.sym_int() for _ in range(modes)), cute.sym_int(divisibility=16))
    return make_fake_tensor(cutlass.Uint8, shape, stride=tuple(strides), assumed_align=16)
