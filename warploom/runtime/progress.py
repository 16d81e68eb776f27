"""One line of progress on stderr."""

from __future__ import annotations

import sys
from time import perf_counter

WIDTH = 28


class Progress:
    """Redrawn in place, at most ten times a second; silent unless `enabled`, and in the first `after` seconds."""

    def __init__(self, total: int, enabled: bool, after: float = 0.0) -> None:
        self.total = max(1, total)
        self.enabled = enabled
        self.done = 0
        self.begun = perf_counter() + after
        self.drawn = 0.0
        self.label = ""

    def start(self, label: str) -> None:
        self.label = label
        self._draw(force=True)

    def step(self, count: int = 1) -> None:
        self.done += count
        self._draw()

    def close(self) -> None:
        if self.drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _draw(self, force: bool = False) -> None:
        now = perf_counter()
        if not self.enabled or now < self.begun or (not force and now - self.drawn < 0.1):
            return
        self.drawn = now
        share = min(1.0, self.done / self.total)
        filled = round(share * WIDTH)
        sys.stderr.write(f"\r\x1b[K[{'#' * filled}{'.' * (WIDTH - filled)}] {share:4.0%}  {self.label}")
        sys.stderr.flush()
