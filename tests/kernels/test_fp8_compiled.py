"""The loop that quantises dense tiles, compiled offline for sm_90: what its speed rests on, which no result shows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tools.kernel_resources import Recorded, compiled_launch, recorder, resources_of
from warploom.kernels.fp8_quantize import BLOCK, quantize_op
from warploom.kernels.triton import fp8_launch

REGISTERS, SHARED, RESERVED = 65536, 228 * 1024, 1024  # of a multiprocessor, and of each program besides its own
STACK = 64  # bytes a thread at the most: a few spilled registers of some 1,500 instructions


def launched(dim: int, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """By a dense call."""
    found: list[Recorded] = []
    monkeypatch.setattr(fp8_launch, "Launch", recorder(found))
    monkeypatch.setattr(fp8_launch, "capability", lambda device: 90)
    fp8_launch._dense_launch.cache_clear()
    given = [torch.zeros(1, 256, 2, dim, dtype=torch.bfloat16) for _ in range(3)]
    nothing = [None] * 4
    fp8_launch.quantize(quantize_op.fake(*given, 0, "block", *nothing), *given, 0, "block", *nothing)
    fp8_launch._dense_launch.cache_clear()
    return found.pop()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_are_copied_ahead_and_written_as_they_lie(dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = launched(dim, monkeypatch)
    built = compiled_launch(launch, 90)
    slices = dim // 64
    matrices, copies = slices * 64 * 64 * 2, slices * BLOCK * 64 * 2  # bytes: of the rotation, and of a tile of q or k
    body = built.asm["ttgir"].split("scf.for")[1]
    # Products read what was copied: nothing is put into shared memory for them.
    assert len(re.findall(r"warp_group_dot %.*mutable> \* ", body)) == slices and "local_alloc %" not in body
    found = resources_of(launch, built, 90)
    # Threads store what they have of q and k: no memory is there to change that, but for a reduction.
    assert (found.shared - matrices) % copies <= 1024
    warps, _, programs = fp8_launch._DENSE[dim]
    assert found.faults == 0 and found.stack <= STACK
    assert found.registers * warps * 32 * programs <= REGISTERS
    assert (found.shared + RESERVED) * programs <= SHARED
