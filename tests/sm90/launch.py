"""A kernel's parameters, as its own signature in the traced MLIR lays them out, filled with a problem's sizes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from tests.sm90 import ptx
from tests.sm90.state import Launch


@dataclass(frozen=True)
class Traced:
    """A kernel: its code, and of each parameter its type in MLIR, those left out that take no room."""

    kernel: ptx.Kernel
    types: list[str]

    @property
    def boxes(self) -> dict[int, int]:
        """Bytes that one copy by each tensor map moves."""
        found = {}
        for i, kind in enumerate(self.types):
            if size := re.search(r"copy_bits = (\d+)", kind):
                found[i] = int(size[1]) // 8
        return found


@lru_cache(maxsize=8)  # tests of a kernel follow each other
def read(module: Path, text: Path, part: str = "kernel_cutlass_kernel") -> Traced:
    """The kernel whose name begins with ``part``, from the MLIR and the PTX that a compilation has kept."""
    kernel = next(k for k in ptx.kernels(text.read_text()) if k.name.startswith(part))
    lines = module.read_text().split("\n")
    aliases = dict(re.match(r"(!\w+) = (.*)", line).groups() for line in lines if re.match(r"!\w+ = ", line))  # type: ignore[union-attr, misc]
    signature = next(line for line in lines if f"cuda.kernel @{part}" in line)
    types = []
    for argument in _arguments(signature[signature.index("(") + 1 : signature.rindex(") attributes")]):
        kind = re.sub(r"^%\w+: ", "", argument)
        kind = aliases.get(kind.split(" ")[0], kind)
        if "composed_layout" not in kind.split("<")[0] and not kind.startswith("!cute.layout"):
            types.append(kind)
    assert len(types) == len(kernel.parameters), (types, kernel.parameters)
    return Traced(kernel, types)


def launch(traced: Traced, values: dict[str, Any], names: list[str], **options: Any) -> Launch:
    """Parameters by their ``names``, in the kernel's order; of a tensor ``values`` has (shape, strides, address)."""
    assert len(names) == len(traced.types), f"the kernel takes {len(traced.types)} parameters, not {names}"
    packed = []
    addresses = count(1)
    for name, kind, size in zip(names, traced.types, traced.kernel.parameters, strict=True):
        data = _pack(kind, values.get(name), next(addresses) << 32)
        assert len(data) <= size, f"{name} has {len(data)} bytes, not {size}: {kind}"
        packed.append(data.ljust(size, b"\0"))
    return Launch(packed, traced.boxes, **options)


def _pack(kind: str, value: Any, address: int) -> bytes:
    if kind == "f32":
        return bytes(4)
    if kind.startswith("i"):
        return int(value).to_bytes(int(kind[1:]) // 8, "little", signed=True)
    if kind.startswith(("!cute.coord_tensor", "!cute.memref")):
        shape, _, strides = re.findall(r'"([^"]*)"', kind)[-1].partition(":")
        given_shape, given_strides, place = (*value, None)[:3] if len(value) < 3 else value
        data = b""
        if kind.startswith("!cute.memref"):
            data = (address if place is None else place).to_bytes(8, "little")
        data += _dynamic(shape, given_shape, data)
        return data + _dynamic(strides, given_strides, data)
    return b""


def _dynamic(text: str, given: tuple[int, ...], before: bytes) -> bytes:
    """Of a shape or of strides those numbers that are not fixed, each aligned."""
    data = before
    parts = text.strip("()").split(",")
    for part, number in zip(parts, given, strict=False):
        if part.startswith("?"):
            width = 8 if "i64" in part else 4
            data = data.ljust(math.ceil(len(data) / width) * width, b"\0")
            data += int(number).to_bytes(width, "little", signed=True)
    return data[len(before) :]


def _arguments(text: str) -> list[str]:
    found, depth, start, quoted = [], 0, 0, False
    for i, letter in enumerate(text + ","):
        quoted ^= letter == '"'
        if not quoted:
            depth += (letter in "<({") - (letter in ">)}")
            if letter == "," and depth == 0:
                found.append(text[start:i].strip())
                start = i + 1
    return found
