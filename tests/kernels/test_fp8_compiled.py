"""The loop that quantises dense tiles, compiled offline for sm_90: what its speed rests on, which no result shows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tests.delta.triton_compiled import resources  # noqa: E402
from warploom.kernels.fp8_quantize import BLOCK, quantize_op  # noqa: E402
from warploom.kernels.triton import fp8_launch  # noqa: E402
from warploom.runtime.triton_launch import settings  # noqa: E402

REGISTERS, SHARED, RESERVED = 65536, 228 * 1024, 1024  # of a multiprocessor, and of each program besides its own
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8"}
STACK = 64  # bytes a thread at the most: a few spilled registers of some 1,500 instructions


def compiled(dim: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The binary that a dense call launches."""
    found: list[tuple[Any, dict[str, Any], tuple[Any, ...]]] = []

    class Recorder:
        def __init__(self, kernel: Any, constants: dict[str, Any], direct: bool) -> None:
            self.kernel, self.constants = kernel, constants

        def __call__(self, grid: tuple[int, int], *arguments: Any) -> None:
            found.append((self.kernel, self.constants, arguments))

    monkeypatch.setattr(fp8_launch, "Launch", Recorder)
    monkeypatch.setattr(fp8_launch, "capability", lambda device: 90)
    fp8_launch._dense_launch.cache_clear()
    given = [torch.zeros(1, 256, 2, dim, dtype=torch.bfloat16) for _ in range(3)]
    nothing = [None] * 4
    fp8_launch.quantize(quantize_op.fake(*given, 0, "block", *nothing), *given, 0, "block", *nothing)
    fp8_launch._dense_launch.cache_clear()
    ((kernel, constants, arguments),) = found
    values = dict(zip((p.name for p in kernel.params if not p.is_constexpr), arguments, strict=True))
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, p in enumerate(kernel.params):
        if p.is_constexpr:
            signature[p.name], constexprs[p.name] = "constexpr", constants[p.name]
        elif isinstance(values[p.name], torch.Tensor):
            signature[p.name], attributes[(i,)] = POINTERS[values[p.name].dtype], [["tt.divisibility", 16]]
        else:
            signature[p.name] = p.annotation_type or "i32"
    options = {name: value for name, value in constants.items() if name not in signature}
    with settings():
        source = ASTSource(kernel, signature, constexprs, attributes)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_are_copied_ahead_and_written_as_they_lie(dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    binary = compiled(dim, monkeypatch)
    slices = dim // 64
    matrices, copies = slices * 64 * 64 * 2, slices * BLOCK * 64 * 2  # bytes: of the rotation, and of a tile of q or k
    loop = binary.asm["ttgir"].split("scf.for")[1]
    # Products read what was copied: nothing is put into shared memory for them.
    assert len(re.findall(r"warp_group_dot %.*mutable> \* ", loop)) == slices and "local_alloc %" not in loop
    found = resources(binary)
    # Threads store what they have of q and k: no memory is there to change that, but for a reduction.
    assert (found.shared - matrices) % copies <= 1024
    warps, _, programs = fp8_launch._DENSE[dim]
    assert found.faults == [] and found.stack <= STACK
    assert found.registers * warps * 32 * programs <= REGISTERS
    assert (found.shared + RESERVED) * programs <= SHARED
