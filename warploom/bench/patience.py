"""A limit for peers' first calls, which compile: one that takes longer is left out, and the others are timed all the same."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

OURS = "warploom"


class TooLong(Exception):
    """A peer's first call was ended."""


class Patience:
    """How long a peer's first calls may take in a case.

    Attributes:
        seconds: of one call; None: any number.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._given_up: set[str] = set()

    def begin(self) -> None:
        """A new case: peers that took too long in the last one are asked again."""
        self._given_up.clear()

    def first(self, name: str, call: Callable[[], Any]) -> Any:
        """What a contender's first call returns; TooLong where a peer's takes longer, and at once when it is asked again."""
        if self.seconds is None or name.startswith(OURS) or threading.current_thread() is not threading.main_thread():
            return call()
        if name in self._given_up:
            raise TooLong(f"{name} took more than the {self.seconds:g} s of --peer-seconds before")
        with self._limit(name):
            return call()

    @contextmanager
    def _limit(self, name: str) -> Iterator[None]:
        def end(*_: object) -> None:
            self._given_up.add(name)
            raise TooLong(f"its first call took more than the {self.seconds:g} s of --peer-seconds")

        before = signal.signal(signal.SIGALRM, end)
        assert self.seconds is not None
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            # A backward pass in a thread of its own would not be ended.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


PATIENCE = Patience()
