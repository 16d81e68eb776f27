"""What `verify` runs under Nsight Compute: every kernel of one kind once, in a fixed order, its result checked.

    python -m warploom.smem.device.program single TABLE | copies TABLE | ladder | gemm SIZE | attention SEQLEN

TABLE has a line for each instruction: its number in ACCESSES and the 32 lane addresses, −1 for a lane that is off; of copies
the 32 places in shared and the 32 in global memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from warploom.smem.access import ACCESSES
from warploom.smem.device.kernels import attention, gemm, ladder, single
from warploom.smem.device.kernels.nvrtc import Kernels
from warploom.smem.patterns import SHARED_BYTES


def _read(path: str) -> torch.Tensor:
    return torch.tensor([[int(word) for word in line.split()] for line in Path(path).read_text().splitlines()])


def run_single(path: str) -> None:
    table = _read(path)
    kernels, names = Kernels(single.source()), [single.kernel_name(access) for access in ACCESSES.values()]
    addresses, out = table[:, 1:].int().contiguous().cuda(), torch.empty(32, dtype=torch.int32, device="cuda")
    for which, lanes in zip(table[:, 0].tolist(), addresses, strict=True):
        kernels.launch(names[which], 1, 32, [lanes, out], SHARED_BYTES)
    torch.cuda.synchronize()


def run_copies(path: str) -> None:
    table = _read(path)
    kernels, lines = Kernels(single.copy_source()), table.int().cuda()
    # Of the allocator, whose blocks start with lines.
    source = torch.zeros(int(table[:, 32:].max()) + 16, dtype=torch.uint8, device="cuda")
    out = torch.empty(32, dtype=torch.int32, device="cuda")
    for line in lines:
        kernels.launch(single.COPY, 1, 32, [line, source, out], SHARED_BYTES)
    torch.cuda.synchronize()


def run_ladder() -> None:
    subjects = ladder.Subjects()
    for rung in ladder.rungs():
        _require(rung.name, subjects.check(subjects.launch(rung.name, subjects.poisoned())))


def run_gemm(size: str) -> None:
    subjects = gemm.Subjects(int(size))
    for layout in gemm.LAYOUTS:
        _require(gemm.name(layout), subjects.check(subjects.launch(layout, subjects.poisoned())))


def run_attention(seqlen: str) -> None:
    q, k, v = attention.draw(int(seqlen))
    check = attention.Check(q, k, v)
    for layout, config in attention.layouts().items():
        _require(attention.name(layout), check(attention.forward(config, q, k, v)))


def _require(kernel: str, error: float) -> None:
    if not error <= 2:
        raise RuntimeError(f"{kernel}: the error is {error:.3g} times that of one rounding")


RUN: dict[str, Callable[..., None]] = {
    "single": run_single,
    "copies": run_copies,
    "ladder": run_ladder,
    "gemm": run_gemm,
    "attention": run_attention,
}


def main(arguments: list[str]) -> int:
    what, *rest = arguments
    RUN[what](*rest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
