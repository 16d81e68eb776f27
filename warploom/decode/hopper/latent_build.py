"""Compile a variant of latent caches into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from warploom.decode.hopper.latent_config import LatentConfig
from warploom.decode.hopper.latent_few import HopperLatentFew
from warploom.decode.hopper.latent_kernel import HopperLatent
from warploom.kernels.cute.arguments import rows, stream, vector, view
from warploom.kernels.cute.basics import DTYPES
from warploom.runtime.compile import compile_kernel


def compile_latent(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers and stack."""
    variant = LatentConfig(**config)
    dtype = DTYPES[variant.dtype]
    table = None
    if variant.paged:
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1), assumed_align=4)
    workspace = [make_fake_tensor(Float32, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in range(3)]
    tensors = [view(dtype, 2), view(dtype, 3), view(dtype, 2), rows(3), vector(Int32), table, *workspace]
    arguments = [*tensors, Float32(1.0), *[Int32(0)] * 10, stream()]
    kernel = HopperLatentFew(variant) if variant.few else HopperLatent(variant)
    return compile_kernel(kernel, arguments, name, library)
