"""Compile a forward variant into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from warploom.attention.ampere.config import ForwardConfig
from warploom.attention.ampere.forward import DTYPES, AmpereForward
from warploom.runtime.compile import compile_kernel, view


def compile_forward(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers, stack and shared bytes.

    The arguments are described by fakes: every size and stride is its own symbol, so that one module serves every view,
    and only what cp.async needs is required, 16-byte alignment and a contiguous last dimension.
    """
    variant = ForwardConfig(**config)
    tensors = [view(DTYPES[variant.dtype], 3) for _ in range(4)]
    lse = make_fake_tensor(
        Float32,
        tuple(cute.sym_int() for _ in range(3)),
        stride=(cute.sym_int64(), cute.sym_int64(), 1),
        assumed_align=4,
    )
    sink = make_fake_tensor(Float32, (cute.sym_int(),), stride=(1,), assumed_align=4) if variant.sink else None
    scalars = [Float32(1.0), Float32(1.0), Int32(0), Int32(0)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = [*tensors, lse, sink, *scalars, stream]
    return {**compile_kernel(AmpereForward(variant), arguments, name, library), "shared": variant.shared_bytes}
