"""Launches of the gated delta rule's Triton kernels that do not happen, and their binaries for sm_90, made without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tools.machine_code import faults, listing, tool
from warploom.delta.problem import DeltaCall, StepArgs
from warploom.delta.triton import run

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}


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


def launches(
    e: int, m: int, dtype: torch.dtype = torch.bfloat16, group: int = 1, state: bool = False, packed: bool = False
) -> list[Recorded]:
    """Of a forward pass, a backward pass and a step."""
    found: list[Recorded] = []

    class Recorder:
        def __init__(self, kernel: Any, constants: dict[str, Any], direct: bool) -> None:
            self.kernel, self.constants = kernel, constants

        def __call__(self, grid: tuple[int, int], *arguments: Any) -> None:
            found.append(Recorded(self.kernel, self.constants, arguments))

        def raw(self) -> None:
            return None

        def kept(self, grid: tuple[int, int], rest: tuple[Any, ...]) -> Any:
            return lambda *first: self(grid, *first, *rest)

    cached = [f for f in vars(run).values() if hasattr(f, "cache_clear")]
    for f in cached:
        f.cache_clear()
    tokens, heads = 1024, 2
    q, k = (torch.zeros(1, tokens, heads, e, dtype=dtype) for _ in range(2))
    v = torch.zeros(1, tokens, heads * group, m, dtype=dtype)
    beta, decay = (torch.zeros(1, tokens, heads * group) for _ in range(2))
    s = torch.zeros(1, heads * group, e, m)
    cu = torch.tensor([0, tokens], dtype=torch.int32) if packed else None
    call = DeltaCall(q, k, v, beta, decay, 1.0, True, 1e-6, s if state else None, None, cu)
    one = (t[:, 0] for t in (q, k, v, beta))
    try:
        with patch.object(run, "Launch", Recorder):
            run.forward(call, state)
            run.backward(call, v, s if state else None)
            run.step(StepArgs(*one, s, decay[:, 0], 1.0, True, 1e-6, "triton"), None)
    finally:
        for f in cached:
            f.cache_clear()
    return found


def compiled(recorded: Recorded) -> Any:
    """The binary."""
    kernel, constants, arguments = recorded
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    given = dict(zip((p.name for p in kernel.params if not p.is_constexpr), arguments, strict=True))
    for i, p in enumerate(kernel.params):
        value = constants[p.name] if p.is_constexpr else given[p.name]
        if p.is_constexpr or value is None:
            signature[p.name], constexprs[p.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[p.name] = POINTERS[value.dtype]
            if not p.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[p.name] = "fp32" if isinstance(value, float) else "i32"
    options = {name: value for name, value in constants.items() if name not in signature}
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
