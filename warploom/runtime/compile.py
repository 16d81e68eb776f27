"""Compile a kernel into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import cutlass.cute as cute

from warploom.runtime.cubin import resources
from warploom.runtime.link import link


def compile_kernel(kernel: Any, arguments: list[Any], name: str, library: Path) -> dict[str, int]:
    """Write ``library``, which exports ``name``; returns registers and stack, the largest of the kernels that it launches.

    WARPLOOM_KEEP_CUBIN names a folder that gets the GPU code too.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = os.environ.get("WARPLOOM_KEEP_CUBIN")
        # Relative to the worker's folder: the compiler reads this path as options, where a space or a quote would end it.
        options = f"--enable-tvm-ffi --keep-cubin --dump-dir={os.path.relpath(folder)}" + (" --keep-ptx" if kept else "")
        compiled = cute.compile(kernel, *arguments, options=options)
        cubins = sorted(Path(folder).glob("*.cubin"))
        found = [kernel for cubin in cubins for kernel in resources(cubin.read_bytes())]
        if kept:
            for suffix in ("cubin", "ptx"):
                shutil.copy(min(Path(folder).glob(f"*.{suffix}")), Path(kept) / f"{name}.{suffix}")
        objects = Path(folder) / f"{name}.o"
        compiled.export_to_c(str(objects), function_name=name)
        link(objects, library)
    return {"registers": max(f.registers for f in found), "stack": max(f.stack for f in found)}
