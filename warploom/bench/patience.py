"""Which peers are asked, and for how long: one that nobody asked for is not called, since a first call compiles.

One that takes longer than the limit is left out, and the others are timed all the same.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

OURS = "warploom"


class TooLong(Exception):
    """A peer's first call was ended."""


class NotAsked(Exception):
    """A peer that --peers leaves out."""


def asked(name: str, peers: Collection[str] | None) -> bool:
    """Whether a contender is ours or one of these peers; None: all are."""
    return name.startswith(OURS) or peers is None or name in peers


class Patience:
    """Which peers a run asks, and how long their first calls may take in a case.

    Attributes:
        peers: their names; None: all.
        seconds: of one call; None: any number.
    """

    def __init__(self) -> None:
        self.peers: Collection[str] | None = None
        self.seconds: float | None = None
        self._given_up: set[str] = set()

    @contextmanager
    def during(self, peers: Collection[str] | None, seconds: float | None) -> Iterator[None]:
        """A run that asks these peers, and lets their first calls take so long."""
        before = self.peers, self.seconds
        self.peers, self.seconds = peers, seconds
        try:
            yield
        finally:
            self.peers, self.seconds = before

    def begin(self) -> None:
        """A new case: peers that took too long in the last one are asked again."""
        self._given_up.clear()

    def asks(self, name: str) -> bool:
        """Whether a contender is ours or a peer that the run asks."""
        return asked(name, self.peers)

    def first(self, name: str, call: Callable[[], Any]) -> Any:
        """What a contender's first call returns.

        Raises:
            NotAsked: the run does not ask this peer; it was not called.
            TooLong: a peer's call took longer; at once when it is asked again.
        """
        if not self.asks(name):
            raise NotAsked(f"{name} is not among --peers")
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
