"""Ctrl-C reaches these tests and what they start, also in the background of a shell, where SIGINT is ignored."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is not None:  # one that Python knows
        signal.signal(signal.SIGINT, before)
