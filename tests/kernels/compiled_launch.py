"""A Triton kernel as a launch compiles it, offline for sm_90."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from warploom.runtime.triton_launch import settings

POINTERS = {
    **{torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv"},
    **{torch.uint8: "*u8", torch.int32: "*i32"},
}


class Recorder:
    """In place of `Launch`: what would be launched, as kernel, constants and arguments."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, dict[str, Any], tuple[Any, ...]]] = []

    def __call__(self, kernel: Any, constants: dict[str, Any], direct: bool) -> Any:
        return lambda grid, *arguments: self.found.append((kernel, constants, arguments))


def binary(kernel: Any, constants: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
    """The binary of a launch whose pointers lie at multiples of 16 bytes."""
    values = dict(zip((p.name for p in kernel.params if not p.is_constexpr), arguments, strict=True))
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, p in enumerate(kernel.params):
        if p.is_constexpr:
            signature[p.name], constexprs[p.name] = "constexpr", constants[p.name]
            continue
        value = values[p.name]
        signature[p.name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else p.annotation_type or "i32"
        if isinstance(value, torch.Tensor) or (value % 16 == 0 and not p.do_not_specialize):
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in constants.items() if name not in signature}
    with settings():
        source = ASTSource(kernel, signature, constexprs, attributes)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
