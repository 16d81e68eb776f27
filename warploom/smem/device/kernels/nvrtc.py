"""CUDA C++ compiled at run time by NVRTC and launched on torch's memory and stream, both through cuda.core."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HEADERS = ("cuda_fp16.h", "mma.h", "crt/mma.h")


def refusal() -> str | None:
    """Why no kernel can be compiled and run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    if torch.cuda.get_device_capability() < (8, 0):
        return "mma.m16n8k16 and cp.async need compute capability 8.0 or newer"
    try:
        import cuda.core
    except ImportError:
        return "cuda-core is not installed (pip install 'warploom[lab]')"
    if not hasattr(cuda.core, "Program"):
        return f"cuda-core {cuda.core.__version__} is too old, 1.0 is needed (pip install 'warploom[lab]')"
    return None


def headers() -> Path | None:
    """A folder with CUDA's headers: a toolkit's, NVIDIA's packages', or the ones that come with Triton."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(root) / "include" for root in roots if root]
    for package, inside in (("nvidia", "cu13/include"), ("triton", "backends/nvidia/include")):
        spec = find_spec(package)
        folders += [Path(place) / inside for place in (spec.submodule_search_locations if spec else None) or ()]
    return next((folder for folder in folders if all((folder / name).is_file() for name in _HEADERS)), None)


def compile_source(source: str, architecture: str) -> Any:
    """A cuda.core.ObjectCode of the source's kernels, for an architecture like sm_90a; no GPU is needed."""
    from cuda.core import Program, ProgramOptions

    found = headers()
    options = ProgramOptions(arch=architecture, std="c++17", include_path=[str(found)] if found else None)
    return Program(source, "c++", options).compile("cubin")


class Kernels:
    """The kernels of one source, compiled for the current device; C functions, found by their names."""

    def __init__(self, source: str) -> None:
        from cuda.core import Device

        major, minor = torch.cuda.get_device_capability()
        Device(torch.cuda.current_device()).set_current()
        self._code = compile_source(source, f"sm_{major}{minor}{'a' if major == 9 else ''}")
        self._kernels: dict[tuple[str, int], Any] = {}

    def launch(self, name: str, blocks: int, threads: int, arguments: Sequence[Tensor | int], shared_bytes: int = 0) -> None:
        """Launch on torch's current stream; numbers are passed as `int`, tensors as pointers."""
        from cuda.core import LEGACY_DEFAULT_STREAM, LaunchConfig, Stream, launch

        kernel = self._kernels.get((name, shared_bytes))
        if kernel is None:
            kernel = self._kernels[name, shared_bytes] = self._code.get_kernel(name)
            if shared_bytes:
                _allow(kernel, shared_bytes)
        handle = torch.cuda.current_stream().cuda_stream
        stream = Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM
        passed = [one.data_ptr() if isinstance(one, Tensor) else ctypes.c_int(one) for one in arguments]
        launch(stream, LaunchConfig(grid=blocks, block=threads, shmem_size=shared_bytes), kernel, *passed)


def _allow(kernel: Any, shared_bytes: int) -> None:
    """Let a kernel have more dynamic shared memory than the 48 KiB that every kernel may."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, torch.cuda.current_device())
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{shared_bytes} bytes of shared memory: {error.name}")
