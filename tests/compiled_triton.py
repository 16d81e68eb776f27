"""Launches of Triton kernels that do not happen, and their binaries for sm_90, made without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tools.machine_code import faults, listing, tool
from warploom.runtime.triton_launch import settings

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv"}
POINTERS |= {torch.uint8: "*u8", torch.int32: "*i32"}


class Recorded(NamedTuple):
    """A launch's kernel, constants and arguments."""

    kernel: Any
    constants: dict[str, Any]
    arguments: tuple[Any, ...]


class Resources(NamedTuple):
    """What one program of a binary takes."""

    registers: int  # a thread
    stack: int  # bytes a thread, where spilled registers go
    shared: int  # bytes
    wgmma: int  # instructions in the PTX
    faults: list[str]


def recorder(found: list[Recorded]) -> type:
    """What stands for `Launch` and adds to ``found`` what would be launched."""

    class Recorder:
        def __init__(self, kernel: Any, constants: dict[str, Any], direct: bool) -> None:
            self.kernel, self.constants = kernel, constants

        def __call__(self, grid: tuple[int, int], *arguments: Any) -> None:
            found.append(Recorded(self.kernel, self.constants, arguments))

        def raw(self) -> None:
            return None

        def kept(self, grid: tuple[int, int], rest: tuple[Any, ...]) -> Any:
            return lambda *first: self(grid, *first, *rest)

    return Recorder


def compiled(recorded: Recorded) -> Any:
    """The binary of a launch whose tensors lie at multiples of 16 bytes."""
    kernel, constants, arguments = recorded
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    given = dict(zip((p.name for p in kernel.params if not p.is_constexpr), arguments, strict=True))
    for i, p in enumerate(kernel.params):
        value = constants[p.name] if p.is_constexpr else given[p.name]
        if p.is_constexpr or value is None:
            signature[p.name], constexprs[p.name] = "constexpr", value
            continue
        tensor = isinstance(value, torch.Tensor)
        number = p.annotation_type or ("fp32" if isinstance(value, float) else "i32")
        signature[p.name] = POINTERS[value.dtype] if tensor else number
        if not p.do_not_specialize and (tensor or (isinstance(value, int) and value % 16 == 0)):
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in constants.items() if name not in signature}
    with settings():
        source = ASTSource(kernel, signature, constexprs, attributes)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(binary: Any) -> Resources:
    """Of a binary, as its tools tell."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary.asm["cubin"])
        usage = subprocess.run([tool("cuobjdump"), "-res-usage", str(file)], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    wrong = faults(binary.asm["ttgir"], binary.asm["ptx"], listing(binary.asm["cubin"]))
    return Resources(registers, stack, binary.metadata.shared, binary.asm["ptx"].count("wgmma.mma_async"), wrong)
