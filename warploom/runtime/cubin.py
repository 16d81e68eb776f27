"""What a cubin says about its kernels: registers, stack and shared memory, read from its ELF sections."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_REGISTERS = 0x2F  # EIATTR_REGCOUNT
_FRAME_SIZE = 0x11  # EIATTR_FRAME_SIZE: bytes of stack a thread, which is where registers spill to
_SIZED = 0x04  # EIFMT_SVAL: a 16-bit size follows


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers and stack of a thread, ``shared`` static bytes of a block."""

    kernel: str
    registers: int
    stack: int
    shared: int


def resources(cubin: bytes) -> list[Resources]:
    """The kernels of a 64-bit little-endian cubin; ValueError if it is none."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    names_at = headers[names_index][4]
    sections = {_string(cubin, names_at + header[0]): header for header in headers}
    found = []
    for name, header in sections.items():
        if name.startswith(".text."):
            kernel = name.removeprefix(".text.")
            shared = sections.get(f".nv.shared.{kernel}")
            symbol = header[7] & 0xFFFFFF
            attributes = {code: value for index, code, value in _attributes(cubin, sections) if index == symbol}
            registers, frame = attributes.get(_REGISTERS, 0), attributes.get(_FRAME_SIZE, 0)
            found.append(Resources(kernel, registers, frame, shared[5] if shared else 0))
    return found


def _attributes(cubin: bytes, sections: dict[str, tuple[int, ...]]) -> Iterator[tuple[int, int, int]]:
    """(kernel's symbol index, attribute, value) of every attribute that is a number a kernel."""
    header = sections.get(".nv.info")
    at, end = (header[4], header[4] + header[5]) if header else (0, 0)
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, at)
        if form == _SIZED and size == 8:
            symbol, value = struct.unpack_from("<II", cubin, at + 4)
            yield symbol, attribute, value
        at += 4 + (size if form == _SIZED else 0)


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
