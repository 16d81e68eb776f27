"""Peak memory of a stretch of work: of the GPU's allocator, or of the process as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets VmHWM to the current resident size


class PeakMemory:
    """Bytes above the starting level at the highest point since `start()`; None where that cannot be measured."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.base: int | None = None

    def start(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
            return
        _return_freed_memory()
        try:
            _RESET.write_text(_RESET_PEAK)
        except OSError:
            self.base = None
            return
        self.base = _status_bytes("VmRSS")

    def stop(self) -> int | None:
        if self.base is None:
            return None
        peak = torch.cuda.max_memory_allocated() if self.cuda else _status_bytes("VmHWM")
        return None if peak is None else max(0, peak - self.base)


def _return_freed_memory() -> None:
    """Return freed memory to the system, so that it does not hide what the next pass takes; glibc only."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None
