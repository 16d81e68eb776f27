"""How busy other programs keep the machine: a timing taken beside them says little."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter, process_time

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # proc(5): columns idle and iowait of the line "cpu"
_COUNTED = 8  # columns up to steal; guest time is already in user time


class OtherPrograms:
    """Cores that other programs kept busy since `OtherPrograms()`; None where Linux's /proc/stat is missing."""

    def __init__(self) -> None:
        self.start = (perf_counter(), process_time(), _busy_seconds())

    def cores(self) -> float | None:
        wall, own, busy = self.start
        now = _busy_seconds()
        elapsed = perf_counter() - wall
        if busy is None or now is None or elapsed <= 0:
            return None
        return max(0.0, (now - busy - (process_time() - own)) / elapsed)


def _busy_seconds() -> float | None:
    """CPU seconds the machine has spent on anything but idling, all cores together."""
    try:
        ticks = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1 : _COUNTED + 1]]
    except (OSError, IndexError, ValueError):
        return None
    return (sum(ticks) - sum(ticks[i] for i in _IDLE)) / os.sysconf("SC_CLK_TCK")
