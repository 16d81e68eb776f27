"""Compile a forward variant into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from warploom.attention.ampere.config import ForwardConfig
from warploom.attention.ampere.forward import DTYPES, AmpereForward
from warploom.runtime.cubin import resources
from warploom.runtime.link import link


def compile_forward(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers, stack and shared bytes.

    The arguments are described by fakes: every size and stride is its own symbol, so that one module serves every view,
    and only what cp.async needs is required, 16-byte alignment and a contiguous last dimension.
    """
    variant = ForwardConfig(**config)
    tensors = [_view(DTYPES[variant.dtype]) for _ in range(4)]
    lse = make_fake_tensor(
        Float32,
        tuple(cute.sym_int() for _ in range(3)),
        stride=(cute.sym_int64(), cute.sym_int64(), 1),
        assumed_align=4,
    )
    sink = make_fake_tensor(Float32, (cute.sym_int(),), stride=(1,), assumed_align=4) if variant.sink else None
    scalars = [Float32(1.0), Float32(1.0), Int32(0), Int32(0)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --keep-cubin --dump-dir={folder}"
        compiled = cute.compile(AmpereForward(variant), *tensors, lse, sink, *scalars, stream, options=options)
        cubins = sorted(Path(folder).glob("*.cubin"))
        found = resources(cubins[0].read_bytes())[0]
        kept = os.environ.get("WARPLOOM_KEEP_CUBIN")
        if kept:
            shutil.copy(cubins[0], Path(kept) / f"{name}.cubin")
        objects = Path(folder) / f"{name}.o"
        compiled.export_to_c(str(objects), function_name=name)
        link(objects, library)
    return {"registers": found.registers, "stack": found.stack, "shared": variant.shared_bytes}


def _view(dtype: Any) -> Any:
    strides = [cute.sym_int64(divisibility=8) for _ in range(3)]
    shape = (*(cute.sym_int() for _ in range(3)), cute.sym_int(divisibility=8))
    return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=16)
